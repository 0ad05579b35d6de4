"""How `hf-linattn convert` comes to a plan: one that is named, one from a file, or one that is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import json_object, require
from ..errors import DataError, OptionError
from ..plan import name_or_plan
from ..reading import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .. import ChosenPlan

PLAN_FILE, PICTURE_FILE = "plan.json", "plan.png"
TEXT_LENGTH, TEXT_ROWS = 1024, 8  # of the texts that divergence is measured on


def read_keep(text: str) -> float | int:
    """Return a share or a number.

    >>> read_keep("0.1"), read_keep("9")
    (0.1, 9)
    """
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError as error:
        raise OptionError(f"keep must be a share like 0.1 or a number like 9, got {text!r}") from error


def choose(
    model: PreTrainedModel, name: str, keep: str, *, mechanism: str | None, options: str, texts: Sequence[Path],
    **search: Any,
) -> ChosenPlan:  # fmt: skip
    """Choose a plan for a model that was loaded from `name`; `mechanism` with `options` is what replaces its heads."""
    from .. import choose_plan

    wanted = read_keep(keep)
    replace = name_or_plan("mechanism", mechanism or "streaming")
    require("mechanism", mechanism, isinstance(replace, str), "the name of one mechanism where keep chooses the plan")
    tokenizer = read_tokenizer("model", name)
    batches = text_batches(tokenizer, texts, model) if texts else None
    return choose_plan(
        model, tokenizer, wanted, replace={replace: json_object("options", options)}, batches=batches, **search
    )


def text_batches(tokenizer: Any, texts: Sequence[Path], model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return the first tokens of each text as rows [1, N]."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", TEXT_LENGTH)
    batches = []
    for file in texts[:TEXT_ROWS]:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"text: {str(file)!r} cannot be read as text: {error}") from error
        options = {"truncation": True, "max_length": min(TEXT_LENGTH, limit), "return_tensors": "pt"}
        batches.append(dict(tokenizer(text, return_token_type_ids=False, **options)))
    return batches


def save_beside(plan: ChosenPlan, folder: Path) -> dict[str, Any]:
    """Write a plan and its picture into a folder; return what is said of them."""
    from ..report import save_plan_picture

    record = plan.record
    return {
        "plan": str(plan.save(folder / PLAN_FILE)), "picture": str(save_plan_picture(plan, folder / PICTURE_FILE)),
        "kept": record.kept, "signal": record.signal, "reason": record.reason, "seconds": record.seconds,
    }  # fmt: skip


def in_words(plan: ChosenPlan) -> str:
    """Return which heads stay exact, in one line."""
    record = plan.record
    places = " ".join(f"{layer}.{head}" for layer, head in record.kept)
    return (
        f"{record.num_kept} of {sum(record.heads)} key/value heads stay exact (layer.head): {places}; chosen by"
        f" {record.signal} ({record.search}) in {record.seconds:.0f} s"
    )
