"""What classifiers of sentences keep: an encoder fine-tuned on CoLA, SST-2 and RTE, converted, recovered and scored.

    python -m benchmarks.studies.encoder_tasks all-MiniLM-L6-v2/ --task-dir glue/    # results/encoder_tasks.json

An original is fine-tuned for each task and seed. Each conversion of it learns from the labels and from the original;
the control keeps softmax and learns from the labels, on the same sentences as often. A tenth of the training sentences
chose the learning rates and the number of epochs; the validation file is the test. Rows are written as they end, seed
by seed: a run that was stopped goes on with those that are missing. An original whose row is there without its
weights, as in a fresh checkout, is fine-tuned anew for the rows that need it; its own row stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from datasets import DatasetDict, load_dataset
from transformers import set_seed

from benchmarks.measure.classifiers import KeptRows, Material, by_length
from benchmarks.measure.saved_models import save_whole
from benchmarks.result_files import CONTROL, ENCODER_TASKS_FILE, ORIGINAL, RESULTS, Document
from hf_linattn import calibrate, patch_model
from hf_linattn.training.losses.distillation import Teacher

HUB = "nyu-mll/glue"
HELD_OUT = 10  # of ten training sentences one chooses
BATCH, CLASSES = 32, 2


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        name: of its files, and of its configuration on the Hub. columns: of the text, and of a second one.
        metric: that counts. length: tokens to which texts are cut.
        learning_rate: of the original. epochs: of the original, and of each row.
        most: training sentences that are read; None: all.
    """

    name: str
    columns: tuple[str, ...]
    metric: str
    length: int
    learning_rate: float
    epochs: tuple[float, float]
    most: int | None = None


TASKS = (
    GlueTask("sst2", ("sentence",), "accuracy", 64, 1e-4, (1, 1.5), 10_000),
    GlueTask("rte", ("sentence1", "sentence2"), "accuracy", 256, 1e-4, (5, 1.5)),
    GlueTask("cola", ("sentence",), "matthews", 64, 2e-4, (5, 1.5)),
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
    "linear": Conversion("linear", {"feature_map": "learned_exp"}, 2e-4, calibrated=64),
    "performer": Conversion("performer", {"ridge": "learned"}, 2e-4, calibrated=32),
    "hedgehog": Conversion("hedgehog", {}, 2e-4, calibrated=64),
    "hybrid": Conversion("hybrid", {}, 5e-5),
    "lsh": Conversion("lsh", {}, 5e-5),
    "linformer": Conversion("linformer", {}, 5e-5),
    "local": Conversion("local", {}, 5e-5),
}


def read_task(task: GlueTask, folder: Path | None) -> DatasetDict:
    """Return the splits of a task, of JSON lines in a folder or of the Hub, with columns `text` and `text_pair`."""
    if folder is None:
        given: Any = load_dataset(HUB, task.name)
    else:
        files = {split: str(folder / f"{task.name}_{split}.jsonl") for split in ("train", "validation")}
        given = load_dataset("json", data_files=files)
    names = dict(zip(task.columns, ("text", "text_pair"), strict=False))
    given = given.select_columns([*names, "label"]).rename_columns(names)
    train = given["train"].shuffle(seed=0)
    train = train.select(range(min(len(train), task.most or len(train))))
    held_out = len(train) // HELD_OUT
    parts = {"validation": train.select(range(held_out)), "test": given["validation"]}
    return DatasetDict(train=train.select(range(held_out, len(train))), **{k: by_length(x) for k, x in parts.items()})


@dataclass
class Study:
    """A pretrained encoder, where its tasks lie, and where originals and results go."""

    model: str
    task_dir: Path | None
    work: Path
    output: Path
    bf16: bool = False

    def run(self, seeds: Iterable[int], tasks: Sequence[GlueTask], conversions: Mapping[str, Conversion]) -> None:
        """Measure the rows that are missing."""
        said = {"model": Path(self.model).name, "bf16": self.bf16}
        rows = KeptRows(self.output, "benchmarks.studies.encoder_tasks", **said)
        materials = {task: self.material(task) for task in tasks}
        for seed, (task, material) in product(seeds, materials.items()):
            folder = self.work / Path(self.model).name / f"{task.name}-{seed}"
            key = {"task": task.name, "seed": seed, "metric": task.metric}
            fine_tuned = partial(self.fine_tuned, material, seed, task, folder)
            rows.keep({**key, "row": ORIGINAL}, fine_tuned)
            missing = [name for name in conversions if rows.lacks({**key, "row": name})]
            if missing and not folder.exists():
                fine_tuned()
            for name in missing:
                recovered = partial(self.recovered, material, seed, task.epochs[1], folder, conversions[name])
                rows.keep({**key, "row": name}, recovered)

    def material(self, task: GlueTask) -> Material:
        """Return what a task is measured on."""
        splits = read_task(task, self.task_dir)
        return Material(splits, self.model, task.length, task.metric, CLASSES, BATCH, self.bf16)

    def fine_tuned(self, material: Material, seed: int, task: GlueTask, folder: Path) -> Document:
        """Fine-tune the encoder on a task, keep it in a folder, and return its score."""
        set_seed(seed)  # of the head
        model = material.load()
        found = material.train(model, self.work, seed, task.learning_rate, task.epochs[0])
        save_whole(model, folder)
        return {**found, "score": material.score(model)}

    def recovered(
        self, material: Material, seed: int, epochs: float, folder: Path, conversion: Conversion
    ) -> Document:
        """Convert the original, recover it, and return its score after `patch_model` and in the end."""
        set_seed(seed)  # of random features
        model, weight = material.load(folder), conversion.teacher_weight
        patch_model(model, conversion.mechanism, **conversion.options)
        converted = material.score(model)
        if conversion.calibrated:
            calibrate(model, material.batches(conversion.calibrated))
        teacher = Teacher(material.load(folder), kl_weight=weight, hidden_weight=weight) if weight else None
        found = material.train(model, self.work, seed, conversion.learning_rate, epochs, teacher=teacher)
        return {**asdict(conversion), **found, "converted": converted, "score": material.score(model)}


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of an encoder")],
    task_dir: Annotated[Path | None, typer.Option(help="folder with <task>_<split>.jsonl; default: the Hub")] = None,
    seeds: Annotated[int, typer.Option(help="how many, from 0 on")] = 3,
    work: Annotated[Path, typer.Option(help="folder for originals and checkpoints")] = Path("runs/encoder_tasks"),
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / ENCODER_TASKS_FILE,
    bf16: Annotated[bool, typer.Option(help="train in bfloat16, where the processor has it")] = False,
) -> None:
    """Measure the rows that are missing."""
    work.mkdir(parents=True, exist_ok=True)
    Study(model, task_dir, work, output, bf16).run(range(seeds), TASKS, CONVERSIONS)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
