"""Conversations as text: written with a tokenizer's chat template, and where in it the answers stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import DatasetDict
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_linattn.errors import DataError
from hf_linattn.reading import one_line

ANSWERS = "answers"  # the column of their places
ASSISTANT = "assistant"


def render_conversations(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return splits whose `text` is a conversation as the tokenizer's chat template writes it.

    Args:
        splits: their column `text` holds a list of turns, each a mapping with `role` and `content`.

    Returns:
        columns `text`, and `answers`: the places [first character, one past the last] of the assistant's turns.

    Raises:
        DataError: the tokenizer has no chat template or is none of the fast ones, a conversation has no answer or is
            refused by the template, or the template writes earlier turns otherwise when there are later ones.
    """
    if not tokenizer.chat_template:
        raise DataError("completion_only=True: the tokenizer has no chat_template; set one, or leave it out")
    if not tokenizer.is_fast:
        raise DataError(
            f"completion_only=True: {type(tokenizer).__name__} does not say where its tokens stand in the text; give a"
            " tokenizer_name with a tokenizer.json, or leave it out"
        )
    return splits.map(
        lambda row: conversation(row["text"], tokenizer),
        load_from_cache_file=False,
        features=None,
        remove_columns=["text"],
    )


def conversation(turns: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the `text` of a conversation and the places of its `answers`; see `render_conversations`."""
    answers = [i for i, turn in enumerate(turns) if turn.get("role") == ASSISTANT]
    if not answers or not answers[0]:
        raise DataError(
            f"a conversation with the roles {', '.join(str(turn.get('role')) for turn in turns)} has no answer of the"
            f" {ASSISTANT!r} to somebody else; leave such rows out, or leave completion_only out"
        )

    def written(count: int, asks: bool = False) -> str:
        given = [dict(turn) for turn in turns[:count]]
        try:
            return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=asks))
        except TemplateError as error:
            raise DataError(
                f"completion_only=True: the chat template refuses a conversation ({one_line(error)}); leave such rows"
                " out"
            ) from error

    text, places = written(len(turns)), []
    for index in answers:
        before, after = written(index, asks=True), written(index + 1)
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(
                "completion_only=True: the chat template writes earlier turns otherwise once there are later ones, so"
                " answers cannot be told apart; give conversations of one answer, or another chat_template"
            )
        places.append([len(before), len(after)])
    return {"text": text, ANSWERS: places}
