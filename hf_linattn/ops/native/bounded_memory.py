"""Bounded-memory attention of rows that begin, by `block_softmax`: the slots stand before the block of each query.

All blocks before which the slots have one size are read at once; how many of the slots a block sees, and the weight of
a slot, are a bias. Where segments are longer than blocks, the softmax begins with the open one.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..exponential import LOWEST
from ..sink import attenuate
from ..summaries import Summary, find_runs, open_segments, pool, segment_size
from .block_softmax import Keys, attend_blocks, continue_blocks
from .library import suits


def can_attend(heads: tuple[Tensor, ...], num_slots: int, block_size: int, inference: bool) -> bool:
    """Whether the C can work on these heads; only in inference, as it has no gradients, where segments stay open."""
    unit = segment_size((heads[0].shape[2] - 1) // block_size * block_size, num_slots)
    return suits(*heads) and (inference or unit <= block_size)


def whole_rows(
    query: Tensor, tokens: Summary, num_slots: int, block_size: int, scaling: float, sink: Tensor | None
) -> Tensor:
    """Return the output [B, H, N, Dv] for queries [B, H, N, D], beside the sink [H] if there is one."""
    query = query.unflatten(1, (tokens.key.shape[1], -1))
    runs, spans, end = list(find_runs(-(-query.shape[3] // block_size), block_size, num_slots)), [], 0
    for _, last, unit in runs:  # what a run sums up beside the segments of the one before, of which one may be left
        start, end = end // unit * unit, (last - 1) * block_size // unit * unit
        spans.append((start, end))
    slots, before = tokens.map(lambda x: x[:, :, :0]), 1  # the segments of the last run, and their size
    whole, opened = [], []  # what is read of runs with and without open segments
    for (first, last, unit), more in zip(runs, _cut(tokens, spans), strict=True):
        blocks = torch.arange(first, last)
        full = blocks * block_size // unit  # segments that are completed before each block
        most = int(full[-1])
        slots = pool(slots, unit // before, use_native=True)
        slots, before = slots.joined(pool(more, unit, use_native=True)), unit
        bias = query.new_full((len(blocks), most), math.log(unit))
        bias.masked_fill_(torch.arange(most) >= full[:, None], LOWEST)
        part = Keys(first, blocks[:, None, None], bias[:, None, None], (slots.key, slots.value))
        if unit > block_size:
            opened.append((part, (first, last, unit)))
        else:
            whole.append(part)
    heads = query, tokens.key, tokens.value
    how: Any = {"block_size": block_size, "scaling": scaling, "causal": True}
    output, logs = attend_blocks(*heads, whole, **how)
    for part, run in opened:
        place, log = _begin(query, tokens, output, run, block_size, scaling)
        continue_blocks(*heads, part, output, log, **how)
        logs[..., place] = log[..., place]
    return attenuate(output.flatten(1, 2), logs.flatten(1, 2), None if sink is None else sink[:, None])


def _cut(tokens: Summary, spans: list[tuple[int, int]]) -> list[Summary]:
    """Return the tokens from the start to the end of each span. No two overlap where there are gradients, which are
    then put together once, as those of `split` are."""
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        return [tokens.map(lambda x: x[:, :, start:end]) for start, end in spans]  # noqa: B023 - called at once
    sizes = [end - start for start, end in spans]
    rest = tokens.key.shape[2] - sum(sizes)
    return [Summary(*x) for x in zip(*(x.split([*sizes, rest], 2)[:-1] for x in tokens), strict=True)]


def _begin(
    query: Tensor, tokens: Summary, output: Tensor, run: tuple[int, int, int], size: int, scaling: float
) -> tuple[slice, Tensor]:
    """Write what stands for the open segment before each block of a run as output; return where, and log weights."""
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
    return slice(int(place[0]), int(place[-1]) + 1), log
