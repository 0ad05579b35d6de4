"""Measuring a model: perplexity, retrieval, speed and memory, a patched model beside its original attention."""

from ..running import evaluation_mode
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
    "MemoryRow",
    "Perplexity",
    "PerplexityResult",
    "Retrieval",
    "SpeedRow",
    "Spread",
    "StateRow",
    "crossover_length",
    "embed",
    "evaluation_mode",
    "is_masked_language_model",
    "measure_memory",
    "measure_speed",
    "peak_forward_bytes",
    "perplexity",
    "position_limit",
    "retrieval",
    "state_bytes_by_length",
]
