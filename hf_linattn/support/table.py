"""What was found out about architectures, for the console."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from ..console_table import console_table
from .check import Support

COLOURS = {"patched": "green", "partly": "yellow", "not": "red", "untried": "dim"}


def support_table(found: Iterable[Support]) -> Table:
    """Return one row per architecture, for `rich.print`."""
    table = console_table("architecture", "class", "status", "layers", "what holds", "what is missing")
    for row in found:
        table.add_row(
            row.model_type, row.model_class, row.status, str(row.layers or ""), ", ".join(row.passed), row.reason,
            style=COLOURS[row.status],
        )  # fmt: skip
    return table
