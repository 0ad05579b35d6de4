"""Bounded-memory attention of rows that begin, by `block_softmax`: the slots stand before the block of each query.

All blocks before which the slots have one size are read at once; how many of the slots a block sees, and the weight of
a slot, are a bias. Where segments are longer than blocks, the softmax begins with the open one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..exponential import LOWEST
from ..summaries import Summary, find_runs, open_segments, pool
from .block_softmax import attend_blocks
from .library import empty_output, suits


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the C can work on these and no gradients are needed."""
    return not torch.is_grad_enabled() and suits(query, key, value)


def whole_rows(query: Tensor, tokens: Summary, num_slots: int, block_size: int, scaling: float) -> Tensor:
    """Return the output [B, H, N, Dv] for queries [B, H, N, D]."""
    length, size = query.shape[2], block_size
    grouped = query.unflatten(1, (tokens.key.shape[1], -1))
    output, log = empty_output(grouped, tokens.value), None
    slots, before = tokens.map(lambda x: x[:, :, :0]), 1  # the segments of the last run, and their size
    for first, last, unit in find_runs(-(-length // size), size, num_slots):
        blocks = torch.arange(first, last)
        full = blocks * size // unit  # segments that are completed before each block
        most = int(full[-1])
        slots, before = pool(slots, unit // before, use_native=True), unit
        span = slice(slots.key.shape[2] * unit, most * unit)
        more = pool(tokens.map(lambda x: x[:, :, span]), unit, use_native=True)  # noqa: B023 - called at once
        slots = Summary(*(torch.cat(pair, 2) for pair in zip(slots, more, strict=True)))
        bias = query.new_full((len(blocks), most), math.log(unit))
        bias.masked_fill_(torch.arange(most) >= full[:, None], LOWEST)
        if unit > size:
            log = _begin(grouped, tokens, output, (first, last, unit), size, scaling)
        attend_blocks(
            grouped, tokens.key, tokens.value, bias[:, None, None], blocks[:, None, None], output,
            first=first, block_size=size, shared=slots[:2], scaling=scaling, log=log, causal=True,
        )  # fmt: skip
    return output.flatten(1, 2)


def _begin(
    query: Tensor, tokens: Summary, output: Tensor, run: tuple[int, int, int], size: int, scaling: float
) -> Tensor:
    """Write what stands for the open segment before each block of a run as output; return its log weight."""
    first, last, unit = run
    whole = tokens.padded(-(-query.shape[3] // size) * size).map(lambda x: x.flatten(0, 1))
    key, value = (
        x.unflatten(0, tokens.key.shape[:2]) for x in open_segments(whole, first, last, unit // size, size)
    )
    place = torch.arange(first * size, min(last * size, query.shape[3]))
    block = place // size - first
    output[:, :, :, place[0] : place[-1] + 1] = value[:, :, None, block]
    count = place // size * size % unit
    weight = count.clamp(min=1).to(query.dtype).log().masked_fill(count == 0, LOWEST)
    log = query.new_full(query.shape[:4], LOWEST)
    log[..., place] = (query[:, :, :, place] * key[:, :, None, block]).sum(-1) * scaling + weight
    return log
