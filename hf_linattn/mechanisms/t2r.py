"""t2r: linear attention with learned ReLU features, phi(x) = relu(x W + b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .linear import FeatureMapConfig, LinearMechanism
from .registration import register_mechanism


@dataclass
class T2RConfig(FeatureMapConfig):
    """Options of `t2r`."""

    feature_map: ClassVar[str] = "t2r"


@register_mechanism("t2r")
class T2RMechanism(LinearMechanism):
    """Transformer-to-RNN (Kasai et al. 2021): o_i = phi_q(q_i) S_i / (phi_q(q_i) . z_i), S_i and z_i as in `linear`.

    phi(x) = relu(x W + b). The maps' parameters are `weight` [Hkv, H / Hkv, D, F] and `bias` [Hkv, H / Hkv, F] for the
    queries, [Hkv, D, F] and [Hkv, F] for the keys. W starts as the axes and random rotations of them, each direction
    with its opposite, b as zero: no query is without features.

    Deviations: queries and keys have maps of their own, the paper's share one; no epsilon in the denominator, a query
    that sees no weight gets zero.
    """

    config_class = T2RConfig
    citation = "Kasai et al. 2021, Finetuning Pretrained Transformers into RNNs, arXiv 2103.13076"
