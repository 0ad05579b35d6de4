"""The board of a pretrained model: what each conversion keeps of language, of recall and of tasks, row by row.

    python -m benchmarks.studies.real_board SmolLM2-135M-Instruct/ books/ --task-dir zero_shot/

Every row is a mechanism right after `patch_model` and after `calibrate`, in a file of its own under
benchmarks/results/real_board, written when it is done; a run that is started again goes on with those that are
missing. The best mechanisms have a row with every fourth layer softmax, too. Beside all of them stand a tenth and a
quarter of the heads, chosen by recall. Mechanisms are fitted on the training split of the books, and scored on the
test split.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import ORIGINAL, REAL_BOARD, RESULTS, Document, read, resume
from benchmarks.studies.choose_plan import PROMPTS_SEED
from benchmarks.tables.real_board import CALIBRATED, PATCHED
from hf_linattn import calibrate, choose_plan, get_mechanisms, patch_model
from hf_linattn.advice.candidates import most_layers
from hf_linattn.atomic_io import write_json
from hf_linattn.calibration import what_is_fitted
from hf_linattn.chosen_plan import ChosenPlan
from hf_linattn.evaluation import long_losses, state_bytes_by_length, streaming_for, whole_windows
from hf_linattn.evaluation.next_token import evenly, token_losses
from hf_linattn.evaluation.recall import recall
from hf_linattn.evaluation.suite import SuiteOptions, tasks
from hf_linattn.plan import Plan
from hf_linattn.training.data import load_text_splits, tokenize_and_pack
from hf_linattn.training.task import load_model

WINDOW = {"window_size": 256, "num_sink_tokens": 4}
MECHANISMS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"decay": "learned"},
    "performer": {"decay": "learned"},
    "hedgehog": {"decay": "learned"},
    "learned_exp": {"decay": "learned"},
    "retention": {},
    "gla": {},
    "deltanet": {"gate": True},
    "local": {"window_size": 256},
    "streaming": WINDOW,
    "linformer": {},
    "lsh": {},
    "hybrid": {},
}
HEADS = {"heads": 0.1, "heads-quarter": 0.25}  # row -> share of the key/value heads that stays beside windows
EQUAL = "windows"  # that take the bytes of `linear`
KEPT = "+softmax"  # behind the name of a row: every fourth layer keeps its own
BEST = 4  # mechanisms of the lowest perplexity have such a row
ROWS = (ORIGINAL, *HEADS, EQUAL, *MECHANISMS)
LONG_LENGTH = 8192
SEED = 0  # of the training split's order, and of the prompts that choose heads


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        length, windows: of the perplexity. long_length, long_windows: of the loss by position, and of the state.
        recall_lengths, prompts: of the needle in noise; a row right after patching has the first length alone.
        items: of each task. fitted: tokens that are calibrated on, in rows of block_size, batch_size at once.
    """

    length: int = 2048
    windows: int = 32
    long_length: int = LONG_LENGTH
    long_windows: int = 16
    recall_lengths: tuple[int, ...] = (1024, 2048, 4096)
    prompts: int = 20
    items: int = 200
    fitted: int = 32_768
    block_size: int = 1024
    batch_size: int = 4


@dataclass(frozen=True)
class Material:
    """What every row is measured on: batches to fit to, windows [B, N] and texts to score, the folder of tasks."""

    tokenizer: PreTrainedTokenizerBase
    fitted: list[dict[str, torch.Tensor]]
    windows: torch.Tensor
    texts: list[str]
    task_dir: Path | None
    sizes: Sizes


