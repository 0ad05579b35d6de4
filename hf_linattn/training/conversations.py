"""Conversations as text: written with a tokenizer's chat template, and where in it the answers stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset, DatasetDict
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_linattn.chat_templates import render_chat
from hf_linattn.errors import DataError
from hf_linattn.reading import one_line

ANSWERS = "answers"  # the column of their places
ASSISTANT = "assistant"
CONTENT = "content"
SHOWN = 60  # characters of a conversation in a message


def render_conversations(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return splits whose `text` is a conversation as the tokenizer's chat template writes it, see `render_chat`.

    Args:
        splits: their column `text` holds a list of turns, each a mapping with `role` and `content`, or a mapping of
            lists, as a `Sequence` of such turns is read. A content may be a list of parts, all of them texts.

    Returns:
        columns `text`, and `answers`: the places [first character, one past the last] of the assistant's turns, but
            of a greeting: a first turn answers nobody.

    Raises:
        DataError: the tokenizer has no chat template or is none of the fast ones, a conversation has no answer, has
            a content that is no text or is refused by the template, the template writes earlier turns otherwise
            when there are later ones, or asks for an answer with what no answer begins with.
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


def answers_of(texts: Dataset) -> Any:
    """Return the places of the answers in each of some texts; None where these are no conversations."""
    return texts[ANSWERS] if ANSWERS in texts.column_names else None


def turns_of(given: Any) -> list[dict[str, Any]]:
    """Return the turns of a conversation, without what Arrow fills in: keys that other turns have alone, as None.

    Raises:
        DataError: these are no turns, or their content is no text.

    >>> turns_of({"role": ["user", "assistant"], "content": ["one?", "a number"], "tool_calls": [None, None]})
    [{'role': 'user', 'content': 'one?'}, {'role': 'assistant', 'content': 'a number'}]
    """
    turns = _rows(given)
    if isinstance(turns, Mapping) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"a conversation is {str(given)[:SHOWN]!r}; give a list of turns with `role` and `content`")
    turns = [{name: value for name, value in turn.items() if value is not None} for turn in turns]
    return [{**turn, CONTENT: _text_of(turn[CONTENT])} if CONTENT in turn else turn for turn in turns]


def _rows(given: Any) -> Any:
    """Return the rows of columns, as a `Sequence` of mappings is read; all else as it is."""
    columns = isinstance(given, Mapping) and all(isinstance(values, list) for values in given.values())
    return [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)] if columns else given


def _text_of(content: Any) -> str:
    """Return the content of a turn as one text; it may come in parts."""
    if isinstance(content, str):
        return content
    parts = _rows(content)
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and _is_text(part) for part in parts):
        raise DataError(
            f"a conversation has the content {str(content)[:SHOWN]!r}; give a text, or a list of parts like"
            " {'type': 'text', 'text': ...}"
        )
    return "".join(part["text"] for part in parts)


def _is_text(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a content is a text; others are images, for example."""
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def conversation(given: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the `text` of a conversation and the places of its `answers`; see `render_conversations`."""
    turns = turns_of(given)
    answers = [i for i, turn in enumerate(turns) if i and turn.get("role") == ASSISTANT]
    if not answers:
        raise DataError(
            f"a conversation with the roles {', '.join(str(turn.get('role')) for turn in turns)} has no answer of the"
            f" {ASSISTANT!r} to somebody else; leave such rows out, or leave completion_only out"
        )

    def written(count: int, asks: bool = False) -> str:
        try:
            return render_chat(tokenizer, turns[:count], asks)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"completion_only=True: the chat template refuses a conversation ({one_line(error)}); leave such rows"
                " out"
            ) from error

    text, places = written(len(turns)), []
    for index in answers:
        before, after = written(index, asks=True), written(index + 1)
        if not text.startswith(after):
            raise DataError(
                "completion_only=True: the chat template writes earlier turns otherwise once there are later ones, so"
                " answers cannot be told apart; give conversations of one answer, or another chat_template"
            )
        if not after.startswith(before):
            opening = before.removeprefix(written(index))
            raise DataError(
                f"completion_only=True: the chat template asks for an answer with {opening[-SHOWN:]!r}, and writes one"
                " that does not begin so; give answers that do, or a chat_template that asks without it"
            )
        places.append([len(before), len(after)])
    return {"text": text, ANSWERS: places}
