"""What other libraries raise while they read a model, a tokenizer or a data set, as one line that names the option."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError

from .errors import CheckpointError, HfLinattnError

# OSError: no such folder, no connection, not on the Hub; ValueError: no known model type, no tokenizer, broken JSON
UNREADABLE = (OSError, ValueError, ImportError, KeyError, SafetensorError)
TOKENIZER_FILE = "tokenizer_config.json"  # is written with every tokenizer
NEEDS_TOKENIZER = (
    "it needs a tokenizer that was saved there; save one beside the model, or give another tokenizer_name"
)


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

    Raises:
        CheckpointError: there is none, or it cannot be read; the message names `option`.
    """
    tokenizer = find_tokenizer(option, name)
    if tokenizer is None:
        files = ", ".join(_vocabulary_files(_expected_tokenizer(name)))
        raise CheckpointError(f"{option}={name!r} has none of the files {files}; {NEEDS_TOKENIZER}")
    return tokenizer


def find_tokenizer(option: str, name: str) -> Any | None:
    """Load a tokenizer as `read_tokenizer` does; None where no vocabulary was saved.

    Without one the Auto classes of transformers invent a tokenizer that knows no words for some model types.

    Raises:
        CheckpointError: there is one that cannot be read; the message names `option`.
    """
    from transformers import AutoTokenizer

    with reading(option, name, NEEDS_TOKENIZER):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # a tokenizer without its files raises whatever its class does with no path
            files = (TOKENIZER_FILE, *_vocabulary_files(_expected_tokenizer(name)))
            if not any(is_there(name, file) for file in files):
                return None
            if isinstance(error, UNREADABLE):
                raise
            raise ValueError(f"{type(error).__name__}: {one_line(error)}") from error
        has_files = any(is_there(name, file) for file in _vocabulary_files(tokenizer))
    return tokenizer if has_files or not tokenizer.vocab_files_names else None  # those that work on bytes have none


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


# what PyTorch and NumPy say of memory that they did not get, on GPUs and on CPUs
NO_MEMORY = re.compile(r"(?i)out of memory|not enough memory|can't allocate memory|unable to allocate|bad_alloc")
TORCH_MEMORY = "OutOfMemoryError"  # by its name: commands that need no PyTorch ask, too
SIZE = re.compile(r"(?i)allocate (\d+(?:\.\d+)?) ?(bytes|[KMGTP]i?B)")
UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory for a tensor.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."))
    True
    """
    known = isinstance(error, MemoryError) or type(error).__name__ == TORCH_MEMORY
    return known or (isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error))))


def size_said(error: BaseException) -> str:
    """Return how large the tensor was for which there was no memory, or else what was said.

    >>> size_said(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."))
    'at a tensor of 2.15 GB'
    """
    found = SIZE.search(str(error))
    if found is None:
        return one_line(error)
    return f"at a tensor of {gigabytes(float(found[1]) * UNITS[found[2][0].upper()])}"


def gigabytes(count: float) -> str:
    """Return a number of bytes in GB, which are 10^9.

    >>> gigabytes(1_234_000_000)
    '1.23 GB'
    """
    return f"{count / 1e9:.2f} GB"


# what a command says in one line, beside memory that ran out; all else is a fault of the library with its traceback
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
    traceback = f"set {TRACEBACK}=1 to see where it came from"
    if is_out_of_memory(error):
        helps = "give a smaller length, batch_size or model, or dtype bfloat16"
        return f"{type(error).__name__}: memory runs out, {size_said(error)}; {helps}, or {traceback}"
    look = "the path, the connection and the space on the disk" if isinstance(error, OSError) else "the options given"
    return f"{type(error).__name__}: {one_line(error)}; look at {look}, or {traceback}"


@contextmanager
def exit_with_one_line() -> Iterator[None]:
    """End the process with exit code 1 and one line in place of a traceback; see `told_in_one_line`."""
    try:
        yield
    except (*SAID, RuntimeError, MemoryError) as error:
        if os.environ.get(TRACEBACK) or not (isinstance(error, SAID) or is_out_of_memory(error)):
            raise
        raise SystemExit(told_in_one_line(error)) from error
