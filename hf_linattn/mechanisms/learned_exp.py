"""learned_exp: linear attention with learned exponential features, phi(x) = exp(x W + b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .linear import FeatureMapConfig, LinearMechanism
from .registration import register_mechanism


@dataclass
class LearnedExpConfig(FeatureMapConfig):
    """Options of `learned_exp`."""

    feature_map: ClassVar[str] = "learned_exp"


@register_mechanism("learned_exp")
class LearnedExpMechanism(LinearMechanism):
    """Exponential features with trained directions: w_ij = sum_r exp(q_i . u_r + a_r) exp(k_j . w_r + b_r).

    The form of FAVOR+ (`performer`) without its norms, and with directions that learn what random ones only sample.
    The parameters are `weight` [Hkv, H / Hkv, D, F] and `bias` [Hkv, H / Hkv, F] of `query_map`, [Hkv, D, F] and
    [Hkv, F] of `key_map`. Both weights start as the axes and random rotations of them, each direction with its
    opposite, times sqrt(scaling D), the biases as zero: then w_ij resembles exp(scaling q_i . k_j) but for the norms
    of the keys, which it overrates by exp(scaling |k_j|^2 / 2). The largest exponent of a position stands apart from
    its features and the state keeps the running maximum, so nothing overflows and no future maximum is looked at.
    """

    config_class = LearnedExpConfig
    citation = "after Choromanski et al. 2021, Rethinking Attention with Performers, arXiv 2009.14794"
