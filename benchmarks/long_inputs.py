"""What long inputs cost: the memory of a training step, one more token after a long context, reading a long prompt.

    python -m benchmarks.long_inputs                   # benchmarks/results/cpu_long_inputs.json, and the tables

Memory is what a process of its own had at most while it ran forward and backward once, less what it had before, over
the bytes of query, key, value, output and their gradients. Decoding and reading are those of the Llama of
`decoding.py`; its prompts are read by softmax, too.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm

from benchmarks.decoding import Turn, build_model, prefill
from benchmarks.provenance import collect_provenance
from benchmarks.stopwatch import PLANS, SOFTMAX, Plan, Stopwatch, Timing
from benchmarks.tables import FASTER, LONG_INPUTS_FILE, RESULTS, write_tables
from hf_linattn import AttentionLayer
from hf_linattn.config import make_config
from hf_linattn.files import write_text
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing import MODES

MEMORY_LENGTH = 16384
SHORT, LONG, PROMPT = 1024, 65536, 32768  # tokens before the one that is decoded, and of the prompt
PROMPT_REPEATS = 2
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
    """One model: a token after a short and after a long context, and its prompt; `times_faster` than softmax's."""

    mechanism: str
    milliseconds_per_token: dict[int, Timing]
    long_over_short: float
    prompt_seconds: float
    times_faster: float


def resident_bytes(field: str) -> int:
    """Return what this process holds, `VmRSS`, or held at most since that was reset, `VmHWM`; Linux only."""
    found = re.search(rf"^{field}:\s+(\d+) kB", RESIDENT.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{RESIDENT} has no {field}; measure memory on Linux")
    return 1024 * int(found[1])


def measure_memory(name: str, mode: str, length: int, plan: Plan) -> MemoryRow:
    """Run forward and backward once; in a process that does nothing else."""
    layer = AttentionLayer(
        index=0, num_heads=plan.num_heads, num_key_value_heads=plan.num_heads, head_dim=plan.head_dim,
        causal=mode == "causal", scaling=plan.head_dim**-0.5, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    mechanism = MECHANISMS.get(name)(make_config(name, {}), layer).train()

    def step(tokens: int) -> int:
        shape = (1, plan.num_heads, tokens, plan.head_dim)
        heads = [torch.randn(shape).requires_grad_() for _ in range(3)]
        output, _ = mechanism(*heads)
        gradients = torch.autograd.grad(output, heads, torch.randn_like(output))
        return 2 * sum(x.nbytes for x in (output, *gradients))

    step(128)  # what is made once
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the most it held
    operands = step(length)
    peak = resident_bytes("VmHWM") - before
    return MemoryRow(name, mode, length, peak, peak / operands)


def measure_lengths(stopwatch: Stopwatch, names: Sequence[str]) -> list[LengthRow]:
    """Time tokens after both contexts in turns, and the prompt."""
    seconds = {SOFTMAX: time_prompt(stopwatch, SOFTMAX)}
    rows = []
    for name in tqdm(names, desc="long inputs"):
        model = build_model(stopwatch, torch.float32, name)
        turns = {context: Turn(stopwatch, model, prefill(model, context)) for context in stopwatch.plan.contexts}
        measured = stopwatch.compare({str(context): turn for context, turn in turns.items()})
        tokens = {c: Timing.of([s / turn.tokens for s in measured[str(c)]]) for c, turn in turns.items()}
        (_, short), (_, long) = sorted(tokens.items())
        prompt = time_prompt(stopwatch, name)
        rows.append(LengthRow(name, tokens, long.median / short.median, prompt, seconds[SOFTMAX] / prompt))
    return rows


def time_prompt(stopwatch: Stopwatch, name: str) -> float:
    """Return the seconds that a model takes to read the prompt."""
    model, seconds = build_model(stopwatch, torch.float32, name), []
    for _ in range(PROMPT_REPEATS):
        start = time.perf_counter()
        prefill(model, PROMPT)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def prompt_limit(plan: Plan) -> float:
    """Return how much faster a prompt would be read if attention took no time: all products over those outside it."""
    model = build_model(Stopwatch(torch.device("cpu"), plan), torch.float32, SOFTMAX)
    dense = 2 * PROMPT * sum(x.numel() for layer in model.model.layers for x in layer.parameters() if x.dim() == 2)
    pairs = PROMPT * (PROMPT + 1) / 2
    return 1 + plan.num_layers * 4 * pairs * plan.num_heads * plan.head_dim / dense


def main(
    output: Annotated[Path, typer.Option(help="where the results go")] = RESULTS / LONG_INPUTS_FILE,
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default those with targets")] = None,
) -> None:
    """Measure, write the JSON, and rewrite the tables generated from it."""
    plan = dataclasses.replace(PLANS["cpu"], contexts=(SHORT, LONG))
    names: list[str] = list(mechanism or FASTER)
    cases = [(name, mode) for name in names for mode in MODES if mode in MECHANISMS.get(name).modes]
    memory = []
    for name, mode in tqdm(cases, desc="memory"):
        with multiprocessing.get_context("spawn").Pool(1) as alone:
            memory.append(alone.apply(measure_memory, (name, mode, MEMORY_LENGTH, plan)))
    constant = [name for name in names if MECHANISMS.get(name).constant_state]
    lengths = measure_lengths(Stopwatch(torch.device("cpu"), plan), constant)
    results: dict[str, Any] = {
        "provenance": collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.long_inputs"),
        "options": {name: make_config(name, {}).to_options() for name in names},
        "memory": [dataclasses.asdict(row) for row in memory],
        "contexts": [SHORT, LONG],
        "prompt": PROMPT,
        "prompt_limit": prompt_limit(plan),
        "lengths": [dataclasses.asdict(row) for row in lengths],
    }
    write_text(output, json.dumps(results, indent=1) + "\n")
    typer.echo(f"wrote {output}")
    if output == RESULTS / LONG_INPUTS_FILE:
        write_tables()


if __name__ == "__main__":
    typer.run(main)
