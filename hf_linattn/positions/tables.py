"""Positions: which configs say how many, and what learned tables serve, so that a longer input is named at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from ..architecture import root_model
from ..errors import UnsupportedModeError
from ..ops.common.tracing import is_known

POSITION_TABLES = ("wpe", "position_embeddings", "position_embedding", "embed_positions")
PATCHES = {"patch_embedding", "patch_embeddings", "patch_embed"}  # what makes patches of pictures


def position_tables(model: PreTrainedModel, of_parts: bool = False) -> dict[str, tuple[int, int]]:
    """Return path -> the first position that a table serves and the one after the last, of the model's own tables.

    Those inside a transformers model that is a part of it, as an encoder is, serve that part's inputs: they are left
    out unless `of_parts`. Those for the patches of a picture are always left out, as no length of a text meets them.
    """
    parts = [path for path, part in model.named_modules() if path and isinstance(part, PreTrainedModel)]
    parts = [] if of_parts else parts
    others = tuple(f"{path}." for path in parts)
    return {
        path: served_positions(table)
        for path, table in model.named_modules()
        if path.rsplit(".", 1)[-1] in POSITION_TABLES
        and isinstance(table, nn.Embedding)
        and not path.startswith(others)
        and not _is_of_patches(model, path)
    }


def first_position(model: nn.Module) -> int:
    """Return the position id of a text's first token: 0, but padding_idx + 1 in RoBERTa and its kind."""
    tables = position_tables(root_model(model), of_parts=True)
    return max((first for first, _ in tables.values()), default=0)


def _is_of_patches(model: nn.Module, path: str) -> bool:
    """Whether the module nearest to a table that embeds patches or tokens embeds patches."""
    names = path.split(".")
    while names:
        names.pop()
        beside = dict(model.get_submodule(".".join(names)).named_children())
        if PATCHES & beside.keys():
            return True
        if any(isinstance(x, nn.Embedding) and name not in POSITION_TABLES for name, x in beside.items()):
            return False
    return False


def known_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has, by its tables and its config; None if neither says it."""
    tables = [end - first for first, end in position_tables(model, of_parts=True).values()]
    said = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min([*tables, *([said] if isinstance(said, int) else [])], default=None)


def position_configs(config: Any) -> list[Any]:
    """Return the config of a model and, where it has them, those of its text model and of an encoder of tokens."""
    found = [config, config.get_text_config()]
    encoder = getattr(config, "encoder", None)  # of a pair, whose text model is its decoder
    if isinstance(encoder, PreTrainedConfig) and hasattr(encoder.get_text_config(), "max_position_embeddings"):
        found.append(encoder.get_text_config())
    return list({id(one): one for one in found}.values())


def served_positions(table: nn.Embedding) -> tuple[int, int]:
    """Return the first position that a table serves and the one after the last.

    RoBERTa's positions start behind its padding index; OPT's at 0, and its table adds an offset itself.
    """
    if (offset := getattr(table, "offset", None)) is not None:
        return 0, table.num_embeddings - offset
    return 0 if table.padding_idx is None else table.padding_idx + 1, table.num_embeddings


def check_length(
    model: PreTrainedModel,
    tables: dict[str, tuple[int, int]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cache: Cache | None,
) -> None:
    """Name the position table when an input does not fit in it: the look-up would only say 'index out of range'."""
    found = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *filter(_are_tokens, args))
    inputs = next((x for x in found if x is not None), None)
    positions = kwargs.get("position_ids")
    if not isinstance(inputs, Tensor) or not is_known(inputs if positions is None else positions):
        return
    for path, (first, end) in tables.items():
        if positions is not None:
            length = int(positions.max()) + 1 - first
        else:
            length = inputs.shape[1] + (0 if cache is None else int(cache.get_seq_length()))
            if first and length > end - first and _are_tokens(inputs):  # such a model counts no pads
                length -= inputs.shape[1] - int((inputs != first - 1).sum(1).max())
        if length > end - first:
            raise UnsupportedModeError(
                f"the input reaches position {length}, but {type(model).__name__}.{path} holds {end - first}; shorten"
                f" the input, or call extend_positions(model, {length}) before the model is patched (attention is not"
                " the limit)"
            )


def _are_tokens(given: Any) -> bool:
    """Whether an argument without a name can be token ids [B, N]: not pixels, nor the features of sound."""
    return isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point()
