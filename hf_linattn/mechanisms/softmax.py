"""softmax: the original attention, for the layers a mixed plan keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..operands import fitting
from ..ops import reference
from ..ops.common.exact_softmax import softmax_attention
from ..ops.common.precision import accum_dtype
from .capabilities import ExactnessLimit
from .inputs import PLAIN, CallOptions, Pairs
from .registration import register_mechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism


@dataclass
class SoftmaxConfig(SoftmaxTypeConfig):
    """Options of `softmax`: a sink."""


class SoftmaxState(NamedTuple):
    """All keys and values so far, in the dtype they came in.

    key: [B, Hkv, M, D]. value: [B, Hkv, M, Dv]. visible: [B, M], whether later queries see them: no pads, and of
    packed sequences the last alone.
    """

    key: Tensor
    value: Tensor
    visible: Tensor


@register_mechanism("softmax")
class SoftmaxMechanism(SoftmaxTypeMechanism):
    """o_i = sum_j softmax_j(scaling q_i . k_j) v_j, exactly; quadratic in time, its decoding state grows.

    Beyond what transformers does, packed sequences are kept apart in bidirectional models too. Attention dropout,
    sliding windows, soft caps and learned sinks of the layer stay in force: its calls pass them as keywords.
    """

    config_class = SoftmaxConfig
    modes = frozenset({"causal", "bidirectional", "cross"})
    constant_state = False
    subquadratic = False
    takes_exact = any_length = splits = True
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
        *,
        return_state: bool = True,
        sink: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """As the base; `options` are `sliding_window`, `softcap` and `dropout` of `softmax_attention`.

        In a patched model the cache holds keys and values instead of the state, unless this is part of `by_head`.
        """
        key_padding_mask, sequence_ids = fitting(self.layer, query, key, value, key_padding_mask, sequence_ids, state)
        self.record_call()
        real = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        ids = None if sequence_ids is None else sequence_ids.expand_as(real)
        if state is not None:
            if ids is not None:  # what is kept belongs to the first sequence
                first = ids.gather(1, real.long().argmax(1, keepdim=True))
                sequence_ids = ids = torch.cat([first.expand_as(state.visible), ids], dim=1)
            key, value = (torch.cat(pair, dim=2) for pair in zip(state[:2], (key, value), strict=True))
            key_padding_mask = real = torch.cat([state.visible, real], dim=1)
        output = softmax_attention(
            query,
            key,
            value,
            scaling=self.layer.scaling,
            causal=self.layer.causal,
            key_padding_mask=key_padding_mask,
            sequence_ids=sequence_ids,
            sink=self.log_sink(query, sink, accum_dtype(query)),
            **options,
        )
        if not (self.layer.causal and return_state):
            return output, None
        if ids is not None:
            real = real & (ids == ids.gather(1, real.cumsum(1).argmax(1, keepdim=True)))
        return output, SoftmaxState(key, value, real)

    @property
    def has_scores(self) -> bool:
        return True

    def scores(self, pairs: Pairs) -> Tensor:
        """scaling q_i . k_j."""
        return pairs.query @ reference.repeat_heads(pairs.key, pairs.query).mT * self.layer.scaling

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        return reference.softmax_matrix(query, key, self.layer.scaling, allowed, sink=self.log_sink(query, call.sink))
