"""Models side by side: what each scored on the same items, as rows with intervals and paired differences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..errors import OptionError
from .harness import Answer
from .paired import Difference, Score, mean_score, paired_difference

FORMAT_VERSION = 1
BESIDE = ("original", "control")
ROLES = (*BESIDE, "converted")
ROUNDING = 1e-4  # nats, or a share: up to this difference an item is a tie


@dataclass(frozen=True)
class Measurement:
    """One model on the items of one test.

    Attributes:
        suite, name, metric: what was measured.
        values: one for each item.
        prompt_tokens: tokens of each prompt.
        higher_is_better: of the values.
        logarithmic: the score is exp of the mean of the values, losses in nats.
        facts: what else is the same for all models, such as the number of examples.
        answers: of each item of a task.
        groups: the group of each item, such as the document of a window, for intervals over these; none: each item is
            one of its own.
    """

    suite: str
    name: str
    metric: str
    values: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    higher_is_better: bool = True
    logarithmic: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    groups: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What the measurements of several models have in common."""
        return self.suite, self.name, self.metric, len(self.values), self.prompt_tokens


@dataclass(frozen=True)
class Row:
    """One test, all models side by side; `original` and `control` are None where they were not given.

    Attributes:
        num_items: how many items it has.
        prompt_tokens: shortest, mean and longest prompt.
        longer_than_window: share of the prompts that is longer than the window of the converted model; None if it has
            no window.
        differences: converted less original, converted less control, control less original, as far as they are there;
            of a perplexity in nats.
        facts: as in `Measurement`. answers: model -> its answers, item by item.
    """

    suite: str
    name: str
    metric: str
    num_items: int
    prompt_tokens: tuple[float, ...]
    longer_than_window: float | None
    original: Score | None
    control: Score | None
    converted: Score
    differences: tuple[Difference, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, tuple[Answer, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskMean:
    """The mean over the tasks of a suite, by each task's `acc_norm` or else `acc`.

    Attributes:
        long_prompts: whether of the runs with examples before each question.
        original, control, converted: the means.
        of_original: converted over original. above_chance: the same with chance taken off both.
        win_and_tie: share of the tasks in which converted scores no less than the original. All three are None without
            an original.
    """

    long_prompts: bool
    original: float | None
    control: float | None
    converted: float
    of_original: float | None
    above_chance: float | None
    win_and_tie: float | None


@dataclass(frozen=True)
class SuiteReport:
    """All that a suite found; `window` is that of the converted model, see `exact_window`."""

    model: str
    original: str | None
    control: str | None
    window: int | None
    rows: tuple[Row, ...]
    means: tuple[TaskMean, ...]
    format_version: int = FORMAT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))


def compare(measured: Mapping[str, Sequence[Measurement]], window: int | None) -> list[Row]:
    """Set the measurements of several models side by side.

    Args:
        measured: `converted`, and `original` and `control` as far as they are there -> what `measure` returned.
        window: `exact_window` of the converted model.

    Raises:
        OptionError: the models were measured on other items.
    """
    found = {role: {x.key: x for x in measured[role]} for role in ROLES if role in measured}
    for role, own in found.items():
        if own.keys() != found["converted"].keys():
            raise OptionError(f"{role} was measured on other items than converted; measure both with the same options")
    return [_row({role: own[key] for role, own in found.items()}, window) for key in found["converted"]]


def task_means(rows: Iterable[Row]) -> list[TaskMean]:
    """Return the means over tasks: of the runs without examples, and of those with."""
    rows = [row for row in rows if row.facts.get("headline")]
    return [_mean([x for x in rows if x.facts["long_prompts"] is long]) for long in _kinds(rows)]


def _kinds(rows: Iterable[Row]) -> list[bool]:
    return list(dict.fromkeys(row.facts["long_prompts"] for row in rows))


def _mean(rows: Sequence[Row]) -> TaskMean:
    scores = {role: [getattr(row, role) for row in rows] for role in BESIDE}
    original, control = (None if None in own else fmean(x.value for x in own) for own in (scores[r] for r in BESIDE))
    converted, chance = fmean(row.converted.value for row in rows), fmean(row.facts["chance"] for row in rows)
    of_original = converted / original if original else None
    above = None if original is None or original == chance else (converted - chance) / (original - chance)
    no_worse = [row.converted.value >= row.original.value for row in rows if row.original is not None]
    share = fmean(no_worse) if no_worse else None
    return TaskMean(rows[0].facts["long_prompts"], original, control, converted, of_original, above, share)


def _row(found: Mapping[str, Measurement], window: int | None) -> Row:
    one = found["converted"]
    scores = {role: mean_score(x.values, x.logarithmic, x.groups) for role, x in found.items()}
    pairs = [("converted", "original"), ("converted", "control"), ("control", "original")]
    how: dict[str, Any] = {
        "higher_is_better": one.higher_is_better, "tolerance": ROUNDING, "groups": one.groups,
    }  # fmt: skip
    differences = tuple(
        paired_difference(of, to, found[of].values, found[to].values, **how)
        for of, to in pairs
        if of in found and to in found
    )
    tokens = one.prompt_tokens
    return Row(
        suite=one.suite,
        name=one.name,
        metric=one.metric,
        num_items=len(one.values),
        prompt_tokens=(min(tokens), fmean(tokens), max(tokens)),
        longer_than_window=None if window is None else fmean(length > window for length in tokens),
        original=scores.get("original"),
        control=scores.get("control"),
        converted=scores["converted"],
        differences=differences,
        facts=one.facts,
        answers={role: x.answers for role, x in found.items() if x.answers},
    )
