"""Measuring a model, a patched one beside its original: perplexity, fidelity, recall, retrieval, speed, memory."""

from ..inference import evaluation_mode
from .fidelity import Continuations, Fidelity, PositionRow, fidelity, whole_windows, without_far_keys
from .memory import MemoryRow, StateRow, measure_memory, peak_forward_bytes, state_bytes_by_length
from .perplexity import (
    Perplexity,
    PerplexityResult,
    is_masked_language_model,
    perplexity,
    position_limit,
)
from .recall import RecallPrompt, RecallRow, answer_prompts, make_prompts, recall
from .retrieval import Retrieval, embed, retrieval
from .speed import SpeedRow, Spread, crossover_length, measure_speed

__all__ = [
    "Continuations",
    "Fidelity",
    "MemoryRow",
    "Perplexity",
    "PerplexityResult",
    "PositionRow",
    "RecallPrompt",
    "RecallRow",
    "Retrieval",
    "SpeedRow",
    "Spread",
    "StateRow",
    "answer_prompts",
    "crossover_length",
    "embed",
    "evaluation_mode",
    "fidelity",
    "is_masked_language_model",
    "make_prompts",
    "measure_memory",
    "measure_speed",
    "peak_forward_bytes",
    "perplexity",
    "position_limit",
    "recall",
    "retrieval",
    "state_bytes_by_length",
    "whole_windows",
    "without_far_keys",
]
