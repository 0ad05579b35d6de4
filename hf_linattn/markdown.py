"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RULES = {"l": ":---", "r": "---:"}


def markdown_row(cells: Iterable[str]) -> str:
    """Return one line of a table.

    >>> markdown_row(["a|b", "c"])
    '| a\\\\|b | c |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], alignment: str) -> str:
    """Return a table; `alignment` has one letter per column, l or r."""
    return "\n".join(markdown_row(line) for line in (heads, [RULES[letter] for letter in alignment], *rows))
