"""Scores of several models on the same items: means with intervals, and differences item by item."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ..config import require, require_finite
from .recall.measure import Z, wilson_interval


@dataclass(frozen=True)
class Score:
    """A mean over items with its 95 % interval; `low` and `high` are None for a single item."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Difference:
    """One model less another on the same items.

    Attributes:
        of, to: the two models. value: mean of the differences item by item, below zero where `of` has less.
        low, high: its 95 % interval, from the spread of these differences; None for a single item.
        wins, ties, losses: share of the items on which `of` is better, equal, worse.
        win_and_tie: share of the items on which `of` is no worse.
    """

    of: str
    to: str
    value: float
    low: float | None
    high: float | None
    wins: float
    ties: float
    losses: float
    win_and_tie: float


def mean_score(values: Sequence[float], logarithmic: bool = False) -> Score:
    """Return mean and interval: mean +- 1.96 s / sqrt(n), the normal approximation.

    Where all values are 0 or 1 the interval is Wilson's (1927), which keeps its width when all are the same.

    logarithmic: values are logarithms, as losses are, and the score is exp of their mean: a perplexity.

    >>> mean_score([2.0, 4.0])
    Score(value=3.0, low=1.040..., high=4.959...)
    """
    require("values", len(values), len(values) > 0, "at least one item")
    require_finite("values", values)
    share = not logarithmic and {*values} <= {0.0, 1.0} and len(values) > 1
    value, low, high = _interval(values)
    if share:
        return Score(value, *wilson_interval(value, len(values)))
    if not logarithmic:
        return Score(value, low, high)
    return Score(math.exp(value), None if low is None else math.exp(low), None if high is None else math.exp(high))


def paired_difference(
    of: str, to: str, values: Sequence[float], others: Sequence[float], *, higher_is_better: bool = True,
    tolerance: float = 0.0,
) -> Difference:
    """Return the difference of two models on the same items, in the same order.

    tolerance: up to this difference an item is a tie.

    >>> paired_difference("converted", "original", [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]).win_and_tie
    0.6666666666666666
    """
    same = len(values) == len(others)
    require("values", len(values), same and len(values) > 0, f"as many items as the other model has, {len(others)}")
    differences = [a - b for a, b in zip(values, others, strict=True)]
    gains = differences if higher_is_better else [-x for x in differences]
    count = len(gains)
    wins, losses = (sum(sign * gain > tolerance for gain in gains) for sign in (1, -1))
    shares = wins / count, (count - wins - losses) / count, losses / count, (count - losses) / count
    return Difference(of, to, *_interval(differences), *shares)


def _interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    mean = fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = Z * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
