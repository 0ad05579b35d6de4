"""What classifiers of sentences keep: an encoder fine-tuned on CoLA, SST-2 and RTE, converted, recovered and scored.

    python -m benchmarks.studies.encoder_tasks all-MiniLM-L6-v2/ --task-dir glue/    # results/encoder_tasks.json

An original is fine-tuned for each task and seed. Each conversion of it learns from the labels and from the original;
the control keeps softmax and learns from the labels, on the same sentences as often. A tenth of the training sentences
chooses the weights of the originals, and chose the learning rates; the validation file is the test. Rows are written
as they end, seed by seed: a run that was stopped goes on with those that are missing.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset, DatasetDict, load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, set_seed

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import CONTROL, ENCODER_TASKS_FILE, ORIGINAL, RESULTS, Document, read
from hf_linattn import calibrate, patch_model
from hf_linattn.atomic_io import write_text
from hf_linattn.errors import DataError
from hf_linattn.training.arguments import DataArguments, FinetuningArguments
from hf_linattn.training.base_task import TextEncoder
from hf_linattn.training.classification import SequenceClassification
from hf_linattn.training.data import TrainingData
from hf_linattn.training.finetuning import fine_tune
from hf_linattn.training.losses.distillation import Teacher

HUB = "nyu-mll/glue"
HELD_BACK = 10  # of so many training sentences one chooses
BATCH, CLASSES = 32, 2
ORIGINAL_RATE = 1e-4
# of all trainings: batches hold sentences of like lengths
TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "eval_strategy": "no",
    "save_strategy": "no", "load_best_model_at_end": False, "train_sampling_strategy": "group_by_length",
    "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
# of the originals: the best of these weights are kept
LOOKS: dict[str, Any] = {
    "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 0.5, "save_steps": 0.5,
    "load_best_model_at_end": True,
}  # fmt: skip


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        name: of its files, and of its configuration on the Hub. columns: of the text, and of a second one.
        metric: that counts. length: tokens to which texts are cut. epochs: of the original, and of each row.
        most: training sentences that are read; None: all.
    """

    name: str
    columns: tuple[str, ...]
    metric: str
    length: int
    epochs: tuple[float, float]
    most: int | None = None


TASKS = (
    GlueTask("cola", ("sentence",), "matthews", 64, (3, 0.5)),
    GlueTask("sst2", ("sentence",), "accuracy", 64, (1, 0.5), 10_000),
    GlueTask("rte", ("sentence1", "sentence2"), "accuracy", 256, (3, 0.5)),
)


@dataclass(frozen=True)
class Conversion:
    """A mechanism with its options, and how it is recovered.

    Attributes:
        learning_rate: of the recovery. teacher_weight: of the original's predictions, and of its hidden states, beside
            the labels. calibrated: training sentences that the mechanisms are fitted to before.
    """

    mechanism: str
    options: Mapping[str, Any]
    learning_rate: float
    teacher_weight: float = 1.0
    calibrated: int = 0


CONVERSIONS: Mapping[str, Conversion] = {
    CONTROL: Conversion("softmax", {}, 5e-5, teacher_weight=0.0),
    "linear": Conversion("linear", {}, 3e-4),
    "performer": Conversion("performer", {}, 3e-4),
    "hedgehog": Conversion("hedgehog", {}, 3e-4),
    "hybrid": Conversion("hybrid", {}, 5e-5),
    "lsh": Conversion("lsh", {}, 5e-5),
    "linformer": Conversion("linformer", {}, 5e-5),
    "local": Conversion("local", {}, 5e-5),
}


def read_task(task: GlueTask, folder: Path | None) -> DatasetDict:
    """Return the splits of a task, of JSON lines in a folder or of the Hub, with the columns `text` and `text_pair`.

    Validation and test are in the order of their lengths, so that little of a batch is padding.
    """
    if folder is None:
        given: Any = load_dataset(HUB, task.name)
    else:
        files = {split: str(folder / f"{task.name}_{split}.jsonl") for split in ("train", "validation")}
        given = load_dataset("json", data_files=files)
    names = dict(zip(task.columns, ("text", "text_pair"), strict=False))
    given = given.select_columns([*names, "label"]).rename_columns(names)
    train = given["train"].shuffle(seed=0)
    train = train.select(range(min(len(train), task.most or len(train))))
    held_back = len(train) // HELD_BACK
    parts = {"validation": train.select(range(held_back)), "test": given["validation"]}
    return DatasetDict(train=train.select(range(held_back, len(train))), **{k: by_length(x) for k, x in parts.items()})


def by_length(rows: Dataset) -> Dataset:
    """Return the rows of a data set, the shortest first."""
    lengths = [sum(len(row[name] or "") for name in row if name != "label") for row in rows]
    return rows.select(sorted(range(len(rows)), key=lengths.__getitem__))


