"""What lies in the folder of a run, as far as it is there."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ...adapter_config import read_adapter_config
from ...chosen_plan import ChosenPlan
from ...errors import CheckpointError
from ...json_files import read_object
from ...plan import PatchConfig
from ...training.run_folders import ADAPTER
from ..card import patches_in
from ..schema import Report

PLANS = ("plan.json", "stages/plan.json")
EVALUATIONS = "evaluation*.json"  # what `hf-linattn eval --suite` wrote
NAMES = {"original": "original", "control": "control", "converted": "recovered"}  # as reports name them
POSITIONS = ("max_position_embeddings", "n_positions")  # what configs call them, GPT-2's the second
DEPTH = tuple[float, float]


@dataclass(frozen=True)
class Evidence:
    """A run.

    Attributes:
        folder: where it lies. report: its `report.json`.
        patches: path of a part of the model -> its patch; None: the folder holds no model and no adapters.
        alone: whether adapters are there without the model that they make.
        plan: how heads or layers were chosen; None: they were not.
        rows: of the suites that were run on it, as `hf-linattn eval --suite` writes them; each once.
        positions: that the model has, as its config says; None: it does not, or is not there.
    """

    folder: Path
    report: Report
    patches: Mapping[str, PatchConfig] | None = None
    plan: ChosenPlan | None = None
    rows: tuple[Mapping[str, Any], ...] = ()
    alone: bool = False
    positions: int | None = None


@dataclass(frozen=True)
class Recall:
    """Shares of answers that a model wrote, mean over tests: by (depth, length) and by (test, length)."""

    model: str
    by_depth: Mapping[tuple[DEPTH, int], float]
    by_test: Mapping[tuple[str, int], float]


def read_evidence(folder: str | os.PathLike[str]) -> Evidence:
    """Read the folder of a run; `CheckpointError` if it has no report, or a file cannot be read."""
    path = Path(folder)
    report = Report.load(path)
    chosen = next((path / name for name in PLANS if (path / name).is_file()), None)
    plan = None if chosen is None else ChosenPlan.load(chosen)
    patches, adapter = patches_in(path), read_adapter_config(path / ADAPTER)
    alone = patches is None and adapter is not None
    if adapter is not None and alone:
        patches = {"": PatchConfig.from_dict(adapter["hf_linattn"])}
    return Evidence(path, report, patches, plan, tuple(_newest(path.glob(EVALUATIONS))), alone, _positions(path))


def _positions(folder: Path) -> int | None:
    file = folder / "config.json"
    said = read_object(file, "save the model again") if file.is_file() else {}
    said = said.get("base_config", said)  # of a converted model
    return min((said[name] for name in POSITIONS if isinstance(said.get(name), int)), default=None)


def _newest(files: Iterable[Path]) -> list[Mapping[str, Any]]:
    """Return the rows of suites: of each recall test at each length, and of each other suite, those of one file.

    The file is the newest that has them, the last by name of files as new: models are compared on the same items.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
        own = defaultdict(list)
        for row in _rows(file):
            facts = row["facts"]
            test = (facts.get("task", row["name"]), facts["length"]) if row["suite"] == "recall" else ()
            own[row["suite"], *test].append(row)
        found |= own
    return [row for rows in found.values() for row in rows]


def recalls(rows: Iterable[Mapping[str, Any]]) -> list[Recall]:
    """Return what each model recalled, of those that were measured."""
    found = [row for row in rows if row["suite"] == "recall" and row["metric"] == "found"]
    roles = {role for role in NAMES if any(row.get(role) for row in found)}
    parts = [row for row in found if "depth" in row["facts"]]
    parts = [row for row in parts if all(row.get(role) for role in roles)] or parts  # means over the same tests
    whole = [row for row in found if "depth" not in row["facts"]]
    return [
        Recall(
            name,
            _means(parts, role, lambda row: (tuple(row["facts"]["depth"]), row["facts"]["length"])),
            _means(whole, role, lambda row: (row["name"], row["facts"]["length"])),
        )
        for role, name in NAMES.items()
        if role in roles
    ]


def losses_by_position(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return model -> its rows of `PositionRow`'s fields, as the suite `language` measured them."""
    found = [row for row in rows if row["suite"] == "language" and "first" in row["facts"]]
    read = {
        name: [row["facts"] | {"loss": row[role]["value"], "low": row[role]["low"], "high": row[role]["high"]}
               for row in found if row.get(role)]
        for role, name in NAMES.items()
    }  # fmt: skip
    return {name: own for name, own in read.items() if own}


def _means(rows: Sequence[Mapping[str, Any]], role: str, key: Any) -> dict[Any, float]:
    """Return the means over the tests of what a model recalled, each test as heavy as any other, by a key of rows."""
    values: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        if row.get(role):
            values[key(row)].append(row[role]["value"])
    return {place: fmean(own) for place, own in values.items()}


def _rows(file: Path) -> Sequence[Mapping[str, Any]]:
    remedy = "give what `hf-linattn eval --suite` wrote, or move the file away"
    try:
        return json.loads(file.read_text(encoding="utf-8"))["rows"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(file)!r} has no rows of a suite ({error!r}); {remedy}") from error
