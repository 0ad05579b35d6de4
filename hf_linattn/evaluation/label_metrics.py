"""Metrics of classifiers as metrics of the `evaluate` library, over scikit-learn and scipy; nothing is fetched.

Which of them apply follows from the problem, by the names that transformers has for it in `config.problem_type`: one
class per text, several labels per text, or a number per text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import evaluate
import numpy as np
from datasets import Features, List, Value
from scipy import stats
from sklearn import metrics

from ..config import require_known
from ..errors import DataError, OptionError

SINGLE, SEVERAL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
COLUMNS: Mapping[str, Any] = {SINGLE: Value("int64"), SEVERAL: List(Value("int64")), REGRESSION: Value("float64")}
_CITATION = """\
@article{scikit-learn,
  title={Scikit-learn: Machine Learning in {P}ython}, author={Pedregosa, F. and others},
  journal={Journal of Machine Learning Research}, volume={12}, pages={2825--2830}, year={2011}
}
"""
_INPUTS = """
Args:
    predictions, references: class numbers; with several labels per text lists of 0 and 1; in regression numbers.
Returns:
    dict with one number, under the name of the metric.
"""


def problem_of(config: Any) -> str:
    """Return the problem of a classifier, as its config says; one number where it has one output, else one class."""
    return config.problem_type or (REGRESSION if config.num_labels == 1 else SINGLE)


class LabelMetric(evaluate.Metric):
    """A number between predictions and references; built directly, so it needs no connection.

    Args:
        config_name: the problem; None: the first of `problems`.
    """

    key: ClassVar[str]
    problems: ClassVar[tuple[str, ...]] = (SINGLE, SEVERAL)

    def __init__(self, config_name: str | None = None, keep_in_memory: bool = True, **options: Any):
        problem = config_name or self.problems[0]
        if problem not in self.problems:
            raise OptionError(f"metric {self.key!r} is of {' or '.join(self.problems)}, got {problem}; leave it out")
        super().__init__(config_name=problem, keep_in_memory=keep_in_memory, **options)

    def _info(self) -> evaluate.MetricInfo:
        column = COLUMNS[self.config_name]
        return evaluate.MetricInfo(
            description=(type(self).__doc__ or "").splitlines()[0],
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=Features({"predictions": column, "references": column}),
        )

    def _compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        return {self.key: float(self.measure(np.asarray(references), np.asarray(predictions)))}

    def measure(self, wanted: np.ndarray, got: np.ndarray) -> float:
        """Return the number for references and predictions [N], with several labels [N, K]."""
        raise NotImplementedError


class Accuracy(LabelMetric):
    """The share of texts whose class, or whose whole set of labels, is right.

    >>> Accuracy().compute(predictions=[0, 1, 1], references=[0, 1, 0])
    {'accuracy': 0.6666666666666666}
    """

    key = "accuracy"

    def measure(self, wanted: np.ndarray, got: np.ndarray) -> float:
        return metrics.accuracy_score(wanted, got)


class MacroF1(LabelMetric):
    """F1 = 2 precision recall / (precision + recall), the mean over the classes; 0 for one that is never right.

    Classes that neither predictions nor references hold are left out; where that is all of them, it is 0.

    >>> MacroF1().compute(predictions=[0, 0, 0, 0], references=[0, 0, 0, 1])
    {'macro_f1': 0.42857142857142855}
    """

    key = "macro_f1"
    average: ClassVar[str] = "macro"

    def measure(self, wanted: np.ndarray, got: np.ndarray) -> float:
        return np.nan_to_num(metrics.f1_score(wanted, got, average=self.average, zero_division=np.nan))


class MicroF1(MacroF1):
    """F1 of all decisions, those of all labels together."""

    key = "micro_f1"
    average = "micro"
    problems = (SEVERAL,)


class Matthews(LabelMetric):
    """Matthews' correlation of classes, -1 to 1; 0 is no better than chance, or one class alone.

    >>> Matthews().compute(predictions=[0, 0, 1, 1], references=[0, 0, 1, 1])
    {'matthews': 1.0}
    """

    key = "matthews"
    problems = (SINGLE,)

    def measure(self, wanted: np.ndarray, got: np.ndarray) -> float:
        return metrics.matthews_corrcoef(wanted, got)


class Pearson(LabelMetric):
    """The linear correlation of numbers, -1 to 1; 0 where all predictions are the same."""

    key = "pearson"
    problems = (REGRESSION,)

    def measure(self, wanted: np.ndarray, got: np.ndarray) -> float:
        return self.correlation(wanted, got).statistic if np.ptp(got) and np.ptp(wanted) else 0.0

    def correlation(self, wanted: np.ndarray, got: np.ndarray) -> Any:
        """Return what scipy says of two columns of numbers."""
        return stats.pearsonr(wanted, got)


class Spearman(Pearson):
    """The correlation of ranks, -1 to 1; 0 where all predictions are the same."""

    key = "spearman"

    def correlation(self, wanted: np.ndarray, got: np.ndarray) -> Any:
        return stats.spearmanr(wanted, got)


class MeanSquaredError(LabelMetric):
    """The mean of (prediction - reference)^2."""

    key = "mean_squared_error"
    problems = (REGRESSION,)

    def measure(self, wanted: np.ndarray, got: np.ndarray) -> float:
        return metrics.mean_squared_error(wanted, got)


METRICS: dict[str, type[LabelMetric]] = {
    kind.key: kind for kind in (Accuracy, MacroF1, MicroF1, Matthews, Pearson, Spearman, MeanSquaredError)
}
DEFAULT_METRICS = {
    SINGLE: ("accuracy", "macro_f1", "matthews"),
    SEVERAL: ("macro_f1", "micro_f1", "accuracy"),
    REGRESSION: ("pearson", "spearman"),
}


def chosen_metrics(problem: str, names: Sequence[str] | None = None) -> tuple[LabelMetric, ...]:
    """Return the metrics of these names, or those by which such a problem is judged.

    Raises:
        UnknownNameError: a name that is none of `METRICS`. OptionError: a metric of another problem.
    """
    for name in names or ():
        require_known("metric", name, METRICS)
    return tuple(METRICS[name](problem) for name in names or DEFAULT_METRICS[problem])


def label_scores(
    problem: str, predictions: Sequence[Any], references: Sequence[Any], names: Sequence[str] | None = None
) -> dict[str, float]:
    """Return name -> number of the chosen metrics.

    Args:
        predictions, references: as `LabelMetric` takes them. names: of metrics; None: those of the problem.

    Raises:
        DataError: predictions that are not finite. As `chosen_metrics`.

    >>> label_scores(SINGLE, [0, 1, 1], [0, 1, 1])
    {'accuracy': 1.0, 'macro_f1': 1.0, 'matthews': 1.0}
    """
    if problem == REGRESSION and not all(map(math.isfinite, predictions)):
        raise DataError(
            "predictions hold numbers that are not finite; the model has diverged, lower its learning rate"
        )
    found: dict[str, float] = {}
    for metric in chosen_metrics(problem, names):
        found |= metric.compute(predictions=predictions, references=references) or {}
    return found
