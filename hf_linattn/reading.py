"""What other libraries raise while they read a model, a tokenizer or a data set, as one line that names the option."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError

from .errors import CheckpointError, HfLinattnError

# OSError: no such folder, no connection, not on the Hub; ValueError: no known model type, no tokenizer, broken JSON
UNREADABLE = (OSError, ValueError, ImportError, KeyError, SafetensorError)


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


def read_tokenizer(option: str, name: str) -> Any:
    """Load the tokenizer that was saved in a folder or under a name on the Hub.

    Where there is none the Auto classes of transformers invent one without words for some model types.

    Raises:
        CheckpointError: there is none, or it cannot be read; the message names `option`.
    """
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    remedy = "it needs a tokenizer that was saved there; save one beside the model, or give another tokenizer_name"
    with reading(option, name, remedy):
        tokenizer = AutoTokenizer.from_pretrained(name)
        files = {*tokenizer.vocab_files_names.values(), "tokenizer.json"}
        found = [cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in sorted(files)]
    if tokenizer.vocab_files_names and not any(found):  # those that work on bytes have none
        raise CheckpointError(f"{option}={name!r} has none of the files {', '.join(sorted(files))}; {remedy}")
    return tokenizer


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks or a full stop; its name where it has no message.

    >>> one_line(OSError("no such\\n  file."))
    'no such file'
    """
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


# what a command says in one line; anything else is a fault of the library and keeps its traceback
SAID = (HfLinattnError, OSError, ValueError, ImportError)
TRACEBACK = "HF_LINATTN_TRACEBACK"


def told_in_one_line(error: BaseException) -> str:
    """Return what a command says of an error that ended it: what happened and what to do about it.

    >>> told_in_one_line(OSError("no space left on device"))
    'OSError: no space left on device; look at the path, the connection and the space on the disk, ...'
    """
    if isinstance(error, HfLinattnError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        return f"this command needs {error.name}; run pip install 'hf_linattn[all]'"
    look = "the path, the connection and the space on the disk" if isinstance(error, OSError) else "the options given"
    return f"{type(error).__name__}: {one_line(error)}; look at {look}, or set {TRACEBACK}=1 to see where it came from"


@contextmanager
def exit_with_one_line() -> Iterator[None]:
    """End the process with exit code 1 and one line in place of a traceback; see `told_in_one_line`."""
    try:
        yield
    except SAID as error:
        if os.environ.get(TRACEBACK):
            raise
        raise SystemExit(told_in_one_line(error)) from error
