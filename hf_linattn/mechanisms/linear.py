"""linear: kernel attention with a feature map, o_i = phi(q_i) S_i / phi(q_i) . z_i."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from ..config import MechanismConfig
from ..feature_maps import FEATURE_MAPS, FeatureMap
from ..ops import naive
from ..ops.causal_linear import LinearState, causal_linear_attention, linear_attention
from .base import AttentionLayer, ExactnessLimit, Mechanism, register_mechanism


@dataclass
class LinearConfig(MechanismConfig):
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

    Deviations: no epsilon in the denominator (a row without any key is zero); keys and queries are used as the model
    made them, rotary positions included.
    """

    config_class: ClassVar[type[MechanismConfig]] = LinearConfig
    limit = ExactnessLimit("attention with the kernel phi(q) . phi(k), computed naively", kernel=True)
    citation = "Katharopoulos et al. 2020, Transformers are RNNs, arXiv 2006.16236"

    config: Any  # of the subclass's own config class

    def __init__(self, config: MechanismConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        self.feature_map = self.make_feature_map()

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
        return causal_linear_attention(
            query, key, value, self.feature_map, self.feature_map, key_padding_mask, sequence_ids, state
        )

    def bidirectional_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, sequence_ids: Tensor | None
    ) -> Tensor:
        return linear_attention(query, key, value, self.feature_map, self.feature_map, key_padding_mask, sequence_ids)

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        return naive.kernel_matrix(self.feature_map.exact(query), self.feature_map.exact(key), allowed)
