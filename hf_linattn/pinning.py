"""Configs and names of patched models: what would quietly go back to softmax by either says so instead.

transformers chooses a model's attention by its config, and so do `set_attn_implementation`, continuous batching and
every class that makes a model from a config. PEFT and TRL load a model again by its name. While a model is patched its
configs therefore refuse another choice, and its name is none that loads.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from .architecture import root_model
from .attention_call import MECHANISM
from .blueprints import CHOICE
from .errors import PatchError, UnsupportedModeError

IMPLEMENTATION = "hf_linattn"  # the name of our attention and mask functions
SHARED = "_hf_linattn_shared_configs"  # the attribute of a transformers model that holds the configs it had before
EXACT = "_hf_linattn_exact"  # the attribute of modules that keep softmax beside patched ones, as cross-attention does
# modules that read a mask made by their config, as the interface makes it, and attend past the interface
OWN_ATTENTION = frozenset({"Siglip2MultiheadAttentionPoolingHead"})
FORMER_NAME = "_hf_linattn_former_name"  # the attribute of a model and its parts that says what they were named before
PAGING = "init_continuous_batching"  # the method of a model that all of continuous batching goes through
ADAPTER_BASE = "base_model_name_or_path"  # the field of an adapter's config in PEFT
NAME_IN_MEMORY = (
    "patched by hf_linattn in memory: save it with save_pretrained, load that folder, and start again from there"
)
MOVED = (
    "are not those that were patched, in their order: some were taken out, put in or moved; call unpatch_model(model),"
    " then patch_model(model, ...) for the layers that there are"
)


class Meanwhile(str):
    """The attention that a config selects for a while; in a copy of the config it is ours, as the copy is patched."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (IMPLEMENTATION,)


class PinnedConfigMixin:
    """Mixed into the class of each config that selects our attention: it selects no other.

    The config of a whole model is marked as well, `LinearizedConfigMixin`, which is pinned before it is attached, too:
    what `AutoConfig` reads from a checkpoint makes models through the Auto classes alone.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # the class is made while running, where pickle cannot look it up by name
        return _new_config, (base_class(type(self)),), vars(self)

    def to_dict(self) -> dict[str, Any]:
        """Return what the config says, and that its model is patched, which `saved_config` lets no other one miss."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]  # of the config it is mixed into
        return ({IMPLEMENTATION: True} if is_attached(self) else {}) | values

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another attention; reading which one it is stays what it is in transformers, many times a forward."""
        if name == CHOICE:  # `set_attn_implementation` and the class of a model, the only ones to write here
            raise self._refusal(value)
        if name != "_attn_implementation":
            super().__setattr__(name, value)
        else:
            self._choose(value)

    def _choose(self, value: str | dict[str, Any] | None) -> None:
        """Choose what `unpatch_model` will go back to, where no model is attached yet."""
        if value != IMPLEMENTATION and any(vars(part).get(CHOICE) == IMPLEMENTATION for part in nested_configs(self)):
            raise self._refusal(value)
        own = type(self)
        self.__class__ = base_class(own)
        try:
            self._attn_implementation = value
        finally:
            self.__class__ = own

    def _refusal(self, value: Any) -> PatchError:
        return PatchError(
            f"attn_implementation={value!r} was chosen for a {type(self).__name__} that says {IMPLEMENTATION}; use"
            " original_attention(model) for a while, as for Whisper's return_token_timestamps, unpatch_model(model)"
            " for good, and to make another model like this one an Auto class, such as"
            " AutoModelForCausalLM.from_config(config), or copy.deepcopy(model)"
        )


def base_class(config_class: type[Any]) -> Any:
    """Return the class that a config class, pinned or not, is of transformers."""
    return next(kind for kind in config_class.__mro__ if not issubclass(kind, PinnedConfigMixin))


@functools.cache
def _pinned_class(base: Any) -> Any:
    return type(base.__name__, (PinnedConfigMixin, base), {"__module__": __name__, "__doc__": base.__doc__})


def _new_config(base: Any) -> PreTrainedConfig:
    """Return an empty pinned config for pickle and copy to fill."""
    made: Any = _pinned_class(base)
    return made.__new__(made)


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the configs of modules, each once.

    A model may have another config than the attention modules in it: a pair of models gives its halves new ones.
    """
    return list({id(module.config): module.config for module in modules}.values())


