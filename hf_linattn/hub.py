"""Saving and loading: a patched model is saved under a `model_type` of its own and loads through the Auto classes.

In memory a patched model's config is a subclass of the original one that differs in how it is written to disk:

    {"model_type": "hf_linattn", "base_model_type": "llama", "base_config": {... the rest of the original config ...},
     "hf_linattn": {... PatchConfig ...}, "dtype": "... how to load it ...", "auto_map": {... see below ...}}

Whatever loads the checkpoint without this library must fail loudly instead of running softmax. The Auto classes find
a model type that they do not know and code to be trusted. A class such as LlamaForCausalLM would take its sizes from
a nested config of its own type, which is why that type stands outside, or fall back on its default sizes, which may
well be the right ones, and therefore meets a dtype that is none, and, where it has one, a vocabulary size that is no
number, which it reads first and quotes in full.

Beside the config lies a module of a few lines, named in `auto_map`, which does what `import hf_linattn` does wherever
a model is loaded by its name with `trust_remote_code=True`.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from .config import PatchConfig
from .errors import CheckpointError
from .files import write_text

MODEL_TYPE = "hf_linattn"
HOW_TO_LOAD = "this is an hf_linattn checkpoint: `import hf_linattn` and load it through an Auto class of transformers"
SHIM = "configuration_hf_linattn"
SHIM_CODE = '''\
"""Lets `trust_remote_code=True` load this model, whose attention comes from a package: `pip install hf_linattn`."""

from hf_linattn.hub import HfLinattnConfig

__all__ = ["HfLinattnConfig"]
'''


class LinearizedConfigMixin:
    """Mixed into the config class of a patched model; `hf_linattn` is the JSON form of its `PatchConfig`."""

    hf_linattn: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        # the class is made while running, where pickle cannot look it up by name
        return _new_config, (type(self).__mro__[2],), vars(self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the nested form too: PEFT asks the config class of a model for the config of its checkpoint."""
        if "base_config" in config_dict:
            return HfLinattnConfig.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]  # of the config it is mixed into

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write the nested form, each file whole or not at all, and the module that `trust_remote_code` loads."""
        base = json.loads(self.to_json_string(use_diff=use_diff))  # type: ignore[attr-defined]
        outer = {
            "model_type": MODEL_TYPE,
            "base_model_type": base.pop("model_type"),
            "dtype": HOW_TO_LOAD,
            "vocab_size": HOW_TO_LOAD,
            "auto_map": {"AutoConfig": f"{SHIM}.{HfLinattnConfig.__name__}"},
            "architectures": base.get("architectures"),
            MODEL_TYPE: base.pop(MODEL_TYPE),
            "base_config": base,
            "transformers_version": base.pop("transformers_version", None),
        }
        path = Path(json_file_path)
        write_text(path.with_name(f"{SHIM}.py"), SHIM_CODE)
        write_text(path, json.dumps(outer, indent=2, sort_keys=True) + "\n")


class HfLinattnConfig(PreTrainedConfig):
    """What `AutoConfig` finds under the model type `hf_linattn`; reading it gives the linearised base config."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the base config described by `base_config`, marked with the patch; `CheckpointError` if malformed."""
        for name in ("base_config", MODEL_TYPE):
            if not isinstance(config_dict.get(name), dict):
                raise CheckpointError(
                    f"config.json has no field {name!r} (got {config_dict.get(name)!r}); save the model again with"
                    " save_pretrained of a patched model"
                )
        patch = PatchConfig.from_dict(config_dict[MODEL_TYPE])
        model_type = config_dict.get("base_model_type")
        if model_type == MODEL_TYPE or model_type not in CONFIG_MAPPING:
            raise CheckpointError(
                f"config.json has base_model_type {model_type!r}, which is no model type that this version of"
                " transformers knows; try a newer one, or save the model again"
            )
        result = CONFIG_MAPPING[model_type].from_dict(dict(config_dict["base_config"]), **kwargs)
        mark_config(result[0] if isinstance(result, tuple) else result, patch)
        return result


def mark_config(config: PreTrainedConfig, patch: PatchConfig) -> None:
    """Make the config of a patched model one that is saved in the nested form."""
    config.__class__ = linearized_config_class(type(config))  # type: ignore[arg-type]
    config.hf_linattn = patch.to_dict()


def unmark_config(config: PreTrainedConfig) -> None:
    """Undo `mark_config`; a config that is not marked stays as it is."""
    if isinstance(config, LinearizedConfigMixin):
        config.__class__ = type(config).__mro__[2]
        del config.hf_linattn


def _new_config(base: Any) -> PreTrainedConfig:
    """Return an empty marked config for pickle and copy to fill."""
    made: Any = linearized_config_class(base)
    return made.__new__(made)


@functools.cache
def linearized_config_class(base: Any) -> Any:
    """Return the subclass of a config class that is saved in the nested form, known to the Auto classes.

    It bears the name of its base, by which transformers looks up tokenizers and processors.
    """
    if issubclass(base, LinearizedConfigMixin):
        return base
    made = type(base.__name__, (LinearizedConfigMixin, base), {"__module__": __name__, "__doc__": base.__doc__})
    for auto_class, model_class in auto_classes(base):
        auto_class.register(made, linearized_model_class(model_class, made), exist_ok=True)
    return made


def auto_classes(config_class: Any) -> Iterator[tuple[Any, type[PreTrainedModel]]]:
    """Yield the Auto classes that know a config class, each with the model class that it has for it."""
    for auto_class in vars(modeling_auto).values():
        if isinstance(auto_class, type) and issubclass(auto_class, _BaseAutoModelClass):
            mapping: Any = getattr(auto_class, "_model_mapping", None)
            if mapping is not None and config_class in mapping and isinstance(mapping[config_class], type):
                yield auto_class, mapping[config_class]


def load_checkpoint(name_or_path: str, **options: Any) -> PreTrainedModel:
    """Load a folder or a model of the Hub, converted or not, as the class that it was saved as.

    Args:
        **options: of `from_pretrained`.

    Raises:
        CheckpointError: no Auto class knows it by the name in its `architectures`.
    """
    config = AutoConfig.from_pretrained(name_or_path)
    saved_as = (config.architectures or ["no class"])[0]
    for auto_class, model_class in auto_classes(type(config)):
        if model_class.__name__ == saved_as:
            return auto_class.from_pretrained(name_or_path, **options)
    raise CheckpointError(
        f"{name_or_path!r} was saved as {saved_as} ({type(config).__name__}), which no Auto class of transformers"
        " loads; load it yourself and call patch_model"
    )


def linearized_model_class(base: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return a class that builds `base` and patches it as its config says; the result is an instance of `base`."""

    def initialise(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        from .patching import patch_model  # here, since patching marks configs with this module

        patch = PatchConfig.from_dict(config.hf_linattn)
        config = copy.deepcopy(config)  # the caller's may serve for another model
        unmark_config(config)
        base.__init__(self, config, *args, **kwargs)
        self.__class__ = base  # a loaded model and one patched in memory are the same thing
        patch_model(self, patch)

    return type(base.__name__, (base,), {"__init__": initialise, "config_class": config_class, "__module__": __name__})


AutoConfig.register(MODEL_TYPE, HfLinattnConfig, exist_ok=True)
