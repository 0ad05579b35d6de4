"""The command line: `hf-linattn --help`. Each command has a file.

Every command takes `--json`, which prints one JSON document and nothing else on standard output.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .advise import advise
from .bench import bench
from .common import EXIT_CODES
from .compare import compare
from .convert import ConvertCommand, convert
from .distill import distill
from .env import env
from .eval import evaluate
from .finetune import finetune
from .list import list_command
from .push import push
from .recipe import PASS_ON
from .recipes import recipes
from .report import report
from .support import support

app = typer.Typer(
    name="hf-linattn", no_args_is_help=True, pretty_exceptions_enable=False,
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
)  # fmt: skip


def show_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Subquadratic attention for pretrained Hugging Face models: convert, recover, measure, publish."""


# in the order of the help
app.command("list")(list_command)
app.command("support")(support)
app.command("env")(env)
app.command("advise")(advise)
app.command("compare")(compare)
app.command("convert", cls=ConvertCommand)(convert)
app.command("finetune", context_settings=PASS_ON)(finetune)
app.command("distill", context_settings=PASS_ON)(distill)
app.add_typer(recipes, name="recipes")
app.command("eval")(evaluate)
app.command("bench")(bench)
app.command("report")(report)
app.command("push")(push)
