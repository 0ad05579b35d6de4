"""Scores of several models on the same items: means with intervals, and differences item by item."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..config import require, require_finite
from .recall.measure import Z, wilson_interval

# Student's quantile for 95 %: of one to four degrees of freedom; of more, the terms of Cornish and Fisher's expansion
# about Z by powers of 1 / degrees (Abramowitz and Stegun 1964, 26.7.5)
FEW_DEGREES = (12.7062047, 4.3026527, 3.1824463, 2.7764451)
TERMS = (2.3722712, 2.8224986, 2.5558497, 1.5895340)


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
        low, high: its 95 % interval, from the spread of these differences; None for a single item. Where all values
            are 0 or 1 it is Newcombe's (1998, Statistics in Medicine 17:2635-2650, method 10), which keeps its width
            when the two agree on all items.
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


def mean_score(values: Sequence[float], logarithmic: bool = False, groups: Sequence[Hashable] = ()) -> Score:
    """Return mean and interval, that of `half_width`.

    Where all values are 0 or 1 the interval is Wilson's (1927), which keeps its width when all are the same.

    Args:
        logarithmic: values are logarithms, as losses are, and the score is exp of their mean: a perplexity.
        groups: as for `half_width`, of values that are no answers.

    >>> mean_score([2.0, 4.0])
    Score(value=3.0, low=-9.706..., high=15.706...)
    """
    require("values", len(values), len(values) > 0, "at least one item")
    require_finite("values", values)
    value, low, high = _interval(values, groups)
    if not logarithmic and _are_answers(values):
        return Score(value, *wilson_interval(value, len(values)))
    if not logarithmic:
        return Score(value, low, high)
    return Score(math.exp(value), None if low is None else math.exp(low), None if high is None else math.exp(high))


def paired_difference(
    of: str, to: str, values: Sequence[float], others: Sequence[float], *, higher_is_better: bool = True,
    tolerance: float = 0.0, groups: Sequence[Hashable] = (),
) -> Difference:
    """Return the difference of two models on the same items, in the same order.

    Args:
        tolerance: up to this difference an item is a tie.
        groups: as for `half_width`, of values that are no answers.

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
    answers = _are_answers(values) and _are_answers(others)
    return Difference(of, to, *(_newcombe(values, others) if answers else _interval(differences, groups)), *shares)


def half_width(values: Sequence[float], groups: Sequence[Hashable] = ()) -> float:
    """Return half of the 95 % interval of the mean of two or more values: t s, t Student's of G - 1 degrees.

    Groups of values are independent, those of one group need not be (Liang and Zeger 1986, Biometrika 73:13-22):
    s^2 = G / (G - 1) sum_g (sum of the values of g, each less the mean)^2 / n^2, G groups, n values. Where each value
    is a group, s is the standard error.

    Args:
        groups: the group of each value, as the document of a window; of one group, or without, each is one of its own.

    >>> half_width([2.0, 4.0]), half_width([2.0, 2.0, 4.0, 4.0], "aabb")
    (12.706..., 12.706...)
    """
    mean, sums = fmean(values), defaultdict[Hashable, float](float)
    own = groups if len({*groups}) > 1 else range(len(values))
    for value, group in zip(values, own, strict=True):
        sums[group] += value - mean
    degrees = len(sums) - 1
    error = math.sqrt(len(sums) / degrees * math.fsum(x**2 for x in sums.values())) / len(values)
    expansion = Z + sum(term / degrees**power for power, term in enumerate(TERMS, 1))
    quantile = FEW_DEGREES[degrees - 1] if degrees <= len(FEW_DEGREES) else expansion
    return quantile * error


def _interval(values: Sequence[float], groups: Sequence[Hashable]) -> tuple[float, float | None, float | None]:
    mean = fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = half_width(values, groups)
    return mean, mean - half, mean + half


def _are_answers(values: Sequence[float]) -> bool:
    """Return whether two or more values are right (1) and wrong (0) answers."""
    return {*values} <= {0.0, 1.0} and len(values) > 1


def _newcombe(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of two shares of the same items, with its interval."""
    count, one, other = len(values), fmean(values), fmean(others)
    both = math.fsum(a * b for a, b in zip(values, others, strict=True))
    agreement = count * (both - count * one * other)  # of the table of right and wrong: a d - b c
    spread = count**2 * math.sqrt(one * (1 - one) * other * (1 - other))
    phi = (max(agreement - count / 2, 0.0) if agreement > 0 else agreement) / spread if spread else 0.0
    (low, high), (other_low, other_high) = wilson_interval(one, count), wilson_interval(other, count)

    def width(of: float, to: float) -> float:
        return math.sqrt(of**2 - 2 * phi * of * to + to**2)

    difference = one - other
    below, above = width(one - low, other_high - other), width(high - one, other - other_low)
    return difference, difference - below, difference + above
