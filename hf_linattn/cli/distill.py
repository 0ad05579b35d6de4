"""`hf-linattn distill`: recipes/distill.py."""

from __future__ import annotations

import typer

from .common import Json
from .recipe import run_recipe


def distill(context: typer.Context, as_json: Json = False) -> None:
    """Convert a model and have the original teach it: options, a YAML file or recipe:NAME."""
    run_recipe("distill", context.args, as_json)
