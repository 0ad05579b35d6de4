"""The mechanisms of a plan, made for the layers of a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from .config import MechanismConfig, make_config
from .errors import OptionError, PatchError
from .mechanisms import MECHANISMS, AttentionLayer, Mechanism
from .plan import PatchConfig

logger = logging.getLogger(__name__)


@torch.inference_mode(False)  # else they could not be trained afterwards, which nothing would say
def build_all(config: PatchConfig, layers: Mapping[str, AttentionLayer]) -> dict[str, Mechanism]:
    """Make the mechanisms of all layers, and let each join those before it."""
    mechanisms: dict[str, Mechanism] = {}
    for made in {id(made): made for made in config.layers.values()}.values():
        _require_json(made)
    for path, layer in layers.items():
        mechanism = _build(config.layers.get(layer.index), layer)
        mechanism.join(list(mechanisms.values()))
        mechanisms[path] = mechanism
    return mechanisms


def _build(config: MechanismConfig | None, layer: AttentionLayer) -> Mechanism:
    """Make the mechanism of one layer, in its dtype and where its weights are; None keeps softmax."""
    config = config if config is not None else make_config("softmax", {})
    mechanism = MECHANISMS.get(config.mechanism)(config, layer)
    _require_saved(mechanism)
    return mechanism.to(device=None if layer.device.type == "meta" else layer.device, dtype=layer.dtype)


def _require_json(config: MechanismConfig) -> None:
    """Raise `OptionError` for options that no config.json can hold."""
    for name, value in config.to_options().items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"the option {name!r} of mechanism {config.mechanism!r} is {value!r}, which no saved model could say"
                f" ({error}); have it be a number, a string, or a list or dict of such"
            ) from error


def _require_saved(mechanism: Mechanism) -> None:
    """Raise `PatchError` for a tensor that a checkpoint leaves out: a model that is loaded would have none of it."""
    for path, part in mechanism.named_modules():
        left = [*part._non_persistent_buffers_set, *(name for name, x in vars(part).items() if isinstance(x, Tensor))]
        if left:
            name = f"{path}.{left[0]}".lstrip(".")
            raise PatchError(
                f"mechanism {mechanism.config.mechanism!r} has the tensor {name!r}, which a checkpoint leaves out: a"
                " loaded model would be without it; use register_buffer(name, tensor), or make it in the forward"
            )


def warn_of_sinks(mechanisms: Mapping[str, Mechanism], family: str) -> None:
    """Say which layers lose their learned sinks."""
    losing = {path: kind.mechanisms_dropping_sinks() for path, kind in mechanisms.items() if kind.layer.has_sinks}
    if lost := [path for path, names in losing.items() if names]:
        logger.warning(
            "%s: %s have learned sinks in the denominator of their softmax, which %s leaves out, as it has no such"
            " denominator; to keep them use a mechanism there that has one, such as hybrid or local",
            family, ", ".join(lost), " and ".join(sorted({name for path in lost for name in losing[path]})),
        )  # fmt: skip
