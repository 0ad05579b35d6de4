"""Time and memory of mechanisms beside softmax, all measured in one run of one process.

    python -m benchmarks.run                                       # benchmarks/results/cpu.json and the tables
    python -m benchmarks.run --backend torch                       # benchmarks/results/cpu_torch.json
    python -m benchmarks.run --backend compile                     # benchmarks/results/cpu_compiled.json
    python -m benchmarks.run --device cuda --backend triton --output benchmarks/results/gpu.json
    python -m benchmarks.run --tables-only                         # only rewrite the tables from the JSON files

Measured are the operation alone (forward, and forward with backward, causal and bidirectional) against
`scaled_dot_product_attention`; on a CPU the decoding of a whole model at a short and at a long context, on a GPU a
decoding step of one layer; and the machine's ceilings for a matrix product and a copy. Competitors take turns within
every repeat, so drift hits all of them alike. On a GPU softmax is held to FlashAttention besides, and `fla`, if it is
installed, is one of the competitors. What was measured is written after every case: what ends early leaves the rest.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm

from benchmarks.measure.compile_ahead import compile_ahead, failure, processes, results
from benchmarks.measure.decoding import measure_decoding
from benchmarks.measure.fla_kernels import FLA, fla_version, tune
from benchmarks.measure.operations import OperationRow, Operations, find_crossovers, measure_operations
from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.steps import MECHANISMS_WITH_STEPS, StepRow, measure_steps
from benchmarks.measure.stopwatch import FLASH, PLANS, SOFTMAX, Plan, Stopwatch
from benchmarks.measure.targets import FASTER
from benchmarks.measure.timed import timed_config
from benchmarks.render import write_tables
from benchmarks.result_files import RESULTS
from hf_linattn.atomic_io import write_json
from hf_linattn.backends import require_triton
from hf_linattn.config import require_known
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.ops.runtime import cpu as library

# of the result files
SUFFIXES = {"auto": ".json", "torch": "_torch.json", "compile": "_compiled.json", "triton": "_triton.json"}
Save = Callable[[dict[str, Any]], None]


def measure_ceilings(stopwatch: Stopwatch, dtype: torch.dtype) -> dict[str, float]:
    """Return what the machine can do at best: a matrix product in GFLOP/s, a copy in GB/s read and written."""
    size, device = stopwatch.plan.ceiling_size, stopwatch.device
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(16 * size * size, device=device, dtype=dtype)
    target = torch.empty_like(source)
    seconds = stopwatch.compare({"matmul": lambda: left @ right, "copy": lambda: target.copy_(source)})
    return {
        "matmul_gflops": 2 * size**3 / min(seconds["matmul"]) / 1e9,
        "copy_gigabytes_per_second": 2 * source.numel() * source.element_size() / min(seconds["copy"]) / 1e9,
    }


def measure(
    plan: Plan, device: torch.device, dtype: torch.dtype, names: Sequence[str], backend: str,
    until: float = float("inf"), save: Save = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Run everything and return the JSON document; `save` gets what there is of it before and after every case.

    No case begins after `until`, of `time.monotonic()`. `failures` has what could not be measured, and why.
    """
    stopwatch = Stopwatch(device, plan, backend)
    document: dict[str, Any] = {
        "provenance": collect_provenance(device, dtype),
        "backend": backend,
        "compiled_operations": backend == "auto" and device.type == "cpu" and library.available(),
        "plan": dataclasses.asdict(plan),
        "options": {name: timed_config(name).to_options() for name in names},
        "baselines": [SOFTMAX],
        "operations": [],
        "crossovers": [],
        "decoding": [],
        "steps": [],
        "seconds": {},
        "failures": [],
    }
    started = time.monotonic()
    prepare = prepare_gpu if device.type == "cuda" else prepare_nothing
    document |= prepare(stopwatch, names, dtype, document["failures"])
    document["ceilings"] = measure_ceilings(stopwatch, dtype)
    document["seconds"]["before the operations"] = time.monotonic() - started
    save(document)
    operations = Operations(stopwatch, names, dtype, document["ceilings"], document["baselines"])
    with tqdm(total=len(operations.cases()), desc="operations") as progress:

        def done(rows: list[OperationRow]) -> None:
            document["operations"] = [dataclasses.asdict(row) for row in rows]
            document["crossovers"] = [dataclasses.asdict(row) for row in find_crossovers(rows)]
            progress.update()
            save(document)

        measure_operations(operations, until, done)
    document["failures"] += operations.failures
    if plan.contexts:
        document["decoding"] = [dataclasses.asdict(row) for row in measure_decoding(stopwatch, names, dtype)]
    document["seconds"]["all"] = time.monotonic() - started
    save(document)
    return document


