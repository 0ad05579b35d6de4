"""Check architectures from the command line.

    python -m hf_linattn.support gpt2 qwen3                    # some
    python -m hf_linattn.support --output support.json         # all, with the JSON that the documentation is made from
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hf_linattn.errors import HfLinattnError

from . import Support, architectures, check_architecture

app = typer.Typer(add_completion=False)
COLOURS = {"patched": "green", "partly": "yellow", "not": "red", "untried": "dim"}


@app.command()
def main(
    model_types: Annotated[list[str] | None, typer.Argument(help="model types; none: all")] = None,
    mechanism: Annotated[str, typer.Option(help="name of the mechanism to patch with")] = "linear",
    output: Annotated[Path | None, typer.Option(help="write the results as JSON")] = None,
) -> None:
    """Patch a small random model of every architecture and say what holds."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("hf_linattn").setLevel(logging.ERROR)
    names = model_types or list(architectures())
    try:
        found = [check_architecture(name, mechanism) for name in track(names, "checking", transient=True)]
    except HfLinattnError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error
    console = Console()
    console.print(support_table(found))
    console.print(", ".join(f"{count} {status}" for status, count in Counter(s.status for s in found).most_common()))
    if output is not None:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        document = {**versions, "mechanism": mechanism, "architectures": [asdict(support) for support in found]}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def support_table(found: list[Support]) -> Table:
    """Return one row per architecture, for `rich.print`."""
    table = Table("architecture", "class", "status", "layers", "what holds", "why not more")
    for s in found:
        table.add_row(
            s.model_type, s.model_class, s.status, str(s.layers or ""), ", ".join(s.passed), s.reason,
            style=COLOURS[s.status],
        )  # fmt: skip
    return table


if __name__ == "__main__":
    app()
