"""The JSON files under `benchmarks/results`: their names, and reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

Document = dict[str, Any]  # of a result file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = (
    "cpu", "cpu_avx2", "cpu_xeon", "cpu_emerald_rapids", "cpu_genoa", "cpu_granite_rapids",
    "cpu_granite_rapids_bfloat16", "gpu", "gpu_small_tiles",
)  # fmt: skip
SPEED_FILES = tuple(f"{machine}{kind}.json" for machine in MACHINES for kind in ("", "_torch", "_compiled", "_triton"))
GPU_FILES = tuple(name for name in SPEED_FILES if name.startswith("gpu"))
GPU_PAGE_FILES = ("gpu.json", "gpu_small_tiles.json")  # the kernels of Hopper and those of other cards
SPEED_PAGE_FILES = ("cpu_granite_rapids.json", "cpu_granite_rapids_bfloat16.json", "gpu.json")
PAGES_FILE = "cpu_genoa.json"  # the newest complete result of a CPU: the one that mechanisms' pages show
ZERO_SHOT_FILE = "zero_shot.json"
USABLE_FILE = "usable.json"
SUPPORT_FILE = "support.json"
RETRIEVAL_FILE = "retrieval.json"
RECALL_FILE = "recall_smollm2.json"
CHOSEN_PLAN_FILE = "choose_plan_smollm2.json"
CALIBRATION_FILE = "calibration.json"
LONG_INPUTS_FILES = ("cpu_long_inputs.json", "cpu_long_inputs_bfloat16.json")
PEERS_FILE = "cpu_peers.json"
DEPTH_FILE, DEPTH_PLOT = "depth.json", "depth.png"
START_FILE = "start.json"
REAL_BOARD = "real_board"  # a folder, with a file for each row
PLAN_GRID = "plan_grid"  # a folder, with a file for each model
RECALL_SUITE = "recall_suite"  # a folder, with a file for each run of `hf-linattn eval --suite recall`
HEADS_FILE = "heads_speed.json"
HARD_KEYS_FILE = "hard_keys_speed.json"
COMPILED_DECODING_FILE = "compiled_decoding.json"
HARD_KEY_PLANS_FILE = "hard_key_plans_smollm2.json"
EQUAL_BYTES_FILE = "equal_bytes_smollm2.json"
RECIPE_PLANS_FILE = "recipe_plans.json"
RECOVERED_PLANS_FILE = "recovered_plans_smollm2.json"
ENCODER_TASKS_FILE = "encoder_tasks.json"
LONG_DOCUMENTS_FILE, LONG_DOCUMENTS_SPEED_FILE = "long_documents.json", "long_documents_speed.json"
LONG_DOCUMENTS_SPEED_BFLOAT16_FILE = "long_documents_speed_bfloat16.json"
LONG_EMBEDDINGS_FILE = "long_embeddings.json"
MQAR_FILE, MQAR_PLOT = "mqar.json", "mqar.png"
MQAR_SWEEP_FILE, MQAR_SWEEP_PLOT = "mqar_sweep.json", "mqar_sweep.png"
RECALL_BOARD_FILE, RECALL_BOARD_PLOT = "recall_board.json", "recall_board.png"
AS_IT_COMES, CALIBRATED = "untrained", "calibrated"  # how a conversion is, as it comes and after `calibrate`
CONTROL = "control"  # softmax, trained as the conversions are
CUT, WINDOWS = "cut", "windows"  # rows of a classifier that reads the first window, or all of them
PROBE = "probe, "  # before the name of a reader: a logistic regression on its states
ORIGINAL, MEAN_OF_VALUES = "original", "mean of the values"  # rows of the zero-shot results that are no mechanism


def read(path: Path) -> Document:
    """Return a JSON document."""
    return json.loads(path.read_text(encoding="utf-8"))


def resume(path: Path, said: Document, empty: Document) -> Document:
    """Return the results that a study goes on with; of a file that is not there yet `said` and `empty`.

    Args:
        said: what all results of a file have in common, such as the model. empty: what has no results so far.

    Raises:
        typer.BadParameter: the results of the file have something else in common.
    """
    if not path.exists():
        return {**said, **empty}
    document = read(path)
    for name, value in said.items():
        check_same(path, name, document.get(name), value)
    return document


def check_same(path: Path, name: str, found: Any, given: Any) -> None:
    """Raise `typer.BadParameter` where the results of a file are of something else than what is measured now."""
    if found != given:
        raise typer.BadParameter(f"{name} is {given!r}, and {path} has results of {found!r}; move it away")


def read_all(results: Path, *names: str) -> dict[str, Document]:
    """Return name -> document of the files that exist."""
    return {name: read(results / name) for name in names if (results / name).exists()}


def board_reports(results: Path = RESULTS) -> dict[str, Document]:
    """Return "<model>-<recipe>[-seed<n>]" -> the report of that recipe."""
    return {path.stem: read(path) for path in sorted((results / "board").glob("*.json"))}


def recovery_reports(results: Path = RESULTS) -> dict[str, Document]:
    """Return "<model>-<mechanism>" -> the report of that recipe."""
    return {path.stem: read(path) for path in sorted((results / "recovery").glob("*.json"))}
