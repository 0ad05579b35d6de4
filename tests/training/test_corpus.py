"""The bundled corpus: what it holds, and that no package is on two sides of the split."""

from __future__ import annotations

import json
import sys
from pydoc_data.topics import topics

import pytest

from hf_linattn.errors import DataError
from hf_linattn.training.corpus import (
    SPLITS,
    _documents,
    installed_documentation,
    module_documentation,
    split_of,
    standard_library_corpus,
)


@pytest.fixture(scope="module")
def corpus():
    return standard_library_corpus()


def test_no_package_is_in_two_splits(corpus):
    packages = {split: {name.partition(".")[0] for name in corpus[split]["module"]} for split in SPLITS}
    assert not packages["train"] & packages["validation"]
    assert not packages["train"] & packages["test"]
    assert not packages["validation"] & packages["test"]


def test_every_split_is_large_enough_to_be_used(corpus):
    characters = {split: sum(map(len, corpus[split]["text"])) for split in SPLITS}
    assert characters["train"] > 1_500_000
    assert min(characters["validation"], characters["test"]) > 60_000


def test_an_accelerator_twin_follows_its_public_name():
    for twin, public in {"_pydecimal": "decimal", "_pyio": "io", "_strptime": "strptime"}.items():
        assert split_of(twin) == split_of(public)


def test_split_shares_are_what_they_say():
    names = [f"package{index}" for index in range(4000)]
    shares = {split: sum(split_of(name) == split for name in names) / len(names) for split in SPLITS}
    assert shares == pytest.approx(SPLITS, abs=0.02)


def test_documents_hold_the_docstrings_python_itself_shows(corpus):
    documents = {row["module"]: row["text"] for split in SPLITS for row in corpus[split]}
    assert json.__doc__.strip() in documents["json"]
    assert json.loads.__doc__.strip().splitlines()[0] in documents["json"]
    assert "class JSONEncoder(object)" in documents["json.encoder"]
    assert {name for name in documents if ".topics:" in name} == {f"pydoc_data.topics:{name}" for name in topics}


def test_no_test_package_and_no_installed_package(corpus):
    names = [name for split in SPLITS for name in corpus[split]["module"]]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
    assert not [name for name in names if {"test", "tests", "idle_test"} & set(name.split("."))]


def test_it_is_deterministic(corpus, monkeypatch):
    some = {"argparse", "csv", "email", "heapq", "importlib", "json", "statistics", "string", "zipfile"}
    known = {row["module"]: row["text"] for split in SPLITS for row in corpus[split]}
    monkeypatch.setattr(sys, "stdlib_module_names", some)
    again = {name: text for name, text, _ in _documents.__wrapped__() if text.strip()}
    assert {name.partition(".")[0] for name in again} == some
    assert all(known[name] == text for name, text in again.items())


def test_source_is_added_to_the_split_of_its_module(corpus, monkeypatch):
    some = [document for document in _documents() if document[0].startswith(("a", "e", "p", "s"))]
    monkeypatch.setattr("hf_linattn.training.corpus._documents", lambda: some)
    without, with_source = standard_library_corpus(), standard_library_corpus(include_source=True)
    for split in SPLITS:
        assert set() < set(without[split]["text"]) < set(with_source[split]["text"])
        assert all(split_of(name) == split for name in with_source[split]["module"] if ".topics:" not in name)


def test_a_document_reads_like_help():
    source = '''
"""Shapes."""
class Disc(Shape):
    """A disc."""
    def area(self, *, unit="m"):
        """Return the area.

        In square units.
        """
    def undocumented(self): pass
async def fetch(url): "Fetch it."
'''
    assert module_documentation("shapes", source) == (
        "Help on module shapes:\n\nShapes.\n\nclass Disc(Shape)\n    A disc.\n\n"
        "    area(self, *, unit='m')\n        Return the area.\n\n        In square units.\n\n"
        "fetch(url)\n    Fetch it.\n"
    )
    assert module_documentation("bare", "x = 1") == ""


def test_the_documentation_of_an_installed_package_has_its_modules_and_no_tests(tmp_path, monkeypatch):
    package = tmp_path / "shapes_of_test"
    (package / "tests").mkdir(parents=True)
    for name in ("__init__", "area", "tests/test_area"):
        (package / f"{name}.py").write_text(f'"""What {name} is for."""\n')
    (package / "bare.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    documents = installed_documentation(["shapes_of_test"])
    assert documents["module"] == ["shapes_of_test", "shapes_of_test.area"]
    assert documents["text"][1] == "Help on module shapes_of_test.area:\n\nWhat area is for.\n"
    assert "shapes_of_test" not in sys.modules, "read, not imported"
    with pytest.raises(DataError, match="packages: 'no_shapes' is not installed or documents nothing"):
        installed_documentation(["shapes_of_test", "no_shapes"])
