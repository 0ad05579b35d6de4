"""What documents beyond the position table are worth to a classifier: cut, in windows, or read whole by conversions.

    python -m benchmarks.studies.long_documents all-MiniLM-L6-v2/ documents/  # results/long_documents.json

The folder holds <set>_train.jsonl, <set>_validation.jsonl and <set>_test.jsonl, rows with `text` and `label`, a class
number. A reader is an encoder that takes the first 512 tokens of a document: `cut`, or the first 2,048 in overlapping
windows: `windows`, or whole, with a longer position table and another attention.
A probe trains a head alone, a logistic regression on the mean state. The encoder of the first two is the pretrained
one as it comes; the others learn on the training documents, without labels, what it says of them in windows.
The other rows train all weights. For each set and seed an encoder is fine-tuned on the first 512 tokens; it reads
windows, too; the others go on from it on 2,048 tokens, by the labels and by its own pooled answer. The validation
split chooses the weights that are kept. Rows are written as they end: a run that was stopped goes on. A `cut` whose
row is there without its weights is fine-tuned anew for the rows that need it; its own row stays.
"""

from __future__ import annotations

import tempfile
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
from benchmarks.measure.probes import probe
from benchmarks.measure.saved_models import save_whole
from benchmarks.measure.stopwatch import SOFTMAX
from benchmarks.result_files import CUT, LONG_DOCUMENTS_FILE, PROBE, RESULTS, WINDOWS, Document
from hf_linattn import calibrate, extend_positions, patch_model
from hf_linattn.evaluation.document_windows import windows_for
from hf_linattn.training.api import Calibrate, Distill, Distillation
from hf_linattn.training.losses.distillation import Teacher

SETS = ("author20", "movie_reviews_long")
METRIC = "macro_f1"
SEEDS = 3


@dataclass(frozen=True)
class Sizes:
    """How much is read and trained.

    Attributes:
        window: tokens of the first table, and of a window. length: of the longer one.
        cut_epochs, epochs: of the model that reads the first window, and of those that read whole documents.
        batch_size, long_batch_size: documents of a step.
        taught: tokens of documents that teach an encoder to read them whole, before a probe.
    """

    window: int = 512
    length: int = 2048
    cut_epochs: float = 6
    epochs: float = 4
    batch_size: int = 4
    long_batch_size: int = 4
    taught: int = 300_000


@dataclass(frozen=True)
class Reading:
    """An attention with its options, and how it is trained.

    Attributes:
        mechanism: None: the encoder's own attention. learning_rate: of the training. seeds: how many there are.
        calibrated: training documents that the mechanisms are fitted to before.
    """

    mechanism: str | None
    options: Mapping[str, Any]
    learning_rate: float
    calibrated: int = 0
    seeds: int = SEEDS


# pooler and head of an embedding model are small or new: at the rate of the rest the loss stays where it begins
CUT_RATE, HEAD_RATE, KL_WEIGHT = 5e-5, 20.0, 1.0
CONFIG = {"attention_probs_dropout_prob": 0.0}  # as conversions, which have none; with it PyTorch makes all weights
READINGS: Mapping[str, Reading] = {
    "hybrid": Reading("hybrid", {}, 1e-4, calibrated=4),
    "hedgehog": Reading("hedgehog", {}, 3e-4, calibrated=4),
    "longformer": Reading("longformer", {}, 1e-4),
    "linformer": Reading("linformer", {}, 1e-4),
    "lsh": Reading("lsh", {}, 1e-4),
    SOFTMAX: Reading(None, {}, 1e-4, seeds=1),
}


def read_set(name: str, folder: Path) -> DatasetDict:
    """Return the splits of a set of documents."""
    files = {split: str(folder / f"{name}_{split}.jsonl") for split in ("train", "validation", "test")}
    rows: Any = load_dataset("json", data_files=files)
    rows = rows.select_columns(["text", "label"])
    return DatasetDict(train=rows["train"], **{split: by_length(rows[split]) for split in ("validation", "test")})


