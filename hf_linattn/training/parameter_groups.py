"""What is trained at which rate and in which dtype: groups of an optimizer, and float32 copies of small parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hf_linattn import Mechanism, get_mechanisms, is_patched
from hf_linattn.architecture import attention_projections, root_model
from hf_linattn.errors import OptionError
from hf_linattn.pinning import free_config
from hf_linattn.training.losses.attention_transfer import Transfer
from hf_linattn.transformers_bridge import MECHANISM

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Places:
    """Where the parameters of a model are.

    Attributes:
        attention: names of the modules around attention.
        head: the identities of the parameters of what answers: all that are not of the base model, and its pooler.
    """

    attention: list[str]
    head: set[int]

    @classmethod
    def of(cls, root: PreTrainedModel) -> Places:
        """Return the places of a model."""
        mechanisms = get_mechanisms(root) if is_patched(root) else {}
        projections = (name for path in mechanisms for name in attention_projections(root, path))
        base = {id(p) for name, p in root.base_model.named_parameters() if ".pooler." not in f".{name}"}
        return cls([*mechanisms, *projections], {id(p) for p in root.parameters()} - base)


@dataclass(frozen=True)
class Group:
    """Some parameters of a model.

    Attributes:
        rate, weight_decay: names of the options that say how they are trained.
        holds: whether a parameter is of the group, by its name, which begins with a dot, and itself.
    """

    rate: str
    weight_decay: str
    holds: Callable[[str, nn.Parameter, Places], bool]


# the first that holds a parameter has it; what none holds, feed-forwards, norms and embeddings, is the rest
GROUPS = (
    Group("mechanism_rate", "mechanism_weight_decay", lambda name, *_: f".{MECHANISM}." in name),
    Group("attention_rate", "attention_weight_decay", lambda name, _, at: any(f".{x}." in name for x in at.attention)),
    Group("head_rate", "head_weight_decay", lambda _, parameter, at: id(parameter) in at.head),
)


def group_parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module, options: Any, decaying: Collection[str]
) -> None:
    """Give the parameters of mechanisms, of attention and of the head their own learning rate and weight decay.

    Args:
        optimizer: of the parameters of `model`, or of a loss that holds it; its groups are divided. Those
            of attention transfer, which trains mechanisms alone at a rate of its own, are left as they are.
        options: has the rate of each of `GROUPS`, which multiplies the learning rate, and its weight decay, None: as
            for the rest.
        decaying: names of the parameters that are to decay at all; others, such as biases, do not with any of these.

    Raises:
        OptionError: the optimizer holds other tensors than the model's parameters, as where training shards it.
    """
    if not others_than_one(options) or isinstance(model, Transfer):
        return
    places = Places.of(root_model(model))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    divided = []
    for given in optimizer.param_groups:
        parts: dict[tuple[Group | None, bool], list[nn.Parameter]] = {}
        for parameter in given["params"]:
            name = names.get(id(parameter))
            if name is None:
                rates = ", ".join(group.rate for group in GROUPS)
                raise OptionError(
                    f"{rates} need the optimizer to hold the model's own parameters, which it does not where training"
                    " shards them; leave them at 1"
                )
            group = next((group for group in GROUPS if group.holds(f".{name}", parameter, places)), None)
            parts.setdefault((group, name in decaying), []).append(parameter)
        for (group, decays), own in parts.items():
            changed = {} if group is None else _changed(given, group, options, decays)
            divided.append({**given, "params": own, **changed})
    optimizer.param_groups[:] = divided


def others_than_one(options: Any) -> bool:
    """Whether some group has a rate or a decay of its own."""
    return any(
        getattr(options, group.rate) != 1 or getattr(options, group.weight_decay) is not None for group in GROUPS
    )


def _changed(given: dict[str, Any], group: Group, options: Any, decays: bool) -> dict[str, Any]:
    """Return what is different in a group; decays: whether its parameters are to decay."""
    decay = getattr(options, group.weight_decay)
    return {
        "lr": given["lr"] * getattr(options, group.rate),
        "weight_decay": given["weight_decay"] if decay is None or not decays else decay,
    }


class _Rounded(nn.Module):
    """The value of a parameter in the dtype of its model."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, exact: Tensor) -> Tensor:
        return exact.to(self.dtype)

    def right_inverse(self, rounded: Tensor) -> tuple[Tensor]:
        return (rounded.float(),)  # PyTorch refuses a tensor of another dtype unless it is one of several


def cast_as_loaded(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Give a model the dtypes that `from_pretrained(dtype=...)` gives what it saves; None: as it is.

    `model.to(dtype)` casts buffers that are not saved, too: those that the architecture makes in float32, such as the
    frequencies of rotary positions, and those that it makes in the dtype of the weights.
    """
    if dtype is None:
        return
    config = copy.deepcopy(model.config)
    free_config(config)
    with torch.device("meta"):
        made = dict(type(model)._from_config(config, dtype=dtype).named_buffers())
    saved = model.state_dict().keys()
    for module in model.modules():
        if isinstance(module, Mechanism):
            module.to(dtype)  # it may leave some of its buffers as they are
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and f".{MECHANISM}." not in f".{name}":
            tensor.data = tensor.data.to(made[name].dtype if name in made and name not in saved else dtype)


@contextmanager
def float32_masters(model: nn.Module) -> Iterator[None]:
    """Train the small parameters of a model in bfloat16 or float16 in float32 for a while.

    A step of 1e-4 moves no bfloat16 of 1: its neighbours are 4e-3 apart. Vectors, such as the weights of norms and
    biases, and all parameters of mechanisms, are kept in float32 and rounded to the dtype of the model where it uses
    them, so an optimizer adds up what is smaller than a rounding; checkpoints meanwhile hold them in float32. Matrices
    are left as they are: for float32 copies of these, load the model in float32 and train it with `bf16`. What several
    modules have in common, such as a tied bias, stays one parameter.
    """
    chosen: dict[nn.Parameter, list[tuple[Any, str]]] = {}  # a parameter: modules and what it is called there
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            small = parameter.ndim <= 1 or f".{MECHANISM}." in f".{path}."
            if parameter.requires_grad and parameter.dtype in HALVES and small:
                chosen.setdefault(parameter, []).append((module, name))
    for parameter, places in chosen.items():
        masters = []
        for module, name in places:
            parametrize.register_parametrization(module, name, _Rounded(parameter.dtype), unsafe=True)
            masters.append(module.parametrizations[name])
        for tied in masters[:-1]:  # the last one, a projection, has it alone: no tensor can be saved under two names
            del tied.original0
            vars(tied)["original0"] = masters[-1].original0
    try:
        yield
    finally:
        for *others, (last, own) in chosen.values():
            parametrize.remove_parametrizations(last, own, leave_parametrized=True)
            for module, name in others:
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
                setattr(module, name, getattr(last, own))


def initial_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates that the groups of an optimizer had before any schedule."""
    return [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
