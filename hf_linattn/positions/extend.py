"""extend_positions: a model whose positions end at 512 takes longer inputs; its config, buffers and tokenizer agree.

Nothing here knows an architecture. The class of the model is made twice on the meta device, of its config as it is and
of the longer one, and what differs between the two is what has to change:

- An embedding with more rows is a position table. Where transformers' own initialisation computes its rows
  (sinusoids), the new ones are computed as well; otherwise they are learned, and `method` makes them of the old rows.
- A buffer of another shape or content (position ids, token types, causal masks, inverse frequencies) is what
  transformers' initialisation makes it.
- A number or a name kept on a module (`num_embeddings`, `rope_type`, `attention_scaling`) is that of the longer one.
  A number that does more than count positions, as that of DeBERTa's relative distances, is refused.

Rotary positions have no table: their config gets transformers' own rope parameters. What the methods make of rows and
rotations is in `methods.py`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import architecture
from ..blueprints import blueprint, buffers_of, grown_modules, initialised, is_made, plain_attributes, shapes
from ..config import given_as, require, require_count
from ..errors import OptionError, PatchError, UnsupportedModelError
from ..pinning import modules_with_mechanisms, nested_configs, own_config
from ..reading import one_line
from ..saved_config import REGISTERING
from .changes import Extension, ModuleChange
from .methods import KEEPING, OWN_LENGTH, ROPE_METHODS, TABLE_METHODS, UNSCALED
from .tables import position_configs, served_positions

logger = logging.getLogger(__name__)

EXTENSIONS = "_hf_linattn_positions"  # the attribute of a transformers model that holds what was done, in order
# the fields of configs that say how many positions there are; those of sound and images are of inputs of one size
FIELDS = (
    "max_position_embeddings", "max_target_positions", "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)  # fmt: skip

RELATIVE = "relative"  # in the names of numbers that distances are put into buckets by

UNTURNED = "no layer that sees the whole input turns by rope parameters; leave extend_positions out"

# what validators of configs and the formulas of rotations raise: of head_dim=None, of 2 turned dimensions, ...
UNMADE = (StrictDataclassError, ValueError, ArithmeticError, TypeError, RuntimeError)

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.inference_mode(False)  # longer tables are trained afterwards
def extend_positions(model: ModelT, max_length: int, method: str | None = None, *, tokenizer: Any = None) -> ModelT:
    """Let a model take inputs of up to `max_length` tokens, in place, and return it; after an error it is as it was.

    A learned position table, whose old rows are p_0 to p_{n-1}, gets m = `max_length` rows q_i:

        copy         q_i = p_{i mod n}: as before within n tokens, bit for bit (Longformer, Beltagy et al. 2020)
        mirror       q_i = p_0 ... p_{n-1}, p_{n-1} ... p_0, p_0 ...: the same, and without a step at multiples of n
        interpolate  q_i = p at the place i (n - 1) / (m - 1), between its two neighbours

    Rows that serve no position, as RoBERTa's padding row and OPT's first two, stay as they are. Rotary positions get
    transformers' rope parameters, with the factor m / n: `yarn` (Peng et al. 2023), `linear` (Chen et al. 2023), or
    `dynamic` (NTK), which turns inputs below n tokens as before, bit for bit, and others by the longest since the last
    of these, as transformers does. Under it `config.max_position_embeddings` stays n, from which transformers' formula
    starts. Sinusoids are computed.

    The config, the buffers and the tokenizer's `model_max_length` agree with the new length, and so does what
    `save_pretrained` writes: a checkpoint that loads without this library. Train it, or `calibrate` the converted
    model, on long inputs: the new rows were never trained there. Call it before an optimizer, PEFT or torch.compile
    take the model. `unpatch_model` of a model that is not patched undoes it, the last one first; the rows of a table
    are those of then, or, where it was interpolated, those of before. `patch_model(..., max_positions=...)` is a
    shortcut with the default method, undone with the patch.

    Args:
        model: a transformers model, a part of one, or a wrapper around one; not patched.
        max_length: tokens of the longest input.
        method: copy (default), mirror or interpolate for learned tables; yarn (default), linear or dynamic for rotary
            positions; None alone for sinusoids.
        tokenizer: its `model_max_length` is set, if given.

    Raises:
        OptionError: `max_length` is not above what the model has, or `method` is none of this model's.
        UnsupportedModelError: there is nothing to extend (relative biases, ALiBi), or it cannot be done, as it says.
        PatchError: the model is patched; extend it before.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_linattn import extend_positions
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        >>> model = extend_positions(BertModel(BertConfig(**sizes, max_position_embeddings=32)).eval(), 100)
        >>> model(torch.ones(1, 100, dtype=torch.long)).last_hidden_state.shape, model.config.max_position_embeddings
        (torch.Size([1, 100, 16]), 100)
    """
    root = architecture.root_model(model)
    if modules_with_mechanisms(root):
        remedy = "unpatch_model(model) first, extend it and patch it again, or patch with max_positions=..."
        raise PatchError(f"{type(root).__name__} is patched, for the positions that it has; call {remedy}")
    require_count("max_length", max_length)
    require("tokenizer", tokenizer, tokenizer is None or hasattr(tokenizer, "model_max_length"), "a tokenizer or None")
    longer, rotary = copy.deepcopy(root.config), _is_rotary(root.config)
    fields = _scale_rotation(root, longer, max_length, method) if rotary else _lengthen(root, longer, max_length)
    changes = _changes(root, _made_of(root, longer), max_length, method, rotary)
    importlib.import_module(REGISTERING)  # what saves a whole whose part this is
    own_config(model)
    extension = Extension.of(root, changes, fields, tokenizer)
    extension.apply(root, longer, max_length)
    vars(root).setdefault(EXTENSIONS, []).append(extension)
    logger.info("%s takes inputs of up to %d tokens", type(root).__name__, max_length)
    return model


def undo_last_extension(root: PreTrainedModel) -> bool:
    """Undo the last `extend_positions` of a model; return whether there was one."""
    extensions: list[Extension] = vars(root).get(EXTENSIONS, [])
    if not extensions:
        return False
    extensions.pop().undo(root)
    return True


# -- what the config says ---------------------------------------------------------------------------------------------


def _is_rotary(config: Any) -> bool:
    return not getattr(config, "alibi", False) and any(_rope_parameters(config, x) for x in position_configs(config))


def _rope_parameters(config: Any, part: Any) -> Any:
    """Return the rope parameters of one of its `position_configs`; None in those of a pair's encoder, which stay."""
    return getattr(part, "rope_parameters", None) if part is config or part is config.get_text_config() else None


