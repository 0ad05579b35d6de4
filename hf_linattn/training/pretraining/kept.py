"""What a training keeps beside its checkpoints, so that it goes on as the same run: options, text and tokenizer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_from_disk
from tokenizers import Tokenizer

from hf_linattn.atomic_io import write_json, write_text
from hf_linattn.errors import OptionError
from hf_linattn.json_files import read_object
from hf_linattn.training.corpus import installed_documentation
from hf_linattn.training.folder_lock import take_folder
from hf_linattn.training.pretraining.architectures import train_tokenizer
from hf_linattn.training.same_run import difference, told_difference

RUN, TEXT, TOKENIZER = "run.json", "text", "tokenizer.json"


def alone_in(folder: str | None) -> AbstractContextManager[Any]:
    """Return a block in which no other process can train in a folder; see `take_folder`."""
    return take_folder("checkpoint_dir", folder) if folder else nullcontext()


def tokenizer_of(texts: Sequence[str], folder: str | None) -> Tokenizer:
    """Return a tokenizer that is trained on texts; a run that goes on takes it from its folder.

    So its tokens are those that the weights know, whatever the texts have become since.
    """
    kept = Path(folder or "") / TOKENIZER
    if folder and kept.is_file():
        return Tokenizer.from_file(str(kept))
    tokenizer = train_tokenizer(list(texts))
    if folder:
        write_text(kept, tokenizer.to_str())
    return tokenizer


def text_with_documentation(dataset: Dataset, packages: Sequence[str], folder: str | None) -> Dataset:
    """Return a text and the documentation of packages; a run that goes on takes both from its folder.

    So it has the same text, whatever was installed or removed since.
    """
    kept = Path(folder or "") / TEXT
    if folder and kept.is_dir():
        return load_from_disk(str(kept))
    added = installed_documentation(packages)
    text = concatenate_datasets([part.select_columns(["text"]) for part in (dataset, added)])
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            text.save_to_disk(str(Path(scratch) / TEXT))
            os.replace(Path(scratch) / TEXT, kept)
    return text


def same_run_or_new(folder: Path, options: Mapping[str, Any]) -> None:
    """Record what a run is started with, or compare it with what the run of this folder was started with.

    Raises:
        OptionError: the folder holds a run with other options, or on other text.
    """
    file, now = folder / RUN, json.loads(json.dumps(options))
    if not file.is_file():
        write_json(file, now)
        return
    started = read_object(file, "give another checkpoint_dir, or delete this one")
    name = difference(started, now)
    if name is not None:
        raise OptionError(
            f"checkpoint_dir={str(folder)!r} holds a run {told_difference(name, started, now)}; give another folder"
        )