def plan_of(row: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Plan | ChosenPlan:
    """Return the plan of a row."""
    if keep := HEADS.get(row):
        return choose_plan(model, tokenizer, keep=keep, replace={"streaming": WINDOW}, seed=SEED, progress=False)
    if row == EQUAL:
        linear = patch_model(copy.deepcopy(model), plan_of("linear", model, tokenizer))
        return streaming_for(model, bytes=state_bytes_by_length(linear, [LONG_LENGTH])[0].patched)
    name = row.removesuffix(KEPT)
    entry: dict[str, Any] = {"mechanism": name, "options": dict(MECHANISMS[name])}
    if name != row:
        entry["layers"] = most_layers(model.config.num_hidden_layers)
    return [entry]


def measure(model: PreTrainedModel, material: Material, whole: bool) -> Document:
    """Return what a model comes to; of a model that was not fitted perplexity and the shortest needles alone."""
    sizes, tokenizer, start = material.sizes, material.tokenizer, time.perf_counter()
    losses = token_losses(model, material.windows).losses.mean(1)
    found: Document = {"perplexity": math.exp(float(losses.mean())), "window_losses": losses.tolist()}
    lengths = sizes.recall_lengths if whole else sizes.recall_lengths[:1]
    rows = recall(
        model, tokenizer, ["single_noise"], lengths, num_samples=sizes.prompts, seed=PROMPTS_SEED, batch_size=1,
        progress=False,
    )  # fmt: skip
    found["recall"] = [row for row in rows if row["depth"] is None]
    if whole:
        read = long_losses(
            model, tokenizer, material.texts, length=sizes.long_length, num_windows=sizes.long_windows,
            progress=False,
        )  # fmt: skip
        found["positions"] = [vars(row) for row in read.positions]
        found["tasks"] = task_scores(model, material)
    return found | {"seconds": time.perf_counter() - start}


def task_scores(model: PreTrainedModel, material: Material) -> list[Document]:
    """Return each task's score on its first items, and what a guess would have."""
    options = SuiteOptions(
        task_dir=material.task_dir, limit=material.sizes.items, long_prompts=None, num_generated=0, progress=False,
    )  # fmt: skip
    return [
        {"task": found.name, "metric": found.metric, "score": fmean(found.values), "chance": found.facts["chance"]}
        for found in tasks(model, material.tokenizer, options)
        if found.facts.get("headline")
    ]


def run_row(model_path: str, row: str, material: Material, dtype: torch.dtype) -> Document:
    """Measure a row's stages on a model that is loaded anew."""
    model = load_model(model_path, dtype)
    if row == ORIGINAL:
        return {"row": row, "stages": {PATCHED: measure(model, material, whole=True)}}
    plan = plan_of(row, model, material.tokenizer)
    patch_model(model, plan)
    length = material.sizes.long_length
    state = state_bytes_by_length(model, [length])[0]
    stages, fits = {}, bool(what_is_fitted(get_mechanisms(model)))
    stages[PATCHED] = measure(model, material, whole=not fits)
    if fits:
        start = time.perf_counter()
        found = calibrate(model, material.fitted)
        stages[CALIBRATED] = {"calibration_seconds": time.perf_counter() - start}
        stages[CALIBRATED] |= {"layers_taken": sum(result.taken for result in found.held_out.values())}
        stages[CALIBRATED] |= {"whole": [error._asdict() for error in found.whole]}
        stages[CALIBRATED] |= measure(model, material, whole=True)
    bytes_of = {"length": length, "row": state.patched, "softmax": state.original}
    return {"row": row, "plan": plan, "state_bytes": bytes_of, "stages": stages}


def best_rows(folder: Path) -> list[str]:
    """Return the names of the rows of the best mechanisms with every fourth layer softmax."""
    found = {name: read(folder / f"{name}.json")["stages"] for name in MECHANISMS}
    last = {name: [*stages.values()][-1]["perplexity"] for name, stages in found.items()}
    return [f"{name}{KEPT}" for name in sorted(last, key=lambda name: last[name])[:BEST]]


def read_material(model_path: str, books: Path, task_dir: Path | None, sizes: Sizes) -> Material:
    """Read the texts; rows to fit to come from the training split, texts to score from the test split."""
    train, validation, test = (books / f"{split}.jsonl" for split in ("train", "validation", "test"))
    splits = load_text_splits(train_file=train, validation_file=validation, test_file=test)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = tokenize_and_pack(splits["train"].shuffle(seed=SEED), tokenizer, sizes.block_size, sizes.fitted)
    names = ("input_ids", "position_ids")
    batches = [
        {name: rows[first : first + sizes.batch_size][name] for name in names}
        for first in range(0, len(rows), sizes.batch_size)
    ]
    texts = splits["test"]["text"]
    windows = evenly(whole_windows(tokenizer, texts, sizes.length), sizes.windows)  # of all books
    return Material(tokenizer, batches, windows, texts, task_dir, sizes)


def main(
    model: Annotated[str, typer.Argument(help="folder of a causal language model")],
    books: Annotated[Path, typer.Argument(help="folder with train.jsonl, validation.jsonl and test.jsonl")],
    task_dir: Annotated[Path | None, typer.Option(help="folder with the rows of tasks; default: the Hub")] = None,
    row: Annotated[list[str] | None, typer.Option(help="repeatable; by default every one")] = None,
    dtype: Annotated[str, typer.Option(help="of the weights")] = "bfloat16",
    folder: Annotated[Path, typer.Option(help="receives a file for each row")] = RESULTS / REAL_BOARD,
) -> None:
    """Measure the rows that are missing."""
    weights: torch.dtype = getattr(torch, dtype)
    said = {"model": Path(model).name, "dtype": dtype}
    for file in folder.glob("*.json"):
        resume(file, said, {})
    material = read_material(model, books, task_dir, Sizes())
    folder.mkdir(parents=True, exist_ok=True)

    def run(rows: Sequence[str]) -> None:
        for name in tqdm([name for name in rows if not (folder / f"{name}.json").exists()], desc="board", unit="row"):
            provenance = collect_provenance(torch.device("cpu"), weights, "benchmarks.studies.real_board")
            document = {"provenance": provenance, **said, **run_row(model, name, material, weights)}
            write_json(folder / f"{name}.json", document)

    run(row or ROWS)
    if not row:
        run(best_rows(folder))
    typer.echo(f"{folder} has {len(list(folder.glob('*.json')))} rows")


if __name__ == "__main__":
    typer.run(main)