@given_as(max_length="max_positions")
def reach_max_positions(model: ModelT, max_positions: int) -> ModelT:
    """Call `extend_positions` for an option of this name, which its errors then say."""
    return extend_positions(model, max_positions)


def _scale_rotation(root: PreTrainedModel, longer: Any, max_length: int, method: str | None) -> list[tuple[int, str]]:
    """Write rope parameters into each config that has some; return which fields of which were written."""
    method = _known(root, "whose positions are rotary", method, ROPE_METHODS)
    written = []
    for index, part in enumerate(position_configs(longer)):
        if not _rope_parameters(longer, part):
            continue
        length = getattr(part, "max_position_embeddings", None)
        if not isinstance(length, int):
            raise _nothing(root, f"its config says no max_position_embeddings ({length!r}), the length to start from")
        _require_longer(root, max_length, length)
        parameters = copy.deepcopy(part.rope_parameters)
        scaled = [parameters] if "rope_type" in parameters else [v for k, v in parameters.items() if k != UNSCALED]
        if not any(scaled):
            raise _nothing(root, UNTURNED)
        for rotation in filter(None, scaled):
            if (kind := rotation.get("rope_type", "default")) != "default":
                raise _nothing(root, f"its rope type is {kind!r} already; set config.rope_parameters yourself")
            rotation |= ROPE_METHODS[method](length, max_length / length)
        part.rope_parameters = parameters
        written.append((index, "rope_parameters"))
        if method not in OWN_LENGTH:
            part.max_position_embeddings = max_length
            written.append((index, "max_position_embeddings"))
    return written


