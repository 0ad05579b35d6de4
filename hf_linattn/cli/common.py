"""What the commands share: options, errors in one line, output as text or JSON, and the model.

No file of the command line imports PyTorch or transformers before a command that needs them runs.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..adapter_config import CONFIG_FILE, base_of
from ..atomic_io import is_writable, write_json
from ..command_errors import INTERRUPTED, exit_with_one_line
from ..config import require, require_count, require_known
from ..errors import DataError, OptionError, UnsupportedModelError
from ..reading import reading, require_file, require_place
from ..training.file_types import FILE_BUILDERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CALIBRATION_TOKENS = 8192  # as of `calibration_rows`, which is imported with PyTorch
DTYPES = ("bfloat16", "float16", "float32")
SAMPLE = "The tokens of 2 models, naïve or not:\n\tare they the same?"
MOST_THREADS = 1024  # with many more the libraries of threads end the process
STOPPED = 3
EXIT_CODES = {
    0: "it is done",
    1: "an error, said in one line on standard error",
    2: "a command line that cannot be read",
    STOPPED: "a time limit ended a measurement, and what was measured by then is shown",
    INTERRUPTED: "Ctrl-C",
}

Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
CalibrationTokens = Annotated[int, typer.Option(help="tokens of these files that are used at most")]
Model = Annotated[str, typer.Argument(help="a folder, or the name of a model on the Hub")]


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn an error, the library's own or of what it reads and writes, into one line and exit code 1."""
    try:
        with exit_with_one_line():
            yield
    except SystemExit as ended:
        if isinstance(ended.code, str):
            typer.echo(ended.code, err=True)
            raise typer.Exit(1) from ended
        raise


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Keep what hundreds of small models would log off the screen for a while."""
    import transformers

    own, theirs = logging.getLogger("hf_linattn"), transformers.logging.get_verbosity()
    level = own.level
    own.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        own.setLevel(level)
        transformers.logging.set_verbosity(theirs)


def show(document: Any, as_json: bool, *shown: Any, file: Path | None = None) -> None:
    """Print a JSON document, or what is to be shown in its place, and write the document to a file if one is given.

    Where one of the two fails, as into a pipe that nobody reads any more, the other is done all the same.
    """
    try:
        if as_json:
            typer.echo(json.dumps(document, indent=1))
            return
        console = Console()
        for part in shown:
            console.print(part, soft_wrap=isinstance(part, str))
    finally:
        if file is not None:
            _write(document, file)


def note(text: str) -> None:
    """Say on standard error what goes on; results alone go to standard output."""
    typer.echo(text, err=True)


def read_texts(files: Iterable[Path], option: str = "files", column: str = "text") -> list[str]:
    """Return the documents of files: of rows, as .jsonl, one in each row, of all others the whole file.

    Raises:
        DataError: a file cannot be read, or its rows have no texts in that column; the message names the option.
    """
    return [
        text
        for file in files
        for text in (_rows(file, option, column) if _has_rows(file) else [_whole(file, option)])
    ]


def _has_rows(file: Path) -> bool:
    return FILE_BUILDERS.get(file.suffix.lower(), "text") != "text"


def _rows(file: Path, option: str, column: str) -> list[str]:
    from ..training.columns import misread
    from ..training.data import text_of
    from ..training.files import load_file

    rows = load_file(option, file)
    if column not in rows.column_names:
        rename = "rename the one of the texts, or name it with text_column where the command has that"
        raise DataError(
            f"{option}: {str(file)!r} has no column {column!r}, but {', '.join(rows.column_names)};"
            f" {misread(rows) or rename}"
        )
    return list(text_of(repr(str(file)), rows, column)["text"])


def _whole(file: Path, option: str) -> str:
    require_file(option, file)
    try:
        return file.read_text(encoding="utf-8-sig")  # of Notepad, too
    except (OSError, UnicodeDecodeError) as error:
        message = f"{option}={str(file)!r} cannot be read as text: {error}; give a text file in UTF-8"
        raise DataError(message) from error


def check_calibration_tokens(files: Sequence[Path], tokens: int) -> None:
    """Raise `OptionError` where the tokens of files are limited that were not given."""
    fits = bool(files) or tokens == CALIBRATION_TOKENS
    require("calibration_tokens", tokens, fits, "absent where nothing is fitted; give calibrate")


def check_writable(option: str, file: Path | None) -> None:
    """Raise `OptionError` unless a file can be written there, before hours go into it; None: none is asked for."""
    if file is None:
        return
    fits = not os.path.isdir(file) and is_writable(file.parent)
    require(option, str(file), fits, "the path of a file, in a folder that can be written to")


def _write(document: Any, file: Path) -> None:
    with exit_on_error():
        write_json(file, document)
    note(f"written to {file}")


def load(model: str, *, option: str = "model", **options: Any) -> PreTrainedModel:
    """Load the model that this option names, an adapter merged into its base.

    Raises:
        CheckpointError: it, or the base of an adapter, cannot be read.
    """
    from ..hub import load_checkpoint

    with reading_model(option, model) as name:
        loaded = load_checkpoint(name, **options)
    if name == model:
        return loaded
    from ..training.adapter_files import merge_adapter

    return merge_adapter(loaded, model)


@contextmanager
def reading_model(option: str, model: str) -> Iterator[str]:
    """Give the name that a config and weights are read from, of an adapter its base; errors name the option."""
    require_place(option, model)
    with reading(option, model, "give a folder with a saved model, or the name of one on the Hub and a connection"):
        base = base_of(option, model)
        if base is None:
            yield model
            return
    where = f"put its path, or its name on the Hub, into base_model_name_or_path of the {CONFIG_FILE} in {model!r}"
    with reading(f"the base of {option}={model!r}", base, where):
        yield base


def read_model(option: str, name: str, dtype: str | None) -> PreTrainedModel:
    """Load a model onto the default device, in another dtype than it was saved in if one is named.

    None is the dtype that it was saved in, or float32 where a CPU is slow in that.
    """
    if dtype is None:
        return placed(load(name, option=option), dtype)
    require_known("dtype", dtype, DTYPES)
    return placed(load(name, option=option, dtype=dtype), dtype)


def placed(model: PreTrainedModel, dtype: str | None) -> PreTrainedModel:
    """Move a model to the default device, cast to float32 where that is slow in its dtype and none was named."""
    from ..dtypes import to_fast_dtype

    moved = to_default_device(model)
    if dtype is None:
        to_fast_dtype(moved)
    return moved


def read_language_model(option: str, name: str, dtype: str | None) -> PreTrainedModel:
    """As `read_model`; `UnsupportedModelError` unless it predicts tokens, and so has a perplexity."""
    from ..architecture import classifies_texts
    from ..evaluation import is_masked_language_model

    loaded = read_model(option, name, dtype)
    try:
        is_masked_language_model(loaded)
    except UnsupportedModelError as error:
        rows = "; `hf-linattn eval MODEL ROWS.jsonl` scores it on rows" if classifies_texts(loaded) else ""
        raise UnsupportedModelError(f"{option}={name!r}: {error}{rows}") from error
    return loaded


def require_original(option: str, name: str, model: PreTrainedModel) -> None:
    """Raise `OptionError` where the model that this option names is converted already."""
    from .. import is_patched

    if is_patched(model):
        raise OptionError(f"{option}={name!r} is converted already; give the original")


def require_converted(option: str, name: str, model: PreTrainedModel) -> None:
    """Raise `OptionError` where the model that this option names is not converted."""
    from .. import is_patched

    if not is_patched(model):
        raise OptionError(f"{option}={name!r} is not converted; give a folder that hf-linattn convert wrote")


def require_same_tokens(option: str, name: str, tokenizer: Any, model: str, converted: Any) -> None:
    """Raise `OptionError` where a model to stand beside has other tokens: what both read would be no longer the same.

    tokenizer: of the model that this option names. converted: that of `model`.
    """
    words, sample = tokenizer.get_vocab(), tokenizer(SAMPLE)["input_ids"]
    if words != converted.get_vocab() or sample != converted(SAMPLE)["input_ids"]:
        raise OptionError(
            f"{option}={name!r} has another tokenizer than model={model!r}; give the model that it was converted from"
        )


def set_threads(threads: int | None) -> None:
    """Have PyTorch and the library's C use that many threads of the CPU; None: as many as they do by themselves."""
    import torch

    require_count("threads", threads, optional=True)
    require("threads", threads, (threads or 1) <= MOST_THREADS, f"at most {MOST_THREADS:,}")
    if threads is not None:
        torch.set_num_threads(threads)


def to_default_device(model: PreTrainedModel) -> PreTrainedModel:
    """Move a model to the GPU where there is one."""
    import torch

    return model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
