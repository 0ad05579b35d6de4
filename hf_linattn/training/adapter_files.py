"""Adapters on disk: a plan, the mechanisms' parameters and LoRA weights, without the weights of the model.

A folder is one of PEFT, `adapter_config.json` and `adapter_model.safetensors`, of a type that PEFT does not know by
itself. PEFT without this module fails on it, and says what to import; softmax layers under such adapters would be
silent nonsense. With it, `PeftModel.from_pretrained` patches the model as the folder says, then puts the adapters in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, LoraModel, PeftConfig, PeftModel, TaskType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from peft.utils.integrations import skip_init_on_device
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linattn import get_patch_config, is_patched, patch_model, unpatch_model
from hf_linattn.adapter_config import ADAPTER_TYPE, CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from hf_linattn.architecture import root_model
from hf_linattn.atomic_io import write_json, write_whole
from hf_linattn.config import require, require_count
from hf_linattn.errors import CheckpointError, OptionError, PatchError, UnsupportedModelError
from hf_linattn.plan import PatchConfig
from hf_linattn.positions.tables import position_tables
from hf_linattn.reading import one_line, reading
from hf_linattn.training.task import CAUSAL, task_of
from hf_linattn.transformers_bridge import MECHANISM

PREFIX = "base_model.model."  # of the names that PEFT gives tensors
NO_SUM = "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"  # options under which two adapters have no sum
ADAPTED = BaseTunerLayer, ModulesToSaveWrapper  # what PEFT puts around a module


class AdapterType(StrEnum):
    """The type of PEFT under which adapters of this library are known."""

    LORA = ADAPTER_TYPE


@dataclass
class AdapterConfig(LoraConfig):
    """PEFT's config of LoRA adapters, and which mechanism serves which layer.

    Attributes:
        hf_linattn: a `PatchConfig` as a mapping. max_positions: that the model was extended to; None: it was not.
    """

    hf_linattn: dict[str, Any] = field(default_factory=dict)
    max_positions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("r", self.r)
        require_count("max_positions", self.max_positions, optional=True)
        self.peft_type = AdapterType.LORA  # type: ignore[assignment]  # PEFT knows its own by an enumeration alone


class AdapterModel(LoraModel):
    """PEFT's tuner of LoRA adapters, which patches a model before it puts them in.

    Where they do not fit, or the weights that are loaded first, the model is as it was.
    """

    _before: tuple[bool, dict[nn.Parameter, bool]] | None = None  # of the model, until weights are loaded

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any):
        trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
        before = None if has_adapters(model) else (is_patched(model), trained)
        with ExitStack() as undo:
            undo.callback(_give_back, model, before)
            super().__init__(model, *args, **kwargs)
            undo.pop_all()
        self._before = before

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        before, self._before = self._before, None
        own = {} if before is None else self.state_dict(prefix=prefix)
        for name in own.keys() & state_dict.keys():
            if own[name].shape != state_dict[name].shape:
                _give_back(self.model, before)
                raise CheckpointError(
                    f"the adapter belongs to another model: {name!r} is of {list(state_dict[name].shape)}, the model's"
                    f" of {list(own[name].shape)}; give the one it was trained on"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if is_patched(model):  # of a second adapter PEFT asks nothing before
            patch_as(model, self.peft_config[adapter_name])  # type: ignore[arg-type]
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    @skip_init_on_device  # low_cpu_mem_usage makes empty what is made here, and mechanisms begin with weights
    def _pre_injection_hook(self, model: nn.Module, config: PeftConfig, adapter_name: str) -> None:
        patch_as(model, config)  # type: ignore[arg-type]  # the mapping below gives it no other


PEFT_TYPE_TO_CONFIG_MAPPING[AdapterType.LORA] = AdapterConfig  # type: ignore[index]
PEFT_TYPE_TO_TUNER_MAPPING[AdapterType.LORA] = AdapterModel  # type: ignore[index]
PEFT_TYPE_TO_PREFIX_MAPPING[AdapterType.LORA] = "lora_"  # type: ignore[index]


def patch_as(model: Any, config: AdapterConfig) -> bool:
    """Patch a model as an adapter says, and return whether it was not patched yet.

    Raises:
        PatchError: it is patched otherwise, or with fewer positions.
    """
    wanted, limit, longest = PatchConfig.from_dict(config.hf_linattn), positions_of(model), config.max_positions
    extended = longest if longest is not None and limit is not None and limit < longest else None
    if is_patched(model):
        if get_patch_config(model).to_dict() != wanted.to_dict():
            raise PatchError(
                f"{type(model).__name__} is patched otherwise than the adapter was trained with; give the original"
                " model, or unpatch_model(model) first"
            )
        if extended is not None:
            raise PatchError(
                f"{type(model).__name__} is patched with {limit} positions, and the adapter was trained with"
                f" {extended}; give the original model, or unpatch_model(model) first"
            )
        return False
    patch_model(model, wanted, max_positions=extended)
    return True


def positions_of(model: nn.Module) -> int | None:
    """Return how many positions a model has, patched or not: of rotary ones what its config says, else its table's."""
    root = root_model(model)
    config = root.config.get_text_config()
    if getattr(config, "rope_parameters", None):
        return getattr(config, "max_position_embeddings", None)
    return min((end - first for first, end in position_tables(root, of_parts=True).values()), default=None)