def _lengthen(root: PreTrainedModel, longer: Any, max_length: int) -> list[tuple[int, str]]:
    """Write the new length into each field of a config by which something of the model grows; return which."""
    before = blueprint(root, copy.deepcopy(longer))
    lengths: dict[tuple[int, str], int] = {}
    for index, part in enumerate(position_configs(longer)):
        for name in (name for name in FIELDS if isinstance(getattr(part, name, None), int)):
            probe = copy.deepcopy(longer)
            setattr(position_configs(probe)[index], name, getattr(part, name) + 1)
            grown = grown_modules(before, blueprint(root, probe))
            if grown:
                tables = [before.get_submodule(path) for path, table in grown.items() if table]
                served = [end - first for first, end in map(served_positions, tables)]  # type: ignore[arg-type]
                lengths[index, name] = min([getattr(part, name), *served])
    if not lengths:
        raise _nothing(root, next(reason for reason, holds in REASONS.items() if holds(root)))
    _require_longer(root, max_length, min(lengths.values()))
    written = []
    for (index, name), length in lengths.items():
        if length < max_length:
            part = position_configs(longer)[index]
            setattr(part, name, getattr(part, name) + max_length - length)
            written.append((index, name))
    return written


def _require_longer(root: PreTrainedModel, max_length: int, length: int) -> None:
    if max_length <= length:
        raise OptionError(
            f"max_length must be above {length}, the positions that {type(root).__name__} has already, got"
            f" {max_length}"
        )


def _known(root: PreTrainedModel, kind: str, method: str | None, known: Iterable[str]) -> str:
    """Return the method, the first of those known where none is named."""
    names = list(known)
    if method is None and names:
        return names[0]
    if method not in names:
        expected = f"one of {', '.join(names)}" if names else "left out"
        raise OptionError(f"method must be {expected} for {type(root).__name__}, {kind}, got {method!r}")
    return method


def _nothing(root: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(root).__name__} has no positions that can be extended: {reason}")


def _has(part: str) -> Callable[[PreTrainedModel], bool]:
    """Return whether a model has a module, a method or a config field whose name has this part."""

    def has(root: PreTrainedModel) -> bool:
        classes = {type(module) for module in root.modules() if isinstance(module, PreTrainedModel)}
        names = [path.rsplit(".", 1)[-1] for path, _ in root.named_modules()]
        return any(part in name for name in (*names, *chain(*map(dir, classes)), *root.config.to_dict()))

    return has


# why nothing of a model grows, the first that holds
REASONS: dict[str, Callable[[PreTrainedModel], bool]] = {
    "ALiBi lowers scores by their distance, which any length has; leave extend_positions out": _has("alibi"),
    "its positions are a grid of image patches; give images of another size with interpolate_pos_encoding=True": (
        lambda root: "interpolate_pos_encoding" in inspect.signature(type(root).forward).parameters
    ),
    "its positions are a grid of patches, and no text has any; leave extend_positions out": _has("patch_size"),
    "its biases are of relative distances, which any length has; leave extend_positions out": _has("relative"),
    "no table of positions is as long as its config says; leave extend_positions out": lambda root: True,
}


# -- what the longer config makes of the modules ----------------------------------------------------------------------


def _made_of(root: PreTrainedModel, longer: Any) -> PreTrainedModel:
    """Make the model of the longer config without memory, if transformers will load what is saved with it."""
    try:
        for config in position_configs(longer):
            if hasattr(config, "validate"):  # as `save_pretrained` asks
                config.validate()
        return blueprint(root, longer)
    except UNMADE as error:
        said = f"transformers refuses the longer config ({one_line(error)}); give another method, if it has one"
        raise _nothing(root, said) from error


