"""The report survives the way through JSON, and refuses what it cannot be."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from importlib.metadata import version

import pytest
import torch
import transformers

import hf_linattn
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.evaluation import MemoryRow, SpeedRow, Spread
from hf_linattn.report import Evaluation, Perplexities, Report, Training, collect_provenance, schema


@pytest.fixture(scope="module")
def report():
    slow, fast = Spread(10.0, 9.0, 11.0), Spread(20.0, 15.5, 30.0)
    return Report(
        base_model="gpt2",
        mechanism="performer",
        data="bundled",
        options={"num_features": 128, "kernel": "relu"},
        perplexity=Perplexities(original=9.0, control=8.0, converted=300.0, recovered=10.0),
        evaluation=Evaluation(max_length=512, stride=256, num_tokens=1000),
        training=Training(
            tokens=2_000_000,
            recovered_learning_rate=1e-3,
            control_learning_rate=3e-4,
            learning_rate_grid=(3e-4, 1e-3),
            control_learning_rate_grid=(3e-4,),
            search_tokens=100_000,
        ),
        provenance=collect_provenance(7, "accelerate launch recipes/finetune.py"),
        speed=(SpeedRow(256, 1, slow, fast, slow, fast), SpeedRow(512, 1, fast, slow)),
        memory=(MemoryRow(256, 100, 200, 10, 20), MemoryRow(512, 100, 200)),
    )


def changed(report, path, value):
    """Return the JSON text with the field at `path` set to `value`, or removed if that is `...`."""
    data = json.loads(report.to_json())
    *parents, last = path
    target = data
    for parent in parents:
        target = target[parent]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return json.dumps(data)


def test_json_round_trip(report):
    assert Report.from_json(report.to_json()) == report


def test_json_form(report):
    data = json.loads(report.to_json())
    assert data["perplexity"] == {"original": 9.0, "control": 8.0, "converted": 300.0, "recovered": 10.0}
    assert data["ratio"] == 10.0 / 8.0
    assert data["crossover_length"] == 512
    assert data["options"] == {"num_features": 128, "kernel": "relu"}
    assert data["memory"][1]["patched_state"] is None


@pytest.mark.parametrize(("original", "control"), [(9.0, 8.0), (8.0, 9.0)])
def test_ratio_is_to_the_better_softmax_model(original, control):
    assert Perplexities(original, control, 50.0, 12.0).ratio == 1.5


def test_what_is_derived_is_not_taken_from_the_file(report):
    assert Report.from_json(changed(report, ["ratio"], 0.5)).ratio == 1.25


def test_integers_are_numbers(report):
    read = Report.from_json(changed(report, ["perplexity", "original"], 9))
    assert read == report and isinstance(read.perplexity.original, float)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["perplexity"], ..., "report lacks the field 'perplexity'"),
        (["perplexity", "control"], ..., "report.perplexity lacks the field 'control'"),
        (["speed", 1, "length"], ..., r"report.speed\[1\] lacks the field 'length'"),
        (["perplexity", "controll"], 1.0, "unknown field 'controll'; did you mean control"),
        (["surprise"], 1, "report has an unknown field 'surprise'"),
        (["perplexity", "control"], "8", "report.perplexity.control must be a float, got '8'"),
        (["training", "tokens"], True, "report.training.tokens must be a int, got True"),
        (["training", "tokens"], 1.5, "report.training.tokens must be a int, got 1.5"),
        (["training", "learning_rate_grid"], "1e-3", "report.training.learning_rate_grid must be a Sequence"),
        (["speed", 0, "patched_prefill"], None, r"report.speed\[0\].patched_prefill must be a Mapping, got None"),
        (["mechanism"], None, "report.mechanism must be a str, got None"),
        (["format_version"], 99, "format_version 99 was written by a newer"),
    ],
)
def test_malformed_files_name_the_field(report, path, value, message):
    with pytest.raises(CheckpointError, match=message):
        Report.from_json(changed(report, path, value))


def test_a_report_that_is_no_text_is_named(tmp_path):
    (tmp_path / "report.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match=r"directory='.*' cannot be read: 'utf-8' codec .*; give the output"):
        Report.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_not_a_report(text):
    with pytest.raises(CheckpointError, match="the report is"):
        Report.from_json(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5, -1.0])
def test_perplexities_out_of_range(report, value):
    with pytest.raises(OptionError, match=r"perplexity\.recovered"):
        dataclasses.replace(report.perplexity, recovered=value)


def test_a_learning_rate_must_have_been_tried(report):
    with pytest.raises(OptionError, match=r"training\.control_learning_rate"):
        dataclasses.replace(report.training, control_learning_rate=0.5)


def test_save_and_load(report, tmp_path):
    path = report.save(tmp_path / "new" / "place")
    assert path.name == "report.json" and os.listdir(path.parent) == ["report.json"]
    assert Report.load(path.parent) == report
    with pytest.raises(CheckpointError, match=r"cannot be read: .*report\.json'; give the output directory"):
        Report.load(tmp_path)


def test_a_failed_save_leaves_the_old_report(report, tmp_path):
    report.save(tmp_path)
    before = (tmp_path / "report.json").read_text()
    unwritable = dataclasses.replace(report, options={"kernel": object()})
    with pytest.raises(TypeError):
        unwritable.save(tmp_path)
    assert os.listdir(tmp_path) == ["report.json"] and (tmp_path / "report.json").read_text() == before


def test_provenance_states_this_process():
    provenance = collect_provenance(3, "command", dtype=torch.bfloat16)
    assert provenance.torch == torch.__version__ and provenance.transformers == transformers.__version__
    assert provenance.hf_linattn == hf_linattn.__version__
    assert (provenance.seed, provenance.command, provenance.dtype) == (3, "command", "bfloat16")
    assert provenance.num_threads == torch.get_num_threads() and provenance.device.startswith("CPU")
    assert provenance.git_commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", provenance.git_commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", provenance.date)


def test_a_package_that_is_not_there_is_said_so_and_none_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert collect_provenance(0, "command").accelerate == version("accelerate")
    monkeypatch.setattr(schema, "installed_version", lambda package: None)
    assert collect_provenance(0, "command").accelerate == "not installed"


def test_no_git_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert collect_provenance(0, "command").git_commit is None
