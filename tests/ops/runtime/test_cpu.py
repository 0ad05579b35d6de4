"""What is built, and what happens where nothing is."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path

import pytest
import torch

import hf_linattn
from hf_linattn import BuildError
from hf_linattn.ops.runtime import cpu as library
from tests.ops.cpu_cases import make_heads, make_mechanism


def test_it_is_built_where_there_is_a_compiler():
    if platform.machine() == "x86_64" and shutil.which("cc"):
        built = [library.load_variant(name) for name in library.VARIANTS]
        assert all(built) or hasattr(library.build(), "__asan_init")  # sanitizers take the one for this processor


def test_each_build_is_loaded_once_and_unknown_processors_have_none(monkeypatch):
    assert all(library.load_variant(name) is library.load_variant(name) for name in library.VARIANTS)
    assert library.load_variant("SVE256") is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not library.available() and not library.suits(torch.ones(1))


def test_what_it_suits(variant):
    x = torch.ones(1)
    assert library.suits(x) and not library.suits(x, x.double()) and not library.suits(x.to("meta"))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", ["linear", "local", "lsh"])
def test_the_build_of_another_version_is_refused_before_it_is_called(monkeypatch, name, older):
    """A struct with one more field, or a build that says nothing of its structs, as one of libc."""
    if older:
        monkeypatch.setattr(library, "load_variant", lambda _: ctypes.CDLL(None))
    else:
        kinds = {x: type(x.__name__, (x,), {"_fields_": [("more", ctypes.c_int64)]}) for x in arguments()}
        require = library._require_layout
        monkeypatch.setattr(library, "_require_layout", lambda *args: require(*args[:2], kinds[args[2]]))
    with pytest.raises(BuildError, match="build it again: `make install`"):
        make_mechanism(name, causal=True)(*make_heads(2, 100))


def arguments():
    found = [x for x in ctypes.Structure.__subclasses__() if x.__module__.startswith("hf_linattn.ops.")]
    return [x for x in found if x.__name__.endswith("Args")]


def test_every_function_says_what_struct_it_takes():
    from hf_linattn.ops.runtime import operands

    sources = (Path(hf_linattn.__file__).parent / "csrc").rglob("*.c")
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert all(f"LAYOUT({function}, " in text for function in operands.FORMS)
