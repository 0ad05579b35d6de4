"""How a command ends that failed: one line that says what happened and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from .errors import HfLinattnError
from .memory_errors import is_out_of_memory, size_said
from .reading import one_line

# what a command says in one line, beside memory that ran out; all else is a fault of the library with its traceback
SAID = (HfLinattnError, OSError, ValueError, ImportError, SafetensorError)
# what torch.save says where a file could not be written to its end, which is a RuntimeError, too
UNWRITTEN = ("inline_container", "PytorchStreamWriter", "iostream error")
TRACEBACK = "HF_LINATTN_TRACEBACK"
INTERRUPTED = 130  # the exit code of what SIGINT ended, as shells count


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
    of_files = isinstance(error, OSError | SafetensorError) or is_unwritten(error)
    look = "the path, the connection and the space on the disk" if of_files else "the options given"
    return f"{type(error).__name__}: {one_line(error)}; look at {look}, or {traceback}"


def is_unwritten(error: BaseException) -> bool:
    """Return whether an error is that of `torch.save` on a disk that is full.

    >>> is_unwritten(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 153728 vs 153620"))
    True
    """
    return isinstance(error, RuntimeError) and any(name in str(error) for name in UNWRITTEN)


@contextmanager
def exit_with_one_line() -> Iterator[None]:
    """End the process with exit code 1 and one line in place of a traceback; see `told_in_one_line`.

    Ctrl-C ends it with exit code 130 and none: what it stopped has said so.
    """
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get(TRACEBACK):
            raise
        raise SystemExit(INTERRUPTED) from None
    except (*SAID, RuntimeError, MemoryError) as error:
        said = isinstance(error, SAID) or is_out_of_memory(error) or is_unwritten(error)
        if os.environ.get(TRACEBACK) or not said:
            raise
        raise SystemExit(told_in_one_line(error)) from error
