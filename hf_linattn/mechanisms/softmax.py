"""softmax: the original attention, for the layers a mixed plan keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import MechanismConfig
from ..ops import naive
from ..ops.softmax import softmax_attention
from .base import ExactnessLimit, Mechanism, register_mechanism


@dataclass
class SoftmaxConfig(MechanismConfig):
    """No options beside the common ones."""


@register_mechanism("softmax")
class SoftmaxMechanism(Mechanism):
    """o_i = sum_j softmax_j(scaling q_i . k_j) v_j, exactly; quadratic in time, its decoding state grows.

    Beyond what transformers does, packed sequences are kept apart in bidirectional models too. Attention dropout,
    sliding windows and soft caps of the layer stay in force: its calls pass them as keywords.
    """

    config_class = SoftmaxConfig
    constant_state = False
    subquadratic = False
    limit = ExactnessLimit("itself", equal=lambda length: {})
    citation = "Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        state: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """As the base; `options` are `sliding_window`, `softcap` and `dropout` of `softmax_attention`.

        The state is the pair of all keys and values so far. In a patched model the cache holds them instead.
        """
        self.count_call()
        if state is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(state, (key, value), strict=True))
        output = softmax_attention(
            query,
            key,
            value,
            scaling=self.layer.scaling,
            causal=self.layer.causal,
            key_padding_mask=key_padding_mask,
            sequence_ids=sequence_ids,
            **options,
        )
        return output, (key, value)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        return naive.softmax_matrix(query, key, self.layer.scaling, allowed)
