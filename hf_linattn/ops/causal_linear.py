"""Kernel attention in linear time: o_i = sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j).

The keys are read chunk by chunk. Inside a chunk the pairs are formed directly; everything before it is summed up in a
state of constant size. Features may carry a log scale, phi = values * exp(log_scale): exponential feature maps then
neither overflow nor need an epsilon. The state keeps the running maximum of the scales and is rescaled when it grows;
each query's own factor depends only on the keys it may see and cancels in the ratio, so the future cannot leak.

Weights may decay with the distance, w_ij = phi(q_i) . phi(k_j) exp(-|c_i - c_j|) with c the running sum of a decay per
token. That is one more log scale of the keys, counted from the start of each chunk so that it never grows with N.

The normaliser is carried as one more column of the values (a column of ones), so that numerator and denominator see
the same masks, scales and decays by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .exponential import LOWEST, dense, fast_exp

CHUNK_SIZE = 64
SEGMENT = 8  # chunks for which features are made at a time


class Features(NamedTuple):
    """phi(x) = values * exp(log_scale): values [..., N, F], log_scale [..., N] or None where it is zero."""

    values: Tensor
    log_scale: Tensor | None = None


class LinearState(NamedTuple):
    """All that is remembered of the keys read so far; constant size, float32 (float64 for float64 inputs).

    kv: [B, Hkv, F, Dv + 1], sum_j phi(k_j) [v_j, 1] exp(-log_max). log_max: [B, Hkv], the largest log scale so far,
    as seen from the last position.
    """

    kv: Tensor
    log_max: Tensor


FeatureMap = Callable[[Tensor], Features]


class _Chunk(NamedTuple):
    """One chunk of queries and keys after the feature maps."""

    query: Tensor  # [B, Hkv, G, C, F]
    key: Tensor  # [B, Hkv, C, F], zero where masked
    log_scale: Tensor | None  # [B, Hkv, C], LOWEST where masked
    value: Tensor  # [B, Hkv, C, Dv + 1]
    ids: Tensor | None  # [B, C]
    decay: Tensor | None  # [B, Hkv, C], running sum of the log decay since the chunk began, and part of log_scale
    chunks: int = 1  # how many stand side by side in the dimension of the heads

    def part(self, span: slice) -> _Chunk:
        """Return the positions in `span`."""
        return _Chunk(
            self.query[..., span, :],
            self.key[:, :, span],
            None if self.log_scale is None else self.log_scale[:, :, span],
            self.value[:, :, span],
            None if self.ids is None else self.ids[:, span],
            None if self.decay is None else self.decay[:, :, span],
        ).from_its_start()

    def split(self, size: int) -> _Chunk:
        """Return all chunks of this size as heads: [B, Hkv T, ...], T = `chunks`; without ids."""

        def fold(x: Tensor) -> Tensor:
            return x.unflatten(2, (-1, size)).flatten(1, 2)

        query = self.query.unflatten(3, (-1, size)).transpose(2, 3).flatten(1, 2)
        return _Chunk(
            query,
            fold(self.key),
            None if self.log_scale is None else fold(self.log_scale),
            fold(self.value),
            None,
            None if self.decay is None else fold(self.decay),
            self.key.shape[2] // size,
        ).from_its_start()

    def from_its_start(self) -> _Chunk:
        """Sum up the decay of each token, until here as given, and make it part of the log scales."""
        if self.decay is None or self.log_scale is None:
            return self
        decay = self.decay.cumsum(-1)
        return self._replace(decay=decay, log_scale=self.log_scale - decay)


def causal_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_map: FeatureMap,
    key_map: FeatureMap,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    state: LinearState | None = None,
    log_decay: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, LinearState]:
    """Return the causal attention output and the state after the last key.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        query_map, key_map: feature maps; the query's log scale cancels and is ignored.
        key_padding_mask: [B, N], true for real keys. sequence_ids: [B, N], equal inside a packed sequence.
        state: what was read before; it belongs to the first packed sequence.
        log_decay: [B, Hkv, N], at most 0: log of what all earlier keys lose when this token comes; 0 where masked.

    Returns:
        output [B, H, N, Dv]; the state, which belongs to the last packed sequence. Time O(N (F + chunk_size) Dv).
    """
    chunks = _causal_chunks(
        query, key, value, query_map, key_map, key_padding_mask, sequence_ids, state, log_decay, chunk_size,
        strict=False,
    )  # fmt: skip
    outputs: list[Tensor] = []
    after: Any = state
    for partial, _, after in chunks:  # noqa: B007 - the last one is returned
        outputs.append(_ratio(partial))
    return torch.cat(outputs, dim=-2).flatten(1, 2), after


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_map: FeatureMap,
    key_map: FeatureMap,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    log_decay: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Return the bidirectional attention output [B, H, Nq, Dv]; arguments as in `causal_linear_attention`."""
    if sequence_ids is not None or log_decay is not None:
        return _two_way_linear_attention(
            query, key, value, query_map, key_map, key_padding_mask, sequence_ids, log_decay, chunk_size
        )
    state: Any = None
    for start in range(0, key.shape[2], chunk_size):
        chunk = slice(start, start + chunk_size)
        features, log_scale = _key_features(key[:, :, chunk], key_map, key_padding_mask, chunk)
        state = _fold(state, features, log_scale, _with_ones(value[:, :, chunk]))
    batch, kv_heads = key.shape[:2]
    query = query.reshape(batch, kv_heads, -1, *query.shape[2:])
    outputs = []
    for start in range(0, query.shape[3], chunk_size):
        features = query_map(query[..., start : start + chunk_size, :]).values
        outputs.append(_ratio(_group_matmul(features, state.kv)))
    return torch.cat(outputs, dim=-2).flatten(1, 2)


