"""Associative recall over numbers of pairs and lengths: what each state holds, at two sizes, for three seeds.

    python -m benchmarks.studies.mqar_sweep                    # benchmarks/results/mqar_sweep.json and mqar_sweep.png

As in `mqar`, a row states key-value pairs and asks for each of them once, behind them and between fillers; a model of
two layers learns it with softmax and is converted. Here one training has all numbers of pairs and all lengths mixed,
a batch of each at random, and is scored on every one of them. It goes on with the rows that its file lacks.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.ticker import EngFormatter, PercentFormatter
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.saved_models import save_whole
from benchmarks.plot_labels import place_labels
from benchmarks.result_files import MQAR_SWEEP_FILE, MQAR_SWEEP_PLOT, RESULTS, Document, resume
from benchmarks.studies.mqar import answers, fit, make_batch, state_size
from benchmarks.tables.mqar import mean_of, title_of
from hf_linattn import calibrate, get_mechanisms, patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.calibration import what_is_fitted
from hf_linattn.report.plots import ORIGINAL, PATCHED, blank_figure, save_figure
from hf_linattn.training.pretraining.induction import start_llama_with_induction

VOCABULARY, WIDTH, LAYERS = 1024, 64, 2
PAIRS, LENGTHS = (8, 16, 32, 64, 128, 256), (128, 256, 512, 1024, 2048)
POINTS = [(pairs, length) for length, pairs in product(LENGTHS, PAIRS) if 4 * pairs <= length]
BATCH_TOKENS, TEST_TOKENS, CALIBRATION_BATCHES = 8192, 32768, 2
SOFTMAX_STEPS, STEPS = 1500, 400  # of softmax from scratch, of a converted model
RATES = (3e-3, 1e-2)  # the better one of seed 0, on rows that are no test, is that of the other seeds
SEEDS = (0, 1, 2)
TRAIN, TEST, CALIBRATION, VALIDATION = range(4)  # what random numbers are drawn for
_window = {"num_sink_tokens": 4, "block_size": 16}
_narrow = {"linear": "learned_exp", "linear_options": {"feature_dim": 32}}
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    ("streaming", {"window_size": 28, **_window}),  # the bytes of 64 features
    ("streaming", {"window_size": 124, **_window}),  # the bytes of 256
    ("gated_deltanet", {}),
    ("gated_deltanet", {"normalisation": "silu"}),
    ("gated_deltanet", {"expand_key": 4}),
    ("learned_exp", {"feature_dim": 64}),
    ("learned_exp", {"feature_dim": 256}),
    ("hedgehog", {"feature_dim": 64}),
    ("hedgehog", {"feature_dim": 256}),
    ("gla", {"feature_dim": 64}),
    ("gla", {"feature_dim": 256}),
    ("retention", {"feature_dim": 64}),
    ("retention", {"feature_dim": 256}),
    ("deltanet", {"feature_dim": 64, "gate": True}),
    ("deltanet", {"feature_dim": 256, "gate": True}),
    ("performer", {"num_features": 64}),
    ("performer", {"num_features": 256}),
    ("linear", {}),
    ("linear", {"decay": "learned"}),
    ("t2r", {"feature_dim": 64}),
    ("t2r", {"feature_dim": 256}),
    ("hybrid", {"window_size": 16, "num_sink_tokens": 1, **_narrow}),
    ("hybrid", {"window_size": 64, "num_sink_tokens": 4, "linear": "learned_exp"}),
    ("hybrid", {"window_size": 16, "num_hard_keys": 16, **_narrow}),
    ("hybrid", {"window_size": 16, "num_hard_keys": 64, **_narrow}),
]


def generator_of(purpose: int, seed: int) -> torch.Generator:
    """Return random numbers that no other purpose and no other seed has."""
    return torch.Generator().manual_seed(1000 * seed + purpose)


def batches(count: int, purpose: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels [BATCH_TOKENS / N, N], each of a point at random."""
    generator = generator_of(purpose, seed)
    for _ in range(count):
        pairs, length = POINTS[int(torch.randint(len(POINTS), (), generator=generator))]
        yield make_batch(pairs, length, generator, BATCH_TOKENS // length, VOCABULARY)


def make_model(seed: int) -> LlamaForCausalLM:
    """Return an untrained model that already looks, weakly, for what followed the same token before."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, head_dim=WIDTH, intermediate_size=2 * WIDTH, initializer_range=0.05,
        num_hidden_layers=LAYERS, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=LENGTHS[-1],
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    start_llama_with_induction(model)
    return model


@torch.no_grad()
def scores(model: LlamaForCausalLM, purpose: int, tokens: int) -> dict[str, float]:
    """Return "pairs | length" -> the share of right answers, in rows of about as many tokens."""
    found = {}
    for pairs, length in POINTS:
        rows, labels = make_batch(pairs, length, generator_of(purpose, length + pairs), tokens // length, VOCABULARY)
        logits, values = answers(model.eval(), rows, labels)
        found[f"{pairs} | {length}"] = float((logits.argmax(-1) == values).float().mean())
    return found


def measure(
    original: LlamaForCausalLM, name: str, options: dict[str, Any], seed: int, rates: tuple[float, ...]
) -> Document:
    """Convert, calibrate and train on with every rate; the best one counts."""
    converted = patch_model(copy.deepcopy(original), name, **options).eval()
    if what_is_fitted(get_mechanisms(converted)):
        calibrate(converted, [{"input_ids": x} for x, _ in batches(CALIBRATION_BATCHES, CALIBRATION, seed)])
    row = {"mechanism": name, "options": options, "seed": seed, "state_bytes": state_size(converted, LENGTHS[-1])}
    row["calibrated"] = scores(converted, TEST, TEST_TOKENS)
    trained: dict[float, LlamaForCausalLM] = {}
    for rate in rates:
        trained[rate] = copy.deepcopy(converted)
        fit(trained[rate], batches(STEPS, TRAIN, seed), STEPS, rate)
    best = max(rates, key=lambda rate: mean_of(scores(trained[rate], VALIDATION, BATCH_TOKENS)))
    return {**row, "trained": scores(trained[best], TEST, TEST_TOKENS), "rate": best}


def task() -> Document:
    """Return what all rows of a file have in common."""
    return {
        "vocabulary": VOCABULARY, "width": WIDTH, "layers": LAYERS, "pairs": list(PAIRS), "lengths": list(LENGTHS),
        "batch_tokens": BATCH_TOKENS, "softmax_steps": SOFTMAX_STEPS, "steps": STEPS, "rates": list(RATES),
    }  # fmt: skip


def key_of(row: Document) -> str:
    """Return what tells a row from others."""
    return json.dumps([row["mechanism"], row["options"], row["seed"]])


def original_of(seed: int, folder: Path) -> LlamaForCausalLM:
    """Return the model that has learnt the task with softmax, trained here if it is not kept yet."""
    kept = folder / f"seed{seed}"
    if not kept.exists():
        model = make_model(seed)
        fit(model, batches(SOFTMAX_STEPS, TRAIN, seed), SOFTMAX_STEPS, RATES[0])
        save_whole(model, kept)
    return LlamaForCausalLM.from_pretrained(kept)


def draw(document: Document, path: Path) -> None:
    """Write the plot: the mean over all points against bytes, a point for every row and seed."""
    title = f"Recall of {PAIRS[0]} to {PAIRS[-1]} pairs from {LENGTHS[0]} to {LENGTHS[-1]:,} tokens"
    figure, (panel,) = blank_figure(title, 1)
    places = [(row["state_bytes"], mean_of(row["trained"])) for row in document["rows"]]
    for row, place in zip(document["rows"], places, strict=True):
        colour = ORIGINAL if row["mechanism"] == "softmax" else PATCHED
        panel.plot(*place, color=colour, marker="o", markersize=3)
    panel.set_xscale("log")
    panel.set_xlabel("bytes of decoding state")
    panel.set_ylabel("right answers")
    panel.xaxis.set_major_formatter(EngFormatter(unit="B"))
    panel.yaxis.set_major_formatter(PercentFormatter(1))
    rows = zip(document["rows"], places, strict=True)
    place_labels(panel, [(title_of(row), place) for row, place in rows if row["seed"] == SEEDS[0]], fontsize=4)
    save_figure(figure, path)


def main(
    output: Annotated[Path, typer.Option(help="the JSON file, which is gone on with")] = RESULTS / MQAR_SWEEP_FILE,
    originals: Annotated[Path, typer.Option(help="where the models with softmax are kept")] = Path("runs/mqar_sweep"),
    minutes: Annotated[float, typer.Option(help="no row begins after that many")] = float("inf"),
) -> None:
    """Measure what is missing, row by row, and write the JSON and the plot beside it."""
    started = time.perf_counter()
    document = resume(output, {"task": task()}, {"runs": [], "rows": []})
    document["runs"].append(collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.mqar_sweep"))
    done = {key_of(row): row["rate"] for row in document["rows"]}
    for seed in SEEDS:
        missing = [x for x in ROWS if key_of({"mechanism": x[0], "options": x[1], "seed": seed}) not in done]
        for name, options in tqdm(missing, desc=f"seed {seed}"):
            if time.perf_counter() - started > 60 * minutes:
                break
            first = done.get(key_of({"mechanism": name, "options": options, "seed": SEEDS[0]}))
            rates = RATES if first is None else (first,)
            row = measure(original_of(seed, originals), name, options, seed, rates)
            document["rows"].append({**row, "run": len(document["runs"]) - 1})
            done[key_of(row)] = row["rate"]
            write_json(output, document)
            draw(document, output.with_name(MQAR_SWEEP_PLOT))
    typer.echo(f"{output} has {len(document['rows'])} of {len(SEEDS) * len(ROWS)} rows")


if __name__ == "__main__":
    typer.run(main)
