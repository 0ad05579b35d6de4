"""The config of a patched model, in memory and in config.json, under a `model_type` of its own.

In memory a patched model's config is a subclass of the original one that differs in how it is written to disk:

    {"model_type": "hf_linattn", "base_model_type": "llama", "base_config": {... the rest of the original config ...},
     "hf_linattn": {... PatchConfig ...}, "vocab_size": "... how to load it ...", "auto_map": {... see below ...},
     "architectures": ["HfLinattnLlamaForCausalLM"], "hf_linattn_modules": ["lm_head", "model", "model.layers", ...]}

`hf_linattn_modules` is what the transformers models in it have: one may be made without a pooler, which no config
says. Where only parts of the model are patched, `hf_linattn` is {"parts": {path: {... PatchConfig ...}}}.

Whatever loads the checkpoint without this library must fail loudly instead of running softmax. The Auto classes find
a model type that they do not know and code to be trusted. A class such as LlamaForCausalLM would take its sizes from
a nested config of its own type, which is why that type stands outside, or fall back on its default sizes, which may
well be the right ones, and therefore meets a size of its own, such as that of the vocabulary, which is no number.
A serving engine chooses its own model by `architectures`, of the file or of the config in memory: both bear names of
this library.

Beside the config lies a module of a few lines, named in `auto_map`, which does what `import hf_linattn` does wherever
a model is loaded by its name with `trust_remote_code=True`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from .atomic_io import write_json, write_text
from .checkpoint_config import MODEL_TYPE, HfLinattnConfig
from .errors import CheckpointError, PatchError, UnsupportedModelError
from .pinning import PinnedConfigMixin, base_class, unpin_config
from .plan import PatchConfig

HOW_TO_LOAD = "this is an hf_linattn checkpoint: `import hf_linattn` and load it through an Auto class of transformers"
PREFIX = "HfLinattn"  # of the names in `architectures`
PARTS = "parts"  # the field of `hf_linattn` that says which parts of a model are patched
MODULES = f"{MODEL_TYPE}_modules"  # the field that names what the transformers models in a model have
SHIM = "configuration_hf_linattn"
SHIM_CODE = '''\
"""Lets `trust_remote_code=True` load this model, whose attention comes from a package: `pip install hf_linattn`."""

from hf_linattn.hub import HfLinattnConfig

__all__ = ["HfLinattnConfig"]
'''


class LinearizedConfigMixin(PinnedConfigMixin):
    """Mixed into the config class of a patched model; `hf_linattn` is the JSON form of its `PatchConfig`."""

    hf_linattn: dict[str, Any]
    architectures: list[str] | None

    def __reduce__(self) -> tuple[Any, ...]:
        # the class is made while running, where pickle cannot look it up by name
        return _new_config, (base_class(type(self)),), vars(self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the nested form too: `from_pretrained` of a model class, and PEFT, ask the config class of a model."""
        if "base_config" in config_dict:
            return read_config(config_dict, base_class(cls), **kwargs)
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]  # of the config it is mixed into

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write the nested form, each file whole or not at all, and the module that `trust_remote_code` loads."""
        base = json.loads(self.to_json_string(use_diff=use_diff))  # type: ignore[attr-defined]
        base.pop("auto_map", None)  # of remote code, which would load the original
        outer = {
            "model_type": MODEL_TYPE,
            "base_model_type": base.pop("model_type"),
            size_field(self): HOW_TO_LOAD,
            "auto_map": {"AutoConfig": f"{SHIM}.{HfLinattnConfig.__name__}"},
            "architectures": own_names(base.pop("architectures", None)),
            "dtype": base.get("dtype"),
            MODEL_TYPE: base.pop(MODEL_TYPE),
            MODULES: base.pop(MODULES, None),
            "base_config": base,
            "transformers_version": base.pop("transformers_version", None),
        }
        path = Path(json_file_path)
        write_text(path.with_name(f"{SHIM}.py"), SHIM_CODE)
        write_json(path, outer, indent=2, sort_keys=True)


def size_field(config: Any) -> str:
    """Return a field that the class of a config, marked or not, checks to be a number: its vocabulary's, or another.

    Only fields that a class declares itself are checked. Where none is a number there are configs inside it, one of
    which is named.
    """
    base = base_class(type(config))
    values = config.to_dict()
    sizes = [name for name in inspect.get_annotations(base) if type(values.get(name)) is int]
    return "vocab_size" if "vocab_size" in sizes else next(iter([*sizes, *base.sub_configs]), "vocab_size")


def modules_of(model: nn.Module) -> list[str]:
    """Return the paths of the modules and tensors that each transformers model in a model has at its top."""
    return [
        f"{path}.{name}".removeprefix(".")
        for path, part in model.named_modules()
        if isinstance(part, PreTrainedModel)
        for found in (part._modules, part._parameters, part._buffers)
        for name, value in found.items()
        if value is not None
    ]


def require_registered(config: Any) -> None:
    """Raise `UnsupportedModelError` unless `AutoConfig` finds the class of a config, marked or not, by its model type.

    Classes of remote code are found beside the original alone. Others may add to the one that is found.
    """
    base = base_class(type(config))
    known = CONFIG_MAPPING[base.model_type] if base.model_type in CONFIG_MAPPING else None
    adds = known is not None and issubclass(base, known) and base._auto_class is None
    if base is not known and not adds:
        raise UnsupportedModelError(
            f"{base.__name__} is not what AutoConfig has for model_type {base.model_type!r}, so that nothing would"
            f" load what is saved; {how_to_register(base.model_type)}"
        )


def how_to_register(model_type: Any) -> str:
    """Return what has to be done for a config class that is none of transformers."""
    own = "give the class a model_type of its own, " if model_type in CONFIG_MAPPING else ""
    return (
        f"{own}call AutoConfig.register({model_type!r}, its config class) and register(config class, model class) of"
        " an Auto class such as AutoModelForCausalLM, before patching and before loading"
    )


def unfinished(config: Any) -> dict[str, Any]:
    """Return what stands in place of config.json while the files of a checkpoint are replaced by others."""
    return {
        "model_type": MODEL_TYPE,
        "unfinished": "the save of this checkpoint was interrupted and its files are of two models: save it again",
        size_field(config): HOW_TO_LOAD,
        "auto_map": {"AutoConfig": f"{SHIM}.{HfLinattnConfig.__name__}"},
    }


def require_finished(config_dict: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if config.json is what `unfinished` returns."""
    if "unfinished" in config_dict:
        raise CheckpointError(f"config.json says {config_dict['unfinished']!r}")


