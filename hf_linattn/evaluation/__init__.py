"""Measuring a model: perplexity, fidelity, retrieval, speed, memory; a patched model beside its original attention."""

from ..inference import evaluation_mode
from .equal_bytes import constant_state_bytes, streaming_bytes, streaming_for, streaming_like
from .fidelity import Fidelity, fidelity, without_far_keys
from .generation import Continuations, GenerationRow, check_generation
from .memory import MemoryRow, StateRow, measure_memory, peak_forward_bytes, state_bytes_by_length
from .next_token import whole_windows
from .perplexity import (
    Perplexity,
    PerplexityResult,
    is_masked_language_model,
    perplexity,
    position_limit,
)
from .positions import LongLosses, PositionRow, RecurrenceRow, long_losses
from .retrieval import Retrieval, embed, retrieval
from .speed import SpeedRow, Spread, crossover_length, measure_speed

__all__ = [
    "Continuations",
    "Fidelity",
    "GenerationRow",
    "LongLosses",
    "MemoryRow",
    "Perplexity",
    "PerplexityResult",
    "PositionRow",
    "RecurrenceRow",
    "Retrieval",
    "SpeedRow",
    "Spread",
    "StateRow",
    "check_generation",
    "constant_state_bytes",
    "crossover_length",
    "embed",
    "evaluation_mode",
    "fidelity",
    "is_masked_language_model",
    "long_losses",
    "measure_memory",
    "measure_speed",
    "peak_forward_bytes",
    "perplexity",
    "position_limit",
    "retrieval",
    "state_bytes_by_length",
    "streaming_bytes",
    "streaming_for",
    "streaming_like",
    "whole_windows",
    "without_far_keys",
]
