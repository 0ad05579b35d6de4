"""gla: kernel attention whose keys say how much is forgotten, w_ij = phi(q_i) . phi(k_j) g_{j+1} ... g_i."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import require
from ..ops import reference
from ..ops.common.numerics import bounded, running_sum
from .base import Mechanism
from .capabilities import ExactnessLimit
from .inputs import AttentionLayer, Pairs
from .linear import FeatureMapConfig, KernelConfig, LinearMechanism
from .registration import register_mechanism

INITIAL_DECAY = 2.0**-8
SHUT = 1e4  # -log g of a gate that leaves nothing


class ForgetGate(nn.Module):
    """log g_j = -softplus(w . k_j + b) per key/value head, w [Hkv, D] first zero, b [Hkv] so that all are -initial."""

    def __init__(self, num_heads: int, head_dim: int, initial: float = INITIAL_DECAY):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, head_dim, device="cpu"))
        self.bias = nn.Parameter(torch.full((num_heads,), math.log(math.expm1(initial)), device="cpu"))

    def forward(self, key: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return log g [B, Hkv, N] of keys [B, Hkv, N, D], zero where masked."""
        weight, bias = (bounded(x.to(key.dtype)) for x in (self.weight, self.bias))
        log_gate = -F.softplus((key @ weight[..., None]).squeeze(-1) + bias[:, None]).clamp(max=SHUT)
        return log_gate if key_padding_mask is None else log_gate * key_padding_mask[:, None]


@dataclass
class GlaConfig(FeatureMapConfig):
    """Options of `gla`."""

    decay: ClassVar[str | None] = None  # type: ignore[misc]  # no option: the gate is its decay
    ridge: ClassVar[str | None] = None  # type: ignore[misc]  # no option: it has no gates
    feature_map: str = field(  # type: ignore[misc]  # here it is an option
        default="hedgehog", metadata={"help": "name in hf_linattn.feature_maps"}
    )
    initial_decay: float = field(
        default=INITIAL_DECAY, metadata={"help": "-log g of every token before training: how open the gates start"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        decay = self.initial_decay
        require("initial_decay", decay, isinstance(decay, float) and 0 < decay <= 16, "a float above 0, at most 16")


@register_mechanism("gla")
class GlaMechanism(LinearMechanism):
    """Gated linear attention (Yang et al. 2023): o_i = sum_j w_ij v_j / sum_j w_ij with a gate g in (0, 1) per token.

    w_ij = phi(q_i) . phi(k_j) exp(-|G_i - G_j|), G_i = log g_1 + ... + log g_i: causally the state is
    S_i = g_i S_{i-1} + phi(k_i) [v_i, 1]^T, and keys lose what the gates of all later tokens up to the query take;
    bidirectional layers forget both ways, by the gates between. log g_j = -softplus(w . k_j + b) is made from the key,
    as in Liger (Lan et al. 2025, arXiv 2503.01496), which needs no input the pretrained layer has not: `gate.weight`
    w [Hkv, D] starts as zero, `gate.bias` b [Hkv] where -log g is `initial_decay`, so that training begins next to
    `linear`. Time and state are those of `linear`.

    Deviations: one gate per key/value head and token, as in Mamba-2 (arXiv 2405.21060), where the paper has one for
    every feature; a feature map and division by the sum of the weights in place of q . k and a norm of the
    output; no output gate.
    """

    modes = Mechanism.modes
    config_class = GlaConfig
    limit = ExactnessLimit("attention with the kernel phi(q) . phi(k) and its gates, computed naively", kernel=True)
    citation = "Yang et al. 2023, Gated Linear Attention Transformers, arXiv 2312.06635"
    decays_by_distance = False
    takes_half = False  # which the gate reads, too

    def __init__(self, config: KernelConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        self.gate = ForgetGate(layer.num_key_value_heads, layer.head_dim, self.config.initial_decay)

    def log_decay(self, key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return self.gate(key, key_padding_mask)

    def kernel_scores(self, pairs: Pairs) -> Tensor:
        """log(phi(q_i) . phi(k_j)) - |G_i - G_j|."""
        kernel = super().kernel_scores(pairs)
        return kernel - reference.repeat_heads(self._forgotten(pairs.key, pairs.allowed, pairs.first), kernel)

    def kernel_weights(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        kernel = super().kernel_weights(query, key, allowed)
        forgotten = reference.repeat_heads(self._forgotten(key, allowed, 0), kernel)
        return reference.normalise(kernel * torch.exp(-forgotten))

    def _forgotten(self, key: Tensor, allowed: Tensor, first: int) -> Tensor:
        """Return |G_i - G_j| [B, Hkv, C, N] for the queries from place `first` on; only keys a query sees count."""
        total = running_sum(self.gate(key)[:, :, None] * allowed)
        return (total.diagonal(first, -2, -1)[..., None] - total).abs()
