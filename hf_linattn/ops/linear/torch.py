"""Causal sums of kernel attention, for several chunks of tokens at once, with the log factor they were divided by.

Inside a chunk the pairs are formed directly; everything before it is summed up in a state of constant size, which is
carried from chunk to chunk in two products each. What is finished here into a ratio (`causal_linear`) or put under one
denominator with other weights (`hybrid`) are the same sums.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.numerics import LN_2, LOWEST, fast_exp
from ..common.precision import wide_dtype
from ..common.tracing import is_open
from .torch_open_length import Passage

CHUNK_SIZE = 64
AT_ONCE = {"cpu": 32}  # chunks in one product, counted once for each query head and row: here they fit the cache
AT_ONCE_ELSEWHERE = 1024
LEAST_WEIGHT = {dtype: torch.finfo(dtype).tiny ** 0.75 for dtype in (torch.float32, torch.float64)}  # 4e-29 in float32


class LinearState(NamedTuple):
    """All that is remembered of the keys read so far; constant size, float32 (float64 for float64 inputs).

    kv: [B, Hkv, F, Dv + 1], sum_j phi(k_j) [v_j, 1] exp(-log_max). log_max: [B, Hkv], the largest log scale so far,
    as seen from the last position.
    """

    kv: Tensor
    log_max: Tensor

    @classmethod
    def empty(cls, key: Tensor, value: Tensor, scaled: bool) -> LinearState:
        """The state before the first of keys [B, Hkv, ..., F] with values [B, Hkv, ..., Dv + 1]."""
        return cls.before(key.shape[-1], value[..., :-1], scaled)

    @classmethod
    def before(cls, num_features: int, value: Tensor, scaled: bool) -> LinearState:
        """The same for values [B, Hkv, ..., Dv] that have no column of ones yet, in any precision."""
        shape = *value.shape[:2], num_features, value.shape[-1] + 1
        kv = value.new_zeros(shape, dtype=wide_dtype(value))
        return cls(kv, kv.new_full(shape[:2], LOWEST / 2 if scaled else 0.0))


class Chunks(NamedTuple):
    """T chunks of C tokens after the feature maps.

    query [B, Hkv, T, G, C, F]; key [B, Hkv, T, C, F], zero where masked; value [B, Hkv, T, C, Dv + 1], its last column
    ones; log_scale [B, Hkv, T, C] of the keys, LOWEST where masked, None if keys have none and nothing decays;
    log_decay [B, Hkv, T, C], log of what earlier keys lose when a token comes, None if nothing decays; sequence_ids
    [B, T, C], equal inside a packed sequence, None if nothing is packed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_scale: Tensor | None = None
    log_decay: Tensor | None = None
    sequence_ids: Tensor | None = None


class _Packing(NamedTuple):
    """Which pairs packed sequences leave: continues, kept [B, 1, T, C], other [B, 1, T, C, C], goes_on [B, 1, T].

    continues: queries that belong to the sequence of the state before their chunk. kept: keys of the chunk's last
    sequence. other: pairs of two sequences. goes_on: chunks whose last sequence is the one of the state before.
    """

    continues: Tensor
    kept: Tensor
    other: Tensor
    goes_on: Tensor

    @classmethod
    def of(cls, ids: Tensor, carried: Tensor) -> _Packing:
        """Compare the ids [B, T, C] and the id [B] of the state's sequence."""
        last = ids[..., -1]
        previous = torch.cat([carried[:, None], last[:, :-1]], dim=1)
        other = ids[..., :, None] != ids[..., None, :]
        found = (ids == previous[..., None], ids == last[..., None], other, last == previous)
        return cls(*(x[:, None] for x in found))


