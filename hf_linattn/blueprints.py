"""What transformers makes of a config: a model without memory, what its modules keep, and its initial tensors."""

from __future__ import annotations

import copy
import inspect
import math
import types
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

CHOICE = "_attn_implementation_internal"  # the field of a config that names an attention function
PLAIN = (int, float, str, dict, types.FunctionType)  # of these types is what modules keep of their config


def blueprint(root: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Make the model of a config without any memory for its weights."""
    with torch.device("meta"):
        return type(root)(config)


def twin_of(attention: nn.Module, implementation: str) -> nn.Module:
    """Make an attention module once more, with another attention function and random weights in float32.

    Its hidden states are one number wide, and the columns of its other matrices are all one, so that it costs nothing
    however large the model is.
    """
    config: Any = copy.copy(attention.config)
    vars(config)[CHOICE] = implementation
    kind: Any = type(attention)
    names = [name for name in inspect.signature(kind).parameters if name != "config"]
    found = {name: getattr(attention, name, getattr(config, name, None)) for name in names}
    given = {name: x for name, x in found.items() if not (x is None or isinstance(x, (nn.Module, Tensor)))}
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        twin = kind(config=config, **given).eval()
    width = next((x.in_features for x in twin.modules() if hasattr(x, "in_features")), None)
    generator = torch.Generator("cpu").manual_seed(0)
    for part in twin.modules():
        for name, weight in part.named_parameters(recurse=False):
            *outer, inner = weight.shape
            shape = (*outer, 1) if outer else (inner,)
            drawn = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
            drawn = drawn if inner == width else drawn.expand(weight.shape)
            # not registered, as Accelerate moves to the meta device what is
            part._parameters[name] = nn.Parameter(drawn, requires_grad=False)
        if type(part) is nn.Linear:
            part.forward = partial(_one_column, part)  # type: ignore[method-assign]
    return twin


def _one_column(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return what a layer whose columns are all one makes of x; PyTorch would make a copy of its weight."""
    return F.linear(x.sum(-1, keepdim=True), linear.weight[:, :1], linear.bias)


def grown_modules(before: PreTrainedModel, after: PreTrainedModel) -> dict[str, bool]:
    """Return path -> whether it is an embedding, of the modules with tensors of another shape.

    Ids of positions and token types, which only count them, are none of these tensors.
    """
    return {
        path: isinstance(module, nn.Embedding)
        for (path, module), other in zip(before.named_modules(), after.modules(), strict=True)
        if shapes(module, ids=False) != shapes(other, ids=False)
    }


def shapes(module: nn.Module, ids: bool = True) -> dict[str, Any]:
    """Return name -> shape of what a module itself has of parameters and buffers, those of ids among them or not."""
    tensors = {**module._parameters, **module._buffers}
    return {
        name: tensor.shape
        for name, tensor in tensors.items()
        if tensor is not None and (ids or tensor.dtype != torch.long)
    }


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain values that a module keeps, as `num_embeddings`; flags, as `training`, are none of a config."""
    return {name: value for name, value in vars(module).items() if name[0] != "_" and type(value) in PLAIN}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a module itself has."""
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


def initialised(model: PreTrainedModel, path: str) -> dict[str, Tensor]:
    """Return the tensors of one module as transformers initialises them, NaN or -1 where it leaves them alone."""
    module = model.get_submodule(path)
    for name, weight in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(_unset(weight), requires_grad=False))
    for name, buffer in buffers_of(module).items():
        setattr(module, name, _unset(buffer))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for place in (path, path.rpartition(".")[0]):
            _model_around(model, place)._init_weights(model.get_submodule(place))
    return dict(module.named_parameters(recurse=False)) | buffers_of(module)


def _model_around(model: PreTrainedModel, path: str) -> Any:
    """Return the innermost transformers model around a module, which initialises it; a model initialises itself."""
    while not isinstance(module := model.get_submodule(path), PreTrainedModel):
        path = path.rpartition(".")[0]
    return module


def _unset(tensor: Tensor) -> Tensor:
    value = math.nan if tensor.is_floating_point() else -1
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")


def is_made(own: Tensor, made: Tensor) -> bool:
    """Whether a tensor is what its initialisation makes it, rounded to its dtype.

    A table that grew while a long input was read, as sinusoids do, is compared by the rows that both have.
    """
    if own.shape[1:] != made.shape[1:] or own.device.type == "meta":
        return False
    rows = tuple(slice(count) for count in min(own.shape[:1], made.shape[:1]))
    near = 1e-2 if own.dtype.itemsize == 2 else 1e-5
    return torch.allclose(own.detach()[rows].cpu().double(), made[rows].double(), rtol=near, atol=near)
