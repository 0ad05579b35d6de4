"""Bounded-memory attention of rows that begin, by block softmax: the slots stand before the block of each query.

All blocks before which the slots have one size are read at once; how many of the slots a block sees, and the weight of
a slot, are a bias. Where segments are longer than blocks, the softmax begins with the open one.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block_softmax import BlockSoftmax, Keys, attend_blocks, continue_blocks
from .exponential import LOWEST
from .native.block_softmax import NATIVE_BLOCKS
from .precision import wide, wide_number
from .sink import attenuate
from .source import Source
from .summaries import Summary, find_runs, open_segments, pool, pool_part, segment_size


class Pooled(NamedTuple):
    """The slots of segments of `unit` tokens, how many of the tokens are in them, and whether the C sums them up."""

    slots: Summary
    unit: int
    end: int
    natively: bool


def find_operation(
    blocks: BlockSoftmax | None, heads: tuple[Tensor, ...], num_slots: int, block_size: int, use_native: bool,
    inference: bool,
) -> BlockSoftmax | None:  # fmt: skip
    """Return `blocks`, or if None the C's, where that can work on these heads.

    Where segments stay open only in inference, as what goes on from what was read before has no gradients.
    """
    unit = segment_size((heads[0].shape[2] - 1) // block_size * block_size, num_slots)
    blocks = NATIVE_BLOCKS if blocks is None and use_native else blocks
    able = blocks is not None and blocks.suits(*heads) and (inference or unit <= block_size)
    return blocks if able else None


def whole_rows(
    operation: BlockSoftmax, query: Tensor, tokens: Summary, sources: list[Source], num_slots: int, block_size: int,
    scaling: float, sink: Tensor | None,
) -> tuple[Tensor, Pooled]:  # fmt: skip
    """Return the output [B, H, N, Dv] for queries [B, H, N, D], and the slots of the last run.

    sources: what the tokens are the whole of, which put the gradients of all parts together. sink: [H] or None.
    """
    of_query = Source(query.unflatten(1, (tokens.key.shape[1], -1)))
    query, natively = of_query.whole, operation is NATIVE_BLOCKS
    arange = functools.partial(torch.arange, device=query.device)
    runs, end = list(find_runs(-(-query.shape[3] // block_size), block_size, num_slots)), 0
    slots, before = tokens.map(lambda x: x.detach()[:, :, :0]), 1  # the segments of the last run, and their size
    whole, opened = [], []  # what is read of runs with and without open segments
    for first, last, unit in runs:
        blocks = arange(first, last)
        full = blocks * block_size // unit  # segments that are completed before each block
        most = (last - 1) * block_size // unit
        # beside the segments of the run before, of which one may be left, this one sums up what lies behind these
        start, end = end // unit * unit, most * unit
        slots = pool(slots, unit // before, use_native=natively)
        slots, before = slots.joined(pool_part(sources, start, end - start, unit, natively)), unit
        bias = wide_number(query).new_full((len(blocks), most), math.log(unit))
        bias.masked_fill_(arange(most) >= full[:, None], LOWEST)
        shared = slots.key.to(query.dtype), slots.value.to(query.dtype)
        part = Keys(first, blocks[:, None, None], bias[:, None, None], shared)
        if unit > block_size:
            opened.append((part, (first, last, unit)))
        else:
            whole.append(part)
    heads = query, tokens.key, tokens.value
    how: Any = {"block_size": block_size, "scaling": scaling, "causal": True}
    output, logs = attend_blocks(operation, *heads, whole, sources=[of_query, *sources[:2]], **how)
    for part, run in opened:
        place, log = _begin(query, tokens, output, run, block_size, scaling)
        continue_blocks(operation, *heads, part, output, log, **how)
        logs[..., place] = log[..., place]
    output = attenuate(output.flatten(1, 2), logs.flatten(1, 2), None if sink is None else sink[:, None])
    return output, Pooled(slots, before, end, natively)


def _begin(
    query: Tensor, tokens: Summary, output: Tensor, run: tuple[int, int, int], size: int, scaling: float
) -> tuple[slice, Tensor]:
    """Write what stands for the open segment before each block of a run as output; return where, and log weights."""
    first, last, unit = run
    whole = tokens.padded(-(-query.shape[3] // size) * size).map(lambda x: x.flatten(0, 1))
    key, value = (x.unflatten(0, tokens.key.shape[:2]) for x in open_segments(whole, first, last, unit // size, size))
    start, end = first * size, min(last * size, query.shape[3])
    place = torch.arange(start, end, device=query.device)
    block = place // size - first
    output[:, :, :, start:end] = value[:, :, None, block]
    count = place // size * size % unit
    weight = count.clamp(min=1).to(key.dtype).log().masked_fill(count == 0, LOWEST)
    log = key.new_full(query.shape[:4], LOWEST)
    log[..., place] = (wide(query[:, :, :, place]) * key[:, :, None, block]).sum(-1) * scaling + weight
    return slice(start, end), log
