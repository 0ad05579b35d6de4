"""The package of docs/extending.md, installed beside the library and found without being imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

from hf_linattn import list_mechanisms
from hf_linattn.testing.invariants import CAUSAL_ONLY, INVARIANTS
from tests.test_project import ROOT, code_blocks

NAME = "gated_mean"
PROGRAM = f"""
import json

import torch
from hf_linattn import list_mechanisms
from hf_linattn.testing import check_mechanism

torch.set_num_threads(1)
listed = list_mechanisms()
report = check_mechanism({NAME!r}, ["llama"])
failures = [(check.case.mode, check.invariant, check.error) for check in report.failures]
print(json.dumps([listed, len(report.checks), failures]))
"""


def install(site: Path) -> None:
    """Put the package's module and metadata into a folder as pip does, but without a build and its setuptools."""
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


def test_an_installed_mechanism_is_listed_and_keeps_every_invariant(tmp_path: Path):
    install(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed, num_checks, failures = json.loads(done.stdout.splitlines()[-1])
    assert NAME not in list_mechanisms() and set(listed) == {NAME, *list_mechanisms()}
    assert num_checks == 2 * len(INVARIANTS) - len(CAUSAL_ONLY) and failures == []
