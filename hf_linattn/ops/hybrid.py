"""Softmax weights for near keys and kernel weights for far ones under one denominator, in linear time.

    o_i = sum_j w_ij v_j / sum_j w_ij,   w_ij = exp(s q_i . k_j)                               j near i, or a sink
                                                exp(g) phi(q_i) . phi(k_j) exp(-r |i - j|)     j far from i

Near is |i - j| < window_size, sinks are the first `num_sinks` tokens; g is a number per query head, r one per
key/value head. Both parts are summed with a log factor of their own and meet under their common maximum, so neither is
rescaled against the other and neither overflows.

The far part is strictly causal linear attention over keys that lie window_size - 1 positions back: query i stands
beside key i - (window_size - 1) and reads only what is before it. So the window slides token by token, in a prefill as
in decoding. Chunks of queries are taken several at a time: their sums over keys are made in one product, and the sums
before each chunk in another one. Read backwards, the same gives the far keys after a query.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .causal_linear import LOWEST, FeatureMap, LinearState

CHUNK_SIZE = 64
AT_ONCE = 128  # chunks, counted once for each query head and row, in one product: they fit a cache and fill all cores


class HybridWeights(NamedTuple):
    """What decides the weight of a pair.

    log_mix: [H], g above. decay_rate: [Hkv], r above; None is no decay. query_map sees [B, Hkv, G, N, D] and key_map
    [B, Hkv, N, D]; their log scales count.
    """

    window_size: int
    num_sinks: int
    scaling: float
    query_map: FeatureMap
    key_map: FeatureMap
    log_mix: Tensor
    decay_rate: Tensor | None = None

    @property
    def reach(self) -> int:
        """How far the window goes beyond the query itself, to one side."""
        return self.window_size - 1


class HybridState(NamedTuple):
    """All that is remembered; constant size, float32 (float64 for float64 inputs), per key/value head.

    ring_key, ring_value: [B, Hkv, window_size - 1, D or Dv], the last tokens, the newest last; zero before the first.
    sink_key, sink_value: [B, Hkv, num_sinks, D or Dv]. kv [B, Hkv, F, Dv + 1] and log_max [B, Hkv]: the sums over keys
    that have left the window, as in `LinearState`. length: [B], tokens read.
    """

    ring_key: Tensor
    ring_value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    kv: Tensor
    log_max: Tensor
    length: Tensor


class _Sums(NamedTuple):
    """Sums over keys of w_ij [v_j, 1] exp(-log): total [B, Hkv, T, G, C, Dv + 1], log [B, Hkv, T, G, C] or less."""

    total: Tensor
    log: Tensor


class _Rows(NamedTuple):
    """What a call reads. Positions count from the start of the sequence, places from the first token of the call."""

    query: Tensor  # [B, Hkv, G, N, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, Dv]
    ring_key: Tensor | None  # what is left of place 0, zero if None
    ring_value: Tensor | None
    sink_key: Tensor
    sink_value: Tensor
    start: Tensor  # [B or 1], position of place 0
    end: Tensor  # [B or 1], real tokens of the call
    padded: bool  # whether `end` may be less than N


def causal_hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: HybridWeights,
    lengths: Tensor | None = None,
    state: HybridState | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, HybridState]:
    """Return the causal attention output and the state after the last real token.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        lengths: [B], real tokens at the start of each row; None if all are. Outputs behind them mean nothing.
        state: what was read before.

    Returns:
        output [B, H, N, Dv]; the state. Time O(N (F + chunk_size + window_size) Dv).
    """
    rows = _make_rows(query, key, value, weights, lengths, state)
    # without earlier keys a window wider than the call would only see zeros
    left = weights.reach if state is not None else min(weights.reach, key.shape[2] - 1)
    before = None if state is None else LinearState(state.kv, state.log_max)
    outputs: list[Tensor] = []
    linear = before
    for first, far, linear in _far(rows, weights, before, chunk_size):  # noqa: B007 - the last one is kept
        near = _near(rows, weights, first, far.total.shape, left, 0, causal=True)
        outputs.append(_in_order(_join([near, far])))
    output = torch.cat(outputs, dim=3)[:, :, :, : query.shape[2]]
    return output.flatten(1, 2), _remember(rows, weights, linear)


def hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: HybridWeights,
    lengths: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Return the bidirectional attention output [B, H, N, Dv]; arguments as in `causal_hybrid_attention`.

    Far keys before and after a query are summed apart: all keys less the near ones would cancel.
    """
    length = key.shape[2]
    rows = _make_rows(query, key, value, weights, lengths, None)
    turned = rows._replace(query=rows.query.flip(3), key=key.flip(2), value=value.flip(2))
    parts = [
        torch.cat([_in_order(far.total), _in_order(far.log[..., None])], dim=-1)
        for _, far, _ in _far(turned, weights, None, chunk_size, backwards=True)
    ]
    after = torch.cat(parts, dim=3)[:, :, :, :length].flip(3)
    reach = min(weights.reach, length - 1)
    outputs = []
    for first, before, _ in _far(rows, weights, None, chunk_size):
        shape = before.total.shape
        near = _near(rows, weights, first, shape, reach, reach, causal=False)
        behind = _chunked(_places(after, first, first + shape[2] * shape[4], 3), shape[2])
        outputs.append(_in_order(_join([near, before, _Sums(behind[..., :-1], behind[..., -1])])))
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
        taken = new.gather(2, index.expand(-1, -1, -1, new.shape[3]))
        return torch.where(present, taken, torch.zeros_like(taken) if old is None else old)

    query = query.unflatten(1, (kv_heads, -1))
    ring_key, ring_value, sink_key, sink_value = (None,) * 4 if state is None else state[:4]
    sink_key, sink_value = fill(key, sink_key), fill(value, sink_value)
    return _Rows(
        query, key, value, ring_key, ring_value, sink_key, sink_value, start, end, padded=lengths is not None
    )