@dataclass(frozen=True)
class Material:
    """What the rows of a task are measured on: rows of its splits, the sentences of the test, what makes tokens."""

    task: GlueTask
    rows: TrainingData
    test: Dataset
    encoder: TextEncoder

    def score(self, model: PreTrainedModel) -> float:
        """Return the metric of a model on the test."""
        return SequenceClassification().score(model, self.encoder, self.test, BATCH)[self.task.metric]

    def steps(self, epochs: float) -> int:
        """Return how many steps these epochs are."""
        return max(1, round(epochs * len(self.rows.train) / BATCH))

    def batches(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Return the first training sentences in batches."""
        rows = self.rows.train
        chosen = [rows[first : min(first + BATCH, count)] for first in range(0, count, BATCH)]
        return [self.rows.collator([dict(zip(x, row, strict=True)) for row in zip(*x.values(), strict=True)])
                for x in chosen]  # fmt: skip


@dataclass
class Study:
    """A pretrained encoder, where its tasks lie, and where checkpoints and results go."""

    model: str
    task_dir: Path | None
    work: Path
    output: Path

    def __post_init__(self) -> None:
        self.document: Document = read(self.output) if self.output.exists() else {"rows": []}
        self.read: dict[str, Material] = {}

    def run(self, seeds: range, tasks: Sequence[GlueTask], conversions: Mapping[str, Conversion]) -> None:
        """Measure the rows that are missing, and write each when it ends."""
        for seed, task in product(seeds, tasks):
            self.keep(seed, task, ORIGINAL, partial(self.fine_tuned, task, seed))
            for name, conversion in conversions.items():
                self.keep(seed, task, name, partial(self.recovered, task, seed, conversion))

    def keep(self, seed: int, task: GlueTask, name: str, measure: Callable[[], Document]) -> None:
        """Measure a row, unless the document has it."""
        key = {"task": task.name, "seed": seed, "row": name}
        if any(key.items() <= row.items() for row in self.document["rows"]):
            return
        start = time.perf_counter()
        found = measure()
        seconds = {"seconds": round(time.perf_counter() - start, 1)}
        self.document["rows"].append({**key, "metric": task.metric, **found, **seconds})
        source = collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.encoder_tasks")
        self.document |= {"model": Path(self.model).name, "provenance": source}
        write_text(self.output, json.dumps(self.document, indent=1) + "\n")
        typer.echo(f"{key} {found} {seconds}")

    def material(self, task: GlueTask) -> Material:
        """Return what a task is measured on; it is read once."""
        if task.name not in self.read:
            tokenizer, splits = AutoTokenizer.from_pretrained(self.model), read_task(task, self.task_dir)
            encoder = TextEncoder(tokenizer, DataArguments(block_size=task.length, metrics=[task.metric]))
            model = AutoModelForSequenceClassification.from_pretrained(self.model, num_labels=CLASSES)
            rows = SequenceClassification().rows(splits, encoder, model, len(splits["train"]) * task.length)
            self.read[task.name] = Material(task, rows, splits["test"], encoder)
        return self.read[task.name]

    def original(self, task: GlueTask, seed: int) -> Path:
        """Return the folder of the original of a task and seed."""
        return self.work / f"{task.name}-{seed}"

    def fine_tuned(self, task: GlueTask, seed: int) -> Document:
        """Fine-tune the encoder on a task, keep it, and return its score."""
        set_seed(seed)  # of the head
        model = AutoModelForSequenceClassification.from_pretrained(self.model, num_labels=CLASSES)
        material, folder = self.material(task), self.original(task, seed)
        found = self.train(model, material, seed, ORIGINAL_RATE, task.epochs[0], LOOKS)
        model.save_pretrained(folder)
        return {**found, "score": material.score(model)}

    def recovered(self, task: GlueTask, seed: int, conversion: Conversion) -> Document:
        """Convert the original, recover it, and return its score after `patch_model` and in the end."""
        material, folder = self.material(task), self.original(task, seed)
        if not folder.exists():
            raise DataError(f"{str(folder)!r} does not exist: give the work folder that the originals were left in")
        set_seed(seed)  # of random features
        original, model = (AutoModelForSequenceClassification.from_pretrained(folder) for _ in range(2))
        patch_model(model, conversion.mechanism, **conversion.options)
        converted = material.score(model)
        if conversion.calibrated:
            calibrate(model, material.batches(conversion.calibrated))
        weight = conversion.teacher_weight
        teacher = Teacher(original, kl_weight=weight, hidden_weight=weight) if weight else None
        found = self.train(model, material, seed, conversion.learning_rate, task.epochs[1], {}, teacher)
        return {**asdict(conversion), **found, "converted": converted, "score": material.score(model)}

    def train(
        self, model: PreTrainedModel, material: Material, seed: int, rate: float, epochs: float,
        looks: dict[str, Any], teacher: Teacher | None = None,
    ) -> Document:  # fmt: skip
        """Train a model in place, and return for how long and its loss on the validation sentences."""
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            training = FinetuningArguments(output_dir=folder, seed=seed, **(TRAINING | looks))
            result = fine_tune(
                model, material.rows, training, Path(folder), learning_rate=rate, max_steps=material.steps(epochs),
                teacher=teacher,
            ).result  # fmt: skip
        return {
            "learning_rate": rate, "sentences": len(material.rows.train), "steps": result["steps"],
            "validation_loss": result["eval_loss"],
        }  # fmt: skip


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of an encoder")],
    task_dir: Annotated[Path | None, typer.Option(help="folder with <task>_<split>.jsonl; default: the Hub")] = None,
    seeds: Annotated[int, typer.Option(help="how many, from 0 on")] = 3,
    work: Annotated[Path, typer.Option(help="folder for originals and checkpoints")] = Path("runs/encoder_tasks"),
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / ENCODER_TASKS_FILE,
) -> None:
    """Measure the rows that are missing."""
    work.mkdir(parents=True, exist_ok=True)
    Study(model, task_dir, work, output).run(range(seeds), TASKS, CONVERSIONS)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
