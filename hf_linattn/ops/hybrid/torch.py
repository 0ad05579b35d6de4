"""Hybrid attention by PyTorch's operations, which can compute every call.

Chunks of queries are taken several at a time: their sums over keys are made in one product, and the sums before each
chunk in another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST, dense
from ..common.precision import widened
from ..linear.torch import Chunks, chunk_sums, chunks_at_once, with_ones
from ..linear.types import LinearState
from . import hard_keys
from .sums import Rows, Sums, chunked, exact_sums, in_order, join, make_rows, places, remember
from .types import HybridCall, HybridState, HybridWeights


def unsupported(call: HybridCall) -> str | None:
    """PyTorch's operations can compute every call."""
    return None


def run(call: HybridCall) -> tuple[Tensor, Any]:
    """Return the output [B, H, N, Dv], and the state after a causal call."""
    call = call._replace(weights=call.weights.beside(call.key))
    if call.weights.blocks:
        return hard_keys.run(call)
    return _causal_attention(call) if call.causal else (_two_way_attention(call), None)


def _causal_attention(call: HybridCall) -> tuple[Tensor, HybridState]:
    weights, state, chunk_size = call.weights, call.state, call.chunk_size
    query, key, value = widened(call.query, call.key, call.value)
    rows = make_rows(query, key, value, weights, call.lengths, state)
    # without earlier keys a window wider than the call would only see zeros
    left = weights.reach if state is not None else min(weights.reach, key.shape[2] - 1)
    before = None if state is None else LinearState(state.kv, state.log_max)
    band = _band(key, weights.num_sinks, min(chunk_size, key.shape[2]), left)
    outputs: list[Tensor] = []
    linear = before
    for first, far, linear in _far(rows, weights, before, chunk_size):  # noqa: B007 - the last one is kept
        near = _near(rows, weights, first, far.total.shape[2], band, (left, 0), causal=True)
        outputs.append(in_order(join([near, far], weights)))
    output = torch.cat(outputs, dim=3)[:, :, :, : query.shape[2]]
    return output.flatten(1, 2), remember(rows, weights, linear, call.key.dtype)


def _two_way_attention(call: HybridCall) -> Tensor:
    """Far keys before and after a query are summed apart: all keys less the near ones would cancel."""
    weights, chunk_size = call.weights, call.chunk_size
    query, key, value = widened(call.query, call.key, call.value)
    length = key.shape[2]
    rows = make_rows(query, key, value, weights, call.lengths, None)
    turned = rows._replace(
        query=GradAccumulator(rows.query.whole.flip(3)),
        key=GradAccumulator(key.flip(2)),
        value=GradAccumulator(value.flip(2)),
    )
    parts = [
        in_order(torch.cat([far.total, far.weight[..., None], far.log[..., None]], dim=-1))
        for _, far, _ in _far(turned, weights, None, chunk_size, backwards=True)
    ]
    after = GradAccumulator(torch.cat(parts, dim=3)[:, :, :, :length].flip(3))
    reach, size = min(weights.reach, length - 1), min(chunk_size, length)
    band = _band(key, weights.num_sinks, size, 2 * reach)
    outputs = []
    for first, before, _ in _far(rows, weights, None, chunk_size):
        chunks = before.total.shape[2]
        near = _near(rows, weights, first, chunks, band, (reach, reach), causal=False)
        columns = chunked(places(after, first, first + chunks * size, 3), chunks)
        behind = Sums(columns[..., :-2], columns[..., -2], columns[..., -1])
        outputs.append(in_order(join([near, before, behind], weights)))
    return torch.cat(outputs, dim=3)[:, :, :, :length].flatten(1, 2)


def _band(like: Tensor, sinks: int, size: int, reach: int) -> Tensor:
    """Return where a query sees no key of [sinks, window], away from both ends: [C, S + K]."""
    other = torch.arange(size + reach, device=like.device)  # made where it is read: a copy would be waited for
    return F.pad((other < other[:size, None]) | (other > other[:size, None] + reach), (sinks, 0))


def _near(
    rows: Rows, weights: HybridWeights, first: int, chunks: int, band: Tensor, sides: tuple[int, int], *, causal: bool
) -> Sums:
    """Sum over the window and the sinks for T chunks from place `first` on; `sides`: how far they see."""
    size, left, right = band.shape[0], *sides
    last = first + chunks * size

    def seen(x: GradAccumulator, sinks: Tensor, ring: Tensor | None) -> Tensor:
        """Sinks and window of each chunk: [B, Hkv, T, S + left + C + right, D]."""
        window = places(x, first - left, last + right, 2, ring).unfold(2, size + left + right, size)
        return torch.cat([sinks[:, :, None].expand(-1, -1, chunks, -1, -1), window.transpose(-1, -2)], dim=3)

    query = chunked(places(rows.query, first, last, 3), chunks)
    hidden = [band]
    whole = causal or (not rows.padded and last + right <= rows.key.whole.shape[2])
    if first - left < weights.num_sinks or not whole:
        hidden.append(_hidden_at_ends(rows, weights.num_sinks, first, (chunks, size), sides, causal))
    keys, values = seen(rows.key, rows.sink_key, rows.ring_key), seen(rows.value, rows.sink_value, rows.ring_value)
    return exact_sums(query, keys, values, hidden, weights)


