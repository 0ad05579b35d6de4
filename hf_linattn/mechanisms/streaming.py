"""streaming: a sliding window and the first tokens of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import require
from ..errors import UnsupportedModeError, UnsupportedModelError
from ..ops import reference
from .inputs import PLAIN, AttentionLayer, CallOptions
from .local import WindowConfig, WindowMechanism
from .registration import register_mechanism

POSITIONS = ("model", "streaming")


@dataclass
class StreamingConfig(WindowConfig):
    """Options of `streaming`."""

    num_sink_tokens: int = field(default=4, metadata={"help": "first tokens of a sequence, which every query sees"})
    positions: str = field(
        default="model", metadata={"help": "`streaming`: sinks never seem further away than the cache is long"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_counts("num_sink_tokens", least=0)
        require("positions", self.positions, self.positions in POSITIONS, "'model' or 'streaming'")


@register_mechanism("streaming")
class StreamingMechanism(WindowMechanism):
    """Window and attention sinks (Xiao et al. 2023): query i sees key j if |i - j| < window_size or j < S.

    S is `num_sink_tokens`. Trained models put the attention they do not need on the first tokens; a window alone takes
    these away.

    With `positions="streaming"`, for causal layers with rotary positions, distances are counted inside the cache of
    S + window_size tokens as the authors do: a query further on than that sees sink j at the distance S + window_size
    - 1 - j, so inputs can be longer than any the model was trained on. To this end the query is turned back, R(-s) q_i
    with s = i - (S + window_size - 1), where it meets the sinks; the products are twice as wide. With `"model"` all
    distances are what they are, which is nearer to softmax on inputs of the trained length.
    """

    config_class = StreamingConfig
    only_window = True
    citation = "Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453"

    def __init__(self, config: StreamingConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        if not self.streaming:
            return
        self.takes_half = False  # queries and keys are turned anew
        if layer.rotation is None or not layer.causal:
            raise UnsupportedModeError(
                f"positions='streaming' needs a causal layer with rotary positions, which layer {layer.index} is not;"
                " use positions='model'"
            )
        if obstacle := layer.rotation.obstacle(layer.head_dim, layer.device):
            raise UnsupportedModelError(
                f"positions='streaming' turns queries to other positions, which layer {layer.index} does not allow:"
                f" {obstacle}; use positions='model'"
            )

    @property
    def streaming(self) -> bool:
        """Whether positions are counted inside the cache."""
        return self.config.positions == "streaming"

    @property
    def num_global(self) -> int:
        return self.config.num_sink_tokens

    @property
    def global_queries(self) -> bool:
        return False

    def causal_in_place(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, starts: Tensor, call: CallOptions = PLAIN
    ) -> tuple[Tensor, Any] | None:
        if self.streaming:  # keys are turned by their positions
            return None
        return super().causal_in_place(query, key, value, lengths, starts, call)

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: Any,
        call: CallOptions = PLAIN,
    ) -> tuple[Tensor, Any]:
        if not self.streaming:
            return super().causal_sequences(query, key, value, lengths, state, call)
        steps, width = torch.arange(key.shape[2], device=key.device), value.shape[3]
        position = steps[None] if state is None else state.length[:, None] + steps
        if state is not None:
            state = state._replace(
                key=self._widen_key(state.key, state.position[:, 0] - 1), value=self._widen_value(state.value)
            )
        heads = self._widen_query(query, position), self._widen_key(key, position), self._widen_value(value)
        output, after = super().causal_sequences(*heads, lengths, state, call)
        if after is not None:
            window, sinks = after.key.chunk(2, dim=-1)
            after = after._replace(key=window + sinks, value=after.value[..., :width])
        return output[..., :width], after

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        if self.streaming:
            position = reference.positions(allowed)[:, 0].clamp(min=0)
            query, key = self._widen_query(query, position), self._widen_key(key, position)
        return super().weights(query, key, allowed, call)

    def _widen_query(self, query: Tensor, position: Tensor) -> Tensor:
        """Return [q, q turned back]: the first half meets the window, the second the sinks."""
        rotation: Any = self.layer.rotation
        beyond = (position - (self.config.num_sink_tokens + self.config.window_size - 1)).clamp(min=0)
        return torch.cat([query, rotation.back(query, beyond)], dim=-1)

    def _widen_key(self, key: Tensor, position: Tensor) -> Tensor:
        """Return [k, 0] for keys at `position` [B or 1, N] in the window, [0, k] for sinks."""
        sink = (position < self.config.num_sink_tokens)[:, None, :, None]
        return torch.cat([key.masked_fill(sink, 0.0), key.masked_fill(~sink, 0.0)], dim=-1)

    def _widen_value(self, value: Tensor) -> Tensor:
        """Return [v, 0]: PyTorch's fast kernels want heads of one width."""
        return F.pad(value, (0, value.shape[-1]))
