"""What mechanisms on the linear base may give to a query's own token, beside what its features make of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import reference
from .inputs import AttentionLayer, Pairs

FIRST_BIAS = -4.0  # where a token like any other has a share of 2 %


class SelfWeight(nn.Module):
    """What a query gives to its own token: g_i = sigmoid(a_h q_i . k_i + b_h).

    `slope` a [H] starts as the layer's scaling, `bias` b [H] as -4.
    """

    def __init__(self, layer: AttentionLayer):
        super().__init__()
        self.slope = nn.Parameter(torch.full((layer.num_heads,), layer.scaling, device="cpu"))
        self.bias = nn.Parameter(torch.full((layer.num_heads,), FIRST_BIAS, device="cpu"))

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """Return a_h q_i . k_i + b_h [B, H, N] for queries [B, H, N, D] and keys [B, Hkv, N, D] of the same tokens."""
        products = (query.unflatten(1, (key.shape[1], -1)) * key[:, :, None]).sum(-1).flatten(1, 2)
        slope, bias = (x.to(key.dtype)[:, None] for x in (self.slope, self.bias))
        return torch.addcmul(bias, slope, products)

    def forward(
        self, average: Tensor, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> Tensor:
        """Return g_i v_i + (1 - g_i) average_i [B, H, N, Dv]; g is zero for pads."""
        share = torch.sigmoid(self.logits(query, key))[..., None]
        if key_padding_mask is not None:
            share = share * key_padding_mask[:, None, :, None]
        return torch.lerp(average, reference.repeat_heads(value, average), share)

    def add_to_scores(self, scores: Tensor, pairs: Pairs) -> Tensor:
        """Return scores whose softmax gives every query's own token its share, for scores [B, H, C, N] without."""
        own = slice(pairs.first, pairs.first + pairs.query.shape[2])
        logits = self.logits(pairs.query, pairs.key[:, :, own])[..., None]
        lowest = torch.finfo(scores.dtype).min
        others = scores.masked_fill(~pairs.allowed, lowest).log_softmax(-1) + F.logsigmoid(-logits)
        alone = torch.full_like(others, lowest).diagonal_scatter(F.logsigmoid(logits)[..., 0], pairs.first, -2, -1)
        return torch.logaddexp(others, alone)

    def add_to_weights(self, weights: Tensor, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """Return g I + (1 - g) A for weights A [B, H, N, N]."""
        real = allowed.diagonal(dim1=-2, dim2=-1)
        share = torch.sigmoid(self.logits(query, key)) * real
        return weights * (1 - share[..., None]) + torch.diag_embed(share)