def read_config(config_dict: dict[str, Any], config_class: Any = None, **kwargs: Any) -> Any:
    """Return the base config described by `base_config`, marked with the patch; `CheckpointError` if malformed.

    config_class: of the config; None: the one that `AutoConfig` has.
    """
    require_finished(config_dict)
    for name in ("base_config", MODEL_TYPE):
        if not isinstance(config_dict.get(name), dict):
            raise CheckpointError(
                f"config.json has no field {name!r} (got {config_dict.get(name)!r}); save the model again with"
                " save_pretrained of a patched model"
            )
    described = config_dict[MODEL_TYPE]
    read_patches(described)
    model_type = config_dict.get("base_model_type")
    if model_type == MODEL_TYPE or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json has base_model_type {model_type!r}, which is no model type that this version of"
            f" transformers knows; try a newer one, or, for code that is not its own, {how_to_register(model_type)}"
        )
    architectures = config_dict.get("architectures", config_dict["base_config"].get("architectures"))
    base = {**config_dict["base_config"], "architectures": architectures}
    result = (config_class or CONFIG_MAPPING[model_type]).from_dict(base, **kwargs)
    mark_config(result[0] if isinstance(result, tuple) else result, described)
    return result


def read_patches(described: Mapping[str, Any]) -> dict[str, PatchConfig]:
    """Return path of a part -> its patch, of the whole model under `""`, or raise `CheckpointError`."""
    if PARTS not in described:
        return {"": PatchConfig.from_dict(described)}
    parts = described[PARTS]
    if not isinstance(parts, Mapping) or not parts or not all(isinstance(part, Mapping) for part in parts.values()):
        raise CheckpointError(f"hf_linattn.{PARTS} must say what is patched in each part, got {parts!r}; save anew")
    return {path: PatchConfig.from_dict(part) for path, part in parts.items()}


