"""Bounded-memory attention by block softmax: the slots stand before the block of each query.

All blocks before which the slots have one size are read at once; how many of the slots a block sees, and the weight of
a slot, are a bias. Where segments are longer than blocks, the softmax begins with the open one.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_softmax.autograd import BlockSoftmax, Keys, attend_blocks, continue_blocks
from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST
from ..common.precision import accum_dtype, wide
from ..common.sink_logit import attenuate
from .segment_pool import Summary, find_runs, open_segments, pool, pool_part, segment_size
from .state import Pooled, state_after
from .types import MemoryState, SlotsCall


class Begun(NamedTuple):
    """What stands before a row: the slots of segments of `unit` tokens, all completed, of `start` tokens in all.

    block: the number, from the start of the sequence, of the first block with queries; 0 if nothing was read before.
    """

    slots: Summary
    unit: int
    start: int
    block: int

    @classmethod
    def of(cls, slots: Summary, read: int, end: int, num_slots: int, block_size: int) -> tuple[Begun, Summary]:
        """Return what can be left as it is until `end` tokens are read, and tokens that the rest is the sums of.

        read: tokens in whole blocks that are in the slots. A slot is as good as one token of its weight, and others of
        none.
        """
        unit, largest = segment_size(read, num_slots), segment_size(end // block_size * block_size, num_slots)
        start = read // max(largest, block_size) * max(largest, block_size)
        left = slots.map(lambda x: x[:, :, start // unit : -(-read // unit)])
        row = Summary(
            *(F.pad(x[..., None, :], (0, 0, 0, unit - 1)).flatten(2, 3) for x in left[:2]),
            *(F.pad(x[..., None], (0, unit - 1), value=LOWEST).flatten(2, 3) for x in left[2:]),
        )
        begun = cls(slots.map(lambda x: x[:, :, : start // unit]), unit, start, read // block_size)
        return begun, row.map(lambda x: x[:, :, : read - start])


def open_in_training(call: SlotsCall) -> str | None:
    """Return why a call that begins has no kernels: what a segment goes on from has no gradients, None elsewhere."""
    unit = segment_size((call.query.shape[2] - 1) // call.block_size * call.block_size, call.num_slots)
    able = call.policy.inference or unit <= call.block_size
    return None if able else "segments longer than blocks, with gradients or in training"


def attend(blocks: BlockSoftmax, call: SlotsCall, compiled: bool) -> tuple[Tensor, MemoryState | None]:
    """Return the output [B, H, N, Dv] of rows that begin, and their state; `compiled` as for `whole_rows`."""
    of_key, of_value = GradAccumulator(call.key), GradAccumulator(call.value)
    of_wide = of_key if of_key.whole.dtype == accum_dtype(call.key) else GradAccumulator(wide(of_key.whole))
    sources = [of_key, of_value, *(GradAccumulator(x) for x in call.writer(of_wide))]
    tokens = Summary(*(source.whole for source in sources))
    how = call.num_slots, call.block_size, call.scaling, call.sink
    output, pooled = whole_rows(blocks, call.query, tokens, sources, *how, compiled=compiled)
    if not call.keep_state:
        return output, None
    return output, state_after(tokens, call.lengths, call.num_slots, call.block_size, pooled)


def read_on(blocks: BlockSoftmax, call: SlotsCall, state: MemoryState, compiled: bool) -> tuple[Tensor, MemoryState]:
    """Read on from whole blocks as from the start; without gradients."""
    read = int(state.length[0])
    end = read + call.query.shape[2]
    begun, row = Begun.of(Summary(*state[:4]), read, end, call.num_slots, call.block_size)
    kept, tokens = row.key.shape[2], row.joined(Summary(call.key, call.value, *call.writer(GradAccumulator(call.key))))
    query, sources = F.pad(call.query, (0, 0, kept, 0)), [GradAccumulator(x) for x in tokens]
    how = call.num_slots, call.block_size, call.scaling, call.sink
    output, pooled = whole_rows(blocks, query, tokens, sources, *how, begun, compiled)
    return output[:, :, kept:], state_after(tokens, None, call.num_slots, call.block_size, pooled, begun.start)


def whole_rows(
    operation: BlockSoftmax, query: Tensor, tokens: Summary, sources: list[GradAccumulator], num_slots: int,
    block_size: int, scaling: float, sink: Tensor | None, begun: Begun | None = None, compiled: bool = False,
) -> tuple[Tensor, Pooled]:  # fmt: skip
    """Return the output [B, H, N, Dv] for queries [B, H, N, D], and the slots of the last run.

    sources: what the tokens are the whole of, which put the gradients of all parts together. sink: [H] or None.
    begun: what stands before the tokens; outputs of blocks before its first mean nothing. compiled: whether the C sums
    up segments.
    """
    of_query = GradAccumulator(query.unflatten(1, (tokens.key.shape[1], -1)))
    query = of_query.whole
    arange = functools.partial(torch.arange, device=query.device)
    begun = begun or Begun(tokens.map(lambda x: x.detach()[:, :, :0]), 1, 0, 0)
    # the segments of the last run, their size, the tokens in them; blocks before the row
    slots, before, end, passed = begun.slots, begun.unit, begun.start, begun.start // block_size
    whole, opened = [], []  # what is read of runs with and without open segments
    for start, last, unit in find_runs(passed - (-query.shape[3] // block_size), block_size, num_slots):
        first = max(start, begun.block)
        if first >= last:
            continue
        blocks = arange(first, last)
        full = blocks * block_size // unit  # segments that are completed before each block
        most = (last - 1) * block_size // unit
        # beside the segments of the run before, of which one may be left, this one sums up what lies behind these
        start, end = end // unit * unit, most * unit
        slots = pool(slots, unit // before, compiled=compiled)
        new = pool_part(sources, start - begun.start, end - start, unit, compiled)
        slots, before = slots.joined(new), unit
        bias = query.new_full((len(blocks), most), math.log(unit), dtype=accum_dtype(query))
        bias.masked_fill_(arange(most) >= full[:, None], LOWEST)
        shared = slots.key.to(query.dtype), slots.value.to(query.dtype)
        keys = Keys(first - passed, (blocks - passed)[:, None, None], bias[:, None, None], shared)
        if unit > block_size:
            opened.append((keys, (first - passed, last - passed, unit)))
        else:
            whole.append(keys)
    heads = query, tokens.key, tokens.value
    how: Any = {"block_size": block_size, "scaling": scaling, "causal": True}
    output, logs = attend_blocks(operation, *heads, whole, sources=[of_query, *sources[:2]], **how)
    for part, run in opened:
        place, log = _begin(query, tokens, output, run, block_size, scaling)
        continue_blocks(operation, *heads, part, output, log, **how)
        logs[..., place] = log[..., place]
    output = attenuate(output.flatten(1, 2), logs.flatten(1, 2), None if sink is None else sink[:, None])
    return output, Pooled(slots, before, end, compiled)


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
