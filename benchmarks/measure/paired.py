"""Speed of this checkout beside another one, row by row: what a change costs.

    python -m benchmarks.measure.paired ../before                            # all rows, 20 rounds, a table
    python -m benchmarks.measure.paired ../before --mechanism linear --output paired.json

`../before` is a checkout of another commit, with its C built (`git worktree add ../before HEAD~1`). PAIRS pairs of a
process of each checkout do the same rows, a round each in turn, as where a process has its memory makes a call faster
or slower by several per cent. The two of a pair take turns within a round, in random order. Given is the ratio of
their times, this one's over the other's: the geometric mean over the rounds and its 95 % interval, of Student's t on
the logarithms. All rounds of a pair have the same memory, so that the interval is of the PAIRS means, not of the
rounds. A mechanism has in both the options that it has by default in the other checkout.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm

from benchmarks.result_files import ROOT
from hf_linattn import patch_model
from hf_linattn.backends import use_backend
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer

MODULE = "benchmarks.measure.paired"  # this one
HEADS, DIM, LAYERS = 8, 64, 4  # of the operations, and of the model that decodes, as in `benchmarks.run`
CONTEXT = 1024  # tokens before a step
PAIRS = 4  # of processes
TURN = 0.03  # seconds that a turn takes at least
T_QUANTILE = 3.182  # Student's t, two-sided 95 %, of PAIRS means
DIRECTIONS = ("forward", "backward", "decoding")


@dataclass(frozen=True)
class Row:
    """What is timed: a pass over `length` tokens, with its backward pass or without; or one token of a model."""

    mechanism: str
    mode: str
    direction: str
    length: int


@dataclass(frozen=True)
class Ratio:
    """Time of this checkout over that of the other one, and its 95 % interval."""

    row: Row
    ratio: float
    low: float
    high: float
    rounds: int


# -- in the process of one checkout -----------------------------------------------------------------------------------


def operation(row: Row, options: Mapping[str, Any], backend: str) -> Callable[[], Any]:
    """Return the pass of a mechanism over random heads."""
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, HEADS, row.length, DIM, generator=generator) for _ in range(3)]
    device = torch.device("cpu")
    layer = AttentionLayer(0, HEADS, HEADS, DIM, row.mode == "causal", DIM**-0.5, device, torch.float32)
    mechanism = MECHANISMS.get(row.mechanism)(make_config(row.mechanism, options), layer)
    use_backend(mechanism, backend)
    if row.direction == "forward":
        mechanism.eval()
        return torch.no_grad()(lambda: mechanism(*heads))
    for x in heads:
        x.requires_grad_()
    gradient = torch.randn(heads[0].shape, generator=generator)
    return lambda: torch.autograd.grad(mechanism(*heads)[0], heads, gradient)


def decoding(row: Row, options: Mapping[str, Any], backend: str) -> Callable[[], Any]:
    """Return one step of a small Llama after `length` tokens."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=HEADS * DIM, intermediate_size=1536, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=2**20,
    )  # fmt: skip
    model = patch_model(LlamaForCausalLM(config).eval(), row.mechanism, **options)
    for module in model.modules():
        if module.__class__ is MECHANISMS.get(row.mechanism):
            use_backend(module, backend)
    cache, token = DynamicCache(config=config), torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        model(torch.randint(1024, (1, row.length)), past_key_values=cache, use_cache=True)
    return torch.no_grad()(lambda: model(token, past_key_values=cache, use_cache=True))


