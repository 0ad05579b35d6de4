"""Intervals and differences against a loop and against published values."""

from __future__ import annotations

import math
import statistics

import pytest
from scipy import stats

from hf_linattn import OptionError
from hf_linattn.evaluation.paired import half_width, mean_score, paired_difference
from hf_linattn.evaluation.side_by_side import Measurement, SuiteReport, compare
from hf_linattn.evaluation.suite_table import OVER, suite_table

FIRST = [0.3, -1.2, 2.5, 0.0, 4.1, 0.7, 0.7]
SECOND = [0.1, -1.0, 2.5, 0.5, 3.0, 0.7, 0.2]
QUANTILE = stats.t.ppf(0.975, len(FIRST) - 1)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857-872, table I, the score method without continuity correction
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_a_share_has_the_published_interval(right, count, low, high):
    score = mean_score([1.0] * right + [0.0] * (count - right))
    assert (score.value, score.low, score.high) == pytest.approx((right / count, low, high), abs=1e-4)


def test_a_mean_has_its_standard_errors_and_a_perplexity_is_the_exp_of_them():
    mean, error = statistics.mean(FIRST), statistics.stdev(FIRST) / len(FIRST) ** 0.5
    expected = mean, mean - QUANTILE * error, mean + QUANTILE * error
    score = mean_score(FIRST)
    assert (score.value, score.low, score.high) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    score = mean_score(FIRST, logarithmic=True)
    assert (score.value, score.low, score.high) == pytest.approx(tuple(map(math.exp, expected)), rel=1e-4)
    assert mean_score([3.0]).low is None


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 9, 32, 1000])
def test_few_values_have_the_interval_of_student(count):
    values = [(i * i) % 7 + 0.5 * i for i in range(count)]
    expected = stats.t(count - 1, statistics.fmean(values), stats.sem(values)).interval(0.95)
    assert half_width(values) == pytest.approx((expected[1] - expected[0]) / 2, rel=2e-4)


def test_items_of_a_group_are_as_one_where_groups_are_equal_and_no_others():
    """The windows of three texts, each read twice: an interval that takes them for independent is too narrow."""
    means, groups = [1.0, 2.0, 4.0], (0, 1, 2, 0, 1, 2)
    values, others = ([x + y for y in (-0.2, 0.2) for x in row] for row in (means, [1.5, 1.0, 0.5]))
    error = stats.sem(means) * stats.t.ppf(0.975, 2)
    assert half_width(values, groups) == pytest.approx(error, rel=1e-6) and error > 1.5 * half_width(values)
    assert half_width(values, [7] * 6) == half_width(values)
    measured = {role: [Measurement("language", "text", "perplexity", tuple(x), (9,) * 6, False, True, groups=groups)]
                for role, x in (("converted", values), ("original", others))}  # fmt: skip
    (row,) = compare(measured, None)
    assert math.log(row.converted.high / row.converted.value) == pytest.approx(error, rel=1e-6)
    (pair,) = row.differences
    gaps = [-0.5, 1.0, 3.5]
    assert (pair.high - pair.low) / 2 == pytest.approx(stats.sem(gaps) * stats.t.ppf(0.975, 2), rel=1e-6)
    assert str(suite_table(SuiteReport("m", "o", None, None, (row,), ())).caption).endswith(OVER)


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    # both right, the first alone, the second alone, none; the first row is Newcombe's own (1998, Statistics in
    # Medicine 17:2635-2650), the others are the intervals of Wilson put together without any correlation
    [((36, 12, 2, 0), 0.0569, 0.3404), ((20, 0, 0, 0), -0.1611, 0.1611), ((0, 0, 0, 20), -0.1611, 0.1611)],
)
def test_answers_that_agree_have_an_interval_all_the_same(counts, low, high):
    answers = [pair for pair, count in zip([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], counts, strict=True)
               for _ in range(count)]  # fmt: skip
    found = paired_difference("a", "b", *zip(*answers, strict=True))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert found.value == pytest.approx(found.wins - found.losses)


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize(("tolerance", "close"), [(0.0, 2), (0.25, 4)])
def test_a_difference_is_taken_item_by_item(higher, tolerance, close):
    found = paired_difference("a", "b", FIRST, SECOND, higher_is_better=higher, tolerance=tolerance)
    gains = [x - y for x, y in zip(FIRST, SECOND, strict=True)]
    mean, error = statistics.mean(gains), statistics.stdev(gains) / len(gains) ** 0.5
    expected = mean, mean - QUANTILE * error, mean + QUANTILE * error
    assert (found.value, found.low, found.high) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    more = sum(gain > tolerance for gain in gains)
    wins = more if higher else len(gains) - close - more
    assert (found.wins, found.ties) == pytest.approx((wins / len(gains), close / len(gains)))
    assert found.wins + found.ties + found.losses == pytest.approx(1)
    assert found.win_and_tie == pytest.approx((wins + close) / len(gains))


def test_other_items_are_refused():
    with pytest.raises(OptionError, match="values must be as many items as the other model has, 7, got 6"):
        paired_difference("a", "b", FIRST[1:], SECOND)
    with pytest.raises(OptionError, match="values must be at least one item, got 0"):
        mean_score([])
    with pytest.raises(OptionError, match=r"values must be finite, or the model is broken: .*, got \[nan\]"):
        mean_score([1.0, math.nan])
