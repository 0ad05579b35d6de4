"""Retrieval with an embedding model after its conversion, on the test split of WikiText-2.

    python -m benchmarks.studies.retrieval all-MiniLM-L6-v2/ wikitext-2/       # benchmarks/results/retrieval.json

The model is converted, calibrated, transferred and taught by the hidden states of the original, then asked for the
second half of every test paragraph by its first, and for a paragraph's nearest neighbour.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import RESULTS
from benchmarks.studies.wikitext import FILES, is_heading, read_articles
from hf_linattn import calibrate, patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.evaluation import retrieval
from hf_linattn.training.arguments import FinetuningArguments
from hf_linattn.training.data import TrainingData, tokenize_and_pack
from hf_linattn.training.finetuning import fine_tune
from hf_linattn.training.losses.attention_transfer import AttentionTransfer
from hf_linattn.training.losses.distillation import HiddenStates

LEAST_WORDS = 20  # of a paragraph
BLOCK, BATCH = 256, 8
CALIBRATED = 2  # batches


def read_paragraphs(file: Path) -> list[list[str]]:
    """Return the paragraphs of each article that are of some length."""
    articles = (
        [line for line in lines if not is_heading(line) and len(line.split()) >= LEAST_WORDS]
        for lines in read_articles(file)
    )
    return [article for article in articles if article]


def run(
    model_path: str, wikitext: Path, mechanism: str, options: dict[str, Any], tokens: int, rate: float, work: Path
) -> dict[str, Any]:
    """Score the original, convert and recover, and score again."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    articles = {split: read_paragraphs(wikitext / name) for split, name in FILES.items()}
    texts = {split: Dataset.from_dict({"text": [p for a in articles[split] for p in a]}) for split in FILES}
    rows = {split: tokenize_and_pack(texts[split].shuffle(seed=0), tokenizer, BLOCK, tokens) for split in FILES}
    data = TrainingData(rows["train"], rows["validation"].select(range(min(128, len(rows["validation"])))))
    model = AutoModel.from_pretrained(model_path)
    teacher = patch_model(AutoModel.from_pretrained(model_path), "softmax")
    training = FinetuningArguments(
        output_dir=str(work), per_device_train_batch_size=BATCH, per_device_eval_batch_size=16, report_to="none"
    )
    results: list[dict[str, Any]] = []

    def record(stage: str, seconds: float = 0.0, tokens: int = 0, loss: float | None = None) -> None:
        results.append({"stage": stage, "tokens": tokens, "seconds": seconds, "validation_loss": loss})

    def score() -> None:
        results[-1] |= retrieval(model, tokenizer, articles["test"], max_length=BLOCK, progress=True)
        typer.echo(str(results[-1]))

    record("original")
    score()
    patch_model(model, mechanism, **options)
    start, fitted = time.perf_counter(), CALIBRATED * BATCH
    names = ("input_ids", "position_ids")
    batches = [{name: rows["train"][i : i + BATCH][name] for name in names} for i in range(0, fitted, BATCH)]
    calibrate(model, batches, progress=True)
    record("calibrated", time.perf_counter() - start, fitted * BLOCK)
    budget = {"transferred": (tokens // 4, 1e-2), "recovered": (tokens - tokens // 4 - fitted * BLOCK, rate)}
    for stage, (share, learning_rate) in budget.items():
        trainee = AttentionTransfer(model, 1.0, 0.0) if stage == "transferred" else HiddenStates(model, teacher)
        steps = share // (BLOCK * BATCH)
        result, _ = fine_tune(trainee, data, training, work / stage, learning_rate=learning_rate, max_steps=steps)
        record(stage, result["seconds"], steps * BLOCK * BATCH, result["eval_loss"])
    score()
    return {
        "provenance": collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.retrieval"),
        "model": Path(model_path).name,
        "mechanism": mechanism,
        "options": options,
        "learning_rate": rate,
        "stages": results,
    }


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of an embedding model with mean pooling")],
    wikitext: Annotated[Path, typer.Argument(help="folder with the three files of WikiText-2")],
    mechanism: Annotated[str, typer.Option(help="name of the mechanism")] = "learned_exp",
    options: Annotated[str, typer.Option(help="its options, as JSON")] = '{"decay": "learned"}',
    tokens: Annotated[int, typer.Option(help="training tokens of all stages together")] = 1_200_000,
    learning_rate: Annotated[float, typer.Option(help="of the last stage")] = 3e-4,
    work: Annotated[Path, typer.Option(help="folder for checkpoints")] = Path("runs/retrieval"),
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / "retrieval.json",
) -> None:
    """Measure and write the JSON."""
    results = run(model, wikitext, mechanism, json.loads(options), tokens, learning_rate, work)
    write_json(output, results)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