def _two_way_linear_attention(
    query, key, value, query_map, key_map, key_padding_mask, sequence_ids, log_decay, chunk_size
):
    """Bidirectional attention inside each packed sequence: keys up to i read forwards, keys after i read backwards."""
    operands, mask, ids = (query, key, value), key_padding_mask, sequence_ids
    forward = _collect(operands, query_map, key_map, mask, ids, log_decay, chunk_size, strict=False)
    backward = _collect(
        tuple(x.flip(2) for x in operands),
        query_map,
        key_map,
        None if mask is None else mask.flip(1),
        None if ids is None else ids.flip(1),
        # read backwards, what comes between two tokens is the decay of the later one
        None if log_decay is None else F.pad(log_decay[:, :, 1:].flip(2), (1, 0)),
        chunk_size,
        strict=True,
    )
    (left, left_max), (right, right_max) = forward, (x.flip(-2 if x.dim() == 5 else -1) for x in backward)
    top = torch.maximum(left_max, right_max).detach()
    total = left * (left_max - top).exp()[:, :, None, :, None] + right * (right_max - top).exp()[:, :, None, :, None]
    return _ratio(total).flatten(1, 2)


def _collect(operands, query_map, key_map, mask, sequence_ids, log_decay, chunk_size, strict):
    """Run the causal chunks and return all partial sums [B, Hkv, G, N, Dv + 1] with their log factors [B, Hkv, N]."""
    chunks = list(
        _causal_chunks(*operands, query_map, key_map, mask, sequence_ids, None, log_decay, chunk_size, strict=strict)
    )
    partials = torch.cat([partial for partial, _, _ in chunks], dim=-2)
    if chunks[0][1] is None:
        return partials, partials.new_zeros(*partials.shape[:2], partials.shape[3])
    return partials, torch.cat([top for _, top, _ in chunks], dim=-1)


def _causal_chunks(
    query, key, value, query_map, key_map, key_padding_mask, sequence_ids, state, log_decay, chunk_size, strict
):
    """Yield for every segment: sums over visible keys [B, Hkv, G, N, Dv + 1], their log factor, the state after it.

    Features are made for a segment of several chunks at a time: large enough that the cost of starting an operation
    does not count, small enough to stay in the cache.
    """
    batch, kv_heads, length = key.shape[:3]
    query = query.reshape(batch, kv_heads, -1, *query.shape[2:])
    carried_id = None if sequence_ids is None else sequence_ids[:, 0]
    size = min(chunk_size, length)
    diagonal = -1 if strict else 0
    hidden = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(diagonal + 1)
    for start in range(0, length, SEGMENT * chunk_size):
        span = slice(start, min(start + SEGMENT * chunk_size, length))
        features, log_scale = _key_features(
            key[:, :, span], key_map, key_padding_mask, span, scaled=log_decay is not None
        )
        segment = _Chunk(
            query_map(dense(query[..., span, :])).values,
            features,
            log_scale,
            _with_ones(value[:, :, span]),
            None if sequence_ids is None else sequence_ids[:, span],
            None if log_decay is None else log_decay[:, :, span],
        )
        if sequence_ids is None and (span.stop - span.start) % size == 0:
            partial, top, state = _read_together(segment.split(size), state, hidden, diagonal)
            yield partial, top, state
            continue
        partials, tops = [], []
        for first in range(0, span.stop - span.start, chunk_size):
            chunk = segment.part(slice(first, first + chunk_size))
            partial, top = _read(chunk, state, carried_id, hidden, diagonal)
            state, carried_id = _advance(chunk, state, carried_id)
            partials.append(partial)
            tops.append(top if chunk.decay is None else top + chunk.decay)
        yield torch.cat(partials, dim=-2), None if tops[0] is None else torch.cat(tops, dim=-1), state


