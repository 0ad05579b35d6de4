"""What a suite found, as tables for the console (rich)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich import box
from rich.table import Table

from ..console_table import console_table
from .paired import Difference, Score
from .side_by_side import ROLES, Row, SuiteReport, TaskMean

NONE = "-"
CAPTION = (
    "95 % intervals, differences item by item, a perplexity's in nats; as good: items on which the converted model is"
    " as good or better"
)
OVER = "intervals of language are over texts, or over the windows of a single one"


def suite_table(report: SuiteReport) -> Table:
    """Return a line for each test: the models side by side, and the difference to the original.

    What all lines have in common stands below them, and a column without anything is left out: a console has 80
    columns.
    """
    rows = [row for row in report.rows if "depth" not in row.facts]  # these are for the page of a run
    facts = {head: [cell(row) for row in rows] for head, cell in FACTS.items()}
    common = [f"{head}: {column[0]}" for head, column in facts.items() if len({*column}) == 1 and column[0] != NONE]
    cells = {"test": [f"{row.name}: {row.metric}" for row in rows]}
    cells |= {head: column for head, column in facts.items() if len({*column}) > 1}
    cells |= {head: column for head, cell in SCORES.items() if {*(column := [cell(row) for row in rows])} != {NONE}}
    captions = [*common, CAPTION, *([OVER] if any(row.suite == "language" for row in rows) else [])]
    window = "no window" if report.window is None else f"window {report.window:,}"
    table = console_table(
        *cells, numbers=True, title=f"{report.model}, {window}", caption="; ".join(captions),
        box=box.SIMPLE, padding=0, show_edge=False,
    )  # fmt: skip
    for line in zip(*cells.values(), strict=True):
        table.add_row(*line)
    return table


def means_table(means: tuple[TaskMean, ...]) -> Table:
    """Return the means over tasks, of short prompts and of long ones."""
    heads = ("prompts", *ROLES, "/ original", "/ original, above chance", "as good")
    table = console_table(*heads, numbers=True, title="mean of the tasks")
    for mean in means:
        values = mean.original, mean.control, mean.converted, mean.of_original, mean.above_chance, mean.win_and_tie
        cells = [NONE if value is None else f"{value:.3f}" for value in values]
        table.add_row("long" if mean.long_prompts else "short", *cells)
    return table


def _score(row: Row, role: str) -> str:
    score: Score | None = getattr(row, role)
    return NONE if score is None else f"{score.value:.3f}"


def _pair(row: Row) -> Difference | None:
    return next((x for x in row.differences if (x.of, x.to) == ("converted", "original")), None)


def _difference(row: Row) -> str:
    found = _pair(row)
    if found is None:
        return NONE
    if found.low is None or found.high is None:
        return f"{found.value:+.3f}"
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _as_good(row: Row) -> str:
    found = _pair(row)
    return NONE if found is None else f"{found.win_and_tie:.0%}"


# head of a column -> what a row has there
FACTS: dict[str, Callable[[Row], str]] = {
    "shots": lambda row: str(row.facts.get("shots", NONE)),
    "items": lambda row: f"{row.num_items:,}",
    "tokens": lambda row: f"{row.prompt_tokens[1]:,.0f}",
    "> window": lambda row: NONE if row.longer_than_window is None else f"{row.longer_than_window:.0%}",
}
SCORES: dict[str, Callable[[Row], str]] = {
    **{role: partial(_score, role=role) for role in ROLES},
    "difference": _difference,
    "as good": _as_good,
}
