"""What mechanisms on the linear base may have beside their averages: a reading of a ridge regression of the values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..feature_maps import FeatureMap
from ..ops import reference
from ..ops.common.numerics import bounded, positive
from ..ops.linear.ridge import ridge_attention
from ..ops.linear.torch import unit_length
from .capabilities import ExactnessLimit
from .inputs import AttentionLayer

FIRST_PENALTY, FIRST_SCALE = 0.1, 0.5


class RidgeReading(nn.Module):
    """o_i = s_h average_i + t_h a_i (sum_j b_j b_j^T + lambda_h I)^-1 sum_j b_j v_j^T, as `ridge="learned"` has it.

    a_i and b_j are phi(q_i) and phi(k_j) divided by their length, j runs over all keys of the sequence. Averages with
    positive weights blur: where many keys are a little like the query, they outweigh the one that is it. The
    regression takes out what keys have in common, so that the features' contrast no longer bounds how sharp a layer
    can look; it is what the delta rule of `deltanet` goes towards token by token (Schlag et al. 2021, arXiv
    2102.11174), solved for at once, as Garnelo and Czarnecki 2023 do it with q and k themselves (arXiv 2305.10203).

    Trained: `average_scale` s and `ridge_scale` t [H], which start as 1/2, `log_penalty` log lambda [Hkv], as log 0.1.
    """

    limit = ExactnessLimit("its own average and a ridge regression on phi(k), computed naively", kernel=True)

    def __init__(self, layer: AttentionLayer):
        super().__init__()
        self.average_scale = nn.Parameter(torch.full((layer.num_heads,), FIRST_SCALE, device="cpu"))
        self.ridge_scale = nn.Parameter(torch.full((layer.num_heads,), FIRST_SCALE, device="cpu"))
        penalty = math.log(FIRST_PENALTY)
        self.log_penalty = nn.Parameter(torch.full((layer.num_key_value_heads,), penalty, device="cpu"))

    def forward(
        self,
        average: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        maps: tuple[FeatureMap, FeatureMap],
        key_padding_mask: Tensor | None,
        sequence_ids: Tensor | None,
    ) -> Tensor:
        """Return o [B, H, N, Dv] for the mechanism's own output `average`."""
        penalty = positive(self.log_penalty.to(key))
        read = ridge_attention(query, key, value, *maps, penalty, key_padding_mask, sequence_ids)
        return self._mix(average, read)

    def weights(
        self, average: Tensor, query: Tensor, key: Tensor, maps: tuple[FeatureMap, FeatureMap], allowed: Tensor
    ) -> Tensor:
        """Return the weights [B, H, N, N] for the mechanism's own: a_i . b_j times (lambda I + b_i . b_j)^-1."""
        queries = unit_length(maps[0].exact(query.unflatten(1, (key.shape[1], -1)))).flatten(1, 2)
        keys = unit_length(maps[1].exact(key))
        together = allowed & allowed.mT
        gram = keys @ keys.mT * together + torch.diag_embed(
            positive(self.log_penalty.to(key))[:, None].expand(*key.shape[1:3])
        )
        alike = queries @ reference.repeat_heads(keys, queries).mT * allowed
        return self._mix(average, alike @ reference.repeat_heads(gram.inverse(), queries))

    def _mix(self, average: Tensor, read: Tensor) -> Tensor:
        average_scale, ridge_scale = (bounded(x.to(read)) for x in (self.average_scale, self.ridge_scale))
        return average_scale[:, None, None] * average + ridge_scale[:, None, None] * read