def _read_together(chunks: _Chunk, state: LinearState | None, hidden: Tensor, diagonal: int):
    """Read several chunks [B, Hkv T, ...] at once, each as a head of its own that has its own state before it."""
    sums = _fold(None, chunks.key, chunks.log_scale, chunks.value)
    before, after = _states_before(chunks, sums, state)
    partial, top = _read(chunks, before, None, hidden, diagonal)
    heads = after.kv.shape[1]
    if top is not None:
        top = top if chunks.decay is None else top + chunks.decay
        top = top.unflatten(1, (heads, -1)).flatten(2)
    return partial.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3, 4), top, after


def _states_before(chunks: _Chunk, sums: LinearState, state: LinearState | None) -> tuple[LinearState, LinearState]:
    """Return the states before each chunk [B, Hkv T, ...] and the one after the last."""
    heads = chunks.key.shape[1] // chunks.chunks
    kv, log_max = (x.unflatten(1, (heads, -1)) for x in sums)
    if state is None:
        lowest = 0.0 if chunks.log_scale is None else LOWEST / 2
        state = LinearState(torch.zeros_like(kv[:, :, 0]), torch.full_like(log_max[:, :, 0], lowest))
    passed = None if chunks.decay is None else chunks.decay[..., -1].unflatten(1, (heads, -1))
    states = [state]
    for chunk in range(chunks.chunks):
        if chunks.log_scale is None:
            state = LinearState(state.kv + kv[:, :, chunk], state.log_max)
        else:
            top = torch.maximum(log_max[:, :, chunk], state.log_max.detach())
            old, new = (state.log_max - top).exp(), (log_max[:, :, chunk] - top).exp()
            joined = torch.addcmul(state.kv * old[..., None, None], kv[:, :, chunk], new[..., None, None])
            state = LinearState(joined, top if passed is None else top + passed[:, :, chunk])
        states.append(state)
    before = LinearState(*(torch.stack(x, dim=2).flatten(1, 2) for x in zip(*states[:-1], strict=True)))
    return before, state


def _key_features(key, key_map, key_padding_mask, span, scaled=False) -> Features:
    """Features of a chunk of keys, `scaled` for sure; a masked key has no weight and no say in the maximum."""
    values, log_scale = key_map(dense(key))
    if scaled and log_scale is None:
        log_scale = values.new_zeros(values.shape[:-1])
    if key_padding_mask is not None:
        hidden = ~key_padding_mask[:, None, span].bool()
        values = values.masked_fill(hidden[..., None], 0.0)
        log_scale = None if log_scale is None else log_scale.masked_fill(hidden, LOWEST)
    return Features(values, log_scale)


