"""The package of docs/extending.md, installed beside the library and found without being imported."""

from __future__ import annotations

import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType

from hf_linattn import list_mechanisms
from hf_linattn.cards import loading_lines, packages_of, sources
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing import check_mechanism
from hf_linattn.testing.invariants import CAUSAL_ONLY, INVARIANTS
from tests.helpers import ask_only
from tests.test_project import code_blocks

NAME = "gated_mean"


def install(site: Path) -> str:
    """Put the package's module and metadata into a folder as pip does, without a build; return the module's name."""
    project = tomllib.loads(code_blocks("docs/extending.md", "toml")[0])
    (module,) = project["tool"]["setuptools"]["py-modules"]
    (site / f"{module}.py").write_text(code_blocks("docs/extending.md", "python")[0], encoding="utf-8")
    name, version = (project["project"][field] for field in ("name", "version"))
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = ConfigParser()
    points.read_dict(project["project"]["entry-points"])
    with (metadata / "entry_points.txt").open("w") as file:
        points.write(file)
    return module


def test_an_installed_mechanism_is_listed_and_keeps_every_invariant(tmp_path: Path, monkeypatch):
    known, module = list_mechanisms(), install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(MECHANISMS, "_discovered", False)
    assert NAME not in known and module not in sys.modules and set(list_mechanisms()) == {NAME, *known}
    report = check_mechanism(NAME, ["llama"])
    assert len(report.checks) == 2 * len(INVARIANTS) - len(CAUSAL_ONLY)
    assert [(check.case.mode, check.invariant, check.error) for check in report.failures] == []
    monkeypatch.delitem(sys.modules, module)


def test_a_card_names_the_package_of_a_mechanism(tmp_path: Path, monkeypatch):
    module = install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(MECHANISMS, "_discovered", False)
    monkeypatch.setattr(MECHANISMS, "_entries", dict(MECHANISMS._entries))
    packages = packages_of([NAME, "linear"])
    assert packages == ["hf-linattn-gated-mean"]
    assert "# pip install hf_linattn hf-linattn-gated-mean\n" in loading_lines("AutoModel", "me/mine", None, packages)
    assert sources([NAME, "linear"]) == sources(["linear"]), "without a paper there is no entry"
    monkeypatch.delitem(sys.modules, module)


def test_the_plain_mean_has_a_report_that_says_what_it_forgot(monkeypatch):
    """A mechanism without a product of matrices, whose outputs have no gradient of queries and keys."""
    monkeypatch.setattr(MECHANISMS, "_entries", {name: MECHANISMS.get(name) for name in list_mechanisms()})
    ask_only(monkeypatch, "1 causality", "9 reference", "11 linear cost")
    package = ModuleType("plain_mean")
    monkeypatch.setitem(sys.modules, "plain_mean", package)
    code = code_blocks("docs/extending.md", "python")[0].replace(NAME, "plain_mean")
    exec(code.replace("repeat_heads(own, query), gate)", "repeat_heads(own, query), 0.0)"), vars(package))
    report = check_mechanism("plain_mean", ["bert"])
    forgot = "output does not depend on query at all"
    assert {(check.invariant, check.case.mode): check.error for check in report.checks} == {
        ("1 causality", "causal"): forgot, ("9 reference", "causal"): forgot, ("9 reference", "bidirectional"): forgot,
        ("11 linear cost", "causal"): None, ("11 linear cost", "bidirectional"): None,
    }
