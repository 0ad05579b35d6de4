"""Time and memory of mechanisms beside softmax, all measured in one run of one process.

    python -m benchmarks.run                                       # benchmarks/results/cpu.json and the tables
    python -m benchmarks.run --backend torch                       # benchmarks/results/cpu_torch.json
    python -m benchmarks.run --backend compile                     # benchmarks/results/cpu_compiled.json
    python -m benchmarks.run --device cuda                         # benchmarks/results/gpu.json
    python -m benchmarks.run --device cuda --backend triton        # benchmarks/results/gpu_triton.json
    python -m benchmarks.run --tables-only                         # only rewrite the tables from the JSON files

Three measurements: the operation alone (forward, and forward with backward, causal and bidirectional) against
`scaled_dot_product_attention`; the decoding of a whole model at a short and at a long context; and the machine's
ceilings for a matrix product and a copy. Competitors take turns within every repeat, so drift hits all of them alike.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from benchmarks.decoding import measure_decoding
from benchmarks.provenance import collect_provenance
from benchmarks.speed_tables import FASTER
from benchmarks.stopwatch import PLANS, SOFTMAX, Plan, Stopwatch, Timing
from benchmarks.tables import RESULTS, write_tables
from hf_linattn import AttentionLayer
from hf_linattn.backends import use_backend
from hf_linattn.config import make_config, require_known
from hf_linattn.files import write_text
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.ops.native import library
from hf_linattn.testing.counters import flops_of

# of the result files
SUFFIXES = {"auto": ".json", "torch": "_torch.json", "compile": "_compiled.json", "triton": "_triton.json"}


@dataclass(frozen=True)
class OperationRow:
    """One mechanism, alone, at one length.

    `ratio` is softmax's median time over this one's. `floor_share` is the part of the median time that its matrix
    products, or reading inputs and writing outputs once, would take at the ceilings of the machine, whichever is
    longer; null for softmax, as the pairs that its kernels leave out are not known.
    """

    mechanism: str
    mode: str
    direction: str
    length: int
    milliseconds: Timing
    ratio: float
    floor_share: float | None = None


@dataclass(frozen=True)
class Call:
    """One call of an operation, with its backward pass if there is a gradient of its output."""

    attend: Callable[..., Tensor]
    heads: list[Tensor]
    gradient: Tensor | None

    def __call__(self) -> None:
        with torch.set_grad_enabled(self.gradient is not None):
            output = self.attend(*self.heads)
            if self.gradient is not None:
                torch.autograd.grad(output, self.heads, self.gradient)

    def flops(self) -> int:
        """Return the floating-point operations of its matrix products; the counter does not know `autograd.grad`."""

        def run() -> None:
            with torch.set_grad_enabled(self.gradient is not None):
                output = self.attend(*self.heads)
                if self.gradient is not None:
                    output.backward(self.gradient)

        count = flops_of(run)
        for x in self.heads:
            x.grad = None
        return count


@dataclass(frozen=True)
class Crossover:
    """The shortest measured length from which a mechanism stays faster than softmax; null if it never does."""

    mechanism: str
    mode: str
    direction: str
    length: int | None


# -- the operation alone ----------------------------------------------------------------------------------------------


def measure_operations(
    stopwatch: Stopwatch, names: Sequence[str], dtype: torch.dtype, ceilings: dict[str, float]
) -> list[OperationRow]:
    """Time each mechanism on random heads [1, H, N, D] beside `scaled_dot_product_attention` on the same ones."""
    plan = stopwatch.plan
    cases = [
        (direction, mode, length)
        for direction, lengths in (("forward", plan.lengths), ("forward+backward", plan.backward_lengths))
        for mode in ("causal", "bidirectional")
        for length in lengths
    ]
    rows = []
    for direction, mode, length in tqdm(cases, desc="operations"):
        backward = direction == "forward+backward"
        competitors = operation_competitors(stopwatch, names, mode, length, backward, dtype)
        # read query, key and value, write the output; backward those, its gradient and theirs
        moved = (4 + 8 * backward) * length * plan.num_heads * plan.head_dim * dtype.itemsize
        floors = {
            name: floor_seconds(call.flops(), moved, ceilings) for name, call in competitors.items() if name != SOFTMAX
        }
        timings = {name: Timing.of(values) for name, values in stopwatch.compare(competitors).items()}
        for name, timing in timings.items():
            ratio, floor = timings[SOFTMAX].median / timing.median, floors.get(name)
            share = None if floor is None else 1e3 * floor / timing.median
            rows.append(OperationRow(name, mode, direction, length, timing, ratio, share))
    return rows


def floor_seconds(flops: float, moved: float, ceilings: dict[str, float]) -> float:
    """Return what so many operations, or so many bytes read or written, take at best."""
    return max(flops / ceilings["matmul_gflops"], moved / ceilings["copy_gigabytes_per_second"]) / 1e9


def operation_competitors(
    stopwatch: Stopwatch, names: Sequence[str], mode: str, length: int, backward: bool, dtype: torch.dtype
) -> dict[str, Call]:
    """Return name -> one call of that operation on shared inputs; mechanisms without the mode are left out."""
    plan, device = stopwatch.plan, stopwatch.device
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (1, plan.num_heads, length, plan.head_dim)
    *heads, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    for x in heads:
        x.requires_grad_(backward)
    causal, given = mode == "causal", gradient if backward else None

    def softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    competitors = {SOFTMAX: Call(softmax, heads, given)}
    layer = AttentionLayer(
        index=0,
        num_heads=plan.num_heads,
        num_key_value_heads=plan.num_heads,
        head_dim=plan.head_dim,
        causal=causal,
        scaling=plan.head_dim**-0.5,
        device=device,
        dtype=dtype,
    )
    for name in names:
        if mode in MECHANISMS.get(name).modes:
            mechanism = MECHANISMS.get(name)(make_config(name, {}), layer).to(device, dtype).train(backward)
            use_backend(mechanism, stopwatch.backend)
            competitors[name] = Call(lambda q, k, v, mechanism=mechanism: mechanism(q, k, v)[0], heads, given)
    return competitors


def find_crossovers(rows: Sequence[OperationRow]) -> list[Crossover]:
    """Return, for each mechanism, mode and direction, the measured length from which it stays ahead."""
    curves: dict[tuple[str, str, str], list[OperationRow]] = {}
    for row in rows:
        if row.mechanism != SOFTMAX:
            curves.setdefault((row.mechanism, row.mode, row.direction), []).append(row)
    crossovers = []
    for key, curve in curves.items():
        ahead = None
        for row in sorted(curve, key=lambda row: -row.length):
            if row.ratio < 1:
                break
            ahead = row.length
        crossovers.append(Crossover(*key, ahead))
    return crossovers


# -- the whole run ----------------------------------------------------------------------------------------------------


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
    plan: Plan, device: torch.device, dtype: torch.dtype, names: Sequence[str], backend: str
) -> dict[str, Any]:
    """Run everything and return the JSON document."""
    stopwatch = Stopwatch(device, plan, backend)
    ceilings = measure_ceilings(stopwatch, dtype)
    operations = measure_operations(stopwatch, names, dtype, ceilings)
    return {
        "provenance": collect_provenance(device, dtype),
        "backend": backend,
        "compiled_operations": backend == "auto" and device.type == "cpu" and library.available(),
        "plan": dataclasses.asdict(plan),
        "options": {name: make_config(name, {}).to_options() for name in names},
        "ceilings": ceilings,
        "operations": [dataclasses.asdict(row) for row in operations],
        "crossovers": [dataclasses.asdict(row) for row in find_crossovers(operations)],
        "decoding": [dataclasses.asdict(row) for row in measure_decoding(stopwatch, names, dtype)],
    }


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="by default float32 on a CPU, bfloat16 on a GPU")] = None,
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default those with targets")] = None,
    backend: Annotated[str, typer.Option(help="auto, torch, compile, triton; times what knows it")] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="by default benchmarks/results/{cpu,gpu}[_torch,_compiled,_triton].json")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes, to see that it runs")] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="measure nothing")] = False,
) -> None:
    """Measure, write the JSON, and rewrite the tables generated from it."""
    if not tables_only:
        kind = torch.device(device).type
        precision = getattr(torch, dtype or {"cpu": "float32", "cuda": "bfloat16"}[kind])
        require_known("backend", backend, SUFFIXES)
        known = [x for x in MECHANISMS.names() if x != SOFTMAX and backend in MECHANISMS.get(x).backends]
        names = mechanism or [name for name in FASTER if name in known]
        if unknown := [name for name in names if name not in known]:
            raise typer.BadParameter(f"{', '.join(unknown)}: with --backend {backend} it is one of {', '.join(known)}")
        results = measure(PLANS["quick" if quick else kind], torch.device(device), precision, names, backend)
        path = output or RESULTS / ({"cpu": "cpu", "cuda": "gpu"}[kind] + SUFFIXES[backend])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(results, indent=1) + "\n")
        typer.echo(f"wrote {path}")
    if output is None:
        write_tables()


if __name__ == "__main__":
    typer.run(main)
