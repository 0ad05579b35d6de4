"""The folder above a checkout, which has the package's name: what `import hf_linattn` finds from there."""

from __future__ import annotations

import tomllib
from importlib.machinery import PathFinder
from pathlib import Path

import hf_linattn

ROOT = Path(hf_linattn.__file__).resolve().parent.parent


def test_an_editable_install_is_found_before_the_folder_of_the_checkout(tmp_path):
    """As a folder on the path it wins over a namespace package; a finder of setuptools would be asked too late."""
    (tmp_path / "hf_linattn").symlink_to(ROOT)
    above = PathFinder.find_spec("hf_linattn", [str(tmp_path)])
    assert above is not None and above.origin is None, "alone, the checkout is an empty namespace package"
    found = PathFinder.find_spec("hf_linattn", [str(tmp_path), str(ROOT)])
    assert found is not None and Path(found.origin).samefile(hf_linattn.__file__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["distutils"]["editable_wheel"]["mode"] == "compat"
