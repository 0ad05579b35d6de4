"""What depth costs: the most memory that a training step of a Llama takes, against its number of layers.

    python -m benchmarks.studies.depth                         # benchmarks/results/depth.json, its table and its plot

Counted are the bytes of all tensors that are alive at once in a forward and a backward pass, beyond the weights and
their gradients, which are there before and grow with the depth however one trains. The loss is of the last hidden
states: what the predictions over a vocabulary take, no layer changes. A count depends on no clock, and sees
neither scratch memory inside one operation nor what an allocator keeps of what was freed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.ticker import EngFormatter, FixedLocator
from tqdm.auto import tqdm

from benchmarks.measure.decoding import build_model
from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.stopwatch import PLANS, SOFTMAX, Stopwatch
from benchmarks.render import write_tables
from benchmarks.result_files import DEPTH_FILE, DEPTH_PLOT, RESULTS, Document
from hf_linattn import chunk_feed_forward, patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.report.plots import CONTROL, ORIGINAL, PATCHED, blank_figure, save_figure
from hf_linattn.training.saved_tensors import save_on_disk

LENGTH = 4096
DEPTHS = (2, 4, 8, 16, 32)
MECHANISMS = ("linear", SOFTMAX)
PLAN = dataclasses.replace(PLANS["cpu"], num_heads=2, contexts=(LENGTH,))
CHUNK_SIZE = 512


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step saves memory: layers made again in the backward pass, feed-forward in chunks, inputs on disk."""

    checkpointing: bool = False
    chunk_size: int | None = None
    saved: Callable[[], AbstractContextManager[None]] = nullcontext
    colour: str = ORIGINAL


WAYS = {
    "plain": Way(),
    "checkpointing": Way(True, colour=CONTROL),
    "checkpointing, chunks": Way(True, CHUNK_SIZE, colour="#E69F00"),
    "checkpointing, chunks, inputs on disk": Way(True, CHUNK_SIZE, save_on_disk, PATCHED),
}


@dataclasses.dataclass(frozen=True)
class DepthRow:
    """One step of one model: its peak in bytes, and in hidden states [1, N, d] of the model."""

    mechanism: str
    way: str
    depth: int
    peak_bytes: int
    hidden_states: float


def measure(mechanism: str, depth: int, length: int) -> list[DepthRow]:
    """Count a step of a Llama of that depth in every way."""
    plan = dataclasses.replace(PLAN, num_layers=depth, contexts=(length,))
    model = patch_model(build_model(Stopwatch(torch.device("cpu"), plan), torch.float32, SOFTMAX), mechanism).train()
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    hidden_state = length * model.config.hidden_size * model.dtype.itemsize
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows = []
    for name, way in WAYS.items():
        chunk_feed_forward(model, way.chunk_size)
        if way.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with LiveBytes() as count:
            with way.saved():
                loss = model.model(tokens, use_cache=False).last_hidden_state.square().mean()
            loss.backward()
        rows.append(DepthRow(mechanism, name, depth, count.peak, count.peak / hidden_state))
    return rows


def draw(document: Document, path: Path) -> None:
    """Write the plot: a panel for each mechanism, a curve for each way."""
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in document["rows"]))
    title = f"Activations of a training step, {document['length']:,} tokens"
    figure, panels = blank_figure(title, len(mechanisms))
    for panel, mechanism in zip(panels, mechanisms, strict=True):
        for name, way in WAYS.items():
            rows = [row for row in document["rows"] if (row["mechanism"], row["way"]) == (mechanism, name)]
            depths, peaks = [row["depth"] for row in rows], [row["peak_bytes"] for row in rows]
            panel.plot(depths, peaks, color=way.colour, marker="o", markersize=5, label=name)
        panel.set_title(mechanism, fontsize=10)
        panel.set_xlabel("layers")
        panel.set_ylabel("most bytes at once")
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_locator(FixedLocator(depths))
        panel.yaxis.set_major_formatter(EngFormatter(unit="B"))
        panel.legend(frameon=False)
    save_figure(figure, path)


def main(output: Annotated[Path, typer.Option(help="where the results go")] = RESULTS / DEPTH_FILE) -> None:
    """Measure, write the JSON and the plot beside it, and rewrite the tables generated from it."""
    cases = [(mechanism, depth) for mechanism in MECHANISMS for depth in DEPTHS]
    rows = [row for mechanism, depth in tqdm(cases, desc="depth") for row in measure(mechanism, depth, LENGTH)]
    results: dict[str, Any] = {
        "provenance": collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.depth"),
        "length": LENGTH,
        "width": PLAN.num_heads * PLAN.head_dim,
        "chunk_size": CHUNK_SIZE,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_json(output, results)
    draw(results, output.with_name(DEPTH_PLOT))
    typer.echo(f"wrote {output} and {DEPTH_PLOT}")
    if output == RESULTS / DEPTH_FILE:
        write_tables()


if __name__ == "__main__":
    typer.run(main)
