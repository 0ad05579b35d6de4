"""Hybrid attention by PyTorch's operations, which can compute every call.

Chunks of queries are taken several at a time: their sums over keys are made in one product, and the sums before each
chunk in another one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.grad_accumulator import Source
from ..common.numerics import LN_2, LOWEST, dense, fast_exp
from ..common.precision import wide, widened
from ..linear.torch import Chunks, chunk_sums, chunks_at_once, with_ones
from ..linear.types import LinearState
from .types import HybridCall, HybridState, HybridWeights


class _Sums(NamedTuple):
    """Sums over keys for T chunks of C queries.

    total: [B, Hkv, T, G, C, Dv], sum_j w_ij v_j exp(-log). weight, log: [B, Hkv, T, G, C], sum_j w_ij exp(-log).
    """

    total: Tensor
    weight: Tensor
    log: Tensor


class _Rows(NamedTuple):
    """What a call reads. Positions count from the start of the sequence, places from the first token of the call."""

    query: Source  # [B, Hkv, G, N, D]
    key: Source  # [B, Hkv, N, D]
    value: Source  # [B, Hkv, N, Dv]
    ring_key: Tensor | None  # what is left of place 0, zero if None
    ring_value: Tensor | None
    sink_key: Tensor
    sink_value: Tensor
    start: Tensor  # [B or 1], position of place 0
    end: Tensor  # [B or 1], real tokens of the call
    padded: bool  # whether `end` may be less than N


def unsupported(call: HybridCall) -> str | None:
    """PyTorch's operations can compute every call."""
    return None


def run(call: HybridCall) -> tuple[Tensor, HybridState | None]:
    """Return the output [B, H, N, Dv], and the state after a causal call."""
    call = call._replace(weights=call.weights.beside(call.key))
    return _causal_attention(call) if call.causal else (_two_way_attention(call), None)


def _causal_attention(call: HybridCall) -> tuple[Tensor, HybridState]:
    weights, state, chunk_size = call.weights, call.state, call.chunk_size
    query, key, value = widened(call.query, call.key, call.value)
    rows = _make_rows(query, key, value, weights, call.lengths, state)
    # without earlier keys a window wider than the call would only see zeros
    left = weights.reach if state is not None else min(weights.reach, key.shape[2] - 1)
    before = None if state is None else LinearState(state.kv, state.log_max)
    band = _band(key, weights.num_sinks, min(chunk_size, key.shape[2]), left)
    outputs: list[Tensor] = []
    linear = before
    for first, far, linear in _far(rows, weights, before, chunk_size):  # noqa: B007 - the last one is kept
        near = _near(rows, weights, first, far.total.shape[2], band, (left, 0), causal=True)
        outputs.append(_in_order(_join([near, far], weights)))
    output = torch.cat(outputs, dim=3)[:, :, :, : query.shape[2]]
    return output.flatten(1, 2), _remember(rows, weights, linear, call.key.dtype)


def _two_way_attention(call: HybridCall) -> Tensor:
    """Far keys before and after a query are summed apart: all keys less the near ones would cancel."""
    weights, chunk_size = call.weights, call.chunk_size
    query, key, value = widened(call.query, call.key, call.value)
    length = key.shape[2]
    rows = _make_rows(query, key, value, weights, call.lengths, None)
    turned = rows._replace(
        query=Source(rows.query.whole.flip(3)), key=Source(key.flip(2)), value=Source(value.flip(2))
    )
    parts = [
        _in_order(torch.cat([far.total, far.weight[..., None], far.log[..., None]], dim=-1))
        for _, far, _ in _far(turned, weights, None, chunk_size, backwards=True)
    ]
    after = Source(torch.cat(parts, dim=3)[:, :, :, :length].flip(3))
    reach, size = min(weights.reach, length - 1), min(chunk_size, length)
    band = _band(key, weights.num_sinks, size, 2 * reach)
    outputs = []
    for first, before, _ in _far(rows, weights, None, chunk_size):
        chunks = before.total.shape[2]
        near = _near(rows, weights, first, chunks, band, (reach, reach), causal=False)
        columns = _chunked(_places(after, first, first + chunks * size, 3), chunks)
        behind = _Sums(columns[..., :-2], columns[..., -2], columns[..., -1])
        outputs.append(_in_order(_join([near, before, behind], weights)))
    return torch.cat(outputs, dim=3)[:, :, :, :length].flatten(1, 2)


