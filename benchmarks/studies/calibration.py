"""Test perplexity after `calibrate` alone, beside the one before it and the recipe's control.

    python -m benchmarks.studies.calibration                               # benchmarks/results/calibration.json

The mechanisms are fitted on the bundled training split and scored on the test split, in the windows of
`benchmarks.studies.zero_shot`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import RESULTS, ROOT, Document
from benchmarks.studies.zero_shot import LENGTH, load, patched
from benchmarks.studies.zero_shot import MODELS as BUNDLED
from hf_linattn import calibrate
from hf_linattn.atomic_io import write_json
from hf_linattn.training.data import load_text_splits, tokenize_and_pack

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("hedgehog", {}),
    ("hedgehog", {"decay": "learned"}),
    ("learned_exp", {"decay": "learned"}),
    ("hybrid", {"window_size": 32}),
    ("hybrid", {"window_size": 32, "linear": "learned_exp"}),
    ("linear", {"decay": "learned"}),
    ("retention", {}),
    ("gla", {}),
    ("deltanet", {}),
    ("gated_deltanet", {}),
    ("gated_deltanet", {"expand_key": 2}),
    ("mixed_chunk", {}),
    ("fusion", {"members": {"local": {"window_size": 64}, "linear": {}}}),
    ("linformer", {"num_slots": 64, "block_size": 32}),
    ("nystrom", {"num_landmarks": 32, "block_size": 32}),
    ("vq", {"num_codes": 64, "block_size": 32}),
    ("conv", {"window_size": 64, "kernel_radius": 4}),
    ("evo", {"window_size": 64, "kernel_radius": 4}),
]
MODELS = {name: BUNDLED[name] for name in ("gpt2", "llama")}  # for which every row has a form
BATCHES, BATCH_SIZE = 6, 16  # rows of LENGTH tokens
SHUFFLE_SEED = 0


def training_batches(path: str) -> list[dict[str, torch.Tensor]]:
    """Return packed batches of the bundled training split, its documents shuffled."""
    texts = load_text_splits()["train"].shuffle(seed=SHUFFLE_SEED)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / path)
    rows = tokenize_and_pack(texts, tokenizer, LENGTH, BATCHES * BATCH_SIZE * LENGTH)
    return [rows[start : start + BATCH_SIZE] for start in range(0, len(rows), BATCH_SIZE)]


def run(rows: Sequence[tuple[str, dict[str, Any]]], documents: int | None = None) -> Document:
    """Calibrate and score every row on the causal bundled models and return the JSON document."""
    texts, scored = load_text_splits()["test"]["text"][:documents], dict[str, int]()
    results: list[dict[str, Any]] = [{"mechanism": name, "options": options, "models": {}} for name, options in rows]
    for name, path in MODELS.items():
        (model, score), batches = load(path, texts, scored), training_batches(path)
        original = score(model)
        for row in tqdm(results, desc=name):
            with patched(model, row["mechanism"], row["options"]):
                before, start = score(model), time.perf_counter()
                errors = calibrate(model, batches)
                seconds = time.perf_counter() - start
                row["models"][name] = {
                    "original": original, "zero_shot": before, "calibrated": score(model),
                    "seconds": seconds, "layer_errors": list(errors.values()),
                }  # fmt: skip
    return {
        "provenance": collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.calibration"),
        "calibration": {"tokens": BATCHES * BATCH_SIZE * LENGTH, "batches": BATCHES},
        "evaluation": {"documents": len(texts), "max_length": LENGTH, "num_tokens": scored},
        "rows": results,
    }


def main(
    documents: Annotated[int | None, typer.Option(help="at most that many documents of the test split")] = None,
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / "calibration.json",
) -> None:
    """Measure and write the JSON; `python -m docs.generate` makes the table from it."""
    results = run(ROWS, documents)
    write_json(output, results)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
