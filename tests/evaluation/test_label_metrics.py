"""Metrics of classifiers beside their formulas, written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_linattn.errors import DataError, OptionError, UnknownNameError
from hf_linattn.evaluation.label_metrics import (
    DEFAULT_METRICS,
    METRICS,
    REGRESSION,
    SEVERAL,
    SINGLE,
    Accuracy,
    chosen_metrics,
    label_scores,
)

pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12)


def f1(wanted: np.ndarray, got: np.ndarray) -> float:
    """2 TP / (2 TP + FP + FN) of yes and no; 0 where nothing is right."""
    right = float((wanted & got).sum())
    return 2 * right / max(1.0, 2 * right + float((wanted & ~got).sum()) + float((~wanted & got).sum()))


@settings(max_examples=15, deadline=None)
@given(pairs)
def test_metrics_of_classes_are_their_formulas(found):
    wanted, got = (np.array(column) for column in zip(*found, strict=True))
    scores = label_scores(SINGLE, got.tolist(), wanted.tolist())
    assert list(scores) == list(DEFAULT_METRICS[SINGLE])
    assert scores["accuracy"] == pytest.approx(sum(a == b for a, b in found) / len(found))
    classes = {*wanted.tolist(), *got.tolist()}
    assert scores["macro_f1"] == pytest.approx(np.mean([f1(wanted == c, got == c) for c in classes]))
    x, y = (np.array([[value == c for c in range(4)] for value in column], dtype=float) for column in (wanted, got))
    covariances = [((a - a.mean(0)) * (b - b.mean(0))).sum() for a, b in ((x, y), (x, x), (y, y))]
    expected = covariances[0] / math.sqrt(covariances[1] * covariances[2]) if covariances[1] * covariances[2] else 0
    assert scores["matthews"] == pytest.approx(expected, abs=1e-12)


def test_metrics_of_several_labels_are_their_formulas():
    wanted = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
    got = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]])
    scores = label_scores(SEVERAL, got.tolist(), wanted.tolist())
    columns = [f1(wanted[:, k] == 1, got[:, k] == 1) for k in range(3)]
    assert scores["macro_f1"] == pytest.approx(sum(columns) / 3)
    assert scores["micro_f1"] == pytest.approx(f1(wanted == 1, got == 1))
    assert scores["accuracy"] == 2 / 4, "a whole row has to be right"


def test_labels_that_nobody_has_do_not_count():
    wanted, got = [[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 0, 0, 1], [1, 0, 0, 0]]
    scores = label_scores(SEVERAL, got, wanted)
    assert (scores["macro_f1"], scores["micro_f1"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    nothing = label_scores(SEVERAL, [[0, 0]] * 3, [[0, 0]] * 3)
    assert nothing == {"macro_f1": 0.0, "micro_f1": 0.0, "accuracy": 1.0}


def test_metrics_of_numbers_are_their_formulas():
    wanted, got = np.array([1.0, 2.5, -3.0, 4.0, 0.5]), np.array([0.5, 2.0, -1.0, 9.0, 0.0])
    names = [*DEFAULT_METRICS[REGRESSION], "mean_squared_error"]
    scores = label_scores(REGRESSION, got.tolist(), wanted.tolist(), names)
    a, b = wanted - wanted.mean(), got - got.mean()
    assert scores["pearson"] == pytest.approx((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))
    ranks = [[sorted(x).index(v) for v in x] for x in (wanted.tolist(), got.tolist())]
    differences = sum((i - j) ** 2 for i, j in zip(*ranks, strict=True))
    assert scores["spearman"] == pytest.approx(1 - 6 * differences / (5 * 24))
    assert scores["mean_squared_error"] == pytest.approx(((wanted - got) ** 2).mean())
    assert label_scores(REGRESSION, [1.0] * 5, wanted.tolist()) == {"pearson": 0.0, "spearman": 0.0}
    with pytest.raises(DataError, match="not finite"):
        label_scores(REGRESSION, [math.nan] * 5, wanted.tolist())


def test_a_metric_of_another_problem_is_refused_by_name():
    with pytest.raises(OptionError, match="metric 'matthews' is of single_label_classification, got regression"):
        chosen_metrics(REGRESSION, ["matthews"])
    with pytest.raises(UnknownNameError, match="did you mean macro_f1"):
        chosen_metrics(SINGLE, ["makro_f1"])
    assert all(problem in METRICS[name].problems for problem, names in DEFAULT_METRICS.items() for name in names)


def test_a_metric_adds_up_batches_as_those_of_evaluate_do():
    metric = Accuracy()
    metric.add_batch(predictions=[0, 1], references=[0, 0])
    metric.add(prediction=1, reference=1)
    assert metric.compute() == {"accuracy": pytest.approx(2 / 3)}
