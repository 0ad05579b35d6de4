"""What long inputs cost: the memory of a training step, one more token after a long context, reading a long prompt.

    python -m benchmarks.studies.long_inputs               # benchmarks/results/cpu_long_inputs.json, and the tables
    python -m benchmarks.studies.long_inputs --dtype bfloat16 --output benchmarks/results/cpu_long_inputs_bfloat16.json

Memory is what a process of its own had at most while it ran forward and backward once, less what it had before, over
the bytes of query, key, value, output and their gradients. Decoding and reading are those of the Llama of
`measure/decoding.py`; prompts are read at once and in pieces (`measure/prompts.py`).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm

from benchmarks.measure.decoding import Turn, build_model, prefill
from benchmarks.measure.prompts import PIECE, measure_prompts
from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.stopwatch import PLANS, Plan, Stopwatch, Timing
from benchmarks.measure.targets import FASTER
from benchmarks.measure.timed import timed_config
from benchmarks.render import write_tables
from benchmarks.result_files import LONG_INPUTS_FILES, RESULTS
from hf_linattn import AttentionLayer
from hf_linattn.atomic_io import write_json
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing import MODES

MEMORY_LENGTH = 16384
SHORT, LONG = 1024, 65536  # tokens before the one that is decoded
RESIDENT = Path("/proc/self/status")


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One training step of one mechanism, alone: bytes beyond those before it, and their share of the operands'."""

    mechanism: str
    mode: str
    length: int
    peak_bytes: int
    ratio: float


@dataclasses.dataclass(frozen=True)
class LengthRow:
    """One model: a token after a short and after a long context."""

    mechanism: str
    milliseconds_per_token: dict[int, Timing]
    long_over_short: float


def resident_bytes(field: str) -> int:
    """Return what this process holds, `VmRSS`, or held at most since that was reset, `VmHWM`; Linux only."""
    found = re.search(rf"^{field}:\s+(\d+) kB", RESIDENT.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{RESIDENT} has no {field}; measure memory on Linux")
    return 1024 * int(found[1])


def measure_memory(name: str, mode: str, length: int, plan: Plan, dtype: torch.dtype) -> MemoryRow:
    """Run forward and backward once; in a process that does nothing else."""
    layer = AttentionLayer(
        index=0, num_heads=plan.num_heads, num_key_value_heads=plan.num_heads, head_dim=plan.head_dim,
        causal=mode == "causal", scaling=plan.head_dim**-0.5, device=torch.device("cpu"), dtype=dtype,
    )  # fmt: skip
    mechanism = MECHANISMS.get(name)(timed_config(name), layer).to(dtype).train()

    def step(tokens: int) -> int:
        shape = (1, plan.num_heads, tokens, plan.head_dim)
        heads = [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3)]
        output, _ = mechanism(*heads)
        gradients = torch.autograd.grad(output, heads, torch.randn_like(output))
        return 2 * sum(x.nbytes for x in (output, *gradients))

    step(128)  # what is made once
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the most it held
    operands = step(length)
    peak = resident_bytes("VmHWM") - before
    return MemoryRow(name, mode, length, peak, peak / operands)


def measure_lengths(stopwatch: Stopwatch, names: Sequence[str], dtype: torch.dtype) -> list[LengthRow]:
    """Time tokens after both contexts in turns."""
    rows = []
    for name in tqdm(names, desc="decoding"):
        model = build_model(stopwatch, dtype, name)
        turns = {n: Turn(stopwatch, model, prefill(model, n, PIECE)) for n in stopwatch.plan.contexts}
        measured = stopwatch.compare({str(context): turn for context, turn in turns.items()})
        tokens = {n: Timing.of([s / turn.tokens for s in measured[str(n)]]) for n, turn in turns.items()}
        (_, short), (_, long) = sorted(tokens.items())
        rows.append(LengthRow(name, tokens, long.median / short.median))
    return rows


def main(
    output: Annotated[Path, typer.Option(help="where the results go")] = RESULTS / LONG_INPUTS_FILES[0],
    dtype: Annotated[str, typer.Option(help="of weights and activations")] = "float32",
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default those with targets")] = None,
) -> None:
    """Measure, write the JSON, and rewrite the tables generated from it."""
    plan, precision = dataclasses.replace(PLANS["cpu"], contexts=(SHORT, LONG)), getattr(torch, dtype)
    names: list[str] = list(mechanism or FASTER)
    cases = [(name, mode) for name in names for mode in MODES if mode in MECHANISMS.get(name).modes]
    memory = []
    for name, mode in tqdm(cases, desc="memory"):
        with multiprocessing.get_context("spawn").Pool(1) as alone:
            memory.append(alone.apply(measure_memory, (name, mode, MEMORY_LENGTH, plan, precision)))
    constant = [name for name in names if MECHANISMS.get(name).constant_state]
    stopwatch = Stopwatch(torch.device("cpu"), plan)
    results: dict[str, Any] = {
        "provenance": collect_provenance(torch.device("cpu"), precision, "benchmarks.studies.long_inputs"),
        "options": {name: timed_config(name).to_options() for name in names},
        "memory": [dataclasses.asdict(row) for row in memory],
        "contexts": plan.contexts,
        "lengths": [dataclasses.asdict(row) for row in measure_lengths(stopwatch, constant, precision)],
        "prompts": [dataclasses.asdict(row) for row in measure_prompts(stopwatch, constant, precision)],
    }
    write_json(output, results)
    typer.echo(f"wrote {output}")
    if output.parent == RESULTS:
        write_tables()


if __name__ == "__main__":
    typer.run(main)
