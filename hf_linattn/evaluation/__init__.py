"""Measuring a model: perplexity, fidelity, retrieval, speed, memory; a patched model beside its original attention."""

from ..inference import evaluation_mode
from .equal_bytes import constant_state_bytes, streaming_bytes, streaming_for, streaming_like
from .fidelity import Continuations, Fidelity, PositionRow, fidelity, whole_windows, without_far_keys
from .memory import MemoryRow, StateRow, measure_memory, peak_forward_bytes, state_bytes_by_length
from .perplexity import (
    Perplexity,
    PerplexityResult,
    is_masked_language_model,
    perplexity,
    position_limit,
)
from .retrieval import Retrieval, embed, retrieval
from .speed import SpeedRow, Spread, crossover_length, measure_speed

__all__ = [
    "Continuations",
    "Fidelity",
    "MemoryRow",
    "Perplexity",
    "PerplexityResult",
    "PositionRow",
    "Retrieval",
    "SpeedRow",
    "Spread",
    "StateRow",
    "constant_state_bytes",
    "crossover_length",
    "embed",
    "evaluation_mode",
    "fidelity",
    "is_masked_language_model",
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
