"""deltanet: every key corrects what the state says about it, S_i = S_{i-1} + beta_i k_i (v_i - S_{i-1}^T k_i)^T."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import reference
from ..ops.common.numerics import bounded
from ..ops.common.precision import wide
from ..ops.common.tracing import scaled
from ..ops.delta_rule.interface import gated_delta_rule
from ..ops.linear.torch import unit_length
from .capabilities import ExactnessLimit
from .gla import INITIAL_DECAY, ForgetGate
from .head_scores import inverse_softplus, look_back, matching_gain
from .inputs import AttentionLayer
from .linear import FeatureMapConfig, FeatureMapMechanism
from .registration import register_mechanism
from .sequence import SequenceMechanism

GATE_BIAS = math.log(math.expm1(INITIAL_DECAY))  # of a gate as it is made


class DeltaState(NamedTuple):
    """What the state says about keys [B, Hkv, F, Dv], float32 (float64 for float64 inputs)."""

    memory: Tensor


@dataclass
class DeltanetConfig(FeatureMapConfig):
    """Options of `deltanet`."""

    decay: ClassVar[str | None] = None  # type: ignore[misc]  # no option: what it forgets is in its rule
    self_weight: ClassVar[str | None] = None  # type: ignore[misc]  # no option: it has no average to share with
    ridge: ClassVar[str | None] = None  # type: ignore[misc]  # no option: its rule goes the same way, token by token
    feature_map: str = field(  # type: ignore[misc]  # here it is an option
        default="t2r", metadata={"help": "name in hf_linattn.feature_maps"}
    )
    gate: bool = field(default=False, metadata={"help": "the state forgets besides, as much as the key says"})


@register_mechanism("deltanet")
class DeltanetMechanism(SequenceMechanism, FeatureMapMechanism):
    """DeltaNet (Yang et al. 2024): o_i = s S_i^T q_i with S_i = g_i (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T.

    Here k and q are features phi(k), phi(q) divided by their length; S [F, Dv] is one per key/value head, float32, all
    there is to the decoding state. beta_i = sigmoid(w . k_i + b) says how far a key replaces what the state said about
    it: `write_weight` w [Hkv, D] starts as zero, `write_bias` b [Hkv] where beta is 1/3. g_i is 1 unless `gate=True`
    (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464): then it is made from the key as in `gla`, in `gate`.

    Every token is one step of gradient descent on |S^T k_i - v_i|^2. What is read at a query of length 1 is therefore
    of the size of the values, although nothing is divided by a sum of weights, and weights may be negative; the
    trained `output_scale` s [H] starts as 1. Causal only: the rule has an order. Time is O(N (F + C) Dv) in chunks of
    C tokens, see `hf_linattn.ops.delta_rule.interface`.

    `calibrate` first lets g halve the state over as many tokens as the head's softmax looks back on average, and s
    make outputs as large as softmax's, where neither has been trained.

    Deviations: phi is one of the feature maps, by default a trained relu (`t2r`), where the paper has silu; beta and
    g come from the key, as there is no other input; no convolution before and no norm behind, which a pretrained
    layer has not either.
    """

    config_class = DeltanetConfig
    modes = frozenset({"causal"})
    averages = False
    prepares = True
    limit = ExactnessLimit("the delta rule, computed token by token", kernel=True)
    citation = "Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484"
    family = "linear"

    def __init__(self, config: DeltanetConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        heads = layer.num_key_value_heads
        self.write_weight = nn.Parameter(torch.zeros(heads, layer.head_dim, device="cpu"))
        self.write_bias = nn.Parameter(torch.full((heads,), -math.log(2), device="cpu"))
        self.output_scale = nn.Parameter(torch.ones(layer.num_heads, device="cpu"))
        if config.gate:
            self.gate = ForgetGate(heads, layer.head_dim)

    @torch.no_grad()
    def prepare(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> None:
        """Let the gate and the gain that are as they were made begin as softmax attention looks and answers."""
        if not bool((self.output_scale == 1).all()):
            return
        if self.config.gate:
            bias = self.gate.bias
            if not torch.allclose(bias, torch.full_like(bias, GATE_BIAS), rtol=1e-2):
                return
            bias.copy_(inverse_softplus(look_back(self, query, key, key_padding_mask)))
        self.output_scale.copy_(matching_gain(self, (query, key, value), key_padding_mask))

    def causal_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, state: DeltaState | None
    ) -> tuple[Tensor, DeltaState]:
        mask = None if lengths is None else torch.arange(key.shape[2], device=key.device) < lengths[:, None]
        query_map, key_map = self.maps
        before = None if state is None else state.memory
        gates = self._beta(key, mask), self.gate(key, mask) if self.config.gate else None
        maps = (lambda x: query_map(x).values), (lambda x: key_map(x).values)
        output, memory = gated_delta_rule(query, key, value, *gates, before, *maps, self.policy)
        return scaled(output, bounded(self.output_scale.to(output.dtype))[:, None, None]), DeltaState(memory)

    def key_entries(self, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what keys [B, Hkv, N, D] write, anywhere: unit features, beta [B, Hkv, N], log g or None."""
        key = bounded(wide(key))
        features = unit_length(self.maps[1](key).values)
        return features, self._beta(key, None), self.gate(key) if self.config.gate else None

    def query_entries(self, query: Tensor, position: Tensor) -> Tensor:
        """Return what queries [B, Hkv, G, N, D] read the state with, anywhere: unit features times s."""
        query = wide(query)
        scale = bounded(self.output_scale.to(query.dtype)).view(query.shape[1], -1, 1, 1)
        return unit_length(self.maps[0](bounded(query)).values) * scale

    def _beta(self, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Return beta [B, Hkv, N], zero where masked."""
        weight, bias = (bounded(x.to(key.dtype)) for x in (self.write_weight, self.write_bias))
        beta = torch.sigmoid((key @ weight[..., None]).squeeze(-1) + bias[:, None])
        return beta if key_padding_mask is None else beta * key_padding_mask[:, None]

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """A_ij = s q_i . p_j with p_i = beta_i k_i, which loses beta_l k_l (k_l . p_i) to every later token l."""
        query_map, key_map = self.maps
        queries = unit_length(query_map.exact(query.unflatten(1, (key.shape[1], -1))))
        keys = unit_length(key_map.exact(key))
        real = allowed[:, 0].diagonal(dim1=-2, dim2=-1)[:, None]
        gates = self._beta(key, real[:, 0]), self.gate(key, real[:, 0]) if self.config.gate else None
        matrix = reference.delta_rule_matrix(queries, keys, *gates).flatten(1, 2)
        return matrix * allowed * self.output_scale.to(key.dtype)[:, None, None]