def with_copies(chosen: list[tuple[Any, str]], models: Iterable[nn.Module]) -> list[tuple[Any, str]]:
    """Return configs that select our attention and what each selected before, those that `models` got since, too."""
    known = {id(config) for config, _ in chosen}
    copies = [config for config in configs_of(models) if id(config) not in known]
    return chosen + [(config, chosen[0][1]) for config in copies if is_attached(config)]


def is_attached(config: Any) -> bool:
    """Whether a config selects our attention now, or will again when `original_attention` ends."""
    choice = vars(config).get(CHOICE)
    return choice == IMPLEMENTATION or isinstance(choice, Meanwhile)


def modules_with_mechanisms(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules inside a model that have mechanisms."""
    return [module for module in model.modules() if MECHANISM in module._modules]


def own_config(model: nn.Module) -> None:
    """Give the model a config of its own: what is done to it must not reach another model made from the same one.

    It remembers the old one. Where it is a part of a model, that is the one in the config of the whole.
    """
    copies: dict[int, Any] = {}
    root = root_model(model)
    old = root.config
    copy.deepcopy(old, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and id(config) in copies:
            module.config = copies[id(config)]
        shared = vars(module).get(SHARED, [])
        shared[:] = [copies.get(id(config), config) for config in shared]
    vars(root).setdefault(SHARED, []).append(old)


@contextmanager
def same_configs(model: nn.Module) -> Iterator[None]:
    """Give the modules of a model, patched only inside, the config objects back that they had; others may hold these.
    """
    before = [(own, own.get("config"), [*own.get(SHARED, [])]) for own in map(vars, model.modules())]
    try:
        yield
    finally:
        for own, config, shared in before:
            own.pop(SHARED, None)
            own |= ({} if config is None else {"config": config}) | ({SHARED: shared} if shared else {})


def pin_config(config: PreTrainedConfig) -> None:
    """Have a config keep the attention that `set_implementation` chooses for it."""
    if not isinstance(config, PinnedConfigMixin):
        config.__class__ = _pinned_class(type(config))  # type: ignore[arg-type]


def unpin_config(config: PreTrainedConfig) -> None:
    """Undo `pin_config`; a config that is not pinned stays as it is."""
    if isinstance(config, PinnedConfigMixin):
        config.__class__ = base_class(type(config))


def free_config(config: PreTrainedConfig) -> None:
    """Make a copy of a patched model's config, and those in it, ones that a model can be made from."""
    for part in nested_configs(config):
        unpin_config(part)
        if vars(part).get(CHOICE) == IMPLEMENTATION:
            vars(part)[CHOICE] = None  # transformers chooses
        vars(part).pop(IMPLEMENTATION, None)  # what `to_dict` said


def nested_configs(config: Any) -> Iterator[PreTrainedConfig]:
    """Yield a config and those in it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from nested_configs(value)


# -- what keeps softmax -----------------------------------------------------------------------------------------------


def keeping_softmax(
    model: nn.Module, attention: Mapping[str, nn.Module], configs: Iterable[PreTrainedConfig]
) -> list[nn.Module]:
    """Return the modules that share a config with the attention modules and are none of them: these get no mechanism.
    """
    chosen, served = {id(config) for config in configs}, {id(m) for m in attention.values()}
    return [
        module
        for module in model.modules()
        if id(getattr(module, "config", None)) in chosen
        and id(module) not in served
        and not isinstance(module, PreTrainedModel)
    ]


def part_configs(modules: Iterable[nn.Module], chosen: list[tuple[Any, str]]) -> list[tuple[nn.Module, Any]]:
    """Give those that make masks for PyTorch's own attention a config that still selects what makes such masks.

    chosen: the configs of a model, and what each selected. Returns the modules, and the config that each had.
    """
    found = [(module, module.config) for module in modules if type(module).__name__ in OWN_ATTENTION]
    for module, config in found:
        own = copy.copy(config)
        unpin_config(own)
        vars(own)[CHOICE] = next(choice for shared, choice in chosen if shared is config)
        module.config = own
    return found


def require_left_out(module: nn.Module) -> None:
    """Raise `PatchError` unless a module without a mechanism is one that keeps softmax, and not one never patched."""
    if not getattr(module, EXACT, False):
        raise PatchError(
            f"{type(module).__name__} has attn_implementation {IMPLEMENTATION!r} and no mechanism; call"
            " patch_model(model, ...), or load a converted model through an Auto class of transformers"
        )


# -- names ------------------------------------------------------------------------------------------------------------


def take_names(root: PreTrainedModel) -> list[tuple[Any, str, str]]:
    """Take the names of a model and its parts, which load it unpatched; return what `give_names` needs.

    PEFT writes the name of the model into an adapter, as its base, and TRL loads its reference model by the name in
    the config, which model cards have, too, and which is therefore empty.
    """
    parts = [part for part in root.modules() if isinstance(part, PreTrainedModel)]
    configs = configs_of(parts)
    names: list[tuple[Any, str, str]] = [(config, "_name_or_path", config._name_or_path) for config in configs]
    for part in parts:
        setattr(part, FORMER_NAME, part.name_or_path)
        part.name_or_path = NAME_IN_MEMORY
    for config in configs:
        config._name_or_path = ""
    return names


def adapter_configs(model: nn.Module) -> list[Any]:
    """Return the configs of PEFT's adapters around a model and in it, each once."""
    found = (getattr(module, "peft_config", None) for module in model.modules())
    every = [config for adapters in found if isinstance(adapters, dict) for config in adapters.values()]
    return list({id(config): config for config in every}.values())


def take_adapter_names(model: nn.Module) -> list[tuple[Any, str, str]]:
    """Take the name of the base from adapters that a model has already; return what `give_names` needs."""
    configs = adapter_configs(model)
    names = [(config, ADAPTER_BASE, getattr(config, ADAPTER_BASE)) for config in configs]
    for config in configs:
        setattr(config, ADAPTER_BASE, NAME_IN_MEMORY)
    return names


def rename_adapters(model: nn.Module, names: Collection[str], name: str) -> None:
    """Name what adapters of a base of these names are for: those that a model got while it was patched."""
    for config in adapter_configs(model):
        if getattr(config, ADAPTER_BASE) in names:
            setattr(config, ADAPTER_BASE, name or None)


def give_names(root: nn.Module, names: list[tuple[Any, str, str]], name: str | None = None) -> None:
    """Give a model, its parts and configs their names back, or the name of the checkpoint that they are of."""
    names = names + [(x, "name_or_path", vars(x)[FORMER_NAME]) for x in root.modules() if FORMER_NAME in vars(x)]
    for owner, field, before in names:
        setattr(owner, field, before if name is None else name)


# -- continuous batching ----------------------------------------------------------------------------------------------


def refuse_paging(*args: Any, **kwargs: Any) -> Any:
    """Stand in place of `init_continuous_batching`, which chooses another attention."""
    raise UnsupportedModeError(
        "continuous batching (generate_batch, cache_implementation='paged') was asked of a patched model: its pages"
        " hold keys for softmax, and a mechanism keeps a decoding state; call generate, with a padded batch for many"
        " prompts, or unpatch_model(model) first"
    )


def forbid_paging(root: nn.Module) -> None:
    """Have a model and its parts refuse continuous batching; see `replace_method`."""
    replace_method(root, PAGING, lambda part: refuse_paging)


def replace_method(root: nn.Module, name: str, make: Callable[[nn.Module], Any]) -> None:
    """Put `make(part)` over a method of a model and its parts, those that have it."""
    for part in root.modules():
        if isinstance(part, PreTrainedModel) and hasattr(part, name):
            setattr(part, name, make(part))
