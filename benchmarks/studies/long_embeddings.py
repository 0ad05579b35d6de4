"""Which article a paragraph is from: embeddings of articles read in windows, and whole by conversions.

    python -m benchmarks.studies.long_embeddings all-MiniLM-L6-v2/ wikitext-2/       # results/long_embeddings.json

Of each test article every fourth paragraph is left out, and looks for what is left of it among all articles. These are
cut to 2,048 tokens; an embedding model reads its first window of them alone (`cut`), all windows, whose embeddings are
averaged (`windows`), or, with a longer position table and another attention, the whole. That is taught by the original
in windows, on the training articles. Rows are written as they end: a run that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from torch import nn

from benchmarks.measure.classifiers import KeptRows
from benchmarks.measure.stopwatch import SOFTMAX
from benchmarks.result_files import CUT, LONG_EMBEDDINGS_FILE, RESULTS, WINDOWS, Document
from benchmarks.studies.wikitext import FILES, is_heading, read_articles
from hf_linattn.evaluation.document_windows import DocumentWindows, windows_for
from hf_linattn.sentence_models import SentenceModel
from hf_linattn.training.api import Calibrate, Distill, Distillation

LEAST_WORDS, LEAST_PARAGRAPHS = 20, 8  # of a paragraph, and of an article
ASKED = 4  # every fourth paragraph is left out


@dataclass(frozen=True)
class Sizes:
    """How much is read and trained: tokens of the original's windows and of the longer table, and documents of a step.
    """

    window: int = 256
    length: int = 2048
    batch_size: int = 4


@dataclass(frozen=True)
class Reading:
    """An attention with its options, and how it is trained.

    Attributes:
        mechanism: `softmax`: the encoder's own. learning_rate: of the training. calibrated: tokens, of the same.
    """

    mechanism: str
    options: Mapping[str, Any]
    learning_rate: float
    calibrated: int = 0


READINGS: Mapping[str, Reading] = {
    "hybrid": Reading("hybrid", {}, 1e-4, calibrated=16384),
    "hedgehog": Reading("hedgehog", {}, 3e-4, calibrated=16384),
    "learned_exp": Reading("learned_exp", {"decay": "learned"}, 3e-4, calibrated=16384),
    SOFTMAX: Reading("softmax", {}, 1e-4),
}


def left_out(articles: Sequence[Sequence[str]]) -> tuple[list[str], list[int], list[str]]:
    """Return the paragraphs that are left out, the number of the article of each, and the articles without them."""
    asked: list[str] = []
    numbers: list[int] = []
    rest: list[str] = []
    for lines in articles:
        paragraphs = [line for line in lines if not is_heading(line) and len(line.split()) >= LEAST_WORDS]
        if len(paragraphs) < LEAST_PARAGRAPHS:
            continue
        own = paragraphs[ASKED - 1 :: ASKED]
        asked += own
        numbers += [len(rest)] * len(own)
        rest.append("\n".join(line for line in lines if line not in own))
    return asked, numbers, rest


@dataclass
class Study:
    """An embedding model, where WikiText-2 lies, and where models and results go."""

    model: str
    wikitext: Path
    work: Path
    output: Path
    sizes: Sizes
    tokens: int
    bf16: bool = False

    def run(self, readings: Mapping[str, Reading]) -> None:
        """Measure the rows that are missing."""
        said = {"model": Path(self.model).name, "tokens": self.tokens}
        rows = KeptRows(self.output, "benchmarks.studies.long_embeddings", **said)
        for name, length in ((CUT, self.sizes.window), (WINDOWS, self.sizes.length)):
            rows.keep({"row": name}, partial(self.in_windows, length))
        for name, reading in readings.items():
            rows.keep({"row": name}, partial(self.whole, name, reading))

    @cached_property
    def asked(self) -> tuple[list[str], list[int], list[str]]:
        """What `left_out` returns of the test articles."""
        return left_out(read_articles(self.wikitext / FILES["test"]))

    def articles(self, split: str) -> Dataset:
        """Return the articles of a split, each a text."""
        articles = read_articles(self.wikitext / FILES[split])
        return Dataset.from_dict({"text": ["\n".join(lines) for lines in articles if len(lines) > 1]})

    def score(
        self, modules: SentenceModel, encoder: nn.Module, length: int, windows: DocumentWindows | None
    ) -> Document:
        """Return for each paragraph whether its own article is the nearest, 1 or 0: a string."""
        paragraphs, numbers, articles = self.asked
        reading: dict[str, Any] = {"max_length": length, "windows": windows, "batch_size": self.sizes.batch_size}
        queries, documents = (modules.embed_texts(encoder, texts, **reading) for texts in (paragraphs, articles))
        found = (queries @ documents.T).argmax(1) == torch.tensor(numbers)
        return {"length": length, "articles": len(articles), "right": "".join(map(str, found.int().tolist()))}

    def in_windows(self, length: int) -> Document:
        """Score the original, which reads windows."""
        modules = SentenceModel(self.model)
        windows = windows_for(modules.tokenizer, self.sizes.window)
        return self.score(modules, modules.take_encoder(), length, windows)

    def whole(self, name: str, reading: Reading) -> Document:
        """Convert the model for longer texts, have the original teach it, and score it."""
        sizes, folder = self.sizes, self.work / Path(self.model).name / name
        taught = Distill(self.tokens, block_size=sizes.length, learning_rate=reading.learning_rate)
        fitted = [Calibrate(reading.calibrated)] if reading.calibrated else []
        report = Distillation(
            self.model, {reading.mechanism: dict(reading.options)}, self.articles("train"), [*fitted, taught], folder,
            self.articles("validation"), self.articles("test"), max_positions=sizes.length, control="none",
            document_window=sizes.window, per_device_train_batch_size=sizes.batch_size, bf16=self.bf16,
            per_device_eval_batch_size=sizes.batch_size, speed_lengths=[sizes.length], report_to="none",
        ).run()  # fmt: skip
        modules = SentenceModel(str(folder))
        return {
            "mechanism": reading.mechanism, "options": reading.options, "learning_rate": reading.learning_rate,
            "calibrated": reading.calibrated, "trained": report.training.tokens, "bf16": self.bf16,
            **self.score(modules, modules.take_encoder(), sizes.length, None),
        }  # fmt: skip


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of an embedding model")],
    wikitext: Annotated[Path, typer.Argument(help="folder with the three files of WikiText-2")],
    tokens: Annotated[int, typer.Option(help="training tokens of a row, beside those that fit it")] = 1_000_000,
    bf16: Annotated[bool, typer.Option(help="train in bfloat16, where the processor has it")] = False,
    row: Annotated[list[str] | None, typer.Option(help="these conversions alone")] = None,
    work: Annotated[Path, typer.Option(help="folder for models")] = Path("runs/long-embeddings"),
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / LONG_EMBEDDINGS_FILE,
) -> None:
    """Measure and write the JSON."""
    wanted = {name: READINGS[name] for name in row or READINGS}
    Study(model, wikitext, work, output, Sizes(), tokens, bf16).run(wanted)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
