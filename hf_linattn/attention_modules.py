"""Which modules of a transformers model are attention, and which of these a mechanism can stand for.

Models say the first by the classes in `_can_record_outputs`, attention modules the second by how they are written.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from .errors import UnsupportedModelError

logger = logging.getLogger(__name__)

# parts by which an attention module chooses its keys, told to its own mask or cache
OWN_CHOICE = ("indexer", "compressor")
# attention modules that no mechanism can stand for, and why
IRREPLACEABLE = {
    "T5Gemma2MergedAttention": "attends to the encoder's tokens and its own under one softmax",
    "DogeAttention": "makes a mask of its own from its values",
}
# positions without a bias, where an attention module that can have one says which it has
UNBIASED = (None, "rotary")
BIAS_TABLE = "relative_position_bias_table"
# what models call a module that attends to other tokens than its own, where they declare it as any other
CROSSING = re.compile(r"cross_?att|\bx_attn\b")
# what models call a module with one query, or with learned ones, for a whole picture
POOLING = re.compile("Pooling|Perceiver")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # in the code of a forward that goes through transformers' attention interface


def self_attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return path -> self-attention module in order, or raise `UnsupportedModelError` saying what is missing."""
    return _replaceable(
        model, False, "no attention layers (_can_record_outputs['attentions']): either it has none, or its code"
        " predates transformers' attention interface; use a model that goes through that interface",
    )  # fmt: skip


def cross_attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return path -> module of the layers that attend to an encoder's tokens; raise as `self_attention_modules`."""
    return _replaceable(
        model, True, "no cross-attention layers (_can_record_outputs['cross_attentions']): cross_attention= is for"
        " these; leave it out",
    )  # fmt: skip


def _replaceable(model: PreTrainedModel, across: bool, missing: str) -> dict[str, nn.Module]:
    """Return the attention modules of one kind, or raise `UnsupportedModelError`: `missing`, or why one must stay."""
    found = _find_attention(model, across)
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} declares {missing}")
    _require_replaceable(model, found)
    _require_apart(model, found)
    return found


def _find_attention(model: PreTrainedModel, across: bool) -> dict[str, nn.Module]:
    crossing = _crossing(model)
    declared = crossing | set(_declared(model, "attentions"))
    return {
        path: module
        for path, module in model.named_modules()
        if _is_declared(path, module, declared) and _is_cross_attention(path, module, crossing) == across
    }


def _require_replaceable(model: PreTrainedModel, found: dict[str, nn.Module]) -> None:
    """Raise `UnsupportedModelError` unless all go through transformers' interface and choose no keys themselves."""
    family = type(model).__name__
    for path, module in found.items():
        if not _calls_interface(module) or not isinstance(getattr(module, "config", None), PreTrainedConfig):
            raise UnsupportedModelError(
                f"{family}: {path} ({type(module).__name__}) computes its attention itself and not through"
                f" transformers' attention interface{_position_bias_note(module)}, so it cannot be replaced"
            )
        if (kind := type(module).__name__) in IRREPLACEABLE:
            raise UnsupportedModelError(f"{family}: {path} ({kind}) {IRREPLACEABLE[kind]}, so it cannot be replaced")
        for part in OWN_CHOICE:
            if getattr(module, part, None) is not None:
                raise UnsupportedModelError(
                    f"{family}: {path} ({kind}) chooses its keys by a part of its own ({part}): it is sparse already"
                )
        own = "position_bias" in getattr(_code_of(module), "co_varnames", ())
        if own and getattr(module, "position_embeddings_type", "") not in UNBIASED:
            raise _adds_bias(family, path, module)
    tables = {path: module for path, module in model.named_modules() if BIAS_TABLE in module._parameters}
    adding = owners(model, tables)  # to the mask of their layers
    for owner in owners(model, found):
        for path, module in adding.get(owner, {}).items():
            raise _adds_bias(family, path, module)


def _code_of(module: nn.Module) -> Any:
    """Return the code of a module's forward, None where it is compiled, as in TorchScript."""
    return getattr(inspect.unwrap(getattr(type(module), "forward", None)), "__code__", None)  # type: ignore[arg-type]