def _remember(rows: _Rows, weights: HybridWeights, linear: Any) -> HybridState:
    """Return the state after the last real token of each row."""
    reach, length = weights.reach, rows.key.shape[2]

    def newest(new: Tensor, ring: Tensor | None) -> Tensor:
        if not rows.padded:
            return _places(new, length - reach, length, 2, ring).clone()  # no view of a long prefill
        known = _places(new, -reach, length, 2, ring)
        index = (rows.end[:, None] + torch.arange(reach, device=new.device))[:, None, :, None]
        return known.gather(2, index.expand(-1, known.shape[1], -1, known.shape[3]))

    ring_key, ring_value = newest(rows.key, rows.ring_key), newest(rows.value, rows.ring_value)
    total = (rows.start + rows.end).expand(rows.key.shape[0]).clone()
    return HybridState(
        ring_key, ring_value, rows.sink_key, rows.sink_value, linear.kv, linear.log_max, total
    )


def _near(rows: _Rows, weights: HybridWeights, first: int, shape, left: int, right: int, *, causal: bool) -> _Sums:
    """Sum over the window and the sinks for T chunks of C queries from place `first` on; shape [., ., T, ., C, .]."""
    chunks, size = shape[2], shape[4]
    last = first + chunks * size

    def seen(x: Tensor, sinks: Tensor, ring: Tensor | None) -> Tensor:
        """Sinks and window of each chunk: [B, Hkv, T, D, S + left + C + right]."""
        window = _places(x, first - left, last + right, 2, ring).unfold(2, size + left + right, size)
        sinks = sinks.transpose(-1, -2)[:, :, None].expand(-1, -1, chunks, -1, -1)
        return torch.cat([sinks, window], dim=-1)

    query = _chunked(_places(rows.query, first, last, 3), chunks) * weights.scaling
    keys = seen(rows.key, rows.sink_key, rows.ring_key)
    scores = (query.flatten(3, 4) @ keys).unflatten(3, (-1, size))
    hidden = _hidden_from_window(rows, weights.num_sinks, first, (chunks, size), (left, right), causal)
    scores = scores.masked_fill(hidden, LOWEST)
    top = scores.detach().amax(-1).clamp(min=LOWEST / 2)
    shares = (scores - top[..., None]).exp()
    values = _with_ones(seen(rows.value, rows.sink_value, rows.ring_value).transpose(-1, -2))
    return _Sums((shares.flatten(3, 4) @ values).unflatten(3, (-1, size)), top)


def _hidden_from_window(rows: _Rows, sinks: int, first: int, chunks: tuple[int, int], sides, causal: bool) -> Tensor:
    """Which of [sinks, window] each query must not see: [C, S + K], or [B or 1, 1, T, 1, C, S + K] at the ends."""
    (number, size), (left, right) = chunks, sides
    device = rows.key.device
    own, other = torch.arange(size, device=device)[:, None], torch.arange(left + size + right, device=device)
    band = (other < own) | (other > own + left + right)
    whole = causal or (not rows.padded and first + number * size + right <= rows.key.shape[2])
    if first - left >= sinks and whole:
        return F.pad(band, (sinks, 0))
    begin = rows.start[:, None, None] + first + size * torch.arange(number, device=device)[:, None]  # [B or 1, T, 1]
    limit = (rows.start + rows.end)[:, None, None]
    position = begin - left + other
    outside = (position < sinks) | (position >= limit)
    slot = torch.arange(sinks, device=device)
    to_come = (slot >= limit)[:, :, None] if not causal else slot > (begin + own[:, 0])[..., None]
    windows = band | outside[:, :, None]
    return torch.cat([to_come.expand(*windows.shape[:3], -1), windows], dim=-1)[:, None, :, None]


