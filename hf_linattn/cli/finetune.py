"""`hf-linattn finetune`: recipes/finetune.py."""

from __future__ import annotations

import typer

from .common import Json
from .recipe import run_recipe


def finetune(context: typer.Context, as_json: Json = False) -> None:
    """Convert a model, fine-tune it on text and report: options, a YAML file or recipe:NAME."""
    run_recipe("finetune", context.args, as_json)
