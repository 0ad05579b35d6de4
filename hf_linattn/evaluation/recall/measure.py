"""Recall by task, length and depth: shares with their intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...config import given_as, require, require_count
from ..perplexity import position_limit
from .answers import RecallAnswer, answer_prompts
from .needles import LETTERS
from .prompts import make_prompts
from .tasks import RECALL_TASKS

Z = 1.959963984540054  # of a normal distribution, between -Z and Z lie 95 %
DEPTH_BINS = 4


class RecallRow(TypedDict):
    """How many prompts of a task and length were answered, at all depths or in one bin of them.

    Attributes:
        task: its name.
        length: tokens of prompt and answer, at most.
        depth: [first, last) of the needle's depths, None for all of them.
        num_samples: prompts.
        found: mean share of the answers in the text that was written.
        found_interval: 95 % (Wilson), of as many answers as there are questions: prompts of one stand together.
        first: share of prompts whose right answer is the likeliest of all candidates.
        first_interval: as `found_interval`.
        chance: what `first` is for a model that has seen nothing: mean of 1 / candidates.
        mean_rank: of the right answer, 1 is the best.
        log_likelihood: of the right answer, mean in nats.
        letters: of multiple choice: how often each letter was the likeliest, else None.
    """

    task: str
    length: int
    depth: tuple[float, float] | None
    num_samples: int
    found: float
    found_interval: tuple[float, float]
    first: float
    first_interval: tuple[float, float]
    chance: float
    mean_rank: float
    log_likelihood: float
    letters: dict[str, int] | None


@given_as(length="lengths")
def recall(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str] = tuple(RECALL_TASKS),
    lengths: Sequence[int] = (1024, 2048),
    *,
    num_samples: int = 20,
    seed: int = 0,
    haystack: Sequence[str] | None = None,
    chat: bool = False,
    batch_size: int = 4,
    progress: bool | None = None,
) -> list[RecallRow]:
    """Return how much of what stands in long prompts a causal language model recalls.

    Each prompt is answered twice. In writing: greedily, and what counts is the share of the answers that the text
    contains, as in RULER (Hsieh et al. 2024, arXiv 2404.06654). And by likelihood: the rank of the right answer among
    wrong ones of the same form, first those that the prompt holds, as values of other keys, then others.

    Deviations from RULER: a model may write 16 tokens more than one and a half times the answer, not 128; texts come
    from `haystack`, words from the library's own list.

    Args:
        model: with a causal language-modelling head, patched or not.
        tokenizer: the model's own.
        tasks: names in `RECALL_TASKS`.
        lengths: tokens of prompt and answer, at most.
        num_samples: questions for each task and length; multiple choice has four prompts for each.
        seed: as in `make_prompts`.
        haystack: as in `make_prompts`.
        chat: as in `make_prompts`.
        batch_size: as in `answer_prompts`.
        progress: as in `answer_prompts`.

    Returns:
        For each task and length one row of all depths, then one for each quarter of the depths that has samples.

    Raises:
        OptionError: there are no tasks or lengths, or as for `make_prompts` and `answer_prompts`.
        DataError: as for `make_prompts` and `answer_prompts`.
        UnknownNameError: no task has that name.
        UnsupportedModelError: the model has no causal language-modelling head.

    Examples:
        >>> from hf_linattn.evaluation import recall
        >>> recall(model, tokenizer, ["single_noise"], [1024])[0]["found_interval"]  # doctest: +SKIP
    """
    require("tasks", tasks, len(tasks) > 0 and not isinstance(tasks, str), "a list of names, at least one")
    require("lengths", lengths, len(lengths) > 0, "a list of numbers of tokens, at least one")
    require_count("num_samples", num_samples)
    options: Any = {"seed": seed, "haystack": haystack, "chat": chat}
    prompts = [
        make_prompts(task, tokenizer, length, count=num_samples, positions=position_limit(model), **options)
        for task in tasks
        for length in lengths
    ]
    rows: list[RecallRow] = []
    for some in prompts:
        rows += recall_rows(answer_prompts(model, tokenizer, some, batch_size=batch_size, progress=progress))
    return rows


def recall_rows(answers: Sequence[RecallAnswer]) -> list[RecallRow]:
    """Return the rows of answers of one task and length: that of all, then one for each quarter of the depths."""
    return [_row(answers, None), *(_row([answers[i] for i in places], depth) for depth, places in by_depth(answers))]


def by_depth(answers: Sequence[RecallAnswer]) -> list[tuple[tuple[float, float], list[int]]]:
    """Return the quarters of the depths, each with the numbers of its answers; none where all are in one."""
    bins = [(i / DEPTH_BINS, (i + 1) / DEPTH_BINS) for i in range(DEPTH_BINS)]
    places = [[i for i, answer in enumerate(answers) if low <= answer["depth"] < high] for low, high in bins]
    return [(depth, own) for depth, own in zip(bins, places, strict=True) if own and len(own) < len(answers)]


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` samples (Wilson 1927).

    Of a mean of shares, as of several answers to a prompt, it is wider than need be.

    >>> low, high = wilson_interval(0.98, 100)
    >>> round(low, 3), round(high, 3)
    (0.93, 0.994)
    """
    scale = 1 + Z**2 / count
    middle = (share + Z**2 / (2 * count)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def _row(answers: Sequence[RecallAnswer], depth: tuple[float, float] | None) -> RecallRow:
    count = len(answers)
    questions = -(-count // RECALL_TASKS[answers[0]["task"]].rotations)
    found = _mean(answer["found"] for answer in answers)
    first = _mean(answer["rank"] == 1 for answer in answers)
    chosen = Counter(answer["letter"] for answer in answers)
    return {
        "task": answers[0]["task"],
        "length": answers[0]["length"],
        "depth": depth,
        "num_samples": count,
        "found": found,
        "found_interval": wilson_interval(found, questions),
        "first": first,
        "first_interval": wilson_interval(first, questions),
        "chance": _mean(1 / answer["candidates"] for answer in answers),
        "mean_rank": _mean(answer["rank"] for answer in answers),
        "log_likelihood": _mean(answer["log_likelihood"] for answer in answers),
        "letters": None if None in chosen else {letter: chosen[letter] for letter in LETTERS},
    }


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