def chunks_at_once(rows: int, device: torch.device) -> int:
    """Return how many chunks to take together when each holds so many rows, one per query head and sequence."""
    return max(1, AT_ONCE.get(device.type, AT_ONCE_ELSEWHERE) // rows)


def part_sizes(query: Tensor, chunk_size: int) -> list[int]:
    """Cut the places of query [B, Hkv, G, N, D] into parts of several chunks; the last may be one short chunk."""
    several = chunks_at_once(query.shape[:3].numel(), query.device) * chunk_size
    whole, rest = divmod(query.shape[3], chunk_size)
    parts, left = divmod(whole * chunk_size, several)
    return [size for size in (*[several] * parts, left, rest) if size]


def chunk_sums(
    chunks: Chunks, state: LinearState, carried_id: Tensor | None = None, *, strict: bool = False
) -> tuple[Tensor, Tensor | None, LinearState]:
    """Return for every query sum_j w_ij [v_j, 1], divided by exp(log factor), the log factor, and the next state.

    Args:
        state: what was read before. carried_id: [B], the id of its sequence, if any are packed.
        strict: whether a query does not see its own key.

    Returns:
        sums [B, Hkv, T, G, C, Dv + 1]; log factor [B, Hkv, T, C], None if all are zero; the state, of the last
        sequence.
    """
    query, key, value, log_scale, log_decay, ids = chunks
    shape, size = query.shape[:5], query.shape[4]
    packing = None if ids is None or carried_id is None else _Packing.of(ids, carried_id)
    query = query.flatten(3, 4)
    # by index: whatever stands in the future, it cannot come through
    scores = _products(query, key.mT).view(*shape, size).tril_(-1 if strict else 0)
    if log_scale is None:
        return _plain_sums(query, key, value, scores, state, packing)
    decay = None if log_decay is None else log_decay.cumsum(-1)  # since the chunk began
    log_scale = log_scale if decay is None else log_scale - decay
    after_scale = log_scale if decay is None else log_scale + decay[..., -1:]  # as seen from the end of the chunk
    passed = None if decay is None else decay[..., -1]
    if packing is not None:
        after_scale = after_scale.masked_fill(~packing.kept, LOWEST)
    before, after, fold = _passage(after_scale.detach().amax(-1), passed, state, packing, is_open(query))
    weighted = value * fast_exp(after_scale - after[..., None])[..., None]
    earlier, kv = fold(query, key, weighted, state.kv)

    hidden = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(0 if strict else 1)
    visible = before[..., None]
    if packing is not None:
        hidden, visible = hidden | packing.other, visible.masked_fill(~packing.continues, LOWEST)
    # in powers of two, see `fast_exp`: every pass over the pairs counts
    visible = visible / LN_2
    powers = (log_scale / LN_2)[..., None, :].masked_fill(hidden, LOWEST)
    # half of LOWEST, so that a row without any key gets weights exp(LOWEST / 2) = 0 and not exp(0)
    top = torch.maximum(powers.detach().amax(-1), visible).clamp(min=LOWEST / 2)
    scores = scores * powers.sub_(top[..., None]).exp2_()[:, :, :, None]
    factor = torch.exp2(visible - top)[:, :, :, None, :, None]
    top = top * LN_2
    within = _products(scores.flatten(3, 4), value).view(*shape, value.shape[-1])
    total = torch.addcmul(within, earlier.view(*shape, value.shape[-1]), factor)
    # a copy: a view would keep all of `after`, and is another kind of input to a compiled slab
    return total, top if decay is None else top + decay, LinearState(kv, after[:, :, -1].clone())


def _plain_sums(query, key, value, scores, state: LinearState, packing: _Packing | None):
    """`chunk_sums` of keys without log scales, given the scores of the pairs [B, Hkv, T, G, C, C]."""
    left, shape = None, scores.shape[:5]
    if packing is not None:
        scores = scores.masked_fill(packing.other[:, :, :, None], 0.0)
        key = key.masked_fill(~packing.kept[..., None], 0.0)
        left = packing.goes_on.to(key.dtype).expand(key.shape[:3])
    if is_open(query):
        goes_on = None if packing is None else packing.goes_on
        earlier, kv = Passage(key, None, None, state.log_max, goes_on).read_and_fold(query, key, value, state.kv)
    else:
        earlier, kv = _read_and_fold(query, key, value, state.kv, left)
    if packing is not None:
        earlier = earlier * packing.continues[..., None].repeat(1, 1, 1, shape[3], 1)
    sums = torch.baddbmm(earlier.flatten(0, 2), scores.view(-1, *query.shape[3:4], shape[4]), value.flatten(0, 2))
    return sums.view(*shape, value.shape[-1]), None, LinearState(kv, state.log_max)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """[B, Hkv, T, M, K] @ [B, Hkv, T, K, N] as one batch [B Hkv T, M, N]."""
    return torch.bmm(left.flatten(0, 2), right.flatten(0, 2))


def _passage(largest: Tensor, passed: Tensor | None, state: LinearState, packing: _Packing | None, is_open: bool):
    """Return the largest log scales before each chunk and after it, and what reads and folds the state."""
    log_max = state.log_max.detach()
    if is_open:
        passage = Passage(largest, largest, passed, log_max, None if packing is None else packing.goes_on)
        return passage.before, passage.after, passage.read_and_fold
    before, after = _running_max(largest, passed, log_max, packing)
    log_left = (before if passed is None else before + passed) - after
    left = fast_exp(log_left if packing is None else log_left.masked_fill(~packing.goes_on, LOWEST))
    return before, after, functools.partial(_read_and_fold, left=left)


def _running_max(largest: Tensor, passed: Tensor | None, log_max: Tensor, packing: _Packing | None):
    """Return the largest log scales [B, Hkv, T] before each chunk and after it, given those of its own keys."""
    maxima = [log_max]
    for chunk, own in enumerate(largest.clamp(min=LOWEST / 2).unbind(2)):
        earlier = maxima[-1] if passed is None else maxima[-1] + passed[:, :, chunk].detach()
        earlier = earlier if packing is None else earlier.masked_fill(~packing.goes_on[:, :, chunk], LOWEST)
        maxima.append(torch.maximum(own, earlier))
    return torch.stack(maxima[:-1], dim=2), torch.stack(maxima[1:], dim=2)


def _read_and_fold(query, key, value, kv: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the products with what stood in the state before each chunk [B, Hkv, T, G C, Dv + 1], and the new state.

    `left` [B, Hkv, T]: what is left of the state after each chunk; None if all.
    """
    shape, flat = kv.shape, kv.flatten(0, 1)
    parts = [x.flatten(0, 1).unbind(1) for x in (query, key.mT, value)]
    factors = [None] * len(parts[0]) if left is None else left.flatten(0, 1)[..., None, None].unbind(1)
    read = []
    for query_part, key_part, value_part, factor in zip(*parts, factors, strict=True):
        read.append(torch.bmm(query_part, flat))
        flat = torch.baddbmm(flat if factor is None else flat * factor, key_part, value_part)
    return torch.stack(read, dim=1).view(*shape[:2], len(read), *read[0].shape[1:]), flat.view(shape)


def with_ones(value: Tensor) -> Tensor:
    """Return the values with the column that sums up the weights: masked, scaled and decayed as they are."""
    return torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)


def ratio(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed values and what to divide them by, inf for a query that saw no weight: it gets zero.

    So does one whose weights all but vanished, far below what its own largest feature times a key's can be, or whose
    sum of features with signs came out negative by rounding: the quotient would be noise, its gradient would overflow.
    """
    summed, weight = sums.split([sums.shape[-1] - 1, 1], -1)
    return summed, torch.threshold(weight, LEAST_WEIGHT[weight.dtype], math.inf)


def inverse_length(features: Tensor) -> Tensor:
    """Return 1 / |features| [..., 1] of features [..., F], zero where all but nothing is there."""
    size = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    return torch.threshold(size, LEAST_WEIGHT[size.dtype], math.inf).reciprocal()


def unit_length(features: Tensor) -> Tensor:
    """Divide features [..., F] by their length; all but vanishing ones are zero."""
    return features * inverse_length(features)
