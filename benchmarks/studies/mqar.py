"""Multi-query associative recall (Arora et al. 2024, Zoology, arXiv 2312.04927): accuracy against bytes of state.

    python -m benchmarks.studies.mqar                  # benchmarks/results/mqar.json and mqar.png

A sequence lists key-value pairs, then asks for the values of its keys again, in random order and between fillers. A
model of two layers learns it with softmax, from scratch. It is then converted to each mechanism of constant state,
calibrated and trained on, and softmax itself as long. What a state of fixed size can hold, and what training can bring
it to hold, shows in how many of the answers are right.

Deviation from Zoology: the mechanisms are not trained from scratch, as this library converts what softmax has learnt,
and no layer has a convolution of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from matplotlib.ticker import EngFormatter, PercentFormatter
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.measure.provenance import collect_provenance
from benchmarks.plot_labels import place_labels
from benchmarks.result_files import MQAR_FILE, MQAR_PLOT, RESULTS, Document
from hf_linattn import calibrate, get_mechanisms, patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.cache import state_bytes
from hf_linattn.calibration import what_is_fitted
from hf_linattn.report.plots import ORIGINAL, PATCHED, blank_figure, save_figure

VOCABULARY, PAIRS, LENGTH = 64, 24, 96  # half of the tokens are keys, the other half values; 0 fills
WIDTH, LAYERS = 64, 2
BATCH_SIZE, TEST_BATCHES = 64, 8
IGNORED = -100


class Stage(NamedTuple):
    """Training on one size of the task."""

    pairs: int
    length: int
    steps: int


# softmax finds out what is asked for on short sequences; on long ones alone it does not
STAGES = (Stage(8, 32, 600), Stage(16, 64, 300), Stage(PAIRS, LENGTH, 300))
CALIBRATION_BATCHES = 4
LEARNING_RATES = (3e-3, 1e-2)  # of converted models; the better one counts
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    ("linear", {}),
    ("linear", {"decay": "learned"}),
    ("performer", {"num_features": 16}),
    ("performer", {"num_features": 64}),
    ("performer", {"num_features": 256}),
    ("hedgehog", {"feature_dim": 16}),
    ("hedgehog", {"feature_dim": 64}),
    ("hedgehog", {"feature_dim": 256}),
    ("learned_exp", {"feature_dim": 16}),
    ("learned_exp", {"feature_dim": 64}),
    ("learned_exp", {"feature_dim": 256}),
    ("t2r", {}),
    ("taylor", {}),
    ("cosformer", {}),
    ("retention", {}),
    ("gla", {}),
    ("deltanet", {"feature_dim": 16}),
    ("deltanet", {"feature_dim": 64}),
    ("deltanet", {"feature_dim": 64, "gate": True}),
    ("gated_deltanet", {}),
    ("gated_deltanet", {"expand_key": 2}),
    ("hybrid", {"window_size": 16, "num_sink_tokens": 1, "linear": "learned_exp", "initial_share": 1}),
    ("mixed_chunk", {"block_size": 16}),
    ("fusion", {"members": {"local": {"window_size": 16}, "deltanet": {"feature_dim": 64}}}),
    ("vq", {"num_codes": 32, "block_size": 16}),
    ("linformer", {"num_slots": 16, "block_size": 16}),
    ("lsh", {"num_rounds": 4, "bucket_size": 8, "num_buckets": 4}),
    ("local", {"window_size": 16, "block_size": 16}),
    ("local", {"window_size": 48, "block_size": 16}),
    ("conv", {"window_size": 16, "kernel_radius": 2}),
    ("evo", {"window_size": 16, "kernel_radius": 2}),
    ("streaming", {"window_size": 16, "num_sink_tokens": 16, "block_size": 16}),
    ("longformer", {"window_size": 16, "num_global": 16}),
    ("atrous", {"window_size": 16, "dilation": 3, "block_size": 16}),
    ("sparse_transformer", {"block_size": 16, "window_size": 16, "stride": 4, "num_strides": 4}),
    ("checkerboard", {"block_size": 16, "window_size": 48}),
    ("fixed_pattern", {"block_size": 16, "group_size": 32, "num_summary": 8, "num_groups": 2}),
    ("radial", {"block_size": 16, "window_blocks": 1}),
    ("learned_sparse", {"block_size": 16, "reach": 3}),
]


def make_batch(
    pairs: int, length: int, generator: torch.Generator, rows: int = BATCH_SIZE, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [rows, N]: after each query stands nothing, and its label is the value of its key."""
    half = vocabulary // 2
    keys = 1 + _drawn(rows, half - 1, pairs, generator)
    values = torch.randint(half, vocabulary, keys.shape, generator=generator)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORED)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    places = 2 * pairs + _drawn(rows, length - 2 * pairs, pairs, generator)
    return tokens.scatter(1, places, keys), labels.scatter(1, places, values)


