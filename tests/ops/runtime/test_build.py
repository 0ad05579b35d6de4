"""How the C is compiled: for two instruction sets side by side, of the same sources."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Distribution
from setuptools.command.build_ext import build_ext

SETUP = runpy.run_path(str(Path(__file__).parents[3] / "setup.py"))


def test_each_instruction_set_has_objects_of_its_own(monkeypatch):
    """In one folder the one would link what the other has written, and a processor without AVX-512 would crash."""
    folders: dict[str, str] = {}
    monkeypatch.setattr(build_ext, "build_extension", lambda self, ext: folders.update({ext.name: self.build_temp}))
    command = SETUP["BuildApart"](Distribution())
    command.build_temp = "build"
    for extension in SETUP["extensions"]():
        command.build_extension(extension)
    assert len(folders) == len(set(folders.values())) == 2
    assert command.build_temp == "build"
