"""What studies of classifiers have in common: rows kept as they end, a training, a score."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import Document, resume
from hf_linattn.atomic_io import write_json
from hf_linattn.evaluation.document_windows import DocumentWindows
from hf_linattn.training.arguments import DataArguments, FinetuningArguments
from hf_linattn.training.base_task import TextEncoder
from hf_linattn.training.classification import SequenceClassification
from hf_linattn.training.data import TrainingData
from hf_linattn.training.finetuning import fine_tune
from hf_linattn.training.losses.distillation import Teacher

TASK = SequenceClassification()
# of all trainings; rows come in the order of `in_batches`
TRAINING: Mapping[str, Any] = {
    "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False,
    "train_sampling_strategy": "sequential", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


def by_length(rows: Dataset) -> Dataset:
    """Return the rows of a data set, the shortest first, so that little of a batch is padding."""
    lengths = [sum(len(row[name] or "") for name in row if name != "label") for row in rows]
    return rows.select(sorted(range(len(rows)), key=lengths.__getitem__))


def in_batches(rows: Dataset, batch_size: int, seed: int) -> Dataset:
    """Return rows in batches of like lengths, the batches in random order.

    transformers' `group_by_length` takes the batches of a stretch from the longest to the shortest: half an epoch then
    ends on short texts, which may have other labels.
    """
    draw = random.Random(seed)
    lengths = [len(ids) for ids in rows["input_ids"]]
    order = sorted(range(len(rows)), key=lambda i: (lengths[i], draw.random()))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    last = [] if len(batches[-1]) == batch_size else [batches.pop()]  # a short batch must not shift those behind it
    draw.shuffle(batches)
    return rows.select([i for batch in [*batches, *last] for i in batch])


@dataclass(frozen=True)
class Material:
    """Texts of a classifier, cut to `length` tokens, and the metric that counts.

    Attributes:
        bf16: train in bfloat16. config: options of the model's config that differ from what was saved.
    """

    splits: DatasetDict
    model: str
    length: int
    metric: str
    classes: int
    batch_size: int
    bf16: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def encoder(self) -> TextEncoder:
        """Return the tokenizer and its options."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        return TextEncoder(tokenizer, DataArguments(block_size=self.length, metrics=[self.metric]))

    @cached_property
    def rows(self) -> TrainingData:
        """Return rows of the training and validation split."""
        return TASK.rows(self.splits, self.encoder, self.load(), len(self.splits["train"]) * self.length)

    def load(self, folder: Path | None = None) -> PreTrainedModel:
        """Return a classifier that a folder holds; without one, the pretrained model with a new head."""
        source = folder or self.model
        return AutoModelForSequenceClassification.from_pretrained(source, num_labels=self.classes, **self.config)

    def score(self, model: PreTrainedModel, windows: DocumentWindows | None = None) -> float:
        """Return the metric of a model on the test, read whole or in windows."""
        test = self.splits["test"]
        return TASK.score(model, self.encoder, test, self.batch_size, windows)[self.metric]

    def batches(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Return the first training texts in batches."""
        rows, size = self.rows.train, self.batch_size
        count = min(count, len(rows))
        return [
            self.rows.collator([rows[i] for i in range(first, min(first + size, count))])
            for first in range(0, count, size)
        ]

    def train(
        self, model: PreTrainedModel, work: Path, seed: int, rate: float, epochs: float, looks: int = 0,
        teacher: Teacher | None = None, head_rate: float = 1.0,
    ) -> Document:  # fmt: skip
        """Train a model in place, and return for how long and its loss on the validation texts.

        looks: how often the validation loss is taken, of which the best weights are kept; 0: the last ones are.
        head_rate: of head and pooler, times the rate.
        """
        looking = {"eval_steps": 1 / looks, "save_steps": 1 / looks, "load_best_model_at_end": True} if looks else {}
        strategies = {"eval_strategy": "steps", "save_strategy": "steps"} if looks else {}
        rows = replace(self.rows, train=in_batches(self.rows.train, self.batch_size, seed))
        with tempfile.TemporaryDirectory(dir=work) as folder:
            training = FinetuningArguments(
                output_dir=folder, seed=seed, per_device_train_batch_size=self.batch_size,
                per_device_eval_batch_size=self.batch_size, bf16=self.bf16, head_rate=head_rate,
                **{**TRAINING, **strategies, **looking},
            )  # fmt: skip
            steps = max(1, round(epochs * len(rows.train) / self.batch_size))
            result = fine_tune(
                model, rows, training, Path(folder), learning_rate=rate, max_steps=steps, teacher=teacher
            ).result
        return {
            "learning_rate": rate, "texts": len(rows.train), "steps": steps, "epochs": epochs,
            "validation_loss": result["eval_loss"], "head_rate": head_rate, "bf16": self.bf16,
        }  # fmt: skip


class KeptRows:
    """Rows of a result file, each written when it ends, so that a run that was stopped goes on.

    Attributes:
        document: what the file holds.
    """

    def __init__(self, output: Path, source: str, **said: Any):
        """Go on with the rows of a file. said: what all of them have in common, as `resume` takes it."""
        self.output, self.source = output, source
        self.document = resume(output, said, {"rows": []})

    def lacks(self, key: Document) -> bool:
        """Return whether there is no row of a key."""
        return not any(key.items() <= row.items() for row in self.document["rows"])

    def keep(self, key: Document, measure: Callable[[], Document]) -> None:
        """Measure the row of a key, unless there is one, and write it with the seconds that it took."""
        if not self.lacks(key):
            return
        start = time.perf_counter()
        found = measure()
        seconds = round(time.perf_counter() - start, 1)
        self.document["rows"].append({**key, **found, "seconds": seconds})
        self.document["provenance"] = collect_provenance(torch.device("cpu"), torch.float32, self.source)
        write_json(self.output, self.document)
