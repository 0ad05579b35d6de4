"""The mechanisms of a plan, made for the layers of a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from .config import MechanismConfig, make_config
from .mechanisms import MECHANISMS, AttentionLayer, Mechanism
from .plan import PatchConfig

logger = logging.getLogger(__name__)


@torch.inference_mode(False)  # else they could not be trained afterwards, which nothing would say
def build_all(config: PatchConfig, layers: Mapping[str, AttentionLayer]) -> dict[str, Mechanism]:
    """Make the mechanisms of all layers, and let each join those before it."""
    mechanisms: dict[str, Mechanism] = {}
    for path, layer in layers.items():
        mechanism = _build(config.layers.get(layer.index), layer)
        mechanism.join(list(mechanisms.values()))
        mechanisms[path] = mechanism
    return mechanisms


def _build(config: MechanismConfig | None, layer: AttentionLayer) -> Mechanism:
    """Make the mechanism of one layer, in its dtype and where its weights are; None keeps softmax."""
    config = config if config is not None else make_config("softmax", {})
    mechanism = MECHANISMS.get(config.mechanism)(config, layer)
    return mechanism.to(device=None if layer.device.type == "meta" else layer.device, dtype=layer.dtype)


def warn_of_sinks(mechanisms: Mapping[str, Mechanism], family: str) -> None:
    """Say which layers lose their learned sinks."""
    losing = {path: kind.mechanisms_dropping_sinks() for path, kind in mechanisms.items() if kind.layer.has_sinks}
    if lost := [path for path, names in losing.items() if names]:
        logger.warning(
            "%s: %s have learned sinks in the denominator of their softmax, which %s leaves out, as it has no such"
            " denominator; to keep them use a mechanism there that has one, such as hybrid or local",
            family, ", ".join(lost), " and ".join(sorted({name for path in lost for name in losing[path]})),
        )  # fmt: skip
