"""hedgehog: linear attention with learned softmax features, phi(x) = [softmax(x W), softmax(-x W)]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .linear import FeatureMapConfig, LinearMechanism
from .registration import register_mechanism


@dataclass
class HedgehogConfig(FeatureMapConfig):
    """Options of `hedgehog`."""

    feature_map: ClassVar[str] = "hedgehog"


@register_mechanism("hedgehog")
class HedgehogMechanism(LinearMechanism):
    """Hedgehog (Zhang et al. 2024): o_i = phi_q(q_i) S_i / (phi_q(q_i) . z_i), S_i and z_i as in `linear`.

    phi(x) = [softmax(x W), softmax(-x W)]: two softmaxes over F/2 features each, which do not compete with each other.
    Both take sharp, spiky shapes when W is trained to imitate softmax attention, which fixed maps cannot. W is
    `query_map.weight` [Hkv, H / Hkv, D, F/2] for the queries and `key_map.weight` [Hkv, D, F/2] for the keys.

    Deviations from the authors' code: F is 4 D unless `feature_dim` says otherwise, where theirs is 2 D; W starts as
    sqrt(scaling D) times the identity, followed by random rotations where F/2 > D, where theirs starts as the identity
    (sharper softmaxes are nearer to the model's own attention before any training); no epsilon in the denominator.
    """

    config_class = HedgehogConfig
    citation = "Zhang et al. 2024, The Hedgehog and the Porcupine, arXiv 2402.04347"
