"""Rows of tokens that only a model which looks far back can predict: what they state once, they ask for again.

A row states items one after another (see `items`) and asks for each of them
once, later, in random order; between them may stand text or noise. What is asked for lies anywhere from a few tokens
to almost the whole row behind, and a row of 1,024 tokens asks up to 200 times, so that a model finds out early in its
training that it has to look. Keys, fillers and statements are random, thus their labels are -100: a row trains its
answers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from hf_linattn.errors import OptionError
from hf_linattn.training.data import IGNORED_LABEL
from hf_linattn.training.pretraining.items import (
    Item,
    Maker,
    Material,
    copies,
    needles,
    pairs,
    passages,
    variables,
)

SHORTEST = 32
EARLY, LATE = 0.2, 0.9  # how likely a row asks in its first part and behind it, where it has anything to ask for
FIRST_PART = (0.1, 0.7)  # how long that is, of the row
NOISY = 0.4  # of the rows with fillers, the share where they are noise


class Query(NamedTuple):
    """An answer, `input_ids[start:stop]`; the same tokens stand at `source` too, before it."""

    start: int
    stop: int
    source: int


class RecallRow(NamedTuple):
    """Tokens and labels, int64 [N], and where the answers are."""

    input_ids: np.ndarray
    labels: np.ndarray
    queries: list[Query]


class Kind(NamedTuple):
    """How a row's items are made, its share of the rows, and how many of these have fillers between the items."""

    maker: Callable[[Material, int, np.random.Generator], Maker]
    share: float
    filled: float


# a row of pairs asks ten times as often as one of needles, so that these need more rows; pairs without marks stand
# closest to each other, and a model learns them last
KINDS = {
    "pairs": Kind(pairs, 0.27, 0.3),
    "bare_pairs": Kind(partial(pairs, bare=1.0), 0.15, 0.3),
    "copies": Kind(copies, 0.05, 0.3),
    "passages": Kind(passages, 0.05, 0.5),
    "needles": Kind(needles, 0.43, 0.6),
    "variables": Kind(variables, 0.05, 0.2),
}


def recall_row(material: Material, length: int, rng: np.random.Generator, kind: str | None = None) -> RecallRow:
    """Return one row of `length` tokens.

    Args:
        kind: a name in `KINDS`; None draws one by the shares.

    Raises:
        OptionError: `length` is below 32. DataError: the material's text is shorter than what a row takes of it.
    """
    if length < SHORTEST:
        raise OptionError(f"length must be at least {SHORTEST} for rows of recall, got {length}")
    if kind is None:
        kind = str(rng.choice(list(KINDS), p=[each.share for each in KINDS.values()]))
    make, filler = KINDS[kind].maker(material, length, rng), _filler(material, length, rng, KINDS[kind].filled)
    first_part = rng.uniform(*FIRST_PART) * length
    tokens: list[int] = []
    queries: list[Query] = []
    items: list[Item] = []
    sources: list[int] = []  # of the items: where the answer stands
    pending: list[int] = []  # items that were not asked for
    while len(tokens) < length:
        tokens += filler()
        if pending and rng.random() < (LATE if len(tokens) > first_part else EARLY):
            number = pending.pop(int(rng.integers(len(pending))))
            item = items[number]
            tokens += item.question
            answer = items[number if item.owner is None else item.owner].statement[item.answer]
            queries.append(Query(len(tokens), len(tokens) + len(answer), sources[number]))
            tokens += [*answer, *item.end]
        else:
            item = make(items)
            sources.append(len(tokens) + item.answer.start if item.owner is None else sources[item.owner])
            pending.append(len(items))
            items.append(item)
            tokens += item.statement
    return _cut(tokens, queries, length)


def _filler(material: Material, length: int, rng: np.random.Generator, share: float) -> Callable[[], list[int]]:
    """Return what writes the fillers of one row: none, or text or noise of a length that varies around a mean."""
    if rng.random() >= share:
        return list
    mean = np.exp(rng.uniform(0, np.log(length / 4)))
    span = material.noise_span if rng.random() < NOISY else material.span
    return lambda: span(rng, min(int(rng.exponential(mean)), length))


def _cut(tokens: list[int], queries: list[Query], length: int) -> RecallRow:
    """Return the row, without an answer that its end would cut."""
    whole = [query for query in queries if query.stop <= length]
    input_ids = np.array(tokens[:length], dtype=np.int64)
    labels = np.full_like(input_ids, IGNORED_LABEL)
    for query in whole:
        labels[query.start : query.stop] = input_ids[query.start : query.stop]
    return RecallRow(input_ids, labels, whole)