def _calls_interface(module: nn.Module) -> bool:
    return INTERFACE in getattr(_code_of(module), "co_names", ())


def _adds_bias(family: str, path: str, module: nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{family}: {path} ({type(module).__name__}) adds a position bias to every score, which has no subquadratic"
        " form here; use a model with rotary or absolute positions"
    )


def _require_apart(model: PreTrainedModel, found: dict[str, nn.Module]) -> None:
    """Raise `UnsupportedModelError` where a list has one layer in two places: saved and loaded, it would be two."""
    for path, stack in model.named_modules():
        first: dict[nn.Module, int] = {}
        for place, layer in enumerate(stack if isinstance(stack, nn.ModuleList) else ()):
            before = first.setdefault(layer, place)
            if before != place and not {*layer.modules()}.isdisjoint(found.values()):
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {path}.{place} is {path}.{before} once more, one layer in two places,"
                    f" which no checkpoint says; put copy.deepcopy(model.{path}[{before}]) there before patch_model"
                )


def _declared(model: PreTrainedModel, output: str) -> Iterator[tuple[Any, str | None]]:
    """Yield (class, part of the path) of the modules that any part of the model names as the source of `output`."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            entries = (getattr(part, "_can_record_outputs", None) or {}).get(output, ())
            for entry in entries if isinstance(entries, (list, tuple)) else (entries,):
                kind = getattr(entry, "target_class", entry)
                if isinstance(kind, type):  # some name a class by its name, of a part that declares it itself
                    yield kind, getattr(entry, "layer_name", None)


def _crossing(model: PreTrainedModel) -> set[tuple[Any, str | None]]:
    """Return what the model names as cross-attention and, as it stands, nothing else."""
    own = {kind for kind, _ in _declared(model, "attentions")}
    return {(kind, name) for kind, name in _declared(model, "cross_attentions") if name or kind not in own}


def _is_declared(path: str, module: nn.Module, declared: set[tuple[type[nn.Module], str | None]]) -> bool:
    return any(isinstance(module, kind) and (name is None or name in path) for kind, name in declared)


def _is_cross_attention(path: str, module: nn.Module, crossing: set[tuple[type[nn.Module], str | None]]) -> bool:
    named = any(isinstance(module, kind) and (name is None or name in path) for kind, name in crossing)
    return named or bool(getattr(module, "is_cross_attention", False)) or bool(CROSSING.search(path))


def _position_bias_note(module: nn.Module) -> str:
    biased = any("bias" in name and isinstance(m, nn.Embedding) for name, m in module.named_modules())
    return " (it adds a learned position bias to every score)" if biased else ""


def owners(model: PreTrainedModel, modules: dict[str, nn.Module]) -> dict[PreTrainedModel, dict[str, nn.Module]]:
    """Return the innermost transformers models around the modules, which make their masks, with those of each."""
    parts = {path: part for path, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    owned: dict[PreTrainedModel, dict[str, nn.Module]] = {}
    for path, module in modules.items():
        owner = max((p for p in parts if p == "" or path.startswith(p + ".")), key=len)
        owned.setdefault(parts[owner], {})[path] = module
    return owned


def undeclared_attention(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return path -> module of the self-attention that a model does not declare, as that of some towers.

    It is what goes through transformers' interface, and neither attends to other tokens than its own nor pools them.
    """
    declared = {*_find_attention(model, across=False), *_find_attention(model, across=True)}
    return {
        path: module
        for path, module in model.named_modules()
        if path not in declared
        and _calls_interface(module)
        and not CROSSING.search(path)
        and not POOLING.search(type(module).__name__)
    }


def warn_of_undeclared(model: PreTrainedModel) -> None:
    """Say which attention modules keep softmax, as the model does not declare them; of each class the first."""
    first: dict[str, str] = {}
    for path, module in (left := undeclared_attention(model)).items():
        first.setdefault(type(module).__name__, path)
    if left:
        logger.warning(
            "%s does not declare %d of its attention modules (_can_record_outputs), which keep softmax: %s",
            type(model).__name__, len(left), ", ".join(f"{path} ({name})" for name, path in first.items()),
        )  # fmt: skip
