"""What is built, and what happens where nothing is."""

from __future__ import annotations

import platform
import shutil

import torch

from hf_linattn.ops.native import library


def test_it_is_built_where_there_is_a_compiler():
    if platform.machine() == "x86_64" and shutil.which("cc"):
        assert all(library.load_variant(name) for name in library.VARIANTS)


def test_each_build_is_loaded_once_and_unknown_processors_have_none(monkeypatch):
    assert all(library.load_variant(name) is library.load_variant(name) for name in library.VARIANTS)
    assert library.load_variant("SVE256") is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not library.available() and not library.suits(torch.ones(1))


def test_what_it_suits(variant):
    x = torch.ones(1)
    assert library.suits(x) and not library.suits(x, x.double()) and not library.suits(x.to("meta"))
