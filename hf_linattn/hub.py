"""Checkpoints of patched models: Auto classes and model classes load them, `save_pretrained` writes them whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import _add_variant
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)

from . import saving
from .blueprints import blueprint
from .errors import CheckpointError
from .patching import get_mechanisms, patch_model, rename_patched
from .pinning import free_config
from .saved_config import (
    MODEL_TYPE,
    MODULES,
    PARTS,
    PREFIX,
    HfLinattnConfig,
    auto_classes,
    class_names,
    for_each_config_class,
    linearized_config_class,
    own_name,
    read_config,
    read_patches,
    unmark_config,
)

__all__ = ["HfLinattnConfig", "load_checkpoint"]  # the first is what the module beside saved configs imports

# options of `from_pretrained` that say where files come from, and those that say so of code
WHERE = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
CODE = ("code_revision", "trust_remote_code")
# what matches the paths of mechanisms and their parts where quantisers look for layers to leave as they are
NOT_QUANTISED = rf".*\.{MODEL_TYPE}"


@for_each_config_class
def register_model_classes(base: Any, made: Any) -> None:
    """Have the Auto classes that know `base` build patched models for its marked subclass `made`."""
    known: dict[Any, list[Any]] = {}
    for auto_class, model_class in auto_classes(base):
        known.setdefault(auto_class, []).append(linearized_model_class(model_class, made))
    for auto_class, classes in known.items():
        if len(classes) > 1:
            for each in classes:  # the Auto class takes the one that `architectures` names
                each.__name__ = PREFIX + each.__name__
        auto_class.register(made, classes[0] if len(classes) == 1 else tuple(classes), exist_ok=True)


def load_checkpoint(name_or_path: str, **options: Any) -> PreTrainedModel:
    """Load a folder or a model of the Hub, converted or not, as the class that it was saved as.

    Args:
        **options: of `from_pretrained`; those of the Hub, as `revision` and `token`, hold for the config as well.

    Raises:
        CheckpointError: no Auto class knows it by the name in its `architectures`.
    """
    config = AutoConfig.from_pretrained(name_or_path, **only(options, *WHERE, *CODE))
    saved_as = (class_names(config) or ["no class"])[0]
    for auto_class, model_class in auto_classes(type(config)):
        if own_name(model_class) == saved_as:
            return auto_class.from_pretrained(name_or_path, **options)
    raise CheckpointError(
        f"{name_or_path!r} was saved as {saved_as} ({type(config).__name__}), which no Auto class of transformers"
        f" loads; call {saved_as}.from_pretrained({name_or_path!r})"
    )


def patched_class(model_class: type[PreTrainedModel], name: Any, config_dict: Mapping[str, Any]) -> Any:
    """Return the class whose `from_pretrained` makes patched models of `model_class`.

    Raises:
        CheckpointError: the checkpoint `name`, whose config.json has `config_dict`, is of another model type.
    """
    config_class: Any = model_class.config_class
    saved = config_dict.get("base_model_type")
    if saved != config_class.model_type:
        raise CheckpointError(
            f"{str(name)!r} is a converted model of type {saved!r}, and {model_class.__name__} is of type"
            f" {config_class.model_type!r}; load it as the class that it was saved as, or through an Auto class"
        )
    return linearized_model_class(model_class, linearized_config_class(config_class))


def linearized_model_class(base: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return a class that builds `base` and patches it as its config says; the result is an instance of `base`."""

    class Linearized(base):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            require_all_parts(base, config)
            patches = read_patches(config.hf_linattn)
            config = copy.deepcopy(config)  # the caller's may serve for another model
            unmark_config(config)
            free_config(config)
            name, config.name_or_path = config.name_or_path, ""
            self.__class__ = base  # a loaded model and one patched in memory are the same thing
            base.__init__(self, config, *args, **kwargs)
            for path, patch in patches.items():
                patch_model(find_part(self, path), patch)
            if getattr(config, "quantization_config", None) is not None:  # of the call, or of the checkpoint
                kept = vars(self).get("_keep_in_fp32_modules") or ()  # which quantisers leave as they are, too
                self._keep_in_fp32_modules = {*kept, NOT_QUANTISED}
            if name:  # of what is patched by itself when it is loaded
                rename_patched(self, name)

        @classmethod
        def from_pretrained(cls, name: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
            """Load the weights, all of them or none: transformers starts what is missing at random, with a warning."""
            adapter = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
            try:
                model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
            except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
                file = damaged_file(name, kwargs.get("variant"), adapter, **only(kwargs, *WHERE))
                raise CheckpointError(f"{file} is damaged ({error}); fetch or save it again") from error
            if adapter is not None:  # of the checkpoint, `_finalize_model_loading` has asked
                require_found(model, info["missing_keys"], adapter, None)
            where = {"_raise_exceptions_for_missing_entries": False, **only(kwargs, *WHERE)}
            asked = model.can_generate() and kwargs.get("generation_config") is None
            if asked and cached_file(name, GENERATION_CONFIG_NAME, **where) is None:
                # config.json was read in its place, whose fields are those of `base_config`
                model.generation_config = GenerationConfig.from_model_config(model.config)
            return (model, info) if output_loading_info else model

        @staticmethod
        def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
            """Check what was found: of an adapter that comes afterwards, transformers says what that one lacks."""
            name = load_config.pretrained_model_name_or_path
            if loading_info.mismatched_keys and not load_config.ignore_mismatched_sizes:
                refuse_mismatched(name, *min(loading_info.mismatched_keys))
            found = base._finalize_model_loading(model, load_config, loading_info)
            require_found(model, found.missing_keys, name, load_config.download_kwargs or {})
            return found

    Linearized.__name__ = Linearized.__qualname__ = base.__name__  # by which transformers knows a class
    Linearized.config_class = config_class
    return Linearized


def require_all_parts(base: type[PreTrainedModel], config: Any) -> None:
    """Refuse the text model alone of a checkpoint with other parts, which transformers makes of unconverted ones."""
    if base.config_class is config.sub_configs.get("text_config"):
        saved_as = class_names(config)
        able = sorted({auto.__name__ for auto, made in auto_classes(type(config)) if own_name(made) in saved_as})
        raise CheckpointError(
            f"{config.name_or_path!r} was saved as {' or '.join(saved_as)}, and {base.__name__} is its text model"
            f" alone; load it as the class that it was saved as, with {' or '.join(able) or 'that class'}"
        )


def find_part(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the part of a model at `path`, which may be its path in the same model with another head, or with none.
    """
    if path == model.base_model_prefix and not hasattr(model, path):
        return model  # it is what has no head
    prefix = f"{model.base_model_prefix}."
    for candidate in (path, path.removeprefix(prefix), prefix + path):
        try:
            part = model.get_submodule(candidate)
        except AttributeError:
            continue
        if isinstance(part, PreTrainedModel):
            return part
    raise CheckpointError(
        f"hf_linattn.{PARTS} in config.json names {path!r}, which {type(model).__name__} does not have; load the"
        " checkpoint as the class that it was saved as"
    )


def refuse_mismatched(name: Any, tensor: str, found: Iterable[int], expected: Iterable[int]) -> NoReturn:
    """Raise `CheckpointError` for a tensor of another shape."""
    raise CheckpointError(
        f"the weights in {str(name)!r} have {tensor!r} of shape {list(found)}, config.json asks for {list(expected)};"
        " they belong to another model, or pass ignore_mismatched_sizes=True to start it anew"
    )


def require_found(model: PreTrainedModel, missing: Iterable[str], name: Any, where: Mapping[str, Any] | None) -> None:
    """Raise `CheckpointError` if tensors are missing that the model had when it was saved.

    A model that was saved as another class, say without this one's head, lacks what that class does not have; its
    attention has to be there.

    where: as `WHERE`, of the checkpoint; None: of an adapter, which must be whole.
    """
    attention = tuple(f"{path}." for path in get_mechanisms(model))
    whole = type(model).__name__ in class_names(model.config)
    absent = sorted(tensor for tensor in missing if whole or tensor.startswith(attention))
    if absent and where is not None:
        absent = sorted(set(absent) - started_anew(model, absent, name, where))
    if absent:
        remedy = (
            "load it with the options that it was made with, such as add_pooling_layer=False"
            if where is not None
            else "load it with peft.PeftModel.from_pretrained, which knows what an adapter, as of AdaLoRA, leaves out"
        )
        raise CheckpointError(
            f"the weights in {str(name)!r} have no {absent[0]!r} and lack {len(absent)} tensors in all; they are"
            f" damaged or belong to another model: save it again, or {remedy}"
        )


def started_anew(model: PreTrainedModel, missing: Iterable[str], name: Any, where: Mapping[str, Any]) -> set[str]:
    """Return which of the missing tensors a model did not have when it was saved; transformers starts these anew.

    It was made without that module, as `add_pooling_layer=False` has it, or its config was changed for loading, as an
    encoder-decoder does to the decoder in it.
    """
    saved, _ = PreTrainedConfig.get_config_dict(name, **where)
    before, now = (tensors_of(model, config) for config in (read_config(saved), model.config))
    new = set(missing) & (now - before)
    modules, parts = saved.get(MODULES), [path for path, x in model.named_modules() if isinstance(x, PreTrainedModel)]
    alike = type(model).__name__ in class_names(model.config)  # else the same modules have other paths
    for tensor in missing if alike and modules is not None else ():
        part = max((path for path in parts if path == "" or tensor.startswith(f"{path}.")), key=len)
        child = tensor.removeprefix(part).removeprefix(".").partition(".")[0]
        if f"{part}.{child}".removeprefix(".") not in modules:
            new.add(tensor)
    return new


def tensors_of(model: PreTrainedModel, config: PreTrainedConfig) -> set[str]:
    """Return the names of the tensors of a model's class, unpatched, with this config; of tied ones the first."""
    config = copy.deepcopy(config)
    free_config(config)
    made = blueprint(model, config)
    return {name for name, _ in chain(made.named_parameters(), made.named_buffers())}


def damaged_file(name: Any, variant: str | None, adapter: Any = None, **where: Any) -> str:
    """Return the first file of the weights of a checkpoint, or of an adapter of it, that cannot be read.

    where: see `WHERE`.
    """
    whole, listing = (_add_variant(x, variant) for x in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
    index = cached_file(name, listing, _raise_exceptions_for_missing_entries=False, **where)
    files = [whole]
    if index is not None:
        try:
            files = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):  # the last three: JSON that is no index
            return repr(index)
    places = [(name, file) for file in files] + ([] if adapter is None else [(adapter, ADAPTER_SAFE_WEIGHTS_NAME)])
    for place, file in places:
        path = cached_file(place, file, **where)
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            return repr(path)
    return f"one of the files {files} of {str(name)!r}"


def only(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options of these names, as far as they are given."""
    return {name: options[name] for name in names if name in options}


saving.install()