def _make_rows(query, key, value, weights: HybridWeights, lengths, state: HybridState | None) -> _Rows:
    """Put together what a call reads; sinks that are still to come are zero."""
    batch, kv_heads, length, _ = key.shape
    start = torch.zeros(1, dtype=torch.long, device=key.device) if state is None else state.length
    end = torch.full_like(start[:1], length) if lengths is None else lengths.long()
    place = torch.arange(weights.num_sinks, device=key.device) - start[:, None]  # [B or 1, S]
    present = ((place >= 0) & (place < end[:, None]))[:, None, :, None]
    index = place.clamp(0, length - 1)[:, None, :, None].expand(batch, kv_heads, -1, -1)

    def fill(new: Tensor, old: Tensor | None) -> Tensor:
        taken = wide(new.gather(2, index.expand(-1, -1, -1, new.shape[3])))
        return torch.where(present, taken, torch.zeros_like(taken) if old is None else old)

    ring_key, ring_value, sink_key, sink_value = (None,) * 4 if state is None else widened(*state[:4])
    sink_key, sink_value = fill(key, sink_key), fill(value, sink_value)
    return _Rows(
        Source(query.unflatten(1, (kv_heads, -1))), Source(key), Source(value),
        ring_key, ring_value, sink_key, sink_value, start, end, padded=lengths is not None,
    )  # fmt: skip


def _remember(rows: _Rows, weights: HybridWeights, linear: Any, dtype: torch.dtype) -> HybridState:
    """Return the state after the last real token of each row, whose tokens came in `dtype`."""
    reach, length = weights.reach, rows.key.whole.shape[2]

    def newest(new: Source, ring: Tensor | None) -> Tensor:
        if not rows.padded:
            return _places(new, length - reach, length, 2, ring).to(dtype, copy=True)  # no view of a long prefill
        known = _places(new, -reach, length, 2, ring)
        index = (rows.end[:, None] + torch.arange(reach, device=known.device))[:, None, :, None]
        return known.gather(2, index.expand(-1, known.shape[1], -1, known.shape[3])).to(dtype)

    ring_key, ring_value = newest(rows.key, rows.ring_key), newest(rows.value, rows.ring_value)
    total = (rows.start + rows.end).expand(rows.key.whole.shape[0]).clone()
    sink_key, sink_value = rows.sink_key.to(dtype), rows.sink_value.to(dtype)
    return HybridState(ring_key, ring_value, sink_key, sink_value, linear.kv, linear.log_max, total)


def _band(like: Tensor, sinks: int, size: int, reach: int) -> Tensor:
    """Return where a query sees no key of [sinks, window], away from both ends: [C, S + K]."""
    other = torch.arange(size + reach, device=like.device)  # made where it is read: a copy would be waited for
    return F.pad((other < other[:size, None]) | (other > other[:size, None] + reach), (sinks, 0))


def _near(
    rows: _Rows, weights: HybridWeights, first: int, chunks: int, band: Tensor, sides: tuple[int, int], *, causal: bool
) -> _Sums:
    """Sum over the window and the sinks for T chunks from place `first` on; `sides`: how far they see."""
    size, left, right = band.shape[0], *sides
    last = first + chunks * size

    def seen(x: Source, sinks: Tensor, ring: Tensor | None) -> Tensor:
        """Sinks and window of each chunk: [B, Hkv, T, S + left + C + right, D]."""
        window = _places(x, first - left, last + right, 2, ring).unfold(2, size + left + right, size)
        return torch.cat([sinks[:, :, None].expand(-1, -1, chunks, -1, -1), window.transpose(-1, -2)], dim=3)

    # in powers of two, see fast_exp; in place, since every pass over the scores counts
    query = _chunked(_places(rows.query, first, last, 3), chunks) * (weights.scaling / LN_2)
    keys = seen(rows.key, rows.sink_key, rows.ring_key)
    scores = (query.flatten(3, 4) @ keys.transpose(-1, -2)).unflatten(3, (-1, size)).masked_fill_(band, LOWEST)
    whole = causal or (not rows.padded and last + right <= rows.key.whole.shape[2])
    if first - left < weights.num_sinks or not whole:
        scores.masked_fill_(_hidden_at_ends(rows, weights.num_sinks, first, (chunks, size), sides, causal), LOWEST)
    top = scores.detach().amax(-1).clamp(min=LOWEST / 2)
    beside = None if weights.sink is None else (weights.sink / LN_2).view(top.shape[1], 1, -1, 1)
    top = top if beside is None else torch.maximum(top, beside.detach())
    shares = scores.sub_(top[..., None]).exp2_()
    total = shares.flatten(3, 4) @ seen(rows.value, rows.sink_value, rows.ring_value)
    if weights.window_log is None:
        log = top * LN_2
    else:
        log = weights.window_log.view(top.shape[1], 1, -1, 1).expand(top.shape)
    weight = shares.sum(-1) if beside is None else shares.sum(-1) + (beside - top).exp2()
    return _Sums(total.unflatten(3, (-1, size)), weight, log)


