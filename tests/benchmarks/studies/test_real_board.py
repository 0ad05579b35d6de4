"""The board of a pretrained model: its rows at a tiny size, what they are measured on, and the table."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.result_files import Document, read
from benchmarks.studies import real_board
from benchmarks.tables.real_board import real_board_section
from hf_linattn.evaluation.suite import SuiteOptions
from tests.evaluation.recall_reader import BUNDLED
from tests.evaluation.test_harness import TASK_FILES, task_dir, words

__all__ = ["task_dir"]

pytestmark = pytest.mark.tools
SIZES = real_board.Sizes(
    length=64, windows=3, long_length=400, long_windows=2, recall_lengths=(150, 200), prompts=2, items=3, fitted=256,
    block_size=64, batch_size=2,
)  # fmt: skip
MECHANISMS = {"linear": {}, "hedgehog": {}, "local": {"window_size": 1}, "streaming": {"window_size": 40}}


@pytest.fixture
def board(monkeypatch, tmp_path, task_dir):
    """Return what runs the study at this size, and its folder."""
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"text": words(900, seed)}) for seed in range(3)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    for name, value in {"MECHANISMS": MECHANISMS, "BEST": 1, "ROWS": ("original", "windows", *MECHANISMS)}.items():
        monkeypatch.setattr(real_board, name, value)
    monkeypatch.setattr(real_board, "Sizes", lambda: SIZES)
    options = functools.partial(SuiteOptions, tasks=("piqa", "boolq"), task_files=TASK_FILES)
    monkeypatch.setattr(real_board, "SuiteOptions", options)
    folder = tmp_path / "board"
    return lambda **given: real_board.main(str(BUNDLED), tmp_path, task_dir, folder=folder, **given), folder


def test_every_row_is_measured_once(board, monkeypatch):
    run, folder = board
    run(dtype="float32")
    rows = {file.stem: read(file) for file in folder.glob("*.json")}
    assert set(rows) == {"original", "windows", *MECHANISMS, "streaming+softmax"}
    kept = rows["streaming+softmax"]["plan"]
    assert kept == [{"mechanism": "streaming", "options": {"window_size": 40}, "layers": [0, 1, 3]}]
    assert rows["windows"]["state_bytes"]["row"] <= rows["linear"]["state_bytes"]["row"]
    assert {name: len(row["stages"]) for name, row in rows.items() if len(row["stages"]) > 1} == {"hedgehog": 2}
    assert {*rows["hedgehog"]["stages"]["calibrated"]["whole"][0]} == {"before", "after", "taken"}
    windows = real_board.read_material(str(BUNDLED), folder.parent, None, SIZES).windows
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float64)(windows, labels=windows).loss
    measured = rows["original"]["stages"]["patched"]
    assert measured["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert [(cell["task"], cell["chance"]) for cell in measured["tasks"]] == [("piqa", 0.5), ("boolq", 0.5)]
    assert [cell["length"] for cell in measured["recall"]] == [150, 200]
    monkeypatch.setattr(real_board, "run_row", lambda *given: pytest.fail("a row was measured again"))
    run(dtype="float32")


def stage(perplexity: float, found: float, **more: object) -> Document:
    recall = [{"length": 1024, "found": found, "num_samples": 20}]
    return {"perplexity": perplexity, "recall": recall, "seconds": 120.0, **more}


def test_the_table_has_a_line_for_each_stage():
    def whole(loss: float, score: float) -> Document:
        tasks = [{"score": score, "chance": 0.5}, {"score": score, "chance": 0.3}]
        return {"positions": [{"first": 1024, "loss": loss}, {"first": 2048, "loss": 2 * loss}], "tasks": tasks}

    provenance = {"dtype": "bfloat16", "device": "a CPU", "threads": 1}
    head = {"model": "one", "provenance": provenance}
    state = {"state_bytes": {"length": 8192, "row": 1_500_000, "softmax": 9e6}}
    rows = {
        "linear": {**head, **state, "stages": {
            "patched": stage(80.0, 0.0), "calibrated": stage(24.0, 0.25, calibration_seconds=60.0, **whole(3.5, 0.6)),
        }},
        "hybrid": {**head, **state, "provenance": {**provenance, "device": "another"}, "stages": {
            "calibrated": stage(30.0, 0.0, whole=[{"taken": False}]),
        }},
        "heads": {**head, **state, "stages": {"patched": stage(22.0, 1.0, **whole(3.25, 0.8))}},
        "original": {**head, "stages": {"patched": stage(20.0, 1.0, **whole(3.0, 0.8))}},
    }  # fmt: skip
    what, _, *lines = real_board_section(rows).split("\n")
    assert "one, bfloat16, on a CPU or another, CPU threads: 1. " in what
    assert "softmax has 9.0 MB. Perplexity of test books over the original's, 20.0; " in what
    assert [line.strip("| ").split(" | ") for line in lines[2:]] == [
        ["original", "", "", "1.000", "+0.000", "+0.000", "", "100%", "100%", "100%", "2"],
        ["heads", "1.5 MB", "`patch_model`", "1.100", "+0.250", "+0.500", "", "100%", "100%", "100%", "2"],
        ["linear", "1.5 MB", "`patch_model`", "4.000", "", "", "", "0%", "", "", "2"],
        ["linear", "1.5 MB", "`calibrate`", "1.200", "+0.500", "+1.000", "", "25%", "75%", "50%", "3"],
        ["hybrid", "1.5 MB", "`calibrate`, all fits taken back", "1.500", "", "", "", "0%", "", "", "2"],
    ]
