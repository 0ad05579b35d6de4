"""`hf-linattn list`: the mechanisms."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any

import typer
from rich.table import Table

from ..config import require_known
from ..console_table import console_table
from ..mechanism_table import rows
from .common import Json, exit_on_error, show
from .completion import mechanism_names

NAME_HELP = "a mechanism, to see its options; none: all mechanisms"
Name = Annotated[str | None, typer.Argument(help=NAME_HELP, autocompletion=mechanism_names)]


def list_command(name: Name = None, as_json: Json = False) -> None:
    """List the mechanisms by family, a line each; `hf-linattn list hybrid` shows one with its options."""
    with exit_on_error():
        found = rows()
        if name is not None:
            require_known("mechanism", name, [row["name"] for row in found])
    if name is None:
        show(found, as_json, by_family(found))
    else:
        row = next(row for row in found if row["name"] == name)
        show(row, as_json, facts(row), options(row))


def by_family(found: list[dict[str, Any]]) -> Table:
    """Return all mechanisms, a line each."""
    table = Table(box=None, pad_edge=False)
    table.add_column("mechanism", no_wrap=True, min_width=max(len(row["name"]) for row in found) + 2)
    table.add_column("what it is", no_wrap=True, overflow="ellipsis")
    for family, members in groupby(sorted(found, key=lambda row: row["family"]), lambda row: row["family"]):
        table.add_row(f"[bold]{family}[/bold]", "")
        for row in members:
            table.add_row(f"  {row['name']}", row["summary"].replace("[", "\\["))
    return table


def facts(row: dict[str, Any]) -> str:
    """Return what a mechanism is, in a few lines."""
    state = "of constant size" if row["constant_state"] else "grows with the context"
    return (
        f"{row['name']}: {row['summary']}\n\nfamily: {row['family']}\nmodes: {', '.join(row['modes'])}\n"
        f"decoding state: {state}\nequals softmax: {row['exact']}\nsource: {row['source']}\n"
    ).replace("[", "\\[")


def options(row: dict[str, Any]) -> Table:
    """Return the options of a mechanism."""
    table = console_table("option", "default", "meaning")
    for option in row["options"]:
        table.add_row(option["name"], str(option["default"]), option["help"].replace("[", "\\["))
    return table
