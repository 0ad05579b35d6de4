"""`hf-linattn eval`: perplexity on text files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import DataError
from ..reading import read_tokenizer
from .common import Json, Model, exit_on_error, load, show, to_default_device


def evaluate(
    model: Model,
    files: Annotated[list[Path], typer.Argument(help="text files, a document each")],
    max_length: Annotated[int, typer.Option(help="tokens per window")] = 512,
    stride: Annotated[int | None, typer.Option(help="by how many tokens windows advance; default: half")] = None,
    batch_size: Annotated[int, typer.Option(help="windows at once")] = 8,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of a causal or masked language model, converted or not, on text files."""
    with exit_on_error():
        from ..evaluation import perplexity

        texts = [read_text(file) for file in files]
        loaded = to_default_device(load(model))
        found = perplexity(
            loaded, read_tokenizer("model", model), texts, max_length=max_length, stride=stride,
            batch_size=batch_size, progress=not as_json,
        )  # fmt: skip
    document = {"model": model, **found}
    show(document, as_json, f"perplexity {found['perplexity']:.4f} over {found['num_tokens']:,} tokens")


def read_text(file: Path) -> str:
    """Read a document; `DataError` if it cannot be read as text."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"files: {str(file)!r} cannot be read as text: {error}") from error