def prepare_nothing(
    stopwatch: Stopwatch, names: Sequence[str], dtype: torch.dtype, failures: list[dict[str, Any]]
) -> dict[str, Any]:
    """Measure the steps, if the plan has any."""
    plan, device = stopwatch.plan, stopwatch.device
    stepping = [name for name in MECHANISMS_WITH_STEPS if name in names]
    steps = measure_steps(plan, device, dtype, stepping, stopwatch.backend) if plan.step_context else []
    return {"steps": [dataclasses.asdict(row) for row in steps]}


def prepare_gpu(
    stopwatch: Stopwatch, names: Sequence[str], dtype: torch.dtype, failures: list[dict[str, Any]]
) -> dict[str, Any]:
    """Compile what will be timed, measure the steps in a process of their own, and let fla choose its kernels."""
    plan, device, backend, version = stopwatch.plan, stopwatch.device, stopwatch.backend, fla_version()
    stepping = [name for name in MECHANISMS_WITH_STEPS if name in names]
    with processes(1) as alone:
        alone.submit(torch.cuda.init)  # imports while others compile
        compiled = compile_ahead(plan, device, dtype, names, backend, version is not None)
        failures += compiled.pop("failures")
        measured = alone.submit(measure_steps, plan, device, dtype, stepping, backend)
        found = results({"steps": measured}, failures)  # without them the operations are measured all the same
        steps: list[StepRow] = found[0] if found else []
    baselines = [SOFTMAX, FLASH]
    if compiled["fla"]:
        try:
            tune(plan.batch, plan.num_heads, plan.head_dim, device, dtype)
            baselines += FLA
        except Exception as error:
            failures.append(failure("fla", error))
    prepared = {"fla_version": version, "compiled_ahead": compiled, "baselines": baselines}
    return {**prepared, "steps": [dataclasses.asdict(row) for row in steps]}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="by default float32 on a CPU, bfloat16 on a GPU")] = None,
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default those with targets")] = None,
    backend: Annotated[str, typer.Option(help="auto, torch, compile, triton; times what knows it")] = "auto",
    limit: Annotated[float, typer.Option(help="seconds after which no other case begins")] = float("inf"),
    output: Annotated[
        Path | None, typer.Option(help="by default benchmarks/results/{cpu,gpu}[_torch,_compiled,_triton].json")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes, to see that it runs")] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="measure nothing")] = False,
) -> None:
    """Measure, write the JSON, and rewrite the tables generated from it; exit with 1 if something failed."""
    failures: list[dict[str, Any]] = []
    if not tables_only:
        until, kind = time.monotonic() + limit, torch.device(device).type
        if kind == "cuda" and not torch.cuda.is_available():
            raise typer.BadParameter("--device cuda: PyTorch finds no GPU")
        precision = getattr(torch, dtype or {"cpu": "float32", "cuda": "bfloat16"}[kind])
        require_known("backend", backend, SUFFIXES)
        known = [x for x in MECHANISMS.names() if x != SOFTMAX and backend in MECHANISMS.get(x).backends]
        names = mechanism or [name for name in FASTER if name in known]
        if unknown := [name for name in names if name not in known]:
            raise typer.BadParameter(f"{', '.join(unknown)}: with --backend {backend} it is one of {', '.join(known)}")
        if backend == "triton":
            require_triton()  # what it needs and has not is an error before anything is measured
        path = output or RESULTS / ({"cpu": "cpu", "cuda": "gpu"}[kind] + SUFFIXES[backend])
        plan = PLANS["quick" if quick else kind]

        def save(document: dict[str, Any]) -> None:
            write_json(path, document)

        failures = measure(plan, torch.device(device), precision, names, backend, until, save)["failures"]
        typer.echo(f"wrote {path}")
    if output is None or output.resolve().parent == RESULTS:
        write_tables()
    for entry in failures:
        typer.echo(f"{entry['what']}: {entry['error']}", err=True)
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
