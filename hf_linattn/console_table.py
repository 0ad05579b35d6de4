"""Tables for the console that cut nothing."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def console_table(*heads: str, numbers: bool = False, **options: Any) -> Table:
    """Return a table whose first column, of names, stays on one line; in the others what is too wide wraps.

    Args:
        numbers: whether all columns but the first hold numbers, which stand on the right.
        **options: of `rich.table.Table`, which by itself cuts words that do not fit into 80 columns.
    """
    table = Table(**options)
    for place, head in enumerate(heads):
        justify: Any = "right" if numbers and place else "left"
        table.add_column(head, justify=justify, no_wrap=not place, overflow="fold")
    return table