def _hidden_at_ends(
    rows: Rows, sinks: int, first: int, chunks: tuple[int, int], sides: tuple[int, int], causal: bool
) -> Tensor:
    """Which of [sinks, window] are not there, or there as a sink already: [B or 1, 1, T, 1, C, S + K]."""
    (number, size), (left, right) = chunks, sides
    device = rows.key.whole.device
    begin = rows.start[:, None] + first + size * torch.arange(number, device=device)  # [B or 1, T]
    limit = (rows.start + rows.end)[:, None, None]
    position = begin[..., None] - left + torch.arange(left + size + right, device=device)
    outside = (position < sinks) | (position >= limit)
    slot = torch.arange(sinks, device=device)
    own = begin[..., None] + torch.arange(size, device=device)
    to_come = slot > own[..., None] if causal else (slot >= limit)[:, :, None]
    shape = (max(len(own), len(limit)), number, size, -1)
    return torch.cat([to_come.expand(shape), outside[:, :, None].expand(shape)], dim=-1)[:, None, :, None]


def _far(
    rows: Rows, weights: HybridWeights, state: LinearState | None, chunk_size: int, *, backwards: bool = False
) -> Iterator[tuple[int, Sums, LinearState]]:
    """Yield for every segment of T chunks: its first place, the sums over far keys before each query, the state.

    `backwards`: the rows are turned around, and place N - 1 is the start of the sequence.
    """
    batch, kv_heads, groups, length, _ = rows.query.whole.shape
    size = min(chunk_size, length)
    most = chunks_at_once(batch * kv_heads * groups, rows.key.whole.device)
    mix, rate = weights.log_mix.view(kv_heads, 1, groups, 1), weights.decay_rate
    # a key beside a pad stays out of the state: it is still in the window of the token that will come
    end = torch.full_like(rows.end, length) if backwards else rows.end
    for first in range(0, length, most * size):
        chunks = min(most, -(-(length - first) // size))
        last = first + chunks * size
        key, value, log_scale = _far_keys(rows, weights, first, last, end, backwards)
        query, query_log = weights.query_map(dense(places(rows.query, first, last, 3)))
        state = LinearState.empty(key, value, log_scale is not None) if state is None else state
        decay = None
        if rate is not None:
            real = torch.arange(first, last, device=end.device) < end[:, None]  # a pad takes nothing from the others
            decay = (-rate[:, None] * real[:, None]).expand(batch, -1, -1)
        given: list[Any] = [None if x is None else x.unflatten(2, (-1, size)) for x in (key, value, log_scale, decay)]
        total, top, state = chunk_sums(Chunks(chunked(query, chunks), *given), state, strict=True)
        log = mix if query_log is None else mix + chunked(query_log[..., None], chunks)[..., 0]
        log = log if top is None else log + top[:, :, :, None]
        log = log if rate is None else log - (rate * weights.reach).view(-1, 1, 1, 1)
        yield first, Sums(total[..., :-1], total[..., -1], log.expand(total.shape[:-1])), state


def _far_keys(
    rows: Rows, weights: HybridWeights, first: int, last: int, end: Tensor, backwards: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return features, values and log scales (None if all zero) of the keys beside the queries from `first` on."""
    length, span = rows.key.whole.shape[2], (first - weights.reach, last - weights.reach)
    index = torch.arange(first, last, device=end.device)
    place = index - weights.reach
    if backwards:
        position = length - 1 - place
        hidden = (position < weights.num_sinks) | (position >= rows.end[:, None])
    else:
        hidden = (rows.start[:, None] + place < weights.num_sinks) | (index >= end[:, None])
    key, log_scale = weights.key_map(dense(places(rows.key, *span, 2, rows.ring_key)))
    if log_scale is None and weights.decay_rate is not None:
        log_scale = key.new_zeros(key.shape[:-1])
    if backwards or rows.padded or span[0] < weights.num_sinks or last > length:
        key = key.masked_fill(hidden[:, None, :, None], 0.0)
        log_scale = None if log_scale is None else log_scale.masked_fill(hidden[:, None], LOWEST)
    return key, with_ones(places(rows.value, *span, 2, rows.ring_value)), log_scale
