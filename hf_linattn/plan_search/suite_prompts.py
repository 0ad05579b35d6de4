"""The prompts that a plan is chosen by: those of the recall suite, or one's own."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import require
from ..errors import DataError, OptionError
from ..position_tables import position_tables
from .options import SearchOptions
from .recall_signal import is_known

LENGTHS = (256, 512, 1024, 2048)  # tokens of a prompt; the two longest that a model has positions for


def prompts_for(root: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, options: SearchOptions) -> list[Any]:
    """Return the prompts, each checked.

    Raises:
        OptionError: they are longer than the model's positions.
        DataError: there is no tokenizer, or it cannot write an answer.
    """
    limit = _positions(root)
    prompts = list(options.prompts) if options.prompts is not None else _suite(tokenizer, options, limit)
    for prompt in prompts:
        length = len(prompt.prompt_ids) + len(prompt.answer_ids)
        if limit is not None and length > limit:
            raise OptionError(
                f"lengths: a prompt of {prompt.task!r} has {length} tokens with its answer, and {type(root).__name__}"
                f" has {limit} positions; give shorter lengths"
            )
        unknown = getattr(tokenizer, "unk_token_id", None)
        if not prompt.answer_ids or (unknown is not None and unknown in prompt.answer_ids):
            raise DataError(
                f"tokenizer: {type(tokenizer).__name__} has no tokens for the answer of a prompt of {prompt.task!r};"
                " give a tokenizer that has, or prompts=... of your own"
            )
    return prompts


def _suite(tokenizer: PreTrainedTokenizerBase | None, options: SearchOptions, limit: int | None) -> list[Any]:
    from ..evaluation.recall import RECALL_TASKS, make_prompts

    if tokenizer is None:
        raise DataError("tokenizer must be the model's, got None; the recall prompts are text")
    lengths = options.lengths
    if lengths is None:
        lengths = [length for length in LENGTHS if limit is None or length <= limit][-2:]
        require("lengths", lengths, bool(lengths), f"given for a model of {limit} positions")
    how = {"count": options.num_prompts, "seed": options.seed, "haystack": options.haystack, "chat": options.chat}
    tasks = list(RECALL_TASKS) if options.tasks is None else options.tasks
    return [p for length in lengths for task in tasks for p in make_prompts(task, tokenizer, length, **how)]


def in_own_words(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[Any], progress: bool
) -> list[Any]:
    """Return the prompts whose answers a model knows, with these as it writes them itself.

    Where a model puts a colon first, the probability of an answer without one would speak of the colon.
    """
    from ..evaluation.recall import own_answers

    answers = own_answers(model, tokenizer, prompts, progress=progress)
    return [
        dataclasses.replace(prompt, answer_ids=own.ids)
        for prompt, own in zip(prompts, answers, strict=True)
        if own is not None and is_known(own.log_likelihood, own.ids)
    ]


def _positions(root: PreTrainedModel) -> int | None:
    """Return how many positions a model has, by its tables and its config; None if neither says it."""
    tables = [end - first for first, end in position_tables(root).values()]
    said = getattr(root.config.get_text_config(), "max_position_embeddings", None)
    return min([*tables, *([said] if isinstance(said, int) else [])], default=None)
