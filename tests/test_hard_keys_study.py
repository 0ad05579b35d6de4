"""The study of what hard keys cost, at a tiny size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.result_files import HARD_KEYS_FILE, RESULTS, read
from benchmarks.studies import hard_keys

pytestmark = pytest.mark.tools


def test_both_precisions_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hard_keys, "TIMES", replace(hard_keys.TIMES, budget=0.0, min_repeats=1))
    hard_keys.main(tmp_path / "results.json", 260)
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["provenance"]["dtype"] for run in runs] == ["float32", "bfloat16"]
    for run in (*runs, *read(RESULTS / HARD_KEYS_FILE)["runs"]):
        for row in (run["prompt"], run["token"]):
            for name in hard_keys.WINDOWS:
                times = row[name]["median"], row[f"{name}, hard keys"]["median"]
                assert row[f"{name}, hard keys"]["share"] == pytest.approx(times[0] / times[1])