def serve() -> None:
    """Answer lines of JSON: the options that a mechanism has, rows to make ready, and calls for one turn."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run: Callable[[], Any] = float
    repeats = 1
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = None
        if asked["do"] == "options":
            answer = make_config(asked["mechanism"], {}).to_options()
        elif asked["do"] == "prepare":
            row = Row(**asked["row"])
            make = decoding if row.direction == "decoding" else operation
            run = make(row, asked["options"], asked["backend"])
            repeats = 1
            while (seconds := timed(run, repeats)) < TURN:
                repeats = max(repeats + 1, math.ceil(repeats * 1.2 * TURN / max(seconds, 1e-6)))
            answer = repeats
        else:
            run()
            answer = timed(run, asked["repeats"])
        print(json.dumps(answer), file=sys.__stderr__, flush=True)


def timed(run: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of that many calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - start


# -- in the process that compares -------------------------------------------------------------------------------------


class Checkout:
    """A process that runs the library of one checkout, with the rows of this file."""

    def __init__(self, path: Path, threads: int):
        read, write = os.pipe()  # answers, apart from whatever else the process says
        script = f"import sys; sys.__stderr__ = open({write}, 'w'); from {MODULE} import serve; serve()"
        # `benchmarks` of this checkout, `hf_linattn` of that one
        finder = f"import sys; sys.path[:0] = [{str(path.resolve())!r}]; import hf_linattn; sys.path.pop(0); "
        self.process = subprocess.Popen(
            [sys.executable, "-c", finder + script], stdin=subprocess.PIPE, text=True, pass_fds=[write],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        os.close(write)
        self.answers = os.fdopen(read)

    def ask(self, **asked: Any) -> Any:
        """Return the answer to one line; `ChildProcessError` if the process ended."""
        questions: Any = self.process.stdin
        try:
            questions.write(json.dumps(asked) + "\n")
            questions.flush()
            line = self.answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildProcessError(f"the process of one checkout ended when asked {asked}; its words stand above")
        return json.loads(line)


def compare(
    row: Row, pairs: Sequence[tuple[Checkout, Checkout]], options: Any, backend: str, rounds: int
) -> Ratio:
    """Let both of each pair do a row in turns, and return how their times compare.

    Args:
        pairs: PAIRS of them. rounds: of all pairs together, as many of each.
    """
    every = {x for pair in pairs for x in pair}
    repeats = max(x.ask(do="prepare", row=asdict(row), options=options, backend=backend) for x in every)
    logs: list[list[float]] = [[] for _ in pairs]
    for number in range(rounds):
        this, other = pair = pairs[number % PAIRS]
        seconds = {x: x.ask(do="turn", repeats=repeats) for x in random.sample(pair, 2)}
        logs[number % PAIRS].append(math.log(seconds[this] / seconds[other]))
    means = [fmean(of_pair) for of_pair in logs]
    middle, reach = fmean(means), T_QUANTILE * stdev(means) / math.sqrt(PAIRS)
    return Ratio(row, math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), rounds)


def rows_of(name: str, lengths: Sequence[int], directions: Sequence[str]) -> list[Row]:
    """Return what is timed of a mechanism: every mode it has, and every direction."""
    modes = [mode for mode in ("causal", "bidirectional") if mode in MECHANISMS.get(name).modes]
    passes = [x for x in directions if x != "decoding"]
    rows = [Row(name, mode, way, n) for mode in modes for way in passes for n in lengths]
    return rows + [Row(name, "causal", "decoding", CONTEXT)] * ("causal" in modes and "decoding" in directions)


def main(
    other: Annotated[Path, typer.Argument(help="a checkout of the other commit, with its C built")],
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default all")] = None,
    length: Annotated[list[int] | None, typer.Option(help="tokens, repeatable")] = None,
    direction: Annotated[list[str] | None, typer.Option(help=f"repeatable, of {', '.join(DIRECTIONS)}")] = None,
    rounds: Annotated[int, typer.Option(help=f"a multiple of {PAIRS}")] = 20,
    backend: Annotated[str, typer.Option(help="auto or torch")] = "auto",
    threads: Annotated[int, typer.Option(help="of each process")] = 1,
    output: Annotated[Path | None, typer.Option(help="JSON file of all ratios")] = None,
) -> None:
    """Print the rows, the slowest first."""
    if rounds < PAIRS or rounds % PAIRS:
        raise typer.BadParameter(f"rounds must be a multiple of {PAIRS}, the pairs of processes, got {rounds}")
    pairs = [(Checkout(ROOT, threads), Checkout(other, threads)) for _ in range(PAIRS)]
    this, that = pairs[0]
    rows = [
        row
        for name in mechanism or MECHANISMS.names()
        for row in rows_of(name, length or [512, 2048], direction or DIRECTIONS)
    ]
    found = []
    for row in tqdm(rows):
        known = this.ask(do="options", mechanism=row.mechanism)
        options = {k: v for k, v in that.ask(do="options", mechanism=row.mechanism).items() if k in known}
        found.append(compare(row, pairs, options, backend, rounds))
        if output:
            output.write_text(json.dumps([asdict(x) for x in found], indent=1) + "\n")
    for x in sorted(found, key=lambda x: -x.low):
        row = x.row
        print(
            f"{row.mechanism:20} {row.mode:14} {row.direction:9} {row.length:6}"
            f"  {x.ratio:.3f}  [{x.low:.3f}, {x.high:.3f}]"
        )
    over = [x for x in found if x.low > 1.03]
    print(f"{len(found)} rows, {len(over)} with an interval above 1.03")


if __name__ == "__main__":
    typer.run(main)
