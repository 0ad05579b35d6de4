"""A comparison as records, one for each plan and length: in Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation import MemoryRow
from ..markdown import RULES, markdown_row
from .measure import Comparison, Entry, Quality

NONE, STOPPED = "-", " (stopped)"
ORIGINAL = "softmax (original)"


@dataclass(frozen=True)
class Record:
    """One line of the comparison, see `Entry`; speeds are times softmax's. None: not measured."""

    attention: str
    tokens: int
    untrained: Quality | None = None
    calibrated: Quality | None = None
    prompt_speedup: float | None = None
    token_speedup: float | None = None
    memory: MemoryRow | None = None
    stopped: bool = False

    @property
    def bytes(self) -> tuple[int | None, int | None]:
        """The decoding state and softmax's; of a model that does not decode the peaks of a forward."""
        row = self.memory
        if row is None:
            return None, None
        states, peaks = (row.patched_state, row.original_state), (row.patched_peak, row.original_peak)
        return peaks if row.patched_state is None else states


FIELDS: Mapping[str, Callable[[Record], Any]] = {
    "attention": lambda row: row.attention,
    "tokens": lambda row: row.tokens,
    "perplexity": lambda row: _get(row.untrained, "perplexity"),
    "ratio": lambda row: _get(row.untrained, "ratio"),
    "ratio_low": lambda row: _get(row.untrained, "low"),
    "ratio_high": lambda row: _get(row.untrained, "high"),
    "calibrated_perplexity": lambda row: _get(row.calibrated, "perplexity"),
    "calibrated_ratio": lambda row: _get(row.calibrated, "ratio"),
    "calibrated_low": lambda row: _get(row.calibrated, "low"),
    "calibrated_high": lambda row: _get(row.calibrated, "high"),
    "prompt_speedup": lambda row: row.prompt_speedup,
    "token_speedup": lambda row: row.token_speedup,
    "state_bytes": lambda row: _get(row.memory, "patched_state"),
    "original_state_bytes": lambda row: _get(row.memory, "original_state"),
    "peak_bytes": lambda row: _get(row.memory, "patched_peak"),
    "original_peak_bytes": lambda row: _get(row.memory, "original_peak"),
    "stopped": lambda row: row.stopped,
}  # of the CSV


@dataclass(frozen=True)
class Column:
    """One column of the Markdown table: its head, what stands in it, and its alignment."""

    head: str
    cell: Callable[[Record], str]
    alignment: str = "r"


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns that the comparison has something for."""
    fitted = [
        Column("calibrated", lambda row: _number(_get(row.calibrated, "perplexity"))),
        Column("/ softmax", lambda row: _ratio(row.calibrated)),
    ]
    decoded = [Column("token, x as fast", lambda row: _number(row.token_speedup))]
    return [
        Column("attention", lambda row: row.attention + STOPPED * row.stopped, "l"),
        Column("tokens", lambda row: _count(row.tokens)),
        Column("perplexity", lambda row: _number(_get(row.untrained, "perplexity"))),
        Column("/ softmax", lambda row: _ratio(row.untrained)),
        *(fitted if comparison.options.calibration else []),
        Column("prompt, x as fast", lambda row: _number(row.prompt_speedup)),
        *(decoded if comparison.decodes else []),
        Column("state bytes" if comparison.decodes else "peak bytes", lambda row: _count(row.bytes[0])),
        Column("softmax's", lambda row: _count(row.bytes[1])),
    ]


def records(comparison: Comparison, entry: Entry) -> list[Record]:
    """Return the lines of one plan, a length each."""
    speeds, memories = {row.length: row for row in entry.speed}, {row.length: row for row in entry.memory}
    return [
        Record(
            entry.name, length, entry.untrained, entry.calibrated, _get(speeds.get(length), "prefill_speedup"),
            _get(speeds.get(length), "decode_speedup"), memories.get(length), entry.stopped,
        )
        for length in sorted(set(comparison.options.lengths))
    ]  # fmt: skip


def original_record(comparison: Comparison) -> Record:
    """Return the line of softmax, at the longest length."""
    longest, decoded = max(comparison.options.lengths), 1.0 if comparison.decodes else None
    return Record(ORIGINAL, longest, comparison.original, None, 1.0, decoded)


def head_lines(comparison: Comparison) -> list[str]:
    """Return the first lines of the Markdown table: heads, and the original."""
    chosen = columns(comparison)
    rule = markdown_row(RULES[column.alignment] for column in chosen)
    return [markdown_row(column.head for column in chosen), rule, *_lines(chosen, [original_record(comparison)])]


def markdown_lines(comparison: Comparison, entry: Entry) -> list[str]:
    """Return the lines of one plan."""
    return _lines(columns(comparison), records(comparison, entry))


def csv_text(comparison: Comparison) -> str:
    """Return all records as CSV, with a line of names; what was not measured is empty."""
    found = [original_record(comparison), *(row for entry in comparison.entries for row in records(comparison, entry))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    writer.writerows([read(row) for read in FIELDS.values()] for row in found)
    return text.getvalue()


def _lines(chosen: Sequence[Column], rows: Sequence[Record]) -> list[str]:
    return [markdown_row(column.cell(row) for column in chosen) for row in rows]


def _get(found: object | None, name: str) -> Any:
    return None if found is None else getattr(found, name)


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.2f}"


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _ratio(found: Quality | None) -> str:
    if found is None:
        return NONE
    interval = "" if found.low is None or found.high is None else f" ({found.low:.3f} to {found.high:.3f})"
    return f"{found.ratio:.3f}{interval}"
