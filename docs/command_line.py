"""The generated sections of command-line.md: what every command says of itself."""

from __future__ import annotations

import re

import typer
from typer.cli import get_docs_for_click

from benchmarks.tables.markdown import table
from hf_linattn.cli import app
from hf_linattn.cli.common import EXIT_CODES

NAME = "hf-linattn"
LEFT_OUT = ("* `--help`: Show this message and exit.\n",)  # of every command


def exit_codes() -> str:
    """Return the table of exit codes."""
    return table(["code", "what it says"], [[str(code), meaning] for code, meaning in EXIT_CODES.items()])


def commands() -> str:
    """Return usage, arguments and options of every command, as typer writes them."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name=NAME), name=NAME)
    for line in LEFT_OUT:
        text = text.replace(line, "")
    return re.sub(r"^#", "##", text[text.index("\n## ") :].strip(), flags=re.M)  # below a heading of the page