def own_names(architectures: list[str] | None) -> list[str] | None:
    """Return names of classes as this library's checkpoints have them in `architectures`.

    >>> own_names(["LlamaForCausalLM"])
    ['HfLinattnLlamaForCausalLM']
    """
    return architectures and [PREFIX + name.removeprefix(PREFIX) for name in architectures]


def class_names(config: PreTrainedConfig) -> list[str]:
    """Return the names in `architectures` as transformers has them, whether the config is marked or not."""
    return [name.removeprefix(PREFIX) for name in config.architectures or ()]


def mark_config(config: PreTrainedConfig, described: dict[str, Any]) -> None:
    """Make the config of a patched model one that is saved in the nested form, with this under `hf_linattn`."""
    config.__class__ = linearized_config_class(base_class(type(config)))  # type: ignore[arg-type]
    config.hf_linattn = described
    config.architectures = own_names(config.architectures)


def unmark_config(config: PreTrainedConfig) -> None:
    """Undo `mark_config`; one that is not marked, and was made from the dict of one that is, forgets that."""
    if isinstance(config, LinearizedConfigMixin):
        unpin_config(config)
        config.architectures = config.architectures and class_names(config)
    vars(config).pop(MODEL_TYPE, None)


PLAIN_INIT = PreTrainedModel.__init__


@functools.wraps(PLAIN_INIT)
def refuse_dicts(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in place of `PreTrainedModel.__init__`: the config of a patched model that became a dict makes no other.

    A dict has no class to say it: pairs of models are made from the dicts of their halves' configs.
    """
    if MODEL_TYPE in getattr(config, "__dict__", ()) and not isinstance(config, LinearizedConfigMixin):
        raise PatchError(
            f"{type(config).__name__} was made from the dict of a patched model's config, and {type(self).__name__}"
            " would run softmax; use an Auto class, such as AutoModelForCausalLM.from_config(model.config), or"
            " copy.deepcopy(model), and put the models into a pair"
        )
    PLAIN_INIT(self, config, *args, **kwargs)


PreTrainedModel.__init__ = refuse_dicts  # type: ignore[method-assign]


def _new_config(base: Any) -> PreTrainedConfig:
    """Return an empty marked config for pickle and copy to fill."""
    made: Any = linearized_config_class(base)
    return made.__new__(made)


REGISTERING = "hf_linattn.hub"  # what has something to register; it imports this module
_REGISTERS: list[Callable[[Any, Any], object]] = []
RegisterT = TypeVar("RegisterT", bound=Callable[[Any, Any], object])


def for_each_config_class(register: RegisterT) -> RegisterT:
    """Have `register(base, made)` called with each config class of transformers and its marked subclass.

    `hub.py` registers the model classes so. They patch models, and patching marks configs with this module.
    """
    _REGISTERS.append(register)
    return register


@functools.cache
def linearized_config_class(base: Any) -> Any:
    """Return the subclass of a config class that is saved in the nested form, known to the Auto classes.

    It bears the name of its base, by which transformers looks up tokenizers and processors.
    """
    if issubclass(base, LinearizedConfigMixin):
        return base
    importlib.import_module(REGISTERING)
    # what copies the file of a class of remote code must not find this one
    own = {"__module__": __name__, "__doc__": base.__doc__, "_auto_class": None}
    made = type(base.__name__, (LinearizedConfigMixin, base), own)
    for register in _REGISTERS:
        register(base, made)
    return made


def own_name(model_class: type[PreTrainedModel]) -> str:
    """Return the name of a model class, or of the one that a class of patched models is made of."""
    return model_class.__name__.removeprefix(PREFIX)


def auto_classes(config_class: Any) -> Iterator[tuple[Any, type[PreTrainedModel]]]:
    """Yield the Auto classes that know a config class, each with a model class that it has for it, of DeiT two."""
    for auto_class in vars(modeling_auto).values():
        if isinstance(auto_class, type) and issubclass(auto_class, _BaseAutoModelClass):
            mapping: Any = getattr(auto_class, "_model_mapping", None)
            if mapping is not None and config_class in mapping:
                known = mapping[config_class]
                yield from ((auto_class, one) for one in (known if isinstance(known, tuple) else (known,)))