def _hidden_at_ends(rows: _Rows, sinks: int, first: int, chunks: tuple[int, int], sides, causal: bool) -> Tensor:
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
    rows: _Rows, weights: HybridWeights, state: LinearState | None, chunk_size: int, *, backwards: bool = False
) -> Iterator[tuple[int, _Sums, LinearState]]:
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
        query, query_log = weights.query_map(dense(_places(rows.query, first, last, 3)))
        state = LinearState.empty(key, value, log_scale is not None) if state is None else state
        decay = None
        if rate is not None:
            real = torch.arange(first, last, device=end.device) < end[:, None]  # a pad takes nothing from the others
            decay = (-rate[:, None] * real[:, None]).expand(batch, -1, -1)
        given: list[Any] = [None if x is None else x.unflatten(2, (-1, size)) for x in (key, value, log_scale, decay)]
        total, top, state = chunk_sums(Chunks(_chunked(query, chunks), *given), state, strict=True)
        log = mix if query_log is None else mix + _chunked(query_log[..., None], chunks)[..., 0]
        log = log if top is None else log + top[:, :, :, None]
        log = log if rate is None else log - (rate * weights.reach).view(-1, 1, 1, 1)
        yield first, _Sums(total[..., :-1], total[..., -1], log.expand(total.shape[:-1])), state


def _far_keys(rows: _Rows, weights: HybridWeights, first: int, last: int, end: Tensor, backwards: bool):
    """Return features, values and log scales (None if all zero) of the keys beside the queries from `first` on."""
    length, span = rows.key.whole.shape[2], (first - weights.reach, last - weights.reach)
    index = torch.arange(first, last, device=end.device)
    place = index - weights.reach
    if backwards:
        position = length - 1 - place
        hidden = (position < weights.num_sinks) | (position >= rows.end[:, None])
    else:
        hidden = (rows.start[:, None] + place < weights.num_sinks) | (index >= end[:, None])
    key, log_scale = weights.key_map(dense(_places(rows.key, *span, 2, rows.ring_key)))
    if log_scale is None and weights.decay_rate is not None:
        log_scale = key.new_zeros(key.shape[:-1])
    if backwards or rows.padded or span[0] < weights.num_sinks or last > length:
        key = key.masked_fill(hidden[:, None, :, None], 0.0)
        log_scale = None if log_scale is None else log_scale.masked_fill(hidden[:, None], LOWEST)
    return key, with_ones(_places(rows.value, *span, 2, rows.ring_value)), log_scale


def _join(parts: list[_Sums], hybrid: HybridWeights) -> Tensor:
    """Divide summed values by summed weights under the parts' common maximum: [B, Hkv, T, G, C, Dv]; near ones first.

    Each part counts with the weight it has, not with what its log factor allows for: features that hardly meet would
    otherwise push the others below what a float can hold. Sums that all but vanished are noise and left out.
    """
    smallest = torch.finfo(parts[0].weight.dtype).tiny ** 0.75  # 4e-29 in float32
    present = [part.weight.detach() >= smallest for part in parts]
    masses = [
        torch.where(some, part.log.detach() + part.weight.detach().clamp(min=smallest).log(), LOWEST)
        for part, some in zip(parts, present, strict=True)
    ]
    top = functools.reduce(torch.maximum, masses)
    factors = [fast_exp(torch.where(some, part.log - top, LOWEST)) for part, some in zip(parts, present, strict=True)]
    weights = [part.weight * factor for part, factor in zip(parts, factors, strict=True)]
    weight = functools.reduce(torch.add, weights)
    weight = torch.where(weight == 0, 1.0, weight)
    factors = [factor / weight for factor in factors]
    if hybrid.far_gate is not None:
        near, opening = parts[0].weight, hybrid.gate.view(weight.shape[1], 1, -1, 1)
        factors[1:] = [factor * opening for factor in factors[1:]]
        far = functools.reduce(torch.add, (part.weight * x for part, x in zip(parts[1:], factors[1:], strict=True)))
        factors[0] = (1 - far) / torch.where(near == 0, 1.0, near)
    joint = parts[0].total * factors[0][..., None]
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        joint = torch.addcmul(joint, part.total, factor[..., None])
    return joint


def _places(x: Source, start: int, stop: int, dim: int, left: Tensor | None = None) -> Tensor:
    """Return x from place `start` to `stop` along `dim`; before 0 stands the end of `left`, elsewhere zeros."""
    shape = x.whole.shape
    length = shape[dim]

    def zeros(count: int) -> Tensor:
        return x.whole.new_zeros(*shape[:dim], count, *shape[dim + 1 :])

    parts = []
    if start < 0:
        count = min(stop, 0) - start
        parts.append(zeros(count) if left is None else left.narrow(dim, left.shape[dim] + start, count))
    if (start < length and stop > 0) or not parts:
        first = min(max(start, 0), length)
        parts.append(x.narrow(dim, first, max(min(stop, length) - first, 0)))
    if stop > length:
        parts.append(zeros(stop - max(start, length)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _chunked(x: Tensor, chunks: int) -> Tensor:
    """[B, Hkv, G, T C, D] -> [B, Hkv, T, G, C, D]."""
    return x.unflatten(3, (chunks, -1)).transpose(2, 3)


def _in_order(x: Tensor) -> Tensor:
    """[B, Hkv, T, G, C, D] -> [B, Hkv, G, T C, D]."""
    return x.transpose(2, 3).flatten(3, 4)