@dataclass
class Study:
    """An embedding model, where sets of documents lie, and where models and results go."""

    model: str
    documents: Path
    work: Path
    output: Path
    sizes: Sizes
    bf16: bool = False

    def run(
        self, seeds: Iterable[int], sets: Sequence[str], readings: Mapping[str, Reading], heads_only: bool = False
    ) -> None:
        """Measure the rows that are missing. heads_only: the probes alone."""
        said = {"model": Path(self.model).name, "epochs": self.sizes.epochs}
        rows = KeptRows(self.output, "benchmarks.studies.long_documents", **said)
        splits = {each: read_set(each, self.documents) for each in sets}
        for each, name in product(sets, (CUT, WINDOWS)):
            material = self.material(splits[each], name != CUT)
            rows.keep({"set": each, "seed": 0, "row": PROBE + name}, partial(self.probed, material))
        for name, seed, each in product(readings, seeds, sets):
            material, reading = self.material(splits[each], True), readings[name]
            if seed < reading.seeds:
                taught = partial(self.taught, material, seed, reading)
                rows.keep({"set": each, "seed": seed, "row": PROBE + name}, taught)
        if heads_only:
            return
        for seed, each in product(seeds, sets):
            folder = self.work / Path(self.model).name / f"{each}-{seed}"
            key = {"set": each, "seed": seed}
            short, long = (self.material(splits[each], whole) for whole in (False, True))
            fine_tuned = partial(self.fine_tuned, short, seed, folder)
            rows.keep({**key, "row": CUT}, fine_tuned)
            others = {WINDOWS: partial(self.in_windows, long, folder)} | {
                name: partial(self.whole, long, seed, folder, reading)
                for name, reading in readings.items()
                if seed < reading.seeds
            }
            missing = [name for name in others if rows.lacks({**key, "row": name})]
            if missing and not folder.exists():
                fine_tuned()
            for name in missing:
                rows.keep({**key, "row": name}, others[name])

    def material(self, splits: DatasetDict, whole: bool) -> Material:
        """Return the documents of a set, cut to the first window or to the longer table."""
        sizes, classes = self.sizes, len({*splits["train"]["label"]})
        length, batch = (sizes.length, sizes.long_batch_size) if whole else (sizes.window, sizes.batch_size)
        return Material(splits, self.model, length, METRIC, classes, batch, self.bf16, CONFIG)

    def probed(self, material: Material) -> Document:
        """Return the score of a probe on the pretrained encoder, which reads windows."""
        return probe(material, material.load(), windows_for(material.encoder.tokenizer, self.sizes.window))

    def taught(self, material: Material, seed: int, reading: Reading) -> Document:
        """Have the pretrained encoder in windows teach a conversion that reads documents whole, and probe that."""
        sizes, splits = self.sizes, material.splits
        few = splits["validation"].take(sizes.long_batch_size)  # for a report that nobody reads
        fitted = [Calibrate(reading.calibrated * sizes.length)] if reading.calibrated else []
        stages = [*fitted, Distill(sizes.taught, block_size=sizes.length, learning_rate=reading.learning_rate)]
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            training = Distillation(
                self.model, {reading.mechanism or SOFTMAX: dict(reading.options)}, splits["train"], stages, folder,
                splits["validation"], few, max_positions=sizes.length, control="none", seed=seed,
                document_window=sizes.window, per_device_train_batch_size=sizes.long_batch_size, bf16=self.bf16,
                per_device_eval_batch_size=sizes.long_batch_size, speed_lengths=[sizes.length], report_to="none",
            ).run().training  # fmt: skip
            model = material.load(Path(folder))
        found = probe(material, model, windows_for(material.encoder.tokenizer, sizes.length))
        return {**asdict(reading), "trained": training.tokens, "bf16": self.bf16, **found}

    def fine_tuned(self, material: Material, seed: int, folder: Path) -> Document:
        """Fine-tune the encoder on the first window of each document, keep it, and return its score there."""
        set_seed(seed)  # of the head
        model, epochs = material.load(), self.sizes.cut_epochs
        found = material.train(model, self.work, seed, CUT_RATE, epochs, round(epochs), head_rate=HEAD_RATE)
        save_whole(model, folder)
        return {**found, "tokens": material.length, "score": material.score(model)}

    def in_windows(self, material: Material, folder: Path) -> Document:
        """Return the score of the fine-tuned encoder that reads the documents in overlapping windows."""
        windows = windows_for(material.encoder.tokenizer, self.sizes.window)
        score = material.score(material.load(folder), windows)
        return {"tokens": material.length, "stride": windows.step, "score": score}

    def whole(self, material: Material, seed: int, folder: Path, reading: Reading) -> Document:
        """Give the fine-tuned encoder a longer table and another attention, train it, and return its scores."""
        set_seed(seed)  # of random features
        sizes = self.sizes
        model = extend_positions(material.load(folder), sizes.length)
        if reading.mechanism is not None:
            patch_model(model, reading.mechanism, **reading.options)
        converted = material.score(model)
        if reading.calibrated:
            calibrate(model, material.batches(reading.calibrated))
        # side by side: what overlaps would be read twice in every step
        windows = windows_for(material.encoder.tokenizer, sizes.window)
        apart = windows_for(material.encoder.tokenizer, sizes.window, windows.room)
        teacher = Teacher(material.load(folder), kl_weight=KL_WEIGHT, windows=apart)
        found = material.train(
            model, self.work, seed, reading.learning_rate, sizes.epochs, round(sizes.epochs), teacher
        )
        scores = {"converted": converted, "score": material.score(model)}
        return {**asdict(reading), **found, "tokens": material.length, **scores}


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of an embedding model with 512 positions")],
    documents: Annotated[Path, typer.Argument(help="folder with <set>_<split>.jsonl")],
    documents_set: Annotated[list[str] | None, typer.Option("--set", help="repeatable; by default both")] = None,
    reading: Annotated[list[str] | None, typer.Option(help="repeatable; by default all")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="repeatable; by default 0, 1 and 2")] = None,
    epochs: Annotated[float, typer.Option(help="of those that read whole documents")] = Sizes.epochs,
    work: Annotated[Path, typer.Option(help="folder for models and checkpoints")] = Path("runs/long_documents"),
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / LONG_DOCUMENTS_FILE,
    bf16: Annotated[bool, typer.Option(help="train in bfloat16, where the processor has it")] = False,
    heads_only: Annotated[bool, typer.Option("--heads-only", help="the probes alone")] = False,
) -> None:
    """Measure the rows that are missing."""
    work.mkdir(parents=True, exist_ok=True)
    readings = {name: READINGS[name] for name in reading or READINGS}
    seeds = range(SEEDS) if seed is None else seed
    study = Study(model, documents, work, output, Sizes(epochs=epochs), bf16)
    study.run(seeds, documents_set or SETS, readings, heads_only)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