def _changes(
    root: PreTrainedModel, after: PreTrainedModel, max_length: int, method: str | None, rotary: bool
) -> list[ModuleChange]:
    """Return what has to change in each module for the model to be what the longer config makes."""
    before = blueprint(root, copy.deepcopy(root.config))
    added, configs = _added(before.config, after.config), list(nested_configs(root.config))
    changes, learned = [], False
    tables: dict[int, nn.Parameter] = {}  # of an old weight, which several modules may have, the new one
    for (path, old), new in zip(before.named_modules(), after.modules(), strict=True):
        kept = plain_attributes(old)
        attributes = {name: x for name, x in plain_attributes(new).items() if kept.get(name, old) != x}
        if not rotary:
            _require_counts(root, path, kept, attributes, added)
        grown = shapes(old) != shapes(new)
        if not attributes and not grown:
            continue
        module = _own_module(root, path)
        if rotary and hasattr(module, "config") and not any(module.config is one for one in configs):
            attributes["config"] = new.config  # its own, of some layers, which `dynamic` reads in every forward
        made, remade = initialised(before, path), initialised(after, path)
        change = ModuleChange(module, attributes, _new_buffers(root, path, module, made, remade))
        if grown and new._parameters:
            own, first, trains = _table(root, path, module, new, max_length)
            if computed := is_made(own, made["weight"]):
                weight = torch.cat([own, remade["weight"][len(own) :].to(own)])
            else:
                chosen = "copy" if rotary else _known(root, "whose positions are learned", method, TABLE_METHODS)
                learned = True
                weight = torch.cat([own[:first], TABLE_METHODS[chosen](own[first:], max_length)])
            change.weight = tables.setdefault(id(module.weight), nn.Parameter(weight, requires_grad=trains))
            change.kept = computed or chosen in KEEPING
        changes.append(change)
    if not changes:
        raise _nothing(root, UNTURNED)
    if method is not None and not learned and not rotary:
        _known(root, "whose positions are computed", method, ())
    return changes


def _added(before: Any, after: Any) -> set[int]:
    """Return by how many positions the fields of the longer config differ."""
    pairs = zip(position_configs(before), position_configs(after), strict=True)
    fields = [(getattr(old, name, None), getattr(new, name, None)) for old, new in pairs for name in FIELDS]
    return {new - old for old, new in fields if isinstance(old, int) and isinstance(new, int)}


def _require_counts(
    root: PreTrainedModel, path: str, kept: dict[str, Any], attributes: dict[str, Any], added: set[int]
) -> None:
    """Raise unless the numbers that a module keeps are counts of positions, and grow as these do."""
    for name, value in attributes.items():
        old = kept.get(name)
        if RELATIVE in name or old is None or value - old not in added:
            raise _nothing(
                root,
                f"{path}.{name} would be {value!r} in place of {old!r}, which changes what the old lengths get; where"
                f" its config has {name}, set it to {old!r} and load the model again",
            )


def _own_module(root: PreTrainedModel, path: str) -> nn.Module:
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise _nothing(root, f"{path} is not where its class puts it; extend it before PEFT takes it") from error


def _new_buffers(
    root: PreTrainedModel, path: str, module: nn.Module, made: dict[str, Tensor], remade: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the buffers of a module that the longer config changes."""
    new = {}
    for name, own in buffers_of(module).items():
        if name not in made or not is_made(own, made[name]):
            raise _nothing(root, f"the buffer {path}.{name} is not what its class makes it, and cannot be made longer")
        if made[name].shape != remade[name].shape or not torch.equal(made[name], remade[name]):
            new[name] = remade[name].to(own.device, own.dtype)
    return new


def _table(
    root: PreTrainedModel, path: str, module: nn.Module, new: nn.Module, max_length: int
) -> tuple[Tensor, int, bool]:
    """Return the rows of a position table that grows, the first that serves a position, and whether they train."""
    weight: Any = getattr(module, "weight", None)
    first = new.num_embeddings - max_length if isinstance(new, nn.Embedding) else -1
    if not isinstance(module, nn.Embedding) or not 0 <= first < len(weight) or len(new._parameters) != 1:
        raise _nothing(root, f"{path} ({type(new).__name__}) grows with them, and is no table of a row per position")
    if weight.device.type == "meta":
        raise _nothing(root, f"the weights of {path} are on the meta device; load them first")
    return weight.detach(), first, weight.requires_grad
