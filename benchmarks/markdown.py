"""Pieces of markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Document = dict[str, Any]  # of a result file


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def options_text(options: dict[str, Any]) -> str:
    """Return options as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def replace_section(text: str, name: str, body: str) -> str:
    """Return `text` with what stands between the two markers of `name` replaced; ValueError if there are none."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if not 0 <= text.find(begin) < text.find(end):
        raise ValueError(f"the text has no section between {begin} and {end}; put the two markers back")
    head, tail = text.split(begin)[0], text.split(end)[1]
    return f"{head}{begin}\n{body}\n{end}{tail}" if body else f"{head}{begin}\n{end}{tail}"
