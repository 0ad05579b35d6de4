"""What mechanisms are and which options they have, as data: for `hf-linattn list`, which starts without PyTorch.

`mechanism_table.json` has the library's own; `python -m docs.generate` writes it. Where other packages add mechanisms,
or a file has come that is not in the table, the registry is asked.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import pkgutil
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .registry import MECHANISM_PACKAGE, MECHANISMS

FILE = Path(__file__).with_name("mechanism_table.json")
FOLDER = Path(__file__).parent / "mechanisms"


def rows() -> list[dict[str, Any]]:
    """Return what each mechanism is, in alphabetical order.

    >>> [row["family"] for row in rows() if row["name"] == "performer"]
    ['linear']
    """
    table = json.loads(FILE.read_text(encoding="utf-8"))
    if entry_points(group=MECHANISM_PACKAGE) or table["files"] != files():
        return [describe(name) for name in MECHANISMS.names()]
    return table["mechanisms"]


def with_option(option: str) -> list[str]:
    """Return the mechanisms that have an option.

    >>> "local" in with_option("window_size"), with_option("widnow")
    (True, [])
    """
    return [row["name"] for row in rows() if option in {declared["name"] for declared in row["options"]}]


def make_table() -> str:
    """Return the content of the table: the library's own mechanisms."""
    own = f"{MECHANISM_PACKAGE}."
    described = [describe(name) for name in MECHANISMS.names() if MECHANISMS.get(name).__module__.startswith(own)]
    return json.dumps({"files": files(), "mechanisms": described}, indent=1) + "\n"


def files() -> list[str]:
    """Return the names of the files that define mechanisms, or help to."""
    return sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]))


def describe(name: str) -> dict[str, Any]:
    """Return what one mechanism declares of itself."""
    mechanism = MECHANISMS.get(name)
    said = inspect.getdoc(sys.modules[mechanism.__module__]) or inspect.getdoc(mechanism) or ""
    return {
        "name": name,
        "family": mechanism.family,
        "summary": said.splitlines()[0].removeprefix(f"{name}: ") if said else "",
        "modes": sorted(mechanism.modes),
        "constant_state": mechanism.constant_state,
        "exact": mechanism.limit.text,
        "source": mechanism.citation,
        "options": [
            {"name": option.name, "default": _default(option), "help": option.metadata.get("help", "")}
            for option in dataclasses.fields(mechanism.config_class)
        ],
    }


def _default(option: dataclasses.Field[Any]) -> Any:
    """Return the default of an option as JSON has it; the word `required` where there is none."""
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return "required" if option.default is dataclasses.MISSING else option.default