def _far(
    rows: _Rows, weights: HybridWeights, state: LinearState | None, chunk_size: int, *, backwards: bool = False
) -> Iterator[tuple[int, _Sums, LinearState]]:
    """Yield for every segment of T chunks: its first place, the sums over far keys before each query, the state.

    `backwards`: the rows are turned around, and place N - 1 is the start of the sequence.
    """
    batch, kv_heads, groups, length, _ = rows.query.shape
    size = min(chunk_size, length)
    most = max(1, AT_ONCE // (batch * kv_heads * groups))
    mix, rate = weights.log_mix.view(kv_heads, 1, groups, 1), weights.decay_rate
    # a key beside a pad stays out of the state: it is still in the window of the token that will come
    end = torch.full_like(rows.end, length) if backwards else rows.end
    for first in range(0, length, most * size):
        chunks = min(most, -(-(length - first) // size))
        last = first + chunks * size
        steps = torch.arange(first, last + 1, size, device=end.device).minimum(end[:, None]) - first
        key, value, log_scale = _far_keys(rows, weights, first, last, end, backwards)
        query, query_log = weights.query_map(_places(rows.query, first, last, 3).contiguous())
        if state is None:
            log_max = value.new_full(value.shape[:2], 0.0 if log_scale is None else LOWEST / 2)
            state = LinearState(value.new_zeros(batch, kv_heads, key.shape[3], value.shape[3]), log_max)
        key, value = (x.unflatten(2, (chunks, size)) for x in (key, value))
        log_scale = None if log_scale is None else log_scale.unflatten(2, (chunks, size))
        total, top, state = _far_segment(_chunked(query, chunks), key, value, log_scale, state, rate, steps)
        log = mix if query_log is None else mix + _chunked(query_log[..., None], chunks)[..., 0]
        log = log if top is None else log + top[:, :, :, None]
        log = log if rate is None else log - (rate * weights.reach).view(-1, 1, 1, 1)
        yield first, _Sums(total, log.expand(total.shape[:-1])), state


def _far_keys(rows: _Rows, weights: HybridWeights, first: int, last: int, end: Tensor, backwards: bool):
    """Return features, values and log scales (None if all zero) of the keys beside the queries from `first` on."""
    index = torch.arange(first, last, device=end.device)
    place = index - weights.reach
    if backwards:
        position = rows.key.shape[2] - 1 - place
        hidden = (position < weights.num_sinks) | (position >= rows.end[:, None])
    else:
        hidden = (rows.start[:, None] + place < weights.num_sinks) | (index >= end[:, None])
    span = (first - weights.reach, last - weights.reach)
    key, log_scale = weights.key_map(_places(rows.key, *span, 2, rows.ring_key).contiguous())
    key = key.masked_fill(hidden[:, None, :, None], 0.0)
    if log_scale is None and weights.decay_rate is not None:
        log_scale = key.new_zeros(key.shape[:-1])
    if log_scale is not None:
        log_scale = log_scale.masked_fill(hidden[:, None], LOWEST)
    return key, _with_ones(_places(rows.value, *span, 2, rows.ring_value)), log_scale


def _far_segment(query, key, value, log_scale, state: LinearState, rate: Tensor | None, steps: Tensor):
    """Return sums over the keys before each query, their log factor [B, Hkv, T, C] or None, and the next state.

    Args:
        query: [B, Hkv, T, G, C, F]. key: [B, Hkv, T, C, F]. value: [B, Hkv, T, C, Dv + 1].
        log_scale: [B, Hkv, T, C], None if keys have no log scale and nothing decays.
        steps: [B or 1, T + 1], tokens of the segment before each chunk and after the last, pads not counted.
    """
    groups, size = query.shape[3:5]
    query = query.flatten(3, 4)
    # by index: whatever stands in the future, it cannot come through
    scores = (query @ key.transpose(-1, -2)).unflatten(3, (groups, size)).tril(-1)
    if log_scale is None:
        ones = value.new_ones(steps.shape[1], steps.shape[1]).tril()
        states, after = _sum_up(key.transpose(-1, -2) @ value, state.kv, ones)
        total = scores.flatten(3, 4) @ value + query @ states
        return total.unflatten(3, (groups, size)), None, LinearState(after, state.log_max)
    rate = log_scale.new_zeros(1, 1, 1) if rate is None else rate[:, None, None]
    offset = torch.arange(size, device=key.device)
    lost = rate * offset  # [Hkv, 1, C], since the chunk began
    log_weights = log_scale[:, :, :, None] - (rate * (offset[:, None] - offset))[:, None]
    log_weights = log_weights.masked_fill(offset[:, None] <= offset, LOWEST)
    # each chunk's sums as they are seen from its end, then from the start of every later one
    index = torch.arange(key.shape[2] * size, device=key.device).view(-1, size)
    log_keys = log_scale - rate * (steps[:, None, 1:, None] - index)
    tops = log_keys.detach().amax(-1).clamp(min=LOWEST / 2)
    sums = (key * (log_keys - tops[..., None]).exp()[..., None]).transpose(-1, -2) @ value
    tops = torch.cat([state.log_max[:, :, None], tops], dim=2)
    factors = tops[:, :, None] - rate * (steps[:, None, :, None] - steps[:, None, None])
    factors = factors.masked_fill(torch.ones_like(factors, dtype=torch.bool).triu(1), LOWEST)
    reached = factors.detach().amax(-1)  # [B, Hkv, T + 1], the largest log scale before each chunk and after the last
    states, after = _sum_up(sums, state.kv, (factors - reached[..., None]).exp())

    visible = reached[:, :, :-1, None] - lost
    top = torch.maximum(log_weights.amax(-1), visible).detach()
    scores = scores * (log_weights - top[..., None]).exp()[:, :, :, None]
    earlier = (query @ states).unflatten(3, (groups, size)) * (visible - top).exp()[:, :, :, None, :, None]
    total = (scores.flatten(3, 4) @ value).unflatten(3, (groups, size)) + earlier
    return total, top, LinearState(after, reached[:, :, -1])


def _sum_up(sums: Tensor, carried: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk [B, Hkv, T, F, Dv + 1] and the one after the last.

    sums: [B, Hkv, T, F, Dv + 1], of each chunk. carried: what came before. factors: [B, Hkv, T + 1, T + 1] or
    [T + 1, T + 1], by which the state before chunk t (or after the last) counts what was carried and each chunk.
    """
    known = torch.cat([carried[:, :, None], sums], dim=2).flatten(3)
    # apart, so that the states are one contiguous batch
    before, after = factors[..., :-1, :] @ known, factors[..., -1:, :] @ known
    shape = carried.shape[2:]
    return before.unflatten(3, shape), after[:, :, 0].unflatten(2, shape)


def _join(parts: list[_Sums]) -> Tensor:
    """Divide summed values by summed weights under the parts' common maximum: [B, Hkv, T, G, C, Dv].

    Each part counts with the weight it has, not with what its log factor allows for: features that hardly meet would
    otherwise push the others below what a float can hold. Sums that all but vanished are noise and left out.
    """
    logs = []
    for total, log in parts:
        weight = total[..., -1].detach()
        vanished = weight < torch.finfo(weight.dtype).tiny ** 0.75  # 4e-29 in float32
        logs.append((vanished, torch.where(vanished, LOWEST, log.detach() + torch.where(vanished, 1.0, weight).log())))
    top = torch.stack([mass for _, mass in logs]).amax(0)
    shares = [torch.where(gone, LOWEST, log - top).exp() for (_, log), (gone, _) in zip(parts, logs, strict=True)]
    joint = torch.stack([total * share[..., None] for (total, _), share in zip(parts, shares, strict=True)]).sum(0)
    weight = joint[..., -1:]
    return joint[..., :-1] / torch.where(weight == 0, 1.0, weight)


def _places(x: Tensor, start: int, stop: int, dim: int, left: Tensor | None = None) -> Tensor:
    """Return x from place `start` to `stop` along `dim`; before 0 stands the end of `left`, elsewhere zeros."""
    length = x.shape[dim]

    def zeros(count: int) -> Tensor:
        return x.new_zeros(*x.shape[:dim], count, *x.shape[dim + 1 :])

    parts = []
    if start < 0:
        count = min(stop, 0) - start
        parts.append(zeros(count) if left is None else left.narrow(dim, left.shape[dim] + start, count))
    if start < length and stop > 0:
        parts.append(x.narrow(dim, max(start, 0), min(stop, length) - max(start, 0)))
    if stop > length:
        parts.append(zeros(stop - max(start, length)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _chunked(x: Tensor, chunks: int) -> Tensor:
    """[B, Hkv, G, T C, D] -> [B, Hkv, T, G, C, D]."""
    return x.unflatten(3, (chunks, -1)).transpose(2, 3)


def _in_order(x: Tensor) -> Tensor:
    """[B, Hkv, T, G, C, D] -> [B, Hkv, G, T C, D]."""
    return x.transpose(2, 3).flatten(3, 4)


def _with_ones(value: Tensor) -> Tensor:
    """Append the column that sums up the weights."""
    return F.pad(value, (0, 1), value=1.0)
