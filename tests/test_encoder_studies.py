"""The studies of encoders, at a tiny size: rows go on where a run stopped, and softmax changes nothing."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.result_files import CONTROL, ROOT
from benchmarks.studies import encoder_tasks
from benchmarks.studies.encoder_tasks import CONVERSIONS, TASKS, Study

pytestmark = pytest.mark.tools
BERT = str(ROOT / "recipes" / "pretrained" / "bert")
WORDS = ("print", "return", "import", "class", "yield", "raise")


def write_sentences(folder: Path, name: str, columns: tuple[str, ...], count: int) -> None:
    """Write rows of which the first word of the first sentence tells the class."""
    draw = random.Random(name)
    rows = []
    for i in range(count):
        texts = [" ".join([WORDS[i % 2], *draw.choices(WORDS, k=draw.randint(1, 9))]) for _ in columns]
        rows.append({**dict(zip(columns, texts, strict=True)), "label": i % 2, "idx": i})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_encoder_tasks_go_on_with_the_missing_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [replace(task, length=16, epochs=(1, 1), most=30) for task in TASKS[1:]]
    for task in tasks:
        for split, count in (("train", 40), ("validation", 9)):
            write_sentences(tmp_path, f"{task.name}_{split}", task.columns, count)
    monkeypatch.setattr(encoder_tasks, "BATCH", 8)
    output = tmp_path / "out" / "encoder_tasks.json"
    some = {name: CONVERSIONS[name] for name in (CONTROL, "linear")}

    def run(conversions: dict[str, encoder_tasks.Conversion]) -> list[dict]:
        Study(BERT, tmp_path, tmp_path, output).run(range(1), tasks, conversions)
        return json.loads(output.read_text())["rows"]

    first = run({CONTROL: some[CONTROL]})
    both = run(some)
    assert [row for row in both if row["row"] != "linear"] == first
    for task in tasks:
        rows = {row["row"]: row for row in both if row["task"] == task.name}
        assert rows[CONTROL]["converted"] == rows["original"]["score"], "softmax computes what the original does"
        assert rows["linear"]["texts"] == 27 and rows["linear"]["steps"] == rows[CONTROL]["steps"] == 3