def _drawn(rows: int, numbers: int, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` different ones of the first numbers, in random order, for each sequence [rows, count]."""
    return torch.rand(rows, numbers, generator=generator).argsort(dim=1)[:, :count]


def make_model() -> LlamaForCausalLM:
    """Return an untrained model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=LENGTH, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def answers(model: LlamaForCausalLM, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits where something is asked for [Q, V], and the right answers [Q]; no others are made."""
    asked = labels != IGNORED
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return model.lm_head(hidden[asked]), labels[asked]


def fit(model: LlamaForCausalLM, batches: Iterable[tuple[Tensor, Tensor]], steps: int, learning_rate: float) -> None:
    """Train on as many batches as there are steps."""
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    for tokens, labels in tqdm(batches, total=steps, leave=False):
        loss = F.cross_entropy(*answers(model, tokens, labels))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def train(model: LlamaForCausalLM, stage: Stage, learning_rate: float) -> None:
    """Train on fresh sequences."""
    generator = torch.Generator().manual_seed(1)
    fresh = (make_batch(stage.pairs, stage.length, generator) for _ in range(stage.steps))
    fit(model, fresh, stage.steps, learning_rate)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM) -> float:
    """Return the share of right answers on sequences that no training had."""
    generator = torch.Generator().manual_seed(2)
    right = total = 0
    for _ in range(TEST_BATCHES):
        tokens, labels = make_batch(PAIRS, LENGTH, generator)
        answers = model.eval()(input_ids=tokens, use_cache=False).logits.argmax(-1)
        right += int((answers == labels).sum())  # no token has the number of an ignored label
        total += int((labels != IGNORED).sum())
    return right / total


@torch.no_grad()
def state_size(model: LlamaForCausalLM, length: int = LENGTH) -> int:
    """Return the bytes of decoding state after one sequence."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
    return state_bytes(cache)


def measure(original: LlamaForCausalLM, mechanism: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Convert, calibrate and train on with every learning rate; the best one counts."""
    converted = patch_model(copy.deepcopy(original), mechanism, **options).eval()
    row: dict[str, Any] = {"mechanism": mechanism, "options": options, "state_bytes": state_size(converted)}
    row["converted"] = accuracy(converted)
    if what_is_fitted(get_mechanisms(converted)):
        generator = torch.Generator().manual_seed(3)
        batches = [make_batch(PAIRS, LENGTH, generator)[0] for _ in range(CALIBRATION_BATCHES)]
        calibrate(converted, [{"input_ids": tokens} for tokens in batches])
    row["calibrated"] = accuracy(converted)
    scores = {}
    for rate in LEARNING_RATES:
        model = copy.deepcopy(converted)
        train(model, Stage(PAIRS, LENGTH, steps), rate)
        scores[rate] = accuracy(model)
    best = max(scores, key=scores.__getitem__)
    return {**row, "trained": scores[best], "learning_rate": best}


def run(rows: list[tuple[str, dict[str, Any]]], stages: Sequence[Stage], steps: int) -> Document:
    """Train the original in stages, then convert it for every row."""
    original = make_model()
    for stage in stages:
        train(original, stage, LEARNING_RATES[0])
    return {
        "provenance": collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.mqar"),
        "task": {"vocabulary": VOCABULARY, "pairs": PAIRS, "length": LENGTH, "chance": 2 / VOCABULARY},
        "training": {"stages": [stage._asdict() for stage in stages], "steps": steps, "batch_size": BATCH_SIZE},
        "rows": [measure(original, name, options, steps) for name, options in tqdm(rows, desc="mqar")],
    }


def draw(document: Document, path: Path) -> None:
    """Write the plot: a point for every row."""
    figure, (panel,) = blank_figure(f"Recall of {PAIRS} pairs from {LENGTH} tokens", 1)
    for row in document["rows"]:
        exact = row["mechanism"] == "softmax"
        panel.plot(row["state_bytes"], row["trained"], color=ORIGINAL if exact else PATCHED, marker="o", markersize=5)
    panel.set_xscale("log")
    panel.set_xlabel("bytes of decoding state")
    panel.set_ylabel("right answers")
    panel.xaxis.set_major_formatter(EngFormatter(unit="B"))
    panel.yaxis.set_major_formatter(PercentFormatter(1))
    place_labels(panel, [(row["mechanism"], (row["state_bytes"], row["trained"])) for row in document["rows"]])
    save_figure(figure, path)


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps of each converted model")] = 300,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / MQAR_FILE,
) -> None:
    """Measure, and write the JSON and the plot beside it."""
    results = run(ROWS, STAGES, steps)
    write_json(output, results)
    draw(results, output.with_name(MQAR_PLOT))
    typer.echo(f"wrote {output} and {MQAR_PLOT}")


if __name__ == "__main__":
    typer.run(main)
