"""One number per head and token, made from the head's key or from the layer's input: what gates are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.common.exact_softmax import softmax_attention
from ..ops.common.numerics import LN_2, bounded
from ..ops.common.precision import wide
from ..ops.linear.attention_distance import mean_attention_distance


class HeadScores(nn.Module):
    """s_t = w . x_t + b for each of M heads: `weight` w [M, width] starts as zero, `bias` b [M] as it is given.

    x is the key of a head, which M / Hkv scores share, or the layer's input, which all of them share.
    """

    def __init__(self, width: int, bias: Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(bias), width, device="cpu"))
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return s [B, M, N] of keys [B, Hkv, N, width] or of the layer's input [B, N, width]."""
        weight, bias = (bounded(p.to(x.dtype)) for p in (self.weight, self.bias))
        if x.dim() == 3:
            return (x @ weight.mT + bias).mT
        return (x @ weight.unflatten(0, (x.shape[1], -1)).mT).mT.flatten(1, 2) + bias[:, None]


def inverse_softplus(x: Tensor) -> Tensor:
    """Return y with softplus(y) = x > 0.

    >>> torch.nn.functional.softplus(inverse_softplus(torch.tensor([1e-3, 3.0])))
    tensor([1.0000e-03, 3.0000e+00])
    """
    return x + (-torch.expm1(-x)).log()


@torch.no_grad()
def look_back(mechanism: Any, query: Tensor, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return -log of the gate [Hkv] that halves what is known over as many tokens as softmax looks back on average."""
    layer = mechanism.layer
    distance = mean_attention_distance(query, key, layer.scaling, layer.causal, key_padding_mask)
    return LN_2 / distance.clamp(min=1)


@torch.no_grad()
def matching_gain(mechanism: Any, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, **options: Any) -> Tensor:
    """Return by what [H] a mechanism's output is to be multiplied to be as large on average as softmax attention's.

    heads: query, key and value. options: what else the mechanism takes. 1 where one of the two is nothing.
    """
    layer = mechanism.layer
    own = mechanism(*heads, mask, keep_state=False, **options)[0]
    wanted = softmax_attention(*heads, scaling=layer.scaling, causal=layer.causal, key_padding_mask=mask)
    real = 1 if mask is None else mask[:, None, :, None]
    sizes = [(wide(x) * real).square().sum((0, 2, 3)) for x in (wanted, own)]
    gain = (sizes[0] / sizes[1]).sqrt()
    return torch.where(gain.isfinite() & (gain > 0), gain, 1.0)
