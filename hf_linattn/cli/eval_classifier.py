"""`hf-linattn eval` of a classifier: metrics on rows with labels, read whole or in windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import LARGEST_COUNT, require, require_count
from ..errors import DataError, OptionError
from ..reading import read_tokenizer
from .common import read_model, reading_model

TextColumn = Annotated[
    str, typer.Option("--text_column", "--text-column", help="rows: column of the texts in .jsonl, .csv, ...")
]
PairColumn = Annotated[
    str | None, typer.Option("--text_pair_column", "--text-pair-column", help="rows: column of a second text")
]
LabelColumn = Annotated[str, typer.Option("--label_column", "--label-column", help="classifier: column of the labels")]
Metrics = Annotated[
    str | None, typer.Option(help="classifier: accuracy, macro_f1, matthews, pearson, ... by commas; default: its own")
]
DocumentWindow = Annotated[
    int | None,
    typer.Option(
        "--document_window", "--document-window", help="rows: read windows of that many tokens, pool what they give"
    ),
]
DocumentStride = Annotated[
    int | None,
    typer.Option("--document_stride", "--document-stride", help="rows: tokens between them; default: half"),
]


@dataclass(frozen=True)
class RowOptions:
    """What is read of the rows, and how; original: the model to whose embeddings cosines are measured."""

    text_column: str
    text_pair_column: str | None
    label_column: str
    metrics: tuple[str, ...]
    document_window: int | None
    document_stride: int | None
    original: str | None = None


def is_classifier(model: str) -> bool:
    """Return whether a checkpoint was saved as a classifier of texts, as its config says."""
    from transformers import AutoConfig

    with reading_model("model", model) as name:
        config = AutoConfig.from_pretrained(name)
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def classifier_scores(
    model: str, files: list[Path], max_length: int | None, batch_size: int, dtype: str | None, options: RowOptions
) -> tuple[Any, ...]:
    """Return the JSON document, and what is shown in its place.

    Raises:
        OptionError: texts that are longer than the positions, without windows; a metric of another problem.
        DataError: no rows, no labels, labels that the model does not have, texts without a token.
    """
    from datasets import concatenate_datasets

    from ..evaluation import position_limit
    from ..evaluation.document_windows import windows_for
    from ..evaluation.label_metrics import chosen_metrics
    from ..training.arguments import DataArguments
    from ..training.data import text_of
    from ..training.files import load_file
    from ..training.task import TextEncoder, task_of

    if not files:
        raise DataError("files is empty; give at least one file of rows with texts and labels, as .jsonl or .csv")
    require_count("batch_size", batch_size)
    loaded, tokenizer = read_model("model", model, dtype), read_tokenizer("model", model)
    task: Any = task_of(loaded)
    chosen_metrics(task.problem, options.metrics)
    limit, window = position_limit(loaded), options.document_window
    if window is not None and options.text_pair_column:
        raise OptionError(f"document_window={window}: windows of two texts have no rule; leave it out")
    if window is None and options.document_stride is not None:
        raise OptionError(f"document_stride={options.document_stride}: there are no windows; leave it out")
    read, name = (max_length, "max_length") if window is None else (window, "document_window")
    if read is not None and limit is not None and read > limit:
        raise OptionError(
            f"{name}={read} is beyond the {limit} positions of {model!r}; give at most {limit}, with document_window"
            f" it reads longer texts in windows, and extend_positions (max_positions={read}) makes its table longer"
        )
    require("max_length", max_length, max_length is None or max_length >= 2, "at least 2")
    length = max_length or (LARGEST_COUNT if window else limit or LARGEST_COUNT)
    columns = options.text_column, options.label_column, options.text_pair_column
    kinds = task.label_kinds
    rows = [text_of(repr(str(file)), load_file("files", file), *columns, label_kinds=kinds) for file in files]
    data = DataArguments(block_size=length, metrics=list(options.metrics) or None)
    windows = None if window is None else windows_for(tokenizer, window, options.document_stride)
    found = task.score(loaded, TextEncoder(tokenizer, data), concatenate_datasets(rows), batch_size, windows)
    texts = found.pop("num_tokens")
    how = {"max_length": max_length or (None if window else limit), "document_window": window}
    how |= {"document_stride": None if windows is None else windows.step}
    metrics = {name: value for name, value in found.items() if name not in ("perplexity", "loss")}
    shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    return {"model": model, **how, "num_texts": texts, **found}, f"{shown} over {texts:,} texts"
