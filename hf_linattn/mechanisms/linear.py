"""linear: kernel attention with a feature map, o_i = phi(q_i) S_i / phi(q_i) . z_i."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import MechanismConfig, require
from ..feature_maps import FEATURE_MAPS, FeatureMap
from ..ops import naive
from ..ops.causal_linear import LinearState, causal_linear_attention, linear_attention
from .base import AttentionLayer, ExactnessLimit, Mechanism, register_mechanism

SHORTEST, LONGEST = 0.5, 16.0  # tokens over which the weights of the fastest and the slowest head fall by a factor e


@dataclass
class KernelConfig(MechanismConfig):
    """Options of every mechanism on the linear base."""

    decay: str | None = field(
        default=None, metadata={"help": "`learned`: weights fall with the distance, at a rate per key/value head"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require("decay", self.decay, self.decay in (None, "learned"), "None or 'learned'")


@dataclass
class LinearConfig(KernelConfig):
    """Options of `linear`."""

    feature_map: str = field(default="elu", metadata={"help": "name in hf_linattn.feature_maps"})

    def __post_init__(self) -> None:
        super().__post_init__()
        FEATURE_MAPS.get(self.feature_map)


@register_mechanism("linear")
class LinearMechanism(Mechanism):
    """Linear attention (Katharopoulos et al. 2020): o_i = phi(q_i) S_i / (phi(q_i) . z_i).

    S_i = sum_j phi(k_j) v_j^T [F, Dv] and z_i = sum_j phi(k_j) [F] run over j <= i (causal) or over all keys. Time is
    O(N F Dv), the decoding state S, z has constant size, float32, one per key/value head.

    With `decay="learned"` the weights are phi(q_i) . phi(k_j) exp(-r |i - j|), r > 0 one trained number per key/value
    head (parameter `log_decay_rate`, from r = 2 to r = 1/16 over the heads): the state forgets, what is near counts
    more. Models that attended to neighbouring positions find them again with it; elu + 1 alone has too few features
    to tell positions apart (Sun et al. 2023, Retentive Network, arXiv 2307.08621, with fixed rates).

    Deviations: no epsilon in the denominator (a row without any key is zero); keys and queries are used as the model
    made them, rotary positions included.
    """

    config_class: ClassVar[type[MechanismConfig]] = LinearConfig
    limit = ExactnessLimit("attention with the kernel phi(q) . phi(k), computed naively", kernel=True)
    citation = "Katharopoulos et al. 2020, Transformers are RNNs, arXiv 2006.16236"

    config: Any  # of the subclass's own config class

    def __init__(self, config: KernelConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        self.feature_map = self.make_feature_map()
        if config.decay:
            steps = torch.linspace(0, 1, layer.num_key_value_heads)
            self.log_decay_rate = nn.Parameter(-math.log(SHORTEST) - steps * math.log(LONGEST / SHORTEST))

    def make_feature_map(self) -> FeatureMap:
        """Build the map; a subclass chooses another one."""
        layer = self.layer
        return FEATURE_MAPS.get(self.config.feature_map)(
            layer.head_dim, layer.head_dim, layer.scaling, self.generator()
        )

    def causal_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        sequence_ids: Tensor | None,
        state: LinearState | None,
    ) -> tuple[Tensor, LinearState]:
        decay = self.log_decay(key, key_padding_mask)
        return causal_linear_attention(
            query, key, value, self.feature_map, self.feature_map, key_padding_mask, sequence_ids, state, decay
        )

    def bidirectional_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None
    ) -> Tensor:
        decay = self.log_decay(key, key_padding_mask)
        return linear_attention(
            query, key, value, self.feature_map, self.feature_map, key_padding_mask, sequence_ids, decay
        )

    def log_decay(self, key: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
        """Return the log decay of every token [B, Hkv, N], zero where masked; None without decay."""
        if not self.config.decay:
            return None
        decay = -self.log_decay_rate.to(key.dtype).exp()[None, :, None].expand(key.shape[:3])
        return decay if key_padding_mask is None else decay * key_padding_mask[:, None]

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        rate = self.log_decay_rate.to(key.dtype).exp() if self.config.decay else None
        return naive.kernel_matrix(self.feature_map.exact(query), self.feature_map.exact(key), allowed, rate)
