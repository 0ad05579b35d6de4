"""Tensor parallelism: which mechanisms can work where each process has some of a layer's heads and not all of them.

Two ways lead there: transformers' plans (`tp_plan="auto"`, `DistributedConfig`), which split projections as a model is
loaded, and PyTorch's `parallelize_module` on a model in memory. A mechanism is made for all heads. What it keeps or
decides for each head by itself, such as a learned map, would be that of other heads on all processes but the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .config import make_config
from .errors import UnsupportedModelError
from .mechanisms import MECHANISMS, AttentionLayer, Mechanism

SPLITTING = ("colwise", "packed_colwise")  # the styles of a plan that leave each process its own part of the output


def require_heads_apart(
    model: PreTrainedModel, attention: Mapping[str, nn.Module], mechanisms: Mapping[str, Mechanism]
) -> None:
    """Raise `UnsupportedModelError` if processes share out heads which a mechanism cannot compute apart."""
    for path, module in attention.items():
        size = processes_sharing(model, path, module)
        if size == 1:
            continue
        layer = mechanisms[path].layer
        for field in ("num_heads", "num_key_value_heads"):
            if (count := getattr(layer, field)) % size:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {path} has {field}={count}, which {size} tensor-parallel processes"
                    " cannot share out; use a number of processes that divides it"
                )
        if not heads_apart(mechanisms[path]):
            raise UnsupportedModelError(
                f"{type(model).__name__}: tensor parallelism shares out the heads of {path} among {size} processes,"
                f" but mechanism {mechanisms[path].config.mechanism!r} has parameters or choices for each head, which"
                f" stay those of all heads; use {_able(layer)}, or load the model on one device, or with a plan that"
                " leaves its attention whole"
            )


def heads_apart(mechanism: Mechanism) -> bool:
    """Return whether a mechanism works where each process has some of the heads only.

    With parameters it does not: none of the library's are the same for all heads by design, and those that were would
    get other gradients on each process. `sink_logit="one"` is a number for each head, too.
    """
    without = next(mechanism.parameters(), None) is None and getattr(mechanism.config, "sink_logit", None) is None
    return mechanism.splits and without


def processes_sharing(model: PreTrainedModel, path: str, module: nn.Module) -> int:
    """Return how many processes share out the heads of the attention module at `path`; 1 if each has all of them."""
    size, plan = _plan_of(model)
    if size == 1:
        return _processes_holding(model, module)
    names = (re.sub(r"\d+", "*", f"{path}.{name}") for name, _ in module.named_modules() if name)
    return size if any(plan.get(name) in SPLITTING for name in names) else 1


def _plan_of(model: PreTrainedModel) -> tuple[int, dict[str, str]]:
    """Return the number of processes that transformers splits a model over, or is going to, and how."""
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if size := getattr(model, "_tp_size", None):
        return size, plan
    asked: Any = getattr(model.config, "distributed_config", None)
    if asked is None or not any(parameter.is_meta for parameter in model.parameters()):
        return 1, plan  # a config keeps what another model was loaded with; only one without weights is being loaded
    given = getattr(asked, "tp_plan", None)
    return getattr(asked, "tp_size", None) or 1, plan if not isinstance(given, dict) else given and plan | given


def _processes_holding(model: PreTrainedModel, module: nn.Module) -> int:
    """Return over how many processes PyTorch's own tensor parallelism splits the weights of a module."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    if any(isinstance(part, FSDPModule) for part in model.modules()):
        return 1  # which puts whole weights together for each call
    sizes = [
        parameter.device_mesh.size(dim)
        for parameter in module.parameters()
        if isinstance(parameter, DTensor)
        for dim, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard)
    ]
    return max(sizes, default=1)


def refuse_other_heads(mechanism: Mechanism, num_heads: int) -> None:
    """Raise `UnsupportedModelError` for a call with other heads than the layer was patched with."""
    layer = mechanism.layer
    raise UnsupportedModelError(
        f"layer {layer.index} was patched with {layer.num_heads} heads and is called with {num_heads}, and mechanism"
        f" {mechanism.config.mechanism!r} has parameters or choices for each head; if tensor parallelism shares them"
        f" out, use {_able(layer)}"
    )


def _able(layer: AttentionLayer) -> str:
    """Return the names of the mechanisms that compute heads apart as they are by default, in the form of a layer."""
    found = []
    for name in MECHANISMS.names():
        kind = MECHANISMS.get(name)
        if kind.splits and layer.mode in kind.modes and heads_apart(kind(make_config(name, {}), layer)):
            found.append(name)
    return f"one of {', '.join(found)}"
