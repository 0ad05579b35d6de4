"""What a suite found, as tables for the console (rich)."""

from __future__ import annotations

from rich.table import Table

from .paired import Difference, Score
from .side_by_side import ROLES, Row, SuiteReport, TaskMean

NONE = "-"


def suite_table(report: SuiteReport) -> Table:
    """Return a line for each test: the models side by side, and the difference to the original."""
    window = "no window" if report.window is None else f"window {report.window:,}"
    table = Table(title=f"{report.model}, {window}", caption="95 % intervals; differences item by item")
    for head in ("test", "metric", "examples"):
        table.add_column(head)
    for head in ("items", "prompt tokens", "> window", *ROLES, "converted - original", "wins + ties"):
        table.add_column(head, justify="right")
    for row in report.rows:
        if "depth" in row.facts:  # these are for the page of a run
            continue
        table.add_row(*_cells(row))
    return table


def means_table(means: tuple[TaskMean, ...]) -> Table:
    """Return the means over tasks, of short prompts and of long ones."""
    table = Table(title="mean of the tasks")
    table.add_column("prompts")
    for head in (*ROLES, "/ original", "/ original, above chance", "wins + ties"):
        table.add_column(head, justify="right")
    for mean in means:
        values = mean.original, mean.control, mean.converted, mean.of_original, mean.above_chance, mean.win_and_tie
        cells = [NONE if value is None else f"{value:.3f}" for value in values]
        table.add_row("long" if mean.long_prompts else "short", *cells)
    return table


def _cells(row: Row) -> list[str]:
    pair = next((x for x in row.differences if (x.of, x.to) == ("converted", "original")), None)
    return [
        row.name,
        row.metric,
        str(row.facts.get("shots", NONE)),
        f"{row.num_items:,}",
        f"{row.prompt_tokens[1]:,.0f}",
        NONE if row.longer_than_window is None else f"{row.longer_than_window:.0%}",
        *(_score(getattr(row, role)) for role in ROLES),
        _difference(pair),
        NONE if pair is None else f"{pair.win_and_tie:.0%}",
    ]


def _score(score: Score | None) -> str:
    return NONE if score is None else f"{score.value:.3f}"


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return NONE
    if difference.low is None or difference.high is None:
        return f"{difference.value:+.3f}"
    return f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
