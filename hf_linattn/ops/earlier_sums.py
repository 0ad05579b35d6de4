"""Strictly causal sums of kernel attention, for several chunks at once and with the log factor they were divided by.

What `causal_linear` does chunk by chunk up to the finished ratio is cut open here, for operations that put other
weights under the same denominator. Only the state itself is carried from chunk to chunk, in two products each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .causal_linear import LinearState
from .exponential import LOWEST, fast_exp


def earlier_sums(query, key, value, log_scale, state: LinearState, rate: Tensor | None, steps: Tensor):
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
        earlier, kv = _read_and_fold(query, key, value, state.kv, None)
        total = scores.flatten(3, 4) @ value + earlier
        return total.unflatten(3, (groups, size)), None, LinearState(kv, state.log_max)
    rate = log_scale.new_zeros(1, 1, 1) if rate is None else rate[:, None, None]
    offset = torch.arange(size, device=key.device)
    lost = rate * offset  # [Hkv, 1, C], since the chunk began
    log_weights = log_scale[:, :, :, None] - (rate * (offset[:, None] - offset))[:, None]
    log_weights = log_weights.masked_fill(offset[:, None] <= offset, LOWEST)
    # as seen from the end of each chunk, and the largest of all up to there
    index = torch.arange(key.shape[2] * size, device=key.device).view(-1, size)
    log_keys = log_scale - rate * (steps[:, None, 1:, None] - index)
    passed = rate[..., 0] * steps.diff()[:, None]  # [B, Hkv, T]
    log_max = [state.log_max.detach()]
    for largest, decay in zip(log_keys.detach().amax(-1).unbind(2), passed.detach().unbind(2), strict=True):
        log_max.append(torch.maximum(largest.clamp(min=LOWEST / 2), log_max[-1] - decay))
    before, after = torch.stack(log_max[:-1], dim=2), torch.stack(log_max[1:], dim=2)
    key = key * fast_exp(log_keys - after[..., None])[..., None]
    earlier, kv = _read_and_fold(query, key, value, state.kv, fast_exp(before - passed - after))

    visible = before[..., None] - lost
    top = torch.maximum(log_weights.amax(-1), visible).detach()
    scores = scores * fast_exp(log_weights - top[..., None])[:, :, :, None]
    earlier = earlier.unflatten(3, (groups, size)) * fast_exp(visible - top)[:, :, :, None, :, None]
    total = (scores.flatten(3, 4) @ value).unflatten(3, (groups, size)) + earlier
    return total, top, LinearState(kv, log_max[-1])


def _read_and_fold(query, key, value, kv: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the products with what stood in the state before each chunk [B, Hkv, T, G C, Dv + 1], and the new state.

    `factors` [B, Hkv, T]: what is left of the state after each chunk; None if all.
    """
    flat = kv.flatten(0, 1)
    query, key, value = (x.flatten(0, 1) for x in (query, key.transpose(-1, -2), value))
    factors = None if factors is None else factors.flatten(0, 1)[..., None, None]
    read = []
    for chunk in range(query.shape[1]):
        read.append(query[:, chunk] @ flat)
        left = flat if factors is None else flat * factors[:, chunk]
        flat = torch.baddbmm(left, key[:, chunk], value[:, chunk])
    return torch.stack(read, dim=1).view(*kv.shape[:2], *query.shape[1:3], -1), flat.view_as(kv)
