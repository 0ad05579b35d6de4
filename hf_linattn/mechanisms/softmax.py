"""softmax: the original attention, for the layers a mixed plan keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import reference
from ..ops.common.exact_softmax import softmax_attention
from ..ops.common.fixed_keys import FixedKeys, require_room
from ..ops.common.growing import grown
from ..ops.common.precision import accum_dtype
from .capabilities import ExactnessLimit
from .forward import fitting
from .inputs import PLAIN, CallOptions, Pairs
from .registration import register_mechanism
from .softmax_type import SoftmaxTypeConfig, SoftmaxTypeMechanism


@dataclass
class SoftmaxConfig(SoftmaxTypeConfig):
    """Options of `softmax`: a sink."""


class SoftmaxState(NamedTuple):
    """All keys and values so far, in the dtype they came in.

    key: [B, Hkv, M, D]. value: [B, Hkv, M, Dv]. visible: [B, M], whether later queries see them: no pads, and of
    packed sequences the last alone; [B, 0] where they see all.
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
    takes_exact = any_length = splits = static_steps = True
    limit = ExactnessLimit("itself", equal=lambda length: {})
    citation = "Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762"
    family = "exact"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        state: Any = None,
        *,
        keep_state: bool = True,
        sink: Tensor | None = None,
        causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """As the base; `options` are `sliding_window`, `softcap` and `dropout` of `softmax_attention`.

        causal: whether this call is, where that is not as the layer says.

        In a patched model the cache holds keys and values instead of the state, unless this is part of `by_head`.
        Bidirectional keys may be fewer than queries, as in layers that pool them.
        """
        key_padding_mask, sequence_ids = fitting(
            self.layer, query, key, value, key_padding_mask, sequence_ids, state,
            pooled=not self.layer.causal and sequence_ids is None,
        )  # fmt: skip
        self.record_call()
        real, ids = key_padding_mask, sequence_ids
        if isinstance(state, FixedKeys):
            if key.shape[2] == 1 and ids is None:
                return self._step(query, key, value, real, state, sink, **options), state
            state = _growing(state)
        if state is not None:
            if ids is not None:  # what is kept belongs to the first sequence
                first = ids.gather(1, _all_real(key, real).long().argmax(1, keepdim=True))
                ids = torch.cat([first.expand(-1, state.key.shape[2]), ids], dim=1)
            real = _real_keys(state, key, real)
            key, value = grown(state.key, key), grown(state.value, value)
        output = softmax_attention(
            query,
            key,
            value,
            scaling=self.layer.scaling,
            causal=self.layer.causal if causal is None else causal,
            key_padding_mask=real,
            sequence_ids=ids,
            sink=self.log_sink(query, sink, accum_dtype(query)),
            **options,
        )
        if not (self.layer.causal and keep_state):
            return output, None
        if ids is not None:
            real = _all_real(key, real)
            real = real & (ids == ids.gather(1, real.cumsum(1).argmax(1, keepdim=True)))
        if state is None:  # a state is never a view of what it was made from
            key, value = (x.clone(memory_format=torch.contiguous_format) for x in (key, value))
        visible = key.new_empty(len(key), 0, dtype=torch.bool) if real is None else real
        return output, SoftmaxState(key, value, visible)

    def _step(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, state: FixedKeys, sink: Tensor | None,
        sliding_window: int | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Return what one token of each row sees of the keys at fixed places, its own among them from now on."""
        own = state.append(key, value, real)
        visible = state.position > 0
        if sliding_window is not None:
            visible = visible & (state.position > own - sliding_window)
        return softmax_attention(
            query, state.key, state.value, scaling=self.layer.scaling, causal=False, key_padding_mask=visible[:, 0],
            sink=self.log_sink(query, sink, accum_dtype(query)), **options,
        )  # fmt: skip

    def fixed_state(self, state: Any, room: int) -> FixedKeys:
        if isinstance(state, FixedKeys):
            return state
        require_room(state.key.shape[2], room)
        return FixedKeys.of(state.key, state.value, state.visible if state.visible.shape[1] else None, room)

    @property
    def has_scores(self) -> bool:
        return True

    def scores(self, pairs: Pairs) -> Tensor:
        """scaling q_i . k_j."""
        return pairs.query @ reference.repeat_heads(pairs.key, pairs.query).mT * self.layer.scaling

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        return reference.softmax_matrix(query, key, self.layer.scaling, allowed, sink=self.log_sink(query, call.sink))


def _growing(state: FixedKeys) -> SoftmaxState:
    """Return the state that grows instead, for more tokens than one."""
    count = int(state.length[0])
    return SoftmaxState(state.key[:, :, :count], state.value[:, :, :count], state.position[:, 0, :count] > 0)


def _all_real(key: Tensor, real: Tensor | None) -> Tensor:
    """Return `real` [B, N], which says of keys [B, Hkv, N, D] that they are no pads; all true for None."""
    return torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if real is None else real


def _real_keys(state: SoftmaxState, key: Tensor, real: Tensor | None) -> Tensor | None:
    """Return which keys are no pads, those kept and the new ones behind them [B, M + N]; None if all are."""
    kept = state.visible if state.visible.shape[1] else None
    if kept is None and real is None:
        return None
    return grown(_all_real(state.key, kept), _all_real(key, real), dim=1)
