"""The notebooks are as they are kept: valid, without outputs, with public names alone. `make notebooks` runs them."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import nbformat
import pytest

from tests.test_project import ROOT, read

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PRIVATE = re.compile("_(?!_).*")
NAMED_TUPLE = ("_replace", "_fields", "_asdict")  # public, in spite of their names


def private_names(code: str) -> list[str]:
    """Return what code imports from this library that is not public, and what it reads of an object that is not."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in NAMED_TUPLE:
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_linattn":
            module = importlib.import_module(node.module)
            public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
            names = {name.name for name in node.names} - {*public}
            found += [f"{node.module}.{name}" for name in names if f"import {name}" not in read("docs/extending.md")]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_has_no_outputs_and_uses_public_names(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert private_names("\n".join(cell.source for cell in cells)) == []
    assert f"({'../notebooks/' + path.name})" in read("docs/notebooks.md")


def test_private_names_are_seen() -> None:
    private = "from hf_linattn.testing import _run\nfrom hf_linattn import PLAIN\nfrom torch import nn\nmodel._cache"
    assert private_names(private) == ["hf_linattn.testing._run", "hf_linattn.PLAIN", "_cache"]
    assert private_names("from hf_linattn import patch_model\ntype(patch_model).__name__") == []
