"""What `finetune` and `distill` share: a recipe reads its options itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from .common import exit_on_error

# --help too: a recipe lists its options itself
PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run_recipe(command: str, flags: Sequence[str], as_json: bool) -> None:
    """Run a recipe; its own tables go to standard error if JSON is asked for."""
    with exit_on_error():
        from ..training import arguments, pipeline

        kinds = {"finetune": arguments.FINETUNING, "distill": arguments.DISTILLATION}[command]
        found = pipeline.main(flags, kinds, f"hf-linattn {command}", Console(stderr=as_json))
        if as_json:
            typer.echo(found.to_json())
