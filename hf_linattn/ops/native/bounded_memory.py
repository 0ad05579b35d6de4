"""Bounded-memory attention of rows that begin, by `block_softmax`: the slots stand before the block of each query.

All blocks before which the slots have one size are read at once; how many of the slots a block sees, and the weight of
a slot, are a bias. Where segments are longer than blocks, the softmax begins with the open one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..block_softmax import Keys, attend_blocks, continue_blocks
from ..exponential import LOWEST
from ..sink import attenuate
from ..source import Source
from ..summaries import Summary, find_runs, open_segments, pool, segment_size
from .block_softmax import NATIVE_BLOCKS
from .library import suits


class Pooled(NamedTuple):
    """The slots of segments of `unit` tokens, and how many of the tokens are in them."""

    slots: Summary
    unit: int
    end: int


def can_attend(heads: tuple[Tensor, ...], num_slots: int, block_size: int, inference: bool) -> bool:
    """Whether the C can work on these heads; only in inference, as it has no gradients, where segments stay open."""
    unit = segment_size((heads[0].shape[2] - 1) // block_size * block_size, num_slots)
    return suits(*heads) and (inference or unit <= block_size)


def whole_rows(
    query: Tensor, tokens: Summary, sources: list[Source], num_slots: int, block_size: int, scaling: float,
    sink: Tensor | None,
) -> tuple[Tensor, Pooled]:  # fmt: skip
    """Return the output [B, H, N, Dv] for queries [B, H, N, D], and the slots of the last run.

    sources: what the tokens are the whole of, which put the gradients of all parts together. sink: [H] or None.
    """
    of_query = Source(query.unflatten(1, (tokens.key.shape[1], -1)))
    query = of_query.whole
    runs, end = list(find_runs(-(-query.shape[3] // block_size), block_size, num_slots)), 0
    slots, before = tokens.map(lambda x: x.detach()[:, :, :0]), 1  # the segments of the last run, and their size
    whole, opened = [], []  # what is read of runs with and without open segments
    for first, last, unit in runs:
        blocks = torch.arange(first, last)
        full = blocks * block_size // unit  # segments that are completed before each block
        most = int(full[-1])
        # beside the segments of the run before, of which one may be left, this one sums up what lies behind these
        start, end = end // unit * unit, most * unit
        more = Summary(*(source.narrow(2, start, end - start) for source in sources))
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
    output, logs = attend_blocks(NATIVE_BLOCKS, *heads, whole, sources=[of_query, *sources[:2]], **how)
    for part, run in opened:
        place, log = _begin(query, tokens, output, run, block_size, scaling)
        continue_blocks(NATIVE_BLOCKS, *heads, part, output, log, **how)
        logs[..., place] = log[..., place]
    output = attenuate(output.flatten(1, 2), logs.flatten(1, 2), None if sink is None else sink[:, None])
    return output, Pooled(slots, before, end)


def _begin(
    query: Tensor, tokens: Summary, output: Tensor, run: tuple[int, int, int], size: int, scaling: float
) -> tuple[slice, Tensor]:
    """Write what stands for the open segment before each block of a run as output; return where, and log weights."""
    first, last, unit = run
    whole = tokens.padded(-(-query.shape[3] // size) * size).map(lambda x: x.flatten(0, 1))
    key, value = (x.unflatten(0, tokens.key.shape[:2]) for x in open_segments(whole, first, last, unit // size, size))
    place = torch.arange(first * size, min(last * size, query.shape[3]))
    block = place // size - first
    output[:, :, :, place[0] : place[-1] + 1] = value[:, :, None, block]
    count = place // size * size % unit
    weight = count.clamp(min=1).to(query.dtype).log().masked_fill(count == 0, LOWEST)
    log = query.new_full(query.shape[:4], LOWEST)
    log[..., place] = (query[:, :, :, place] * key[:, :, None, block]).sum(-1) * scaling + weight
    return slice(int(place[0]), int(place[-1]) + 1), log
