"""Studies go on with results of the same model and settings alone, and leave others as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks.measure.classifiers import KeptRows
from benchmarks.result_files import Document, read, resume
from benchmarks.studies import mqar_sweep, real_board, recall, recall_board
from benchmarks.studies.choose_plan import PROMPTS_SEED, Study

pytestmark = pytest.mark.tools
MODEL = "absent/one"  # no study reads it before the file
FOUND: Document = {"model": "another", "prompts_seed": PROMPTS_SEED, "provenance": {"dtype": "float32"}, "rows": []}
BOARD = {"length": 1024, "batch_tokens": 2048, "recall": 0.25, "samples": 100, "seed": 1, "tokens": 64, "rate": 0.5}


def study(dtype: torch.dtype) -> Callable[[Path], Any]:
    return lambda output: Study(MODEL, Path("books"), dtype, output)


STUDIES: dict[str, tuple[Callable[[Path], Any], Document, str]] = {
    "classifiers": (lambda output: KeptRows(output, "a study", model="one"), FOUND, "model is 'one'"),
    "epochs": (lambda output: KeptRows(output, "a study", epochs=2.0), {**FOUND, "epochs": 4.0}, r"epochs is 2\.0"),
    "plans": (study(torch.float32), FOUND, "model is 'one'"),
    "dtype": (study(torch.bfloat16), {**FOUND, "model": "one"}, "dtype is 'bfloat16', .* results of 'float32'"),
    "recall": (lambda output: recall.main(MODEL, output=output), FOUND, "model is 'one'"),
    "real_board": (lambda output: real_board.main(MODEL, Path(), folder=output.parent), FOUND, "model is 'one'"),
    "mqar_sweep": (lambda output: mqar_sweep.main(output), {"task": {}}, "task is .*'vocabulary': 1024"),
    "tokens": (lambda output: recall_board.main(output=output, tokens=32, rate=0.5), {"task": BOARD}, "'tokens': 32"),
    "weights": (
        lambda output: recall_board.main(output=output, tokens=64, rate=0.5),
        {"task": BOARD, "teachers": {"llama-recall": "0"}}, "the digest of llama-recall's weights is",
    ),
    "rate": (lambda output: recall_board.main(output=output, tokens=64, rate=0.1), {"task": BOARD}, r"'rate': 0\.1"),
}


@pytest.mark.parametrize("name", STUDIES)
def test_results_of_something_else_are_refused_and_stay_as_they_are(tmp_path: Path, name: str) -> None:
    run, found, message = STUDIES[name]
    (tmp_path / "results.json").write_text(text := json.dumps(found))
    with pytest.raises(typer.BadParameter, match=rf"{message}.*; move it away"):
        run(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_text() == text


def test_results_of_the_same_are_gone_on_with(tmp_path: Path) -> None:
    file, said = tmp_path / "results.json", {"task": BOARD, "model": "one"}
    assert resume(file, said, {"rows": []}) == {**said, "rows": []} and not file.exists()
    file.write_text(json.dumps({**said, "rows": [1], "runs": []}))
    assert resume(file, said, {"rows": []}) == read(file)
