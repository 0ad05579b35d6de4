"""The studies of hard keys: what they cost, at a tiny size, and which plans have the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.result_files import HARD_KEYS_FILE, RESULTS, read
from benchmarks.studies import hard_key_plans, hard_keys
from hf_linattn.chosen_plan import PlanRecord

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


RECORD = PlanRecord("LlamaForCausalLM", [2, 2], "head", [], {}, [[0.1, 0.2], [0.9, 0.3]], "slope", "recall")


def test_the_heads_of_the_largest_scores_stay_exact():
    plan = hard_key_plans.plan_with(RECORD, 2, "streaming", {"window_size": 9})
    assert plan.record.kept == [[1, 0], [1, 1]]
    assert list(plan) == [{"mechanism": "streaming", "options": {"window_size": 9}, "layers": [0]}]


@pytest.mark.parametrize("spare", [0, 1, 3 * 512 - 1])
def test_the_window_beside_hard_keys_is_the_largest_that_fits(spare):
    original = 4096 * 4 * 512  # four heads, 512 bytes for a key and its value
    size = {"length": 4096, "patched": (4096 + 3 * 100) * 512 + spare, "original": original}
    assert hard_key_plans.equal_window(size, RECORD, 1) == {"window_size": 97, "num_sink_tokens": 4}
