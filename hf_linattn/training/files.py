"""Local files of text and what is said of one that cannot be read."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets import logging as datasets_logging
from datasets.exceptions import DatasetGenerationError

from hf_linattn.errors import DataError, did_you_mean
from hf_linattn.reading import one_line, require_file
from hf_linattn.training.columns import check_header
from hf_linattn.training.file_types import FILE_BUILDERS

READ_AS_TEXT = ("csv", "json", "text")  # builders
# how a builder reads a file: a text is a document, and in a table only an empty field is a missing value
READING: Mapping[str, Mapping[str, Any]] = {
    "text": {"sample_by": "document", "encoding": "utf-8-sig"},  # of Notepad, too
    "csv": {"keep_default_na": False, "na_values": [""]},
}


def load_file(option: str, path: Path, split: str = "train") -> Dataset:
    """Load one local file with the builder of its extension; option: named it."""
    require_file(option, path)
    place = f"{option}={str(path)!r}"
    if not path.stat().st_size:
        raise DataError(f"{place} is empty")
    extension = path.suffix.lower()
    if extension not in FILE_BUILDERS:
        hint = did_you_mean(extension, FILE_BUILDERS)
        raise DataError(f"{place}: unknown extension {extension!r}{hint}")
    builder = FILE_BUILDERS[extension]
    if builder in READ_AS_TEXT:
        _require_utf8(place, path)
    pattern = glob.escape(os.path.abspath(path))  # whole, as names of folders are read as patterns, too
    try:
        with _said_once():
            found = load_dataset(builder, data_files={split: pattern}, split=split, **READING.get(builder, {}))
    except (DatasetGenerationError, OSError, ValueError) as error:
        if str(error).endswith("corresponds to no data!"):  # as `datasets` says of a header alone
            raise DataError(f"{place} has no rows") from error
        reason = one_line(error.__cause__ or error)
        raise DataError(f"{place} is not valid {builder}: {reason}; repair the file") from error
    if builder == "csv":
        check_header(place, found)
    return found


def _require_utf8(place: str, path: Path) -> None:
    """Raise `DataError` unless a file is UTF-8: some builders leave that to whoever reads a row."""
    try:
        with path.open(encoding="utf-8") as file:
            while file.read(2**20):
                pass
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 ({error}); save it as UTF-8") from error


@contextmanager
def _said_once() -> Iterator[None]:
    """Keep `datasets` from logging the error that it raises."""
    before = datasets_logging.get_verbosity()
    datasets_logging.set_verbosity(datasets_logging.CRITICAL)
    try:
        yield
    finally:
        datasets_logging.set_verbosity(before)
