"""The GPU's benchmark, what of it runs without one: its measurements at tiny sizes on the CPU, and its tables."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from benchmarks import render, run
from benchmarks.measure import compile_ahead, fla_kernels, operations, provenance, steps, targets
from benchmarks.measure.fla_kernels import FLA, FLA_ALONE, FLA_MAPPED
from benchmarks.measure.stopwatch import FLASH, PLANS, SOFTMAX, Stopwatch
from benchmarks.result_files import Document
from benchmarks.tables import gpu, gpu_page, markdown
from hf_linattn.ops import reference
from tests.helpers import pages_with_markers

pytestmark = pytest.mark.tools

CPU = torch.device("cpu")
PLAN = dataclasses.replace(PLANS["quick"], batch=2, contexts=())
NAMES = ["linear", "hybrid", "local"]


def attend_features(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What fla's kernel computes, by the N x N formula."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    weights = (query @ key.mT).tril()
    return reference.attend(weights / weights.sum(-1, keepdim=True), value).transpose(1, 2)


def without_a_gpu(patch: pytest.MonkeyPatch, version: str | None) -> list[Any]:
    """Have the CPU measure what a GPU does, with a stand-in for fla; return the list of what it was tuned for."""
    tuned: list[Any] = []
    compiled = {"seconds": 0.0, "fla": version is not None, "failures": []}
    patch.setattr(run, "prepare_nothing", run.prepare_gpu)
    patch.setattr(run, "compile_ahead", lambda *_: dict(compiled))
    patch.setattr(run, "fla_version", lambda: version)
    patch.setattr(run, "tune", lambda *sizes: tuned.append(sizes))
    patch.setattr(fla_kernels, "attend_features", attend_features)
    return tuned


@pytest.fixture(scope="module")
def document() -> Document:
    """The results of a run with a stand-in for fla, as they come out of the file."""
    with pytest.MonkeyPatch.context() as patch:
        tuned = without_a_gpu(patch, "0.6.0")
        result = run.measure(PLAN, CPU, torch.float32, NAMES, "torch")
    assert tuned == [(PLAN.batch, PLAN.num_heads, PLAN.head_dim, CPU, torch.float32)]
    return json.loads(json.dumps(result))


def test_everything_is_measured_beside_both_softmaxes_and_fla(document: Document) -> None:
    assert document["failures"] == [] and document["fla_version"] == "0.6.0"
    measured = {(r["mechanism"], r["mode"], r["direction"], r["length"]) for r in document["operations"]}
    assert measured == {
        (name, mode, direction, length)
        for mode in markdown.MODES
        for direction, lengths in (("forward", PLAN.lengths), ("forward+backward", PLAN.backward_lengths))
        for name in (SOFTMAX, FLASH, *(FLA if (mode, direction) == ("causal", "forward") else ()), *NAMES)
        for length in lengths
    }
    times = {
        (r["mechanism"], r["mode"], r["direction"], r["length"]): r["milliseconds"]["median"]
        for r in document["operations"]
    }
    for row in document["operations"]:
        own, case = row["milliseconds"]["median"], (row["mode"], row["direction"], row["length"])
        assert row["ratio"] == pytest.approx(times[SOFTMAX, *case] / own)
        assert row["flash_ratio"] == pytest.approx(times[FLASH, *case] / own)
        assert (row["floor_share"] is None) == (row["mechanism"] not in NAMES)
    assert {row["mechanism"] for row in document["crossovers"]} == set(NAMES)


def test_floors_are_of_all_sequences() -> None:
    """At least their operands are moved: query, key, value and output of every one."""
    clock = Stopwatch(CPU, PLAN, "torch")
    ceilings = {"matmul_gflops": 1e12, "copy_gigabytes_per_second": 10.0}
    measured = operations.Operations(clock, ["linear"], torch.float32, ceilings)
    case = operations.Case("forward", "causal", 64)
    call = operations.operation_competitors(clock, ["linear"], "causal", 64, False, torch.float32)["linear"]
    moved = 4 * 64 * PLAN.batch * PLAN.num_heads * PLAN.head_dim * 4
    assert measured.floor("linear", case, call) == pytest.approx(moved / 10e9)


def test_products_in_triton_are_counted_as_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of fewer tokens and of one sequence, times what there is more of."""
    monkeypatch.setattr(operations, "COUNTED", 512)
    clock, counts = Stopwatch(CPU, PLAN, "torch"), []
    call = operations.operation_competitors(clock, ["linear"], "causal", 1024, True, torch.float32)["linear"]
    for backend in ("torch", "triton"):
        clock.backend = backend
        counted = operations.Operations(clock, ["linear"], torch.float32, {})
        counts.append(counted.flops("linear", operations.Case("forward+backward", "causal", 1024), call))
    assert counts[1] == pytest.approx(counts[0], rel=0.05)


