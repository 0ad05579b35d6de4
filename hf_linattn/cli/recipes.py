"""`hf-linattn recipes`: the recipes that come with the library."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..errors import OptionError
from ..recipe_files import PREFIX, first_comment, recipe_file, recipe_names
from .common import Json, exit_on_error, show
from .completion import recipes as names

recipes = typer.Typer(no_args_is_help=True, help="List, show or copy the recipes that come with the library.")

Name = Annotated[str, typer.Argument(help="a recipe, as `hf-linattn recipes list` names it", autocompletion=names)]


@recipes.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the recipes: `hf-linattn distill recipe:NAME` runs the one of a model."""
    found = {name: first_comment(recipe_file(name)) for name in recipe_names()}
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True, min_width=max(map(len, found)))
    table.add_column("what it is", no_wrap=True, overflow="ellipsis")
    for name, comment in found.items():
        table.add_row(name, comment.replace("[", "\\["))
    show([{"name": name, "summary": comment} for name, comment in found.items()], as_json, table)


@recipes.command("show")
def show_recipe(name: Name, as_json: Json = False) -> None:
    """Print a recipe."""
    with exit_on_error():
        text = recipe_file(name.removeprefix(PREFIX)).read_text(encoding="utf-8")
    if as_json:
        show({"name": name, "text": text}, as_json)
    else:
        typer.echo(text, nl=False)


@recipes.command("copy")
def copy_recipe(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="folder that receives the file; made if it is not there")] = Path("."),
    as_json: Json = False,
) -> None:
    """Copy a recipe, to change it."""
    with exit_on_error():
        source = recipe_file(name.removeprefix(PREFIX))
        target = folder / source.name
        if target.exists():
            raise OptionError(f"folder={str(folder)!r} has a {source.name} already; remove it, or give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    show({"name": name, "file": str(target)}, as_json, f"copied to {target}")
