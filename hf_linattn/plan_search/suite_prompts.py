"""The prompts that a plan is chosen by: those of the recall suite, or one's own."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..architecture import root_model
from ..config import given_as, require
from ..errors import DataError, OptionError
from ..positions.tables import known_positions
from .gates import Gates
from .options import SearchOptions
from .recall_signal import is_known

SHORTEST, LONGEST = 256, 2048  # tokens of a prompt by default
TIMES = (1, 2, 4)  # as many prompts as are asked for, of which those count whose needles lie farthest back


def prompts_for(gates: Gates, tokenizer: PreTrainedTokenizerBase | None, options: SearchOptions) -> list[Any]:
    """Return the prompts that are longer than the window of what replaces heads, each checked.

    Raises:
        OptionError: they are longer than the model's positions.
        DataError: there is no tokenizer, or it cannot write an answer; no prompt is longer than the window.
    """
    root, given = root_model(gates.model), options.prompts
    limit, name = known_positions(root), "lengths" if given is None else "prompts"
    longest = max(options.lengths or (0,)) if given is None else 0
    if limit is not None and longest > limit:  # said before minutes go into writing them
        raise OptionError(
            f"lengths: prompts of {longest} tokens are asked for, and {type(root).__name__} has {limit} positions;"
            " give shorter lengths"
        )
    prompts = list(given) if given is not None else _suite(tokenizer, options, limit, gates.window)
    for prompt in prompts:
        length = len(prompt.prompt_ids) + len(prompt.answer_ids)
        if limit is not None and length > limit:
            raise OptionError(
                f"{name}: a prompt of {prompt.task!r} has {length} tokens with its answer, and {type(root).__name__}"
                f" has {limit} positions; give shorter {name}"
            )
        unknown = getattr(tokenizer, "unk_token_id", None)
        if not prompt.answer_ids or (unknown is not None and unknown in prompt.answer_ids):
            raise DataError(
                f"tokenizer: {type(tokenizer).__name__} has no tokens for the answer of a prompt of {prompt.task!r};"
                " give a tokenizer that has, or prompts=... of your own"
            )
    read = [len(prompt.prompt_ids) + len(prompt.answer_ids) - 1 for prompt in prompts]
    return gates.beyond_window(prompts, read, f"{name}: the longest prompt", name)


def _suite(
    tokenizer: PreTrainedTokenizerBase | None, options: SearchOptions, limit: int | None, window: int
) -> list[Any]:
    from ..evaluation.recall import RECALL_TASKS

    if tokenizer is None:
        raise DataError("tokenizer must be the model's, got None; the recall prompts are text")
    lengths = options.lengths or _lengths(limit, window)[:1]
    tasks = list(RECALL_TASKS) if options.tasks is None else options.tasks
    found: list[Any] = []
    refused: OptionError | None = None
    for length, task in product(lengths, tasks):
        try:
            found += _far_prompts(task, tokenizer, length, options, window)
        except OptionError as error:  # prompts of this kind have more tokens; where none was named, the others do
            if options.tasks is not None:
                raise
            refused = error
    if refused is not None and not found:
        raise refused
    return found


@given_as(length="lengths")
def _far_prompts(
    task: str, tokenizer: PreTrainedTokenizerBase, length: int, options: SearchOptions, window: int
) -> list[Any]:
    """Return prompts whose needles lie further back than the window, or as far as any: a window finds all others.

    Depths are evenly spread, so more prompts are written where too few needles lie early enough.
    """
    from ..evaluation.recall import make_prompts

    how: dict[str, Any] = {"seed": options.seed, "haystack": options.haystack, "chat": options.chat}
    tried: list[list[Any]] = []
    for times in TIMES:
        written = make_prompts(task, tokenizer, length, count=times * options.num_prompts, **how)
        tried.append(written[: len(written) // times])  # the first; multiple choice has several for one question
        if _least_distance(tried[-1]) > window:
            return tried[-1]
    return max(tried, key=_least_distance)


def _least_distance(prompts: list[Any]) -> int:
    return min(prompt.distance for prompt in prompts)


def with_lengths(
    gates: Gates, tokenizer: PreTrainedTokenizerBase | None, options: SearchOptions
) -> list[SearchOptions]:
    """Return the options to try in turn: as they are, or with one length each where prompts are written of any."""
    if tokenizer is None or options.lengths is not None or options.prompts is not None:
        return [options]
    lengths = _lengths(known_positions(root_model(gates.model)), gates.window)
    return [dataclasses.replace(options, lengths=(length,)) for length in lengths]


def _lengths(limit: int | None, window: int) -> list[int]:
    """Return the lengths of 256, 512, ... up to 2,048, or to twice the window, that are beyond it, the longest first.

    None is longer than a model has positions for. One alone chooses: with shorter prompts beside the longest, the
    choice is worse, as their needles lie just behind the window, and other heads find them. A model that was trained
    on shorter rows than it has positions for may answer the shorter ones alone.

    >>> _lengths(1024, 256), _lengths(None, 1024), _lengths(None, 4096), _lengths(300, 400)
    ([1024, 512], [2048], [8192], [256])

    Raises:
        OptionError: the model has too few positions.
    """
    length = SHORTEST
    while length < max(LONGEST, 2 * window):
        length *= 2
    while limit is not None and length > limit:
        length //= 2
    require("lengths", None, length >= SHORTEST, f"given for a model of {limit} positions")
    lengths = [length]
    while lengths[-1] // 2 >= max(SHORTEST, window + 1):
        lengths.append(lengths[-1] // 2)
    return lengths


def in_own_words(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[Any], progress: bool | None
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
