"""`hf-linattn report`: what a recipe found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .common import Json, check_writable, exit_on_error, note, show


def report(
    folder: Annotated[Path, typer.Argument(help="output folder of a recipe")],
    html: Annotated[
        Path | None, typer.Option(help="write the run as one page that needs nothing beside itself")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a recipe found out: the four models, and the way from converted to recovered."""
    with exit_on_error():
        from ..report import Report, four_model_table, stage_table
        from ..report.page import save_page

        check_writable("html", html)
        found = Report.load(folder, option="folder")
        if html is not None:
            note(f"wrote {save_page(folder, html)}")
    show(json.loads(found.to_json()), as_json, four_model_table(found), stage_table(found))
