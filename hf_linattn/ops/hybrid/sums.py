"""What PyTorch's forms of hybrid attention are made of: rows and what is kept of them, sums over keys, their ratio."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LN_2, LOWEST, fast_exp
from ..common.precision import wide, widened
from .types import HardKeyState, HybridState, HybridWeights


class Sums(NamedTuple):
    """Sums over keys for T chunks of C queries.

    total: [B, Hkv, T, G, C, Dv], sum_j w_ij v_j exp(-log). weight, log: [B, Hkv, T, G, C], sum_j w_ij exp(-log).
    """

    total: Tensor
    weight: Tensor
    log: Tensor


class Rows(NamedTuple):
    """What a call reads. Positions count from the start of the sequence, places from the first token of the call."""

    query: GradAccumulator  # [B, Hkv, G, N, D]
    key: GradAccumulator  # [B, Hkv, N, D]
    value: GradAccumulator  # [B, Hkv, N, Dv]
    ring_key: Tensor | None  # what is left of place 0, zero if None
    ring_value: Tensor | None
    sink_key: Tensor
    sink_value: Tensor
    start: Tensor  # [B or 1], position of place 0
    end: Tensor  # [B or 1], real tokens of the call
    padded: bool  # whether `end` may be less than N


def make_rows(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, lengths: Tensor | None,
    state: HybridState | HardKeyState | None,
) -> Rows:  # fmt: skip
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
    return Rows(
        GradAccumulator(query.unflatten(1, (kv_heads, -1))), GradAccumulator(key), GradAccumulator(value),
        ring_key, ring_value, sink_key, sink_value, start, end, padded=lengths is not None,
    )  # fmt: skip


def remember(rows: Rows, weights: HybridWeights, linear: Any, dtype: torch.dtype) -> HybridState:
    """Return the state after the last real token of each row, whose tokens came in `dtype`."""
    reach, length = weights.kept, rows.key.whole.shape[2]

    def newest(new: GradAccumulator, ring: Tensor | None) -> Tensor:
        if not rows.padded:
            return places(new, length - reach, length, 2, ring).to(dtype, copy=True)  # no view of a long prefill
        known = places(new, -reach, length, 2, ring)
        index = (rows.end[:, None] + torch.arange(reach, device=known.device))[:, None, :, None]
        return known.gather(2, index.expand(-1, known.shape[1], -1, known.shape[3])).to(dtype)

    ring_key, ring_value = newest(rows.key, rows.ring_key), newest(rows.value, rows.ring_value)
    total = (rows.start + rows.end).expand(rows.key.whole.shape[0]).clone()
    sink_key, sink_value = rows.sink_key.to(dtype), rows.sink_value.to(dtype)
    return HybridState(ring_key, ring_value, sink_key, sink_value, linear.kv, linear.log_max, total)


def exact_sums(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Sequence[Tensor], weights: HybridWeights
) -> Sums:
    """Sum over keys [B, Hkv, T, K, D] of T chunks of queries [B, Hkv, T, G, C, D], `hidden` ones left out.

    Each of `hidden` broadcasts to [B, Hkv, T, G, C, K].
    """
    # in powers of two, see fast_exp; in place, since every pass over the scores counts
    scores = (query * (weights.scaling / LN_2)).flatten(3, 4) @ keys.transpose(-1, -2)
    scores = scores.unflatten(3, query.shape[3:5])
    for mask in hidden:
        scores.masked_fill_(mask, LOWEST)
    cancels = weights.window_log is None  # the maximum, out of sums and log: it needs no gradient
    top = (scores.detach() if cancels else scores).amax(-1).clamp(min=LOWEST / 2)
    beside = None if weights.sink is None else (weights.sink / LN_2).view(top.shape[1], 1, -1, 1)
    if beside is not None:
        top = torch.maximum(top, beside.detach() if cancels else beside)
    shares = (scores.sub_(top[..., None]) if cancels else scores - top[..., None]).exp2_()
    total = shares.flatten(3, 4) @ values
    if weights.window_log is None:
        log = top * LN_2
    else:
        log = weights.window_log.view(top.shape[1], 1, -1, 1).expand(top.shape)
    weight = shares.sum(-1) if beside is None else shares.sum(-1) + (beside - top).exp2()
    return Sums(total.unflatten(3, query.shape[3:5]), weight, log)


def join(parts: list[Sums], hybrid: HybridWeights) -> Tensor:
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


def places(x: GradAccumulator, start: int, stop: int, dim: int, left: Tensor | None = None) -> Tensor:
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


def chunked(x: Tensor, chunks: int) -> Tensor:
    """[B, Hkv, G, T C, D] -> [B, Hkv, T, G, C, D]."""
    return x.unflatten(3, (chunks, -1)).transpose(2, 3)


def in_order(x: Tensor) -> Tensor:
    """[B, Hkv, T, G, C, D] -> [B, Hkv, G, T C, D]."""
    return x.transpose(2, 3).flatten(3, 4)
