"""The guides say what a reader has to do: every command and program of them runs, in a new checkout, in order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from hf_linattn.cli import app
from hf_linattn.report import Report
from tests import readme_commands
from tests.test_project import PAGES, ROOT, read, relative

RUNS = {"long-classifiers": "runs/files-local", "long-embeddings": "runs/embeddings-hedgehog"}
ABOUT = {"CHANGELOG.md", "docs/command-line.md"}  # pages about commands, whose lines are none
COMMAND = re.compile(r"^(?:    )?hf-linattn (\S.*)", re.M)
BLOCK = re.compile(r"(?P<before>[^\n]*)\n\n```(?P<language>python|sh)\n(?P<code>.*?)^```", re.M | re.S)


def steps(guide: str) -> Iterator[tuple[str | None, str, str]]:
    """Yield the blocks of a guide: the name under which it is to be saved, its language, the code."""
    for found in BLOCK.finditer(read(f"docs/{guide}.md")):
        saved = re.search(r"Save as `([\w.]+)`:$", found["before"])
        yield saved and saved[1], found["language"], found["code"]


def checkout(folder: Path) -> dict[str, str]:
    """Copy what a reader has after a clone and its installation, and return the environment of a shell there."""
    unused = shutil.ignore_patterns("__pycache__")
    for name in ("hf_linattn", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=unused)
    (folder / "bin").mkdir()
    for name, command in {"python": "", "hf-linattn": "-m hf_linattn"}.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    return {**os.environ, **paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count())}


@pytest.mark.parametrize("guide", RUNS)
def test_a_guide_has_files_to_save_and_commands_that_use_them(guide):
    found = [*steps(guide)]
    commands = "".join(code for _, language, code in found if language == "sh")
    saved = [name for name, _, _ in found if name]
    assert len(saved) == 2 and all(f"python {name}" in commands for name in saved)
    assert RUNS[guide] in commands and commands.count("hf-linattn") >= 4
    for _, language, code in found:
        if language == "python":
            compile(code, guide, "exec")


def test_commands_and_their_times_are_read_from_a_page():
    page = "Text\n\n    a b     # 3 minutes: why\n\n```python\n# 60 seconds\nx = 1\n```\n\n    c     # hours\n    d\n"
    found = [(step.code, step.python, step.seconds, step.in_hours) for step in readme_commands.steps(page)]
    blocks = [("# 60 seconds\nx = 1\n", True, 60, False), ("c", False, 3600, True), ("d", False, None, False)]
    assert found == [("a b", False, 180, False), *blocks]
    late = [readme_commands.Done(step, 100, 0, "").late() for step in readme_commands.steps(page)]
    assert late == [False, True, False, True]
    assert len([*readme_commands.steps(read("README.md"))]) > 10


def commands() -> list[str]:
    """Return what follows the program's name on lines of their own, of all pages."""
    texts = [read(relative(page)).replace("\\\n", " ") for page in PAGES if relative(page) not in ABOUT]
    return sorted({said for text in texts for said in COMMAND.findall(text)})


@pytest.mark.parametrize("said", commands())
def test_a_command_on_a_page_can_be_read(said):
    command, context, words = typer.main.get_command(app), None, shlex.split(said, comments=True)
    name = "hf-linattn"
    while hasattr(command, "resolve_command"):
        context = command.make_context(name, [*words], parent=context)
        name, command, words = command.resolve_command(context, words)
    command.make_context(name, words, parent=context)  # raises what a shell would be told


@pytest.mark.slow
@pytest.mark.parametrize("guide", RUNS)
def test_every_command_of_a_guide_runs(guide, tmp_path):
    environment = checkout(tmp_path)
    for saved, language, code in steps(guide):
        if saved:
            (tmp_path / saved).write_text(code)
            continue
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    report = Report.load(tmp_path / RUNS[guide])
    assert [row.reading for row in report.readings] == ["cut", "windows"]
    again = [sys.executable, "-c", RELOAD[guide].format(folder=RUNS[guide])]
    subprocess.run(again, cwd=tmp_path, env=environment, check=True)


# without importing the library
RELOAD = {
    "long-classifiers": (
        "from transformers import AutoModelForSequenceClassification as A;"
        "A.from_pretrained('{folder}', trust_remote_code=True)"
    ),
    "long-embeddings": (
        "from sentence_transformers import SentenceTransformer as S;"
        "S('{folder}', trust_remote_code=True, device='cpu').encode(['a text'])"
    ),
}