def load_adapter(model: PreTrainedModel, path: str | os.PathLike[str], is_trainable: bool = False) -> PeftModel:
    """Patch a model and give it the mechanisms and LoRA weights that `save_adapter` wrote.

    `merge_and_unload()` of the result gives a model without PEFT.

    Args:
        model: the original, or one that is patched as the adapter says; it is changed in place.
        path: a folder, or a name on the Hub.
        is_trainable: whether adapters and mechanisms are to be trained on.

    Raises:
        OptionError: path is no path.
        CheckpointError: the folder cannot be read, is no adapter of this library, or belongs to another model.
        PatchError: the model is patched otherwise, or has adapters of PEFT already.
        HfLinattnError: as `patch_model` raises, for a model that cannot be patched so. After any of these the model
            is as it was.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn.training.adapter_files import load_adapter
        >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")  # doctest: +SKIP
        >>> model = load_adapter(model, "runs/mine/adapter")  # doctest: +SKIP
    """
    require("path", path, isinstance(path, str | os.PathLike), "a folder, or a name on the Hub")
    if isinstance(model, PeftModel) or has_adapters(model):
        raise PatchError(
            f"{type(model).__name__} has adapters already; give the model without them, adapted.unload() of the"
            " PeftModel, or put this one beside them with adapted.load_adapter(path, adapter_name)"
        )
    with reading("path", path, "give a folder that a recipe wrote with save_adapter, or its name on the Hub"):
        read_adapter_config(Path(path))  # which names a damaged file
        config = PeftConfig.from_pretrained(path)
        state = load_peft_weights(path, device="cpu")
    if not isinstance(config, AdapterConfig):
        raise CheckpointError(
            f"path={str(path)!r} holds an adapter of type {config.peft_type}, which is not one of this library;"
            " load it with PEFT"
        )
    config.inference_mode, base = not is_trainable, config.base_model_name_or_path
    config.base_model_name_or_path = None  # PEFT would warn that a folder was called otherwise where it was trained
    with ExitStack() as undo:
        if patch_as(model, config):
            undo.callback(unpatch_model, model)
        undo.callback(_take_out, model, {parameter: parameter.requires_grad for parameter in model.parameters()})
        try:
            adapted: Any = get_peft_model(model, config)
        except ValueError as error:  # PEFT found none of the modules, or one that it has no adapter for
            raise _of_another(path, one_line(error)) from error
        known = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        if (difference := unlike(known, state)) is not None:
            raise _of_another(path, difference)
        set_peft_model_state_dict(adapted, state)
        undo.pop_all()
    config.base_model_name_or_path = base
    return adapted.train(is_trainable)


def merge_adapter(model: PreTrainedModel, path: str | os.PathLike[str]) -> PreTrainedModel:
    """Return a model with an adapter merged into its weights: one of this library, or one that PEFT knows.

    Raises:
        CheckpointError: as `load_adapter`; or its type cannot be merged into weights, as prompt tuning.
    """
    with reading("path", path, "give a folder with an adapter, or the name of one on the Hub"):
        config = PeftConfig.from_pretrained(path)
    adapted: Any
    if isinstance(config, AdapterConfig):
        adapted = load_adapter(model, path)
    else:
        try:
            adapted = PeftModel.from_pretrained(model, path)
        except (ValueError, RuntimeError) as error:  # none of the modules is there; tensors have other shapes
            raise _of_another(path, one_line(error)) from error
        if not hasattr(adapted, "merge_and_unload"):
            raise CheckpointError(
                f"path={str(path)!r} is an adapter of type {config.peft_type.value}, which cannot be merged into the"
                " model's weights; load it with PEFT"
            )
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged


