"""`hf-linattn list`: the mechanisms."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from .. import list_mechanisms
from ..mechanisms import MECHANISMS
from .common import Json, show


def list_command(as_json: Json = False) -> None:
    """List the mechanisms: their modes, their decoding state, when they equal softmax, their source."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "modes": sorted(MECHANISMS.get(name).modes),
            "constant_state": MECHANISMS.get(name).constant_state,
            "exact": MECHANISMS.get(name).limit.text,
            "source": MECHANISMS.get(name).citation,
        }
        for name in list_mechanisms()
    ]
    table = Table("mechanism", "modes", "decoding state", "exactness limit", "source")
    for row in rows:
        state = "constant" if row["constant_state"] else "grows"
        table.add_row(row["name"], ", ".join(row["modes"]), state, row["exact"], row["source"])
    show(rows, as_json, table)
