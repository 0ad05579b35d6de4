"""How long a model reads a long prompt: at once and in pieces, beside softmax and beside no attention at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM

from benchmarks.measure.decoding import build_model, prefill
from benchmarks.measure.stopwatch import SOFTMAX, Stopwatch

PROMPT, PIECE = 32768, 2048  # tokens, of the prompt and of `generate(prefill_chunk_size=...)`
REPEATS = 3
NOTHING = "no attention"  # its output is its values, and nothing is kept: the time of everything else


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One attention; seconds by how many tokens are read at a time, and softmax's fewest over its own fewest."""

    attention: str
    seconds: dict[int, float]
    times_faster: float


def measure_prompts(stopwatch: Stopwatch, names: Sequence[str], dtype: torch.dtype) -> list[PromptRow]:
    """Time the prompt at once and in pieces, in turns, with softmax, with nothing and with every mechanism."""
    seconds: dict[str, dict[int, float]] = {}
    for name in tqdm([SOFTMAX, NOTHING, *names], desc="prompts"):
        model = build_model(stopwatch, dtype, SOFTMAX if name == NOTHING else name)
        if name == NOTHING:
            leave_attention_out(model)
        ways: dict[int, list[float]] = {PROMPT: [], PIECE: []}
        for _ in range(REPEATS):
            for tokens, measured in ways.items():
                read = partial(prefill, model, PROMPT, tokens, use_cache=name != NOTHING)
                measured.append(stopwatch.once(read))
        seconds[name] = {tokens: median(measured) for tokens, measured in ways.items()}
    best = min(seconds[SOFTMAX].values())
    return [PromptRow(name, ways, best / min(ways.values())) for name, ways in seconds.items()]


def leave_attention_out(model: LlamaForCausalLM) -> None:
    """Make every layer's attention return its values."""

    def values(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return value.transpose(1, 2), None

    AttentionInterface.register(NOTHING, values)
    AttentionMaskInterface.register(NOTHING, lambda *_, **__: None)
    model.set_attn_implementation(NOTHING)
