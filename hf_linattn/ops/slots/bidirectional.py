"""Bidirectional attention to the own block exactly and to all other blocks through slots, under one softmax.

The n tokens of a sequence are cut into segments of u(n) tokens, the smallest power of two with which k of them are
enough, and into blocks of C, a power of two as well. A query sees each token of its block, and each segment outside it
as one slot: the mean of its keys and the mean of its values, weighted with exp(log weight) of each token, with
exp(q . mean key) c for its c tokens. Where segments are longer than blocks, the one around the block has two slots,
for its tokens before and behind the block; so every token is seen once. It is `bounded_memory` in both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST
from ..common.sink_logit import softmax_beside
from .segment_pool import Summary, open_segments, pool, segment_size
from .torch import MANY_QUERIES, QUERIES, blocks_in_order, query_blocks, sink_of_blocks
from .types import Writer


def pooled_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    writer: Writer,
    *,
    num_slots: int,
    block_size: int,
    scaling: float,
    lengths: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return the bidirectional attention output [B, H, N, Dv], in time O(N (k + C) (D + Dv)).

    Arguments are those of `bounded_memory_attention`.
    """
    batch, heads, length, _ = query.shape
    tokens = Summary(key, value, *writer(GradAccumulator(key)))
    sizes = [length] * batch if lengths is None else lengths.tolist()
    if min(sizes) == length:
        return _whole_rows(query, tokens, None, segment_size(length, num_slots), block_size, scaling, sink)
    output = value.new_zeros(batch, heads, length, value.shape[3])
    for unit in sorted({segment_size(size, num_slots) for size in sizes}):
        chosen = [row for row, size in enumerate(sizes) if segment_size(size, num_slots) == unit]
        ends = [sizes[row] for row in chosen]
        rows = torch.tensor(chosen, device=query.device)
        longest = max(*ends, 1)
        own = tokens.map(lambda x: x[rows, :, :longest])  # noqa: B023 - called at once
        end = torch.tensor(ends, device=query.device)
        part = _whole_rows(query[rows, :, :longest], own, end, unit, block_size, scaling, sink)
        output = output.index_copy(0, rows, F.pad(part, (0, 0, 0, length - longest)))
    return output


def _whole_rows(
    query: Tensor, tokens: Summary, ends: Tensor | None, unit: int, size: int, scaling: float, sink: Tensor | None
) -> Tensor:
    """Attention of rows whose segments have one size; `ends` [B] counts their tokens, None if they are full."""
    batch, _, length, _ = query.shape
    kv_heads, device = tokens.key.shape[1], query.device
    size = min(size, 1 << max(length - 1, 0).bit_length())
    span = max(size, unit)  # whole blocks and whole segments
    padded = -(-length // span) * span
    count = padded // size
    end = torch.full((1,), length, device=device) if ends is None else ends.repeat_interleave(kv_heads)
    end = end.view(-1, 1, 1, 1)  # [R or 1, 1, 1, 1]
    query = query_blocks(F.pad(query, (0, 0, 0, padded - length)), kv_heads, size)
    tokens = tokens.padded(padded).map(lambda x: x.flatten(0, 1))
    behind = torch.arange(padded, device=device) >= end[:, :, 0, 0]
    tokens = tokens._replace(**{x: getattr(tokens, x).masked_fill(behind, LOWEST) for x in tokens._fields[2:]})
    key, value = (x.unflatten(1, (count, size)) for x in tokens[:2])
    slots = pool(tokens, unit)
    apart: list[tuple[Tensor, Tensor]] = []  # key and value [R, M, .] of what stands beside each block in its segment
    if unit > size:
        backwards = open_segments(tokens.map(lambda x: x.flip(1)), 0, count, unit // size, size)
        apart = [open_segments(tokens, 0, count, unit // size, size), (backwards[0].flip(1), backwards[1].flip(1))]
    bias = _log_counts(end, padded, unit, size, query.dtype)
    beside = None if sink is None else sink_of_blocks(sink, batch, kv_heads, size)
    step = max(QUERIES.get(device.type, MANY_QUERIES) // (len(query) * query.shape[2]), 1)
    outputs = []
    keys = slots.key.transpose(-1, -2)
    of_apart = [[x.split(step, 1) for x in pair] for pair in apart]
    cut = (x.split(step, 1) for x in (query * scaling, key, value, bias))
    for number, (q, k, v, b) in enumerate(zip(*cut, strict=True)):
        sides = [(pair[0][number], pair[1][number]) for pair in of_apart]
        shape = q.shape[1:3]
        scores = [(q.flatten(1, 2) @ keys).unflatten(1, shape)]
        scores += [q @ x[..., None] for x, _ in sides] + [q @ k.transpose(-1, -2)]
        weights = softmax_beside(torch.cat(scores, dim=-1) + b, beside)
        far, *near = weights.split([keys.shape[2], *[1] * len(sides), size], -1)
        part = (far.flatten(1, 2) @ slots.value).unflatten(1, shape) + near[-1] @ v
        for weight, (_, x) in zip(near, sides, strict=False):
            part = part + weight * x[:, :, None]
        outputs.append(part)
    return blocks_in_order(torch.cat(outputs, 1), (batch, kv_heads, count), size)[:, :, :length]


def _log_counts(end: Tensor, length: int, unit: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return the logs [R or 1, M, 1, .] of how many real tokens each block sees in each score, LOWEST where in none.

    The scores are those of all segments, if they are longer than blocks of the two parts of the block's own, and of
    the tokens of the block; `end` [R or 1, 1, 1, 1] is the place behind the last real token.
    """
    place = torch.arange(length, device=end.device)
    block, begin, span = place[::size, None, None], place[::unit], max(size, unit)
    spans = [(begin, torch.where(begin // span == block // span, begin, begin + unit))]
    if unit > size:
        segment = block // unit * unit
        spans += [(segment, block), (block + size, segment + unit)]
    spans.append((block + place[:size], block + place[:size] + 1))
    numbers = [last.minimum(end) - first for first, last in spans]
    counts = torch.cat([x.expand(len(end), length // size, 1, -1) for x in numbers], -1)
    return counts.clamp(min=1).to(dtype).log().masked_fill(counts <= 0, LOWEST)
