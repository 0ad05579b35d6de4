"""taylor: linear attention with exp expanded to second order, w_ij = 1 + s + s^2 / 2 for s = scaling q_i . k_j."""

from __future__ import annotations

from dataclasses import dataclass

from ..feature_maps import FEATURE_MAPS, FeatureMap
from .capabilities import ExactnessLimit
from .linear import KernelConfig, LinearMechanism
from .registration import register_mechanism


@dataclass
class TaylorConfig(KernelConfig):
    """Options of `taylor`."""


@register_mechanism("taylor")
class TaylorMechanism(LinearMechanism):
    """Polynomial attention (Keles et al. 2022; Arora et al. 2024): w_ij = 1 + s + s^2 / 2 with s = scaling q_i . k_j.

    w = (1 + (1 + s)^2) / 2 is never below 1/2, and phi(x) = [1, x, x_i^2 / sqrt 2, x_i x_j (i < j)] on
    x = sqrt(scaling) q makes it. F = 1 + D + D (D + 1) / 2 is 2145 for D = 64, so time O(N F Dv) and the state
    [F, Dv + 1] are large: it pays for small head dimensions or very long inputs. There is nothing to train.

    The features have signs, so weights are differences of large numbers where |q| |k| is large: in float32 their error
    is about 1e-7 (scaling |q| |k|)^2 / 2, against the smallest weight of 1/2.

    Deviations: each product of two coordinates is stored once, which halves the width; no epsilon in the denominator.
    """

    config_class = TaylorConfig
    limit = ExactnessLimit(
        "attention with the kernel 1 + s + s^2 / 2, s = scaling q . k; softmax attention to O(s^3) for small s",
        kernel=True,
    )
    citation = "Arora et al. 2024, Simple linear attention language models (Based), arXiv 2402.18668"

    def choose_feature_map(self) -> tuple[type[FeatureMap], int]:
        kind = FEATURE_MAPS.get("taylor")
        return kind, kind.directions(None, self.layer.head_dim)
