"""What the functions of csrc/linear cost, as FLOP counters count it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .cpu import SEGMENT, parts_of

CHUNK, FEW = 64, 32  # tokens read at a time, and where products are of float32, as in csrc/linear/linear.h


def chunk_size(query: Tensor, num_features: int) -> int:
    """Return how many tokens the C reads at a time."""
    return CHUNK if parts_of(query, num_features) else FEW


@register_flop_formula(torch.ops.hf_linattn.causal_sums, get_raw=True)
def _flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **__: Any) -> int:
    """If causal half of the pairs inside a chunk, twice; reading the state for every query, adding every key to it;
    the maps."""
    (batch, heads, groups, length, input_size), value_size, key_size = query.shape, value.shape[-1], rest[8].shape[2]
    weights, bidirectional = zip(rest[12:16:2], (groups, 1), strict=False), any(rest[19:20])
    maps = [2 * input_size * weight.shape[-1] * number for weight, number in weights if weight is not None]
    pairs = 0 if bidirectional else groups * chunk_size(query, key_size) * (key_size + value_size)
    return batch * heads * length * (pairs + 2 * (groups + 1) * key_size * value_size + sum(maps))


@register_flop_formula(torch.ops.hf_linattn.causal_sums_backward, get_raw=True)
def _backward_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **__: Any) -> int:
    """Pairs inside a chunk five times; a state read once, another folded and read twice; if causal the first is folded
    too, for all chunks of a segment but the last; the maps."""
    (batch, heads, groups, length, input_size), value_size, key_size = query.shape, value.shape[-1], rest[6].shape[2]
    bidirectional, chunk = rest[15], chunk_size(query, key_size)
    learned = 2 if rest[24] is None else 3  # features, what they are made of, the weight itself
    weights = [(x, number) for x, number in zip((rest[8], rest[10]), (groups, 1), strict=True) if x is not None]
    maps = [2 * learned * input_size * weight.shape[-1] * number for weight, number in weights]
    pairs = 0 if bidirectional else groups * chunk * (3 * key_size + 2 * value_size)
    state = 2 * key_size * value_size
    folded = 0 if bidirectional else state * (SEGMENT - chunk) // SEGMENT
    return batch * heads * length * (pairs + (2 * groups + 2) * state + folded + sum(maps))


@register_flop_formula(torch.ops.hf_linattn.causal_step)
def _step_flops(query: Any, key: Any, value: Any, *rest: Any, **__: Any) -> int:
    """Adding the key to the state, reading it for every query, the maps."""
    (batch, heads, groups, _, input_size), size = query, rest[5][2] * rest[5][3]
    weights = zip(rest[9:13:2], (groups, 1), strict=True)
    maps = [2 * input_size * weight[-1] * number for weight, number in weights if weight]
    return batch * heads * (2 * (groups + 1) * size + sum(maps))
