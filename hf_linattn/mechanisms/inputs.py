"""What a mechanism gets: its layer when it is made, options with every call, pairs of queries and keys for scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..positions.rope import Rotation


@dataclass(frozen=True)
class AttentionLayer:
    """What a mechanism knows of its layer.

    Attributes:
        index: position among the model's self-attention layers.
        num_heads: H.
        num_key_value_heads: Hkv, divides H.
        head_dim: D.
        causal: whether a query may see only itself and earlier keys.
        scaling: what the layer multiplies q . k by.
        device: where its parameters live.
        dtype: of its parameters.
        rotation: how its rotary positions are turned; None if it has none.
        value_dim: Dv; None if it is D.
        cross: whether its keys are an encoder's tokens; index then counts the cross-attention layers.
        has_sinks: whether it has learned sinks in its softmax, which it hands over with every call.
        hidden_size: E, numbers of a token in its input; None if nothing says it.
        depth: which layer of the model it is in, the number in its path; None if that has none.
        reads_pads: whether the model reads what comes out for pads, as a pooler of the last token does.
    """

    index: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    causal: bool
    scaling: float
    device: torch.device
    dtype: torch.dtype
    rotation: Rotation | None = None
    value_dim: int | None = None
    cross: bool = False
    has_sinks: bool = False
    hidden_size: int | None = None
    depth: int | None = None
    reads_pads: bool = False

    @property
    def mode(self) -> str:
        """`"cross"`, `"causal"` or `"bidirectional"`."""
        return "cross" if self.cross else "causal" if self.causal else "bidirectional"


class Pairs(NamedTuple):
    """Some queries and the keys they may see, each with its position in its own sequence, pads not counted.

    query [B, H, C, D], key [B, Hkv, N, D], query_position [B or 1, C], key_position [B or 1, N], allowed
    [B or 1, 1, C, N], real [B or 1, 1, C, 1]: queries that are no pads. first: place of the first query in its row.
    sink: the layer's own learned sinks [H], for mechanisms with `takes_sink`; None if it has none.
    """

    query: Tensor
    key: Tensor
    query_position: Tensor
    key_position: Tensor
    allowed: Tensor
    real: Tensor
    first: int
    sink: Tensor | None = None

    @property
    def distance(self) -> Tensor:
        """[B or 1, 1, C, N]."""
        return (self.query_position[:, None, :, None] - self.key_position[:, None, None]).abs()


class CallOptions(NamedTuple):
    """The options of one call, beside its heads. They are not kept on the mechanism: calls may overlap.

    keep_state: whether the state after the call is needed. sink: the layer's own learned sinks [H], for mechanisms
    with `takes_sink`. hidden_states: the layer's input [B, N, E], for those with options in `reads_hidden`.
    first_query: in cross-attention, how many tokens of the decoder stand before the queries; None if nobody knows it.
    """

    keep_state: bool = True
    sink: Tensor | None = None
    hidden_states: Tensor | None = None
    first_query: Any = None  # a tensor with a static cache


PLAIN = CallOptions()