def _predicts_next_tokens(model: nn.Module) -> bool:
    """Return whether a model has a causal head; one with a head that no recipe trains has none."""
    try:
        return task_of(model) is CAUSAL
    except UnsupportedModelError:
        return False


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into a model."""
    return isinstance(model, nn.Module) and any(isinstance(part, ADAPTED) for part in model.modules())


def _give_back(model: Any, before: tuple[bool, Mapping[nn.Parameter, bool]] | None) -> None:
    """Make a model what it was `before` our tuner took it: whether patched, and what was trained; None: leave it."""
    if before is None:
        return
    was_patched, trained = before
    _take_out(model, trained)
    if is_patched(model) and not was_patched:
        unpatch_model(model)


def _take_out(model: nn.Module, trained: Mapping[nn.Parameter, bool]) -> None:
    """Undo what `get_peft_model` did, or what it did before it failed; trained: which parameters were to be."""
    for name, part in list(model.named_modules()):
        if isinstance(part, ADAPTED):
            own = part.original_module if isinstance(part, ModulesToSaveWrapper) else part.get_base_layer()
            model.set_submodule(name, own)
    vars(model).pop("peft_config", None)
    for parameter, wanted in trained.items():
        parameter.requires_grad_(wanted)


def _of_another(path: str | os.PathLike[str], reason: str) -> CheckpointError:
    return CheckpointError(f"path={str(path)!r} belongs to another model: {reason}; give the one it was trained on")


def unlike(known: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """Return the first difference between the tensors of a model and those of a file: names, then shapes."""
    for name in sorted(known.keys() | found.keys()):
        if name not in found:
            return f"the adapter has no {name!r}"
        if name not in known:
            return f"the model has no {name!r}"
        if known[name].shape != found[name].shape:
            return f"{name!r} is of {list(found[name].shape)}, the model's of {list(known[name].shape)}"
    return None


def save_adapter(
    adapted: PeftModel,
    folder: Path,
    base: str,
    max_positions: int | None = None,
    dtype: torch.dtype | None = None,
    before: Path | None = None,
) -> None:
    """Write the adapters of a patched model with its plan and its mechanisms' state, each file whole or not at all.

    Args:
        adapted: a patched model with LoRA adapters, as `add_adapters` makes it.
        folder: is made if it does not exist.
        base: name or folder of the original.
        max_positions: that it was extended to; None: it was not.
        dtype: of the tensors but for integers, such as counters; None: as they are.
        before: an adapter that was merged into the model before these were added; the result is the sum of both.

    Raises:
        OptionError: of these adapters and those `before` them there is no sum, as with DoRA or ranks of their own.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import is_patched, patch_model
        >>> from hf_linattn.training.adapter_files import load_adapter, save_adapter
        >>> from hf_linattn.training.adapters import add_adapters
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> adapted = add_adapters(patch_model(LlamaForCausalLM(config), "hedgehog"), rank=2)
        >>> with TemporaryDirectory() as folder:
        ...     save_adapter(adapted, Path(folder), base="a-llama")
        ...     loaded = load_adapter(LlamaForCausalLM(config), folder)
        >>> is_patched(loaded)
        True
    """
    name: Any = adapted.active_adapter
    config: Any = adapted.peft_config[name]
    state = dict(get_peft_model_state_dict(adapted, save_embedding_layers=False, adapter_name=name))
    trained = {name for name in state if f".{MECHANISM}." in name}
    state |= {name: x for name, x in adapted.state_dict().items() if _is_mechanisms(name) and not trained}
    rank, alpha = config.r, config.lora_alpha
    if before is not None:
        rank = _rank_of_sum(config, before)
        state, alpha = summed(load_file(before / WEIGHTS_FILE), state), alpha * rank / config.r
    own = [MECHANISM] if any(f".{MECHANISM}." in name for name in state) else []
    described = AdapterConfig(
        **_options_of(config) | {"r": rank, "lora_alpha": alpha, "base_model_name_or_path": base},
        modules_to_save=[*own, *(x for x in config.modules_to_save or () if x != MECHANISM)] or None,
        task_type=TaskType.CAUSAL_LM if _predicts_next_tokens(adapted) else None, max_positions=max_positions,
        hf_linattn=get_patch_config(adapted).to_dict(),
    )  # fmt: skip
    tensors = {
        name: x.detach().to("cpu", dtype if x.is_floating_point() else None).contiguous() for name, x in state.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WEIGHTS_FILE, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    plain = described.to_dict()
    lists = {name: sorted(value) if isinstance(value, set) else value for name, value in plain.items()}
    write_json(folder / CONFIG_FILE, lists, indent=2, sort_keys=True)


def _rank_of_sum(config: LoraConfig, before: Path) -> int:
    """Return the rank of adapters and those `before` them together, or raise `OptionError` where they have no sum."""
    if unequal := next((option for option in NO_SUM if getattr(config, option)), None):
        raise OptionError(
            f"{unequal}={getattr(config, unequal)!r}: this adapter and that of {str(before)!r} have no sum; leave it"
            " out, or merge_and_unload() and save the model"
        )
    return config.r + int(json.loads((before / CONFIG_FILE).read_text(encoding="utf-8"))["r"])


def _options_of(config: LoraConfig) -> dict[str, Any]:
    """Return what a LoRA config says, but for what `save_adapter` says itself and how weights begin."""
    said = {"modules_to_save", "task_type"}
    options = {x.name: getattr(config, x.name) for x in fields(LoraConfig) if x.init and x.name not in said}
    return options | {"inference_mode": True, "init_lora_weights": True}


def summed(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return adapters that add what two of the same scaling add one after another; what is no adapter is the second's.

    B A + B' A' = [B B'] [A; A'].
    """
    axes = {"lora_A": 0, "lora_B": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}
    result = dict(second)
    for name, tensor in second.items():
        axis = next((axes[part] for part in name.split(".") if part in axes), None)
        if axis is not None:
            result[name] = torch.cat([first[name].to(tensor), tensor], dim=axis)
    return result


def _is_mechanisms(name: str) -> bool:
    """Return whether a tensor of an adapted model is of a mechanism itself, not of a copy that PEFT trains."""
    return f".{MECHANISM}." in name and "original_module" not in name and "modules_to_save" not in name