def _read(chunk: _Chunk, state: LinearState | None, carried_id: Tensor | None, hidden: Tensor, diagonal: int):
    """Sum over the keys each query of the chunk may see, in the chunk and in the state."""
    length = chunk.key.shape[2]
    hidden = hidden[:length, :length]
    scores = _group_matmul(chunk.query, chunk.key.transpose(-1, -2))
    scores = scores.tril_(diagonal)  # by index: whatever stands in the future, it cannot come through
    other = None if chunk.ids is None else (chunk.ids[:, :, None] != chunk.ids[:, None, :])[:, None]
    visible: Any = None if state is None else _visible_max(state, chunk, carried_id)
    top = None
    if chunk.log_scale is None:
        scores = scores if other is None else scores.masked_fill(other[:, :, None], 0.0)
    else:
        hidden = hidden if other is None else hidden | other
        log_weights = chunk.log_scale[:, :, None, :].masked_fill(hidden, LOWEST)
        # half of LOWEST, so that a row without any key gets weights exp(LOWEST / 2) = 0 and not exp(0)
        top = log_weights.detach().amax(-1).clamp(min=LOWEST / 2)
        top = top if visible is None else torch.maximum(top, visible.detach())
        scores = scores * fast_exp(log_weights - top[..., None])[:, :, None]
    partial = _group_matmul(scores, chunk.value)
    if state is None:
        return partial, top
    earlier = _group_matmul(chunk.query, state.kv)
    if top is not None or other is not None:
        # of a query that does not continue the state's sequence, `visible` is LOWEST and the factor zero
        factor = fast_exp(visible if top is None else visible - top)
        return torch.addcmul(partial, earlier, factor[:, :, None, :, None]), top
    return partial.add_(earlier), top


def _visible_max(state: LinearState, chunk: _Chunk, carried_id: Any) -> Tensor:
    """The state's maximum for the queries that continue its sequence, LOWEST for the others: [B, Hkv, C or 1]."""
    if chunk.ids is None:
        return state.log_max[:, :, None]
    return state.log_max[:, :, None].masked_fill((chunk.ids != carried_id[:, None])[:, None], LOWEST)


def _advance(chunk: _Chunk, state: LinearState | None, carried_id: Any):
    """Take the chunk's keys into the state; with packed sequences only those of the last one remain."""
    key, log_scale, last_id = chunk.key, chunk.log_scale, None
    if chunk.ids is not None:
        last_id = chunk.ids[:, -1]
        other = (chunk.ids != last_id[:, None])[:, None]
        key = key.masked_fill(other[..., None], 0.0)
        log_scale = None if log_scale is None else log_scale.masked_fill(other, LOWEST)
        if state is not None:
            ended = (last_id != carried_id)[:, None]
            log_max = state.log_max if log_scale is None else state.log_max.masked_fill(ended, LOWEST)
            state = LinearState(state.kv.masked_fill(ended[..., None, None], 0.0), log_max)
    state = _fold(state, key, log_scale, chunk.value)
    if chunk.decay is not None:  # log scales count from the start of a chunk: the next one begins here
        state = state._replace(log_max=state.log_max + chunk.decay[..., -1])
    return state, last_id


def _fold(state: LinearState | None, key: Tensor, log_scale: Tensor | None, value: Tensor) -> LinearState:
    """Return state + sum_j phi(k_j) [v_j, 1]^T, rescaled to the new maximum."""
    if log_scale is None:
        kv = key.transpose(-1, -2) @ value
        if state is not None:
            return LinearState(state.kv + kv, state.log_max)
        return LinearState(kv, kv.new_zeros(kv.shape[:2]))
    log_max = log_scale.detach().amax(-1).clamp(min=LOWEST / 2)
    if state is not None:
        log_max = torch.maximum(log_max, state.log_max.detach())
    kv = (key * fast_exp(log_scale - log_max[..., None])[..., None]).transpose(-1, -2) @ value
    if state is not None:
        kv = kv + state.kv * (state.log_max - log_max).exp()[..., None, None]
    return LinearState(kv, log_max)


def _group_matmul(left: Tensor, right: Tensor) -> Tensor:
    """[B, Hkv, G, M, K] @ [B, Hkv, K, N] without repeating the right side for each query head of the group."""
    groups, rows = left.shape[2:4]
    return (left.flatten(2, 3) @ right).unflatten(2, (groups, rows))


def _with_ones(value: Tensor) -> Tensor:
    return torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)


def _ratio(sums: Tensor) -> Tensor:
    """Divide the summed values by the summed weights; a query that saw no weight gets zero.

    So does one whose weights all but vanished, far below what its own largest feature times a key's can be, or whose
    sum of features with signs came out negative by rounding: the quotient would be noise, its gradient would overflow.
    """
    weight = sums[..., -1:]
    vanished = weight < torch.finfo(weight.dtype).tiny ** 0.75  # 4e-29 in float32
    return sums[..., :-1] / torch.where(vanished, torch.inf, weight)
