"""What hard keys stand beside: a state that keys enter block by block, in the order in which they lose their place.

Two kinds. That of kernel attention holds sums over its keys, which share a denominator with the exact weights. That of
the delta rule has no denominator, and its answer is mixed with that of the exact weights. Both are `Memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.numerics import LOWEST, dense, fast_exp
from ..delta_rule.interface import gated_delta_rule
from ..dispatch import Policy
from ..linear.torch import ratio, with_ones
from ..linear.types import FeatureMap
from .sums import Sums, join
from .types import HybridWeights


class Memory(NamedTuple):
    """State of the far part: `kv` and `log_max` of a `HybridState`."""

    kv: Tensor
    log_max: Tensor


class KernelMemory(NamedTuple):
    """S = sum_j exp(-r (p - j)) phi(k_j) [v_j, 1]^T over its keys, as seen from position p, the first of the window.

    Maps and rate as in `HybridWeights`; log_mix: [H].
    """

    query_map: FeatureMap
    key_map: FeatureMap
    log_mix: Tensor
    rate: Tensor | None

    def empty(self, parts: tuple[Tensor, ...]) -> Memory:
        """Return the state of no key, for keys with such `entries`."""
        features, value, *scale = parts
        kv = features.new_zeros(*features.shape[:2], features.shape[-1], value.shape[-1])
        return Memory(kv, kv.new_full(kv.shape[:2], LOWEST / 2 if scale else 0.0))

    def entries(self, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Return what keys [B, Hkv, C, D] would enter: features, values beside a one, log scales if there are any.

        position: [B or 1, Hkv or 1, C], where they stand; anything where there is no key.
        """
        features, log_scale = self.key_map(dense(key))
        if log_scale is None and self.rate is not None:
            log_scale = features.new_zeros(features.shape[:-1])
        return features, with_ones(value), *(() if log_scale is None else (log_scale[..., None],))

    def values(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Return the values among entries."""
        return parts[1][..., :-1]

    def recall(self, parts: tuple[Tensor, ...], memory: Memory) -> Tensor:
        """Return what the state says about such keys [B, Hkv, C, Dv], zero where it says nothing."""
        return torch.div(*ratio(parts[0] @ memory.kv))

    def write(
        self, memory: Memory, parts: tuple[Tensor, ...], real: Tensor, age: Tensor, passed: Tensor | int
    ) -> Memory:
        """Return the state after `real` keys [B, Hkv, C] enter, `age` before p, which moved by `passed` tokens."""
        features, value, *scale = parts
        features, value = (x.masked_fill(~real[..., None], 0.0) for x in (features, value))
        if not scale:
            return memory._replace(kv=memory.kv + features.mT @ value)
        log, left = scale[0][..., 0], memory.log_max
        if self.rate is not None:
            log, left = log - self.rate[:, None] * age, left - self.rate * passed
        log = log.masked_fill(~real, LOWEST)
        top = torch.maximum(log.amax(-1), left).detach()
        value = value * fast_exp(log - top[..., None])[..., None]
        return Memory(memory.kv * fast_exp(left - top)[..., None, None] + features.mT @ value, top)

    def read(self, query: Tensor, memory: Memory, position: Tensor, begin: Tensor) -> Sums:
        """Return the sums of queries [B, Hkv, T, G, C, D] at `position` [B or 1, T, C] over T states [B, Hkv, T, ..].

        begin: [B or 1, T], p of each state.
        """
        features, query_log = self.query_map(dense(query.transpose(2, 3).flatten(3, 4)))
        features = features.unflatten(3, query.shape[2:5:2]).transpose(2, 3)
        total = (features.flatten(3, 4) @ memory.kv).unflatten(3, query.shape[3:5])
        log = self.log_mix.view(total.shape[1], 1, -1, 1) + memory.log_max[..., None, None]
        if query_log is not None:
            log = log + query_log.unflatten(3, query.shape[2:5:2]).transpose(2, 3)
        if self.rate is not None:
            log = log - self.rate.view(-1, 1, 1, 1) * (position - begin[..., None])[:, None, :, None]
        return Sums(total[..., :-1], total[..., -1], log.expand(total.shape[:-1]))

    def join(self, exact: Sums, far: Sums, weights: HybridWeights, entered: Tensor) -> Tensor:
        """Return the output [B, Hkv, T, G, C, Dv]; `entered` [B, Hkv, T]: whether any key is in the state."""
        return join([exact, far], weights)


class DeltaMemory(NamedTuple):
    """S by the delta rule over its keys, in the order in which they enter; `log_max` of the state is not used.

    query_map: makes what queries [B, Hkv, G, N, D] at positions [B or 1, N] read with. key_map: makes of keys
    [B, Hkv, C, D] at positions [B or 1, Hkv or 1, C] what they write, features of length 1, beta [B, Hkv, C], log g or
    None. log_mix: [H], the log of a factor of the state's share. policy: which backends may write.
    """

    query_map: Callable[[Tensor, Tensor], Tensor]
    key_map: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
    log_mix: Tensor
    policy: Policy

    def empty(self, parts: tuple[Tensor, ...]) -> Memory:
        features, value = parts[:2]
        kv = features.new_zeros(*features.shape[:2], features.shape[-1], value.shape[-1])
        return Memory(kv, kv.new_zeros(kv.shape[:2]))

    def entries(self, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        features, beta, log_gate = self.key_map(key, position)
        return features, value, *(x[..., None] for x in (beta, log_gate) if x is not None)

    def values(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[1]

    def recall(self, parts: tuple[Tensor, ...], memory: Memory) -> Tensor:
        return parts[0] @ memory.kv

    def write(self, memory: Memory, parts: tuple[Tensor, ...], real: Tensor, age: Any, passed: Any) -> Memory:
        features, value, beta, *gate = (x.masked_fill(~real[..., None], 0.0) for x in parts)
        log_gate = gate[0][..., 0] if gate else None
        heads = features, features, value  # answers are not read
        _, kv = gated_delta_rule(*heads, beta[..., 0], log_gate, memory.kv, policy=self.policy)
        return memory._replace(kv=kv)

    def read(self, query: Tensor, memory: Memory, position: Tensor, begin: Tensor) -> Sums:
        features = self.query_map(dense(query.transpose(2, 3).flatten(3, 4)), position.flatten(1))
        features = features.unflatten(3, query.shape[2:5:2]).transpose(2, 3)
        total = (features.flatten(3, 4) @ memory.kv).unflatten(3, query.shape[3:5])
        share = self.log_mix.view(total.shape[1], 1, -1, 1).exp().expand(total.shape[:-1])
        return Sums(total, share, torch.zeros_like(share))

    def join(self, exact: Sums, far: Sums, weights: HybridWeights, entered: Tensor) -> Tensor:
        own = exact.total / torch.where(exact.weight == 0, 1.0, exact.weight)[..., None]
        share = far.weight * weights.gate.view(own.shape[1], 1, -1, 1) * entered[..., None, None]
        return own + share[..., None] * (far.total - own)


MemoryRule = KernelMemory | DeltaMemory


def memory_rule(weights: HybridWeights, policy: Policy) -> MemoryRule:
    """Return what keys enter that have left the window and are no hard ones."""
    query_map: Any = weights.query_map
    key_map: Any = weights.key_map
    if weights.delta_rule:
        return DeltaMemory(query_map, key_map, weights.log_mix, policy)
    return KernelMemory(query_map, key_map, weights.log_mix, weights.decay_rate)