@pytest.mark.parametrize("kind", [FLA_MAPPED, FLA_ALONE])
def test_fla_gets_the_same_heads_and_computes_what_linear_does(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(fla_kernels, "attend_features", attend_features)
    clock = Stopwatch(CPU, PLAN)
    given = operations.operation_competitors(clock, ["linear"], "causal", 64, False, torch.float32, (SOFTMAX, *FLA))
    theirs, ours = given[kind], given["linear"]
    output, expected = theirs.attend(*theirs.heads).transpose(1, 2), ours.attend(*ours.heads)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    for mode, backward in (("bidirectional", False), ("causal", True)):
        others = operations.operation_competitors(clock, [], mode, 64, backward, torch.float32, (SOFTMAX, *FLA))
        assert set(others) == {SOFTMAX}


def test_what_fails_is_noted_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    without_a_gpu(monkeypatch, "0.6.0")
    monkeypatch.setattr(fla_kernels, "attend_features", fail)
    plan = dataclasses.replace(PLAN, lengths=(64,), backward_lengths=())
    document = run.measure(plan, CPU, torch.float32, ["linear"], "torch")
    assert document["failures"] == [{"what": "causal, forward, 64", "error": "OutOfMemoryError: no memory"}]
    assert {(row["mechanism"], row["mode"]) for row in document["operations"]} == {
        (name, "bidirectional") for name in (SOFTMAX, FLASH, "linear")
    }
    assert "- causal, forward, 64: OutOfMemoryError" in "\n".join(gpu.gpu_results_parts(document))
    monkeypatch.setattr(run, "tune", fail)
    document = run.measure(plan, CPU, torch.float32, ["linear"], "torch")
    assert [row["what"] for row in document["failures"]] == ["fla"] and document["baselines"] == [SOFTMAX, FLASH]
    monkeypatch.setattr(run, "measure_steps", None)  # and a process that cannot measure steps
    assert [row["what"] for row in run.measure(plan, CPU, torch.float32, [], "torch")["failures"]] == ["steps", "fla"]


def test_no_case_begins_when_the_time_is_over_and_each_is_saved() -> None:
    plan, saved = dataclasses.replace(PLAN, step_context=0), []
    document = run.measure(
        plan, CPU, torch.float32, ["linear"], "torch", save=lambda x: saved.append(len(x["operations"]))
    )
    assert saved == [0, 2, 4, 6, 8, 10, 12, 12] and document["failures"] == []
    assert [row["length"] for row in document["operations"][::2]] == [64] * 4 + [128] * 2
    document = run.measure(plan, CPU, torch.float32, ["linear"], "torch", until=time.monotonic() - 1)
    assert document["operations"] == []
    assert len(document["failures"]) == 6 and document["failures"][0]["error"] == "TimeoutError: no time was left"


def test_a_run_with_failures_exits_with_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(typer.Exit) as caught:
        run.main(mechanism=["linear"], quick=True, limit=0.0, output=tmp_path / "speed.json")
    assert caught.value.exit_code == 1
    with pytest.raises(typer.BadParameter, match="finds no GPU"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        run.main(device="cuda", output=tmp_path / "speed.json")


def test_kernels_are_compiled_by_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pools run; what cannot be compiled, here all of fla, is named."""
    monkeypatch.setattr(compile_ahead, "OURS", 1)
    monkeypatch.setattr(compile_ahead, "THEIRS", 1)
    found = compile_ahead.compile_ahead(PLAN, CPU, torch.float32, ["linear"], "torch", True)
    assert [row["what"] for row in found["failures"]] == ["fla, part 0"] and not found["fla"]
    found = compile_ahead.compile_ahead(PLAN, CPU, torch.float32, ["linear"], "no such backend", False)
    ways = [f"linear, {mode}, backward {back}" for mode in ("causal", "bidirectional") for back in (True, False)]
    assert sorted(row["what"] for row in found["failures"]) == sorted([*ways, "step of linear"])


class Kernel:
    """What Triton's tuner launches, or compiles."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def run(self, *args: Any, **options: Any) -> None:
        self.calls.append(options)
        if options["SIZE"] == 4:
            raise RuntimeError("does not compile")


def test_every_candidate_is_compiled_once_and_none_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import Config
    from triton.runtime.autotuner import Autotuner

    kernel, own = Kernel(), Autotuner.__dict__["run"]
    tuner = Autotuner.__new__(Autotuner)
    tuner.fn, tuner.arg_names = kernel, ["x"]
    tuner.configs = [Config({"SIZE": size}) for size in (1, 2, 4, 8, 16)]
    tuner.early_config_prune = tuner.perf_model = None
    monkeypatch.setattr(fla_kernels, "step", lambda *_: tuner.run(1, grid=(1,), warmup=False))
    given = (1, 1, 64, 16), CPU, torch.float32
    assert [fla_kernels.compile_share(part, 2, *given, until=time.time() + 60) for part in (0, 1)] == [0, 0]
    assert [call["SIZE"] for call in kernel.calls] == [1, 4, 16, 2, 8]
    assert all(call["warmup"] is True and call["grid"] == (1,) for call in kernel.calls)
    assert fla_kernels.compile_share(1, 2, *given, until=time.time() - 1) == 2 and len(kernel.calls) == 5
    assert Autotuner.__dict__["run"] is own


def test_candidates_are_timed_for_less_long(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    timed: list[dict[str, Any]] = []
    tuner = Autotuner.__new__(Autotuner)
    monkeypatch.setattr(triton.testing, "do_bench", lambda run, **options: timed.append(options))
    monkeypatch.setattr(fla_kernels, "step", lambda *_: tuner.do_bench(None, quantiles=(0.5,)))
    fla_kernels.tune(1, 1, 16, CPU, torch.float32)
    assert timed == [{"warmup": fla_kernels.WARMUP, "rep": fla_kernels.REPEATS, "quantiles": (0.5,)}]


def test_steps_are_times_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps.microseconds([3.2, 1.6, 4.8]) == pytest.approx(3.2e6 / 16)
    rows = steps.measure_steps(PLAN, CPU, torch.float32, ["linear", "hybrid"], "torch")
    assert [(row.mechanism, row.context) for row in rows] == [(x, 96) for x in (SOFTMAX, "linear", "hybrid")]
    assert all(row.microseconds > 0 and row.graph_microseconds is None and row.error is None for row in rows)


def test_tables(document: Document) -> None:
    times = targets.medians(document)
    both, forward = (times["linear", "causal", x, 64] for x in ("forward+backward", "forward"))
    if both > forward:
        assert times["linear", "causal", "backward", 64] == pytest.approx(both - forward)
    lines = gpu.passes_table(document).splitlines()[2:]
    rows = {tuple(x.strip() for x in line.split("|")[1:3]): line.split("|")[3:-1] for line in lines}
    names = [SOFTMAX, FLASH, *FLA, "`linear`", "`hybrid` `window_size=64`", "`local`"]
    assert list(rows) == [
        (name, mode) for mode in markdown.MODES for name in names if mode == "causal" or name not in FLA
    ]
    row = [cell.strip() for cell in rows["`linear`", "causal"]]
    flash, softmax = (times[x, "causal", "forward", 64] / forward for x in (FLASH, SOFTMAX))
    assert row[:3] == [f"{forward:.3g}", f"{softmax:.3g}", f"{flash:.3g}"] and row[8].endswith("%")
    assert len(gpu.steps_table(document).splitlines()) == 2 + 3
    assert "| `hybrid` `window_size=64` |" in gpu.steps_table(document)
    for make in (gpu_page.passes_section, gpu_page.steps_section):
        page = make(document, document)
        assert "| `hybrid` `window_size=64` |" in page and "| `hybrid` `window_size=64`, kernels of other" in page
    ratio = times[FLA_ALONE, "causal", "forward", 128] / times["linear", "causal", "forward", 128]
    line = next(x for x in gpu.fla_table(document).splitlines() if FLA_ALONE in x)
    assert line.endswith(f"| {ratio:.3g} |")


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, direction: str, median: float) -> dict[str, Any]:
        times = {"milliseconds": {"median": median}}
        return {"mechanism": name, "mode": "causal", "direction": direction, "length": 16384, **times}

    measured = {FLASH: (13.0, 48.0), "linear": (1.0, 10.0), "hybrid": (4.0, 12.0), FLA_MAPPED: (0.9, 5.0)}
    both = ("forward", "forward+backward")
    rows = [row(name, *x) for name, values in measured.items() for x in zip(both, values, strict=True)]
    taken = [{"mechanism": "linear", "graph_microseconds": 10.0}, {"mechanism": "hybrid", "graph_microseconds": 60.0}]
    found = targets.find_gpu_targets({"operations": rows, "steps": taken})
    assert [(x.value, x.at_least) for x in found] == [
        (13.0, 8), (pytest.approx(35 / 9), 4), (3.25, 4), (pytest.approx(35 / 8), 2), (0.9, 1), (3.0, 1), (0.5, 1)
    ]  # fmt: skip


def test_the_page_of_speed_says_what_was_measured_of_a_gpu(document: Document, tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "gpu.json").write_text(json.dumps({**document, "fla_version": None, "baselines": [SOFTMAX, FLASH]}))
    docs = pages_with_markers(tmp_path)
    render.write_tables(tmp_path)
    text, page = (docs / "speed.md").read_text(), (results / "README.md").read_text()
    assert "batch 2, 2 heads, dimension 16" in text and "fla was not installed." in text
    assert "FlashAttention / | faster from" in text and "A decoding step after 96 tokens" in text
    assert "### Milliseconds" in page and "| forward+backward | 64 | `linear` |" in page


def test_the_commit_of_a_copy_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "output_of", lambda *_: None)
    monkeypatch.setenv("HF_LINATTN_COMMIT", "abc")
    assert provenance.collect_provenance(CPU, torch.float32)["commit"] == "abc"
    monkeypatch.undo()
    assert provenance.output_of("no-such-command") is None and provenance.output_of("false") is None
    assert set(provenance.cuda_versions()) == {"cuda", "cudnn", "driver", "triton", "ptxas"}
