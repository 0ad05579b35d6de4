"""Causal attention in bounded memory by PyTorch's operations, which can compute every call."""

from __future__ import annotations

import math
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST, bounded
from ..common.padding import take
from ..common.precision import widened
from ..common.sink_logit import softmax_beside
from .segment_pool import Summary, find_runs, open_segments, pool
from .state import state_after, take_from
from .types import MemoryState, SlotsCall

QUERIES = {"cpu": 1024}  # at a time: large enough for the products, small enough for the cache
MANY_QUERIES = 131072  # on other devices


def unsupported(call: SlotsCall) -> str | None:
    """PyTorch's operations can compute every call."""
    return None


def run(call: SlotsCall) -> tuple[Tensor, MemoryState | None]:
    """Return the output [B, H, N, Dv], and the state after the last token."""
    if call.state is not None:
        return read_on(call, call.state)
    query, key, value = widened(call.query, call.key, call.value)
    query, key = bounded(query), bounded(key)
    tokens = Summary(key, value, *call.writer(GradAccumulator(key)))
    output = _whole_rows(query, tokens, call.num_slots, call.block_size, call.scaling, call.sink)
    if not call.keep_state:
        return output, None
    return output, state_after(tokens, call.lengths, call.num_slots, call.block_size, None)


class _Run(NamedTuple):
    """Blocks from number `first` on, before which the slots have one size u, and what they see.

    slots: the segments of u tokens that are completed before the last block, with keys [R, D, S] that are scaled.
    partial: key and value [R, M, .] of the segment that is open before each block; None if there is none, as blocks
    are as long as segments or longer. own: [G C, C], what is added to a block's scores for its own keys.
    sink: [R, 1, G C, 1], its score; None if there is none.
    """

    first: int
    unit: int
    slots: Summary
    partial: tuple[Tensor, Tensor] | None
    own: Tensor
    sink: Tensor | None


