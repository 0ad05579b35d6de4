"""What other libraries raise while they read a model, a tokenizer or a data set, as one line that names the option."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .adapter_config import base_of
from .errors import CheckpointError, DataError, HfLinattnError

# OSError: no such folder, no connection, not on the Hub; ValueError: no known model type, no tokenizer, broken JSON
UNREADABLE = (OSError, ValueError, ImportError, KeyError, SafetensorError)
PANICS = "pyo3_runtime"  # the module of what a fault inside tokenizers raises, no `Exception`
TOKENIZER_FILE = "tokenizer_config.json"  # is written with every tokenizer
NEEDS_TOKENIZER = "it needs a tokenizer that was saved there; save one beside the model"
OF_RECIPES = ("model_name_or_path", "tokenizer_name")  # what names a model or a tokenizer where both are options


@contextmanager
def reading(
    option: str, value: object, remedy: str, error_class: type[HfLinattnError] = CheckpointError
) -> Iterator[None]:
    """Turn what is raised while something is read into the library's own error, in one line.

    Args:
        option: the option that named what is read. value: what it was. remedy: what to do about it.
        error_class: is raised. An error of this library passes as it is.
    """
    try:
        yield
    except HfLinattnError:
        raise
    except UNREADABLE as error:
        raise error_class(f"{option}={str(value)!r} cannot be read: {one_line(error)}; {remedy}") from error


def require_file(option: str, path: Path) -> None:
    """Raise `DataError`, which names the option, unless a file is there; a pipe is one, too."""
    if path.is_dir():
        raise DataError(f"{option}={str(path)!r} is a folder; give one of the files in it")
    if not os.path.exists(path):
        raise DataError(f"{option}={str(path)!r} does not exist; give the path of a file")


def require_place(option: str, name: str) -> None:
    """Raise `CheckpointError` for the path of a model where nothing is there, and no name on the Hub looks like it."""
    if os.path.exists(name) or not (name.count("/") > 1 or os.path.isabs(name) or name.startswith((".", "~"))):
        return
    path = Path(name)
    siblings = [place.name for place in path.parent.iterdir() if place.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    remedy = "give a folder with a saved model, or the name of one on the Hub"
    hint = f"did you mean {str(path.with_name(near[0]))!r}?" if near else remedy
    raise CheckpointError(f"{option}={name!r}: there is no such folder; {hint}")


def read_tokenizer(option: str, name: str) -> Any:
    """Load the tokenizer that was saved in a folder or under a name on the Hub.

    Raises:
        CheckpointError: there is none, or it cannot be read; the message names `option`.
    """
    tokenizer = find_tokenizer(option, name)
    if tokenizer is None:
        files = ", ".join(_vocabulary_files(_expected_tokenizer(name)))
        raise CheckpointError(f"{option}={name!r} has none of the files {files}; {_needs_tokenizer(option)}")
    return tokenizer


def find_tokenizer(option: str, name: str) -> Any | None:
    """Load a tokenizer as `read_tokenizer` does; None where no vocabulary was saved. An adapter has that of its base.

    Without one the Auto classes of transformers invent a tokenizer that knows no words for some model types.

    Raises:
        CheckpointError: there is one that cannot be read; the message names `option`.
    """
    from transformers import AutoTokenizer

    require_place(option, name)
    with reading(option, name, _needs_tokenizer(option)):
        base = base_of(option, name)
        if base is not None and not is_there(name, TOKENIZER_FILE):
            name = base
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except BaseException as error:  # a tokenizer without its files raises whatever its class does with no path
            if not isinstance(error, Exception) and type(error).__module__ != PANICS:
                raise
            files = (TOKENIZER_FILE, *_vocabulary_files(_expected_tokenizer(name)))
            there = [file for file in files if is_there(name, file)]
            if not there:
                return None
            kind = "" if isinstance(error, UNREADABLE) else f"{type(error).__name__}: "
            raise ValueError(f"{kind}{one_line(error)}, in {' or '.join(there)}") from error
        there = [file for file in _vocabulary_files(tokenizer) if is_there(name, file)]
        if there and (lacking := _lacks(tokenizer)):
            raise ValueError(f"the vocabulary in {' or '.join(there)} has no {lacking}")
    return tokenizer if there or not tokenizer.vocab_files_names else None  # those that work on bytes have none


def _needs_tokenizer(option: str) -> str:
    """Return what to do about a tokenizer that is missing or damaged, with the options of the command at hand."""
    return f"{NEEDS_TOKENIZER}, or give another tokenizer_name" if option in OF_RECIPES else NEEDS_TOKENIZER


def has_tokenizer(name: str) -> bool:
    """Return whether any file of a tokenizer is there, readable or not, or its class needs none."""
    expected = _expected_tokenizer(name)
    files = (TOKENIZER_FILE, *_vocabulary_files(expected))
    return not expected.vocab_files_names or any(is_there(name, file) for file in files)


def without_tokenizer(option: str, name: str) -> str:
    """Return the warning of a model of text that has none."""
    return (
        f"{option}={name!r} has no tokenizer, and eval and the recipes need one; save one there, with"
        f" AutoTokenizer.from_pretrained(NAME).save_pretrained({name!r})"
    )


def _lacks(tokenizer: Any) -> str | None:
    """Return what a vocabulary was cut off from, without which no text or not every text has tokens; None: nothing."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    words, unknown = backend.get_vocab(with_added_tokens=False), getattr(backend.model, "unk_token", None)
    if not words:
        return "token"
    in_words = type(backend.model).__name__ == "WordPiece"  # which fails at the first word that it does not know
    return repr(unknown) if in_words and unknown not in words else None


def is_there(name: str, file: str) -> bool:
    """Return whether a folder, or a model of the Hub, has a file."""
    from transformers.utils.hub import cached_file

    return cached_file(name, file, _raise_exceptions_for_missing_entries=False) is not None


def _expected_tokenizer(name: str) -> Any:
    """Return the class of tokenizers that models of this type have."""
    from transformers import TOKENIZER_MAPPING, AutoConfig, PreTrainedTokenizerFast

    return TOKENIZER_MAPPING.get(type(AutoConfig.from_pretrained(name)), None) or PreTrainedTokenizerFast


def _vocabulary_files(tokenizer: Any) -> list[str]:
    """Return the files that a tokenizer, or a class of them, may have its vocabulary in."""
    return sorted({*tokenizer.vocab_files_names.values(), "tokenizer.json"})


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks or a full stop; its name where it has no message.

    >>> one_line(OSError("no such\\n  file."))
    'no such file'
    """
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
