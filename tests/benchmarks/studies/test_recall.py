"""The study of recall goes on where it stopped; the folder of SmolLM2 is not made of nothing."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import smollm2
from benchmarks.studies import recall
from hf_linattn import DataError
from hf_linattn.evaluation.recall import RECALL_TASKS, recall_rows
from tests.evaluation.recall_reader import BUNDLED

pytestmark = pytest.mark.tools


def test_all_tasks_are_in_the_table():
    cases = recall.find_cases(None, None, None, "bfloat16", False)
    assert {case.task for case in cases} == set(RECALL_TASKS)
    assert [case.length for case in cases if case.task == "single_noise"] == [512, 1024, 2048, 4096]
    assert all(case.samples == (100 if case.task == "single_noise" else 20) for case in cases)
    some = recall.find_cases(["copying"], [700], 3, "float32", True)
    assert some == [recall.Case("copying", 700, 3, "float32", True)]


def test_a_run_goes_on_inside_a_row(monkeypatch):
    monkeypatch.setattr(recall, "TOKENS", 400)  # two prompts a batch
    cases = recall.find_cases(["single_noise", "copying"], [200], 5, "float32", False)
    *_, whole = recall.run(str(BUNDLED), cases, {})
    (started,) = recall.run(str(BUNDLED), cases, {}, limit=0)
    assert [len(row["answers"]) for row in started["rows"]] == [2]
    *_, resumed = recall.run(str(BUNDLED), cases, started)
    for a, b in zip(whole["rows"], resumed["rows"], strict=True):
        assert a["rows"] == b["rows"] and a["examples"] == b["examples"] and "answers" not in b
        assert a["rows"][0]["num_samples"] == 5 and a["task"] == a["rows"][0]["task"]
    assert recall_rows(started["rows"][0]["answers"])[0]["num_samples"] == 2
    assert list(recall.run(str(BUNDLED), cases, resumed)) == []


def test_a_wheel_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(DataError, match=r"the package 'no_such_package' is not installed; make smollm2"):
        smollm2.find_file()
    spec = importlib.util.find_spec("transformers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match="has no SmolLM2"):
        smollm2.find_file()