def _whole_rows(
    query: Tensor, tokens: Summary, num_slots: int, block_size: int, scaling: float, sink: Tensor | None
) -> Tensor:
    """Attention of rows that begin: all blocks whose slots have one size at a time, in pieces that fit the cache."""
    batch, _, length, _ = query.shape
    kv_heads = tokens.key.shape[1]
    size = min(block_size, length)
    count = -(-length // size)
    if missing := count * size - length:
        query, tokens = F.pad(query, (0, 0, 0, missing)), tokens.padded(count * size)
    query, tokens = query_blocks(query, kv_heads, size), tokens.map(lambda x: x.flatten(0, 1))
    key, value = (x.unflatten(1, (count, size)) for x in tokens[:2])
    # whole rows as far as they fit; parts of one row else, which are contiguous
    queries = QUERIES.get(query.device.type, MANY_QUERIES)
    together = max(queries // (count * query.shape[2]), 1)
    step = max(queries // query.shape[2], 1)
    runs = list(find_runs(count, size, num_slots))
    outputs: list[Tensor] = []
    beside: Any = repeat(None) if sink is None else sink_of_blocks(sink, batch, kv_heads, size).split(together)
    # split and not sliced, so that the gradients of all parts are put together once
    of_rows = zip(tokens.split(together), *(x.split(together) for x in (query, key, value)), strict=True)
    for (summary, *rows), score in zip(of_rows, beside, strict=False):
        parts = []
        of_runs = (x.split([last - first for first, last, _ in runs], 1) for x in rows)
        for (first, last, unit), *blocks in zip(runs, *of_runs, strict=True):
            run = _run(summary, first, last, unit, size, query.shape[2], scaling, score)
            for number, (q, k, v) in enumerate(zip(*(x.split(step, 1) for x in blocks), strict=True)):
                parts.append(_read_blocks(q, k, v, run, first + number * step, scaling))
        outputs += parts if together == 1 else [torch.cat(parts, dim=1)]
    joined = torch.cat([x.flatten(0, 1) for x in outputs])
    return blocks_in_order(joined, (batch, kv_heads, count), size)[:, :, :length]


def query_blocks(query: Tensor, kv_heads: int, size: int) -> Tensor:
    """Return query [B, H, M C, D] as [R = B Hkv, M, G C, D]: a group's queries, beside their one block of keys."""
    rows = query.reshape(query.shape[0], kv_heads, query.shape[1] // kv_heads, -1, size, query.shape[3])
    return rows.transpose(2, 3).reshape(rows.shape[0] * kv_heads, rows.shape[3], -1, query.shape[3])


def sink_of_blocks(sink: Tensor, batch: int, kv_heads: int, size: int) -> Tensor:
    """Return sink [H] as [R, 1, G C, 1], for what `query_blocks` returns."""
    return sink.view(kv_heads, 1, -1, 1).repeat_interleave(size, dim=2).repeat(batch, 1, 1, 1)


def blocks_in_order(output: Tensor, shape: tuple[int, int, int], size: int) -> Tensor:
    """Return the output for `query_blocks`, of `shape` B, Hkv, M, as [B, H, M C, Dv]."""
    output = output.reshape(*shape, -1, size, output.shape[-1]).transpose(2, 3)
    return output.flatten(3, 4).flatten(1, 2)


def _run(
    tokens: Summary, first: int, last: int, unit: int, size: int, queries: int, scaling: float, sink: Tensor | None
) -> _Run:
    """Sum up what the blocks `first` to `last` - 1 see of the past."""
    full = (last - 1) * size // unit  # segments that the last block sees completed
    slots = pool(tokens.map(lambda x: x[:, : full * unit]), unit)
    slots = slots._replace(key=slots.key.transpose(-1, -2) * scaling)
    partial = open_segments(tokens, first, last, unit // size, size) if unit > size else None
    # what a completed segment gains by its u tokens is taken from all others instead: they are fewer
    own = torch.full((size, size), LOWEST, dtype=tokens.key.dtype, device=tokens.key.device).triu(1) - math.log(unit)
    sink = None if sink is None else sink - math.log(unit)
    return _Run(first, unit, slots, partial, own.repeat(queries // size, 1), sink)


def _read_blocks(query: Tensor, key: Tensor, value: Tensor, run: _Run, start: int, scaling: float) -> Tensor:
    """Attention of the blocks of a run from `start` on: query [R, M, G C, D], key and value [R, M, C, .]."""
    count, size, unit, device = key.shape[1], key.shape[2], run.unit, key.device
    known, seen = start * size // unit, (start + count - 1) * size // unit  # segments before the first and last block
    number = torch.arange(start, start + count, device=device) * size // unit
    shape = query.shape[1:3]
    past = (query.flatten(1, 2) @ run.slots.key[:, :, :seen]).unflatten(1, shape)
    hidden = torch.arange(known, seen, device=device) >= number[:, None, None]
    scores = [past[..., :known], past[..., known:].masked_fill(hidden, LOWEST)]
    if run.partial is not None:
        here = [x[:, start - run.first : start - run.first + count] for x in run.partial]
        tokens = torch.arange(start, start + count, device=device) * size - number * unit
        bias = tokens.clamp(min=1).to(query.dtype).log().masked_fill(tokens == 0, LOWEST) - math.log(unit)
        scores.append(query @ here[0][..., None] * scaling + bias[:, None, None])
    own = run.own.expand(len(query) * count, -1, -1)
    mine = torch.baddbmm(own, query.flatten(0, 1), key.flatten(0, 1).transpose(-1, -2), alpha=scaling)
    scores.append(mine.unflatten(0, (-1, count)))
    weights = softmax_beside(torch.cat(scores, dim=-1), run.sink)
    output = (weights[..., :seen].flatten(1, 2) @ run.slots.value[:, :seen]).unflatten(1, shape)
    output = output + weights[..., -size:] @ value
    if run.partial is not None:
        output = output + weights[..., seen : seen + 1] * here[1][:, :, None]
    return output


def read_on(call: SlotsCall, state: MemoryState) -> tuple[Tensor, MemoryState]:
    """Read on from a state, block by block: every row stands at a place of its own in its block."""
    query, key, value = widened(call.query, call.key, call.value)
    writer, num_slots, block_size, sink = call.writer, call.num_slots, call.block_size, call.sink
    batch, _, length, _ = query.shape
    device = query.device
    lengths = torch.full((batch,), length, device=device) if call.lengths is None else call.lengths
    opened = state.length % block_size  # tokens of the open block
    begun = state.length - opened
    count = -(-(block_size - 1 + length) // block_size)
    # rows that begin with their open block, so that all blocks lie alike
    position = torch.arange(count * block_size, device=device)[None]
    index = torch.where(position < opened[:, None], position, block_size + position - opened[:, None])
    index = index.clamp(max=block_size + length - 1)
    keys, values = (take(torch.cat(pair, 2), index) for pair in ((state.key, key), (state.value, value)))
    end = opened + lengths
    query = query * call.scaling
    width = min(block_size, length)
    slots, outputs = Summary(*state[:4]), []
    for number in range(count):
        span = slice(number * block_size, (number + 1) * block_size)
        done = begun + span.start
        block = Summary(keys[:, :, span], values[:, :, span], *writer(GradAccumulator(keys[:, :, span])))
        at = (span.start - opened).clamp(min=0)[:, None] + torch.arange(width, device=device)
        rows = take(query, at.clamp(max=length - 1))
        within = at + opened[:, None] - span.start
        outputs.append(_read_state(rows, within, slots, block, done, num_slots, sink))
        complete = end >= span.stop
        if bool(complete.any()):
            slots = _write(slots, block, done, complete, num_slots)
    place = torch.arange(length, device=device) + opened[:, None]
    which = place // block_size
    offset = torch.arange(length, device=device) - (which * block_size - opened[:, None]).clamp(min=0)
    output = take(torch.cat(outputs, 2), which * width + offset)
    start = end // block_size * block_size
    key, value = (take_from(x, start, end, block_size) for x in (keys, values))
    return output, MemoryState(*slots, key, value, state.length + lengths)


def _read_state(
    query: Tensor, within: Tensor, slots: Summary, block: Summary, done: Tensor, num_slots: int, sink: Tensor | None
) -> Tensor:
    """Attention of query [B, H, W, D] at the positions `within` [B, W] its block, `done` [B] tokens before it."""
    batch, heads, width, _ = query.shape
    rows = query.reshape(batch, slots.key.shape[1], -1, query.shape[3])
    unit = _segment_sizes(done, num_slots)
    begins = torch.arange(num_slots, device=query.device) * unit[:, None]
    tokens = (done[:, None] - begins).clamp(min=0).minimum(unit[:, None])
    weight = tokens.clamp(min=1).to(query.dtype).log().masked_fill(tokens == 0, LOWEST)
    size = block.key.shape[2]
    future = torch.arange(size, device=query.device) > within.repeat(1, rows.shape[2] // width)[:, None, :, None]
    past = rows @ slots.key.transpose(-1, -2) + weight[:, None, None]
    own = (rows @ block.key.transpose(-1, -2)).masked_fill(future, LOWEST)
    if sink is not None:
        sink = sink.view(slots.key.shape[1], -1, 1).repeat_interleave(width, dim=1)
    weights = softmax_beside(torch.cat([past, own], dim=-1), sink)
    output = weights[..., :num_slots] @ slots.value + weights[..., num_slots:] @ block.value
    return output.reshape(batch, heads, width, -1)


def _write(slots: Summary, block: Summary, done: Tensor, complete: Tensor, num_slots: int) -> Summary:
    """Take a block into the slots of the rows that completed it, merging slots where u(T) grows."""
    device, size = done.device, block.key.shape[2]
    begins = torch.arange(num_slots, device=device) * _segment_sizes(done, num_slots)[:, None]
    begins = torch.cat([begins, done[:, None] + torch.arange(size, device=device)], 1)
    target = begins // _segment_sizes(done + size, num_slots)[:, None]
    joins = (target[:, None, :] == torch.arange(num_slots, device=device)[:, None])[:, None]  # [B, 1, k, k + C]
    means, totals = [], []
    for x, y, a, b in zip(slots[:2], block[:2], slots[2:], block[2:], strict=True):
        weights = torch.cat([a, b], 2)[:, :, None].masked_fill(~joins, LOWEST)
        total = weights.logsumexp(-1)
        mean = weights.softmax(-1) @ torch.cat([x, y], 2)
        means.append(mean.masked_fill((total <= LOWEST / 2)[..., None], 0.0))
        totals.append(total)
    return Summary(
        *(
            torch.where(complete.view(-1, *[1] * (new.dim() - 1)), new, old)
            for new, old in zip((*means, *totals), slots, strict=True)
        )
    )


def _segment_sizes(tokens: Tensor, num_slots: int) -> Tensor:
    """`segment_size` of each row [B]."""
    needed = (-(-tokens // num_slots)).clamp(min=1) - 1
    digits = (needed[:, None] >> torch.arange(63, device=tokens.device) > 0).sum(1)
    return 1 << digits
