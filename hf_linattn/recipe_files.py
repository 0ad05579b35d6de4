"""The recipes that come with the library: options of models and boards, configs of accelerate, tasks.

They lie once, in `recipes/` of the repository; what is built from it has them inside the package (`setup.py`).
"""

from __future__ import annotations

from pathlib import Path

from .config import require_known

PACKAGED, CHECKOUT = Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes"
FOLDER = PACKAGED if PACKAGED.is_dir() else CHECKOUT
PREFIX = "recipe:"  # before the name of a recipe, where the path of a file is asked for
BUNDLED = "recipes/pretrained/"  # begins the paths of the small models, which are in the repository alone
MODELS = "models"  # the folder of the recipes that are named without their folder


def recipe_names() -> list[str]:
    """Return the names of all recipes, those of models first.

    >>> {"smollm2-135m", "accelerate/cpu", "board"} <= set(recipe_names())
    True
    """
    paths = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")]
    of_models = sorted(path.removeprefix(f"{MODELS}/") for path in paths if path.startswith(f"{MODELS}/"))
    return of_models + sorted(path for path in paths if not path.startswith(f"{MODELS}/"))


def recipe_file(name: str) -> Path:
    """Return the file of a recipe; `UnknownNameError`, with the nearest names, if there is none."""
    require_known("recipe", name, recipe_names())
    of_model = FOLDER / MODELS / f"{name}.yaml"
    return of_model if of_model.is_file() else FOLDER / f"{name}.yaml"


def locate(path: str | Path) -> Path:
    """Return a path as it is, the file of `recipe:NAME`, and of `recipes/...` that is not here the library's own.

    >>> locate("mine.yaml").as_posix(), locate("recipe:smollm2-135m").name
    ('mine.yaml', 'smollm2-135m.yaml')
    """
    if str(path).startswith(PREFIX):
        return recipe_file(str(path).removeprefix(PREFIX))
    given = Path(path)
    if given.parts[:1] == (CHECKOUT.name,) and not given.exists():
        own = FOLDER.joinpath(*given.parts[1:])
        return own if own.exists() else given
    return given


def first_comment(path: Path) -> str:
    """Return what a recipe says of itself in its first line."""
    line = path.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""
