"""retention: kernel attention that forgets at fixed rates, w_ij = phi(q_i) . phi(k_j) gamma_h^|i - j|."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..config import require
from ..ops.common.precision import accum_dtype
from .base import Mechanism
from .capabilities import ExactnessLimit
from .linear import FeatureMapConfig, LinearMechanism
from .registration import register_mechanism


@dataclass
class RetentionConfig(FeatureMapConfig):
    """Options of `retention`."""

    decay: ClassVar[str | None] = None  # type: ignore[misc]  # no option: its rates are fixed
    feature_map: str = field(  # type: ignore[misc]  # here it is an option
        default="hedgehog", metadata={"help": "name in hf_linattn.feature_maps"}
    )
    fastest: float = field(
        default=2.0**-5, metadata={"help": "1 - gamma of the first key/value head: what it loses with every token"}
    )
    slowest: float | None = field(
        default=None, metadata={"help": "1 - gamma of the last, in equal ratios; None: half of the head's before"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fastest, slowest = self.fastest, self.slowest
        require("fastest", fastest, isinstance(fastest, float) and 0 < fastest < 1, "a float between 0 and 1")
        between = slowest is None or (isinstance(slowest, float) and 0 < slowest <= fastest)
        require("slowest", slowest, between, f"None or a float above 0 and at most fastest = {fastest}")


@register_mechanism("retention")
class RetentionMechanism(LinearMechanism):
    """Retention (Sun et al. 2023): o_i = sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j) gamma_h^|i - j|.

    gamma_h = 1 - 2^(-5 - h) for key/value head h = 0, 1, ..., as in the paper: the first sees some 32 tokens back,
    every other one twice as far as the one before. `fastest` and `slowest` give other ranges. Nothing about the rates
    is trained or saved; `linear` with `decay="learned"` trains them. Time and state are those of `linear`, whose state
    S_i = gamma_h S_{i-1} + phi(k_i) [v_i, 1]^T it is. Bidirectional layers, which the paper has not, forget both ways.

    Deviations: the paper's weights (q_i . k_j) gamma^(i - j) may be negative and are tamed by a GroupNorm and a gate
    that a pretrained model was not trained with; here a feature map makes them positive and they are divided by their
    sum. Positions are the model's own in place of xPos. Heads of a group of queries share their rate.
    """

    modes = Mechanism.modes
    splits = False  # every head has a rate of its own
    config_class = RetentionConfig
    limit = ExactnessLimit("attention with the kernel phi(q) . phi(k) gamma^|i - j|, computed naively", kernel=True)
    citation = "Sun et al. 2023, Retentive Network, arXiv 2307.08621"

    def decay_rate(self, like: Tensor, wide: bool = False) -> Tensor:
        """Return -log gamma [Hkv]."""
        config, heads = self.config, self.layer.num_key_value_heads
        ratio = 0.5 if config.slowest is None else (config.slowest / config.fastest) ** (1 / max(heads - 1, 1))
        powers = torch.arange(heads, dtype=accum_dtype(like) if wide else like.dtype, device=like.device)
        return -torch.log1p(-config.fastest * ratio**powers)
