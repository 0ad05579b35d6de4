"""How far softmax attention looks, as the rate of a decay that looks as far."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import reference

MOST_QUERIES, MOST_ROWS = 64, 4  # of a batch, so that time is linear in its length
SLOWEST, FASTEST = 1e-5, 16.0
STEPS = 20  # bisections of the logarithm, to 1e-5 of the rate


@torch.no_grad()
def matching_decay_rate(
    query: Tensor,
    key: Tensor,
    scaling: float,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    itself: bool = True,
) -> Tensor:
    """Return r [Hkv] for which exp(-r |i - j|) alone looks as far on average as softmax attention does.

    It is the likeliest rate, too: the derivative of sum_ij p_ij log (exp(-r |i - j|) / sum_l exp(-r |i - l|)) is the
    difference of the two mean distances. Between 1e-5, where nothing is nearer than chance has it, and 16.

    query [B, H, N, D], key [B, Hkv, N, D]; at most 4 rows and 64 queries of each are looked at. Pads do not count in
    distances. `itself`: whether a query's own token takes part.

    >>> key = torch.eye(64)[None, None]  # every query finds the key before it: sum_d d e^-rd / sum_d e^-rd = 1
    >>> round(matching_decay_rate(key.roll(1, 2) * 99, key, 1.0, causal=True).item(), 1)
    0.7
    """
    looked, decayed = _distances(query, key, scaling, causal, key_padding_mask, itself)
    low, high = (torch.full_like(looked, bound).log() for bound in (SLOWEST, FASTEST))
    for _ in range(STEPS):
        middle = (low + high) / 2
        farther = decayed(middle.exp()) > looked
        low, high = torch.where(farther, middle, low), torch.where(farther, high, middle)
    return middle.exp()


@torch.no_grad()
def mean_attention_distance(
    query: Tensor, key: Tensor, scaling: float, causal: bool, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Return how many tokens back softmax attention looks on average [Hkv]; arguments as in `matching_decay_rate`.

    >>> key = torch.eye(64)[None, None]  # every query finds the key before it, the first one itself
    >>> round(mean_attention_distance(key.roll(1, 2) * 99, key, 1.0, causal=True).item(), 2)
    0.98
    """
    return _distances(query, key, scaling, causal, key_padding_mask, True)[0]


def _distances(
    query: Tensor, key: Tensor, scaling: float, causal: bool, key_padding_mask: Tensor | None, itself: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the mean distance of softmax attention [Hkv], and a function of r [Hkv] with that of exp(-r |i - j|)."""
    rows, length = min(key.shape[0], MOST_ROWS), key.shape[2]
    compute = torch.promote_types(key.dtype, torch.float32)  # half precision cannot count to 300
    query, key = query[:rows].to(compute), key[:rows].to(compute)
    steps = torch.arange(length, device=key.device)
    count = min(length, MOST_QUERIES)
    chosen = torch.arange(count, device=key.device) * (length - 1) // max(count - 1, 1)
    mask = key.new_ones(rows, length) if key_padding_mask is None else key_padding_mask[:rows]
    real = mask.bool()[:, None]  # [B, 1, N]
    position = real.long().cumsum(-1)
    distance = (position[..., chosen, None] - position[..., None, :]).abs().to(key.dtype)
    allowed = real[..., None, :] & (steps <= chosen[:, None] if causal else True)
    allowed = allowed & (True if itself else steps != chosen[:, None])
    counts = (allowed.any(-1) & real[..., chosen]).to(key.dtype)
    counts = counts / counts.sum().clamp(min=1)

    def mean_distance(scores: Tensor) -> Tensor:
        weights = reference.softmax(scores.masked_fill(~allowed, -torch.inf))
        return ((weights * distance).sum(-1) * counts).sum((0, 2))

    scores = query[:, :, chosen] @ reference.repeat_heads(key, query).mT * scaling
    looked = mean_distance(scores).unflatten(0, (key.shape[1], -1)).mean(1)
    return looked, lambda rate: mean_distance(-rate[:, None, None] * distance)
