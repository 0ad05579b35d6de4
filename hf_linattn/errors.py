"""The exceptions this library raises. Each message names the field, the value received and the remedy.

And its one warning, of former names.
"""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Iterable, Mapping


class HfLinattnError(Exception):
    """Base class: `except HfLinattnError` catches everything raised on purpose by this library."""


class UnknownNameError(HfLinattnError, LookupError):
    """A mechanism, feature map, kernel or option name that is not registered."""

    def __init__(
        self, kind: str, name: object, known: Iterable[str], former: Mapping[str, str] | None = None, remedy: str = ""
    ):
        hint = f"; {remedy}" if remedy else did_you_mean(str(name), known, former)
        super().__init__(f"unknown {kind} {name!r}{hint}")
        self.kind, self.name = kind, name


class OptionError(HfLinattnError, ValueError):
    """An option that does not exist or a value outside its range."""


class PatchError(HfLinattnError, RuntimeError):
    """Patching a patched model, or undoing what was never patched."""


class UnsupportedModelError(HfLinattnError, TypeError):
    """A model whose attention cannot be reached, or its feed-forward not be split; the message says why."""


class UnsupportedModeError(HfLinattnError, ValueError):
    """A call that this mechanism, or any mechanism without an N x N matrix, cannot answer."""


class DerivativeError(HfLinattnError, RuntimeError):
    """A derivative of a gradient, or several gradients at once, from operations that have none."""


class OperandError(HfLinattnError, ValueError):
    """Tensors of one call that fit neither each other nor the layer, or a decoding state of other rows."""


class BuildError(HfLinattnError, ImportError):
    """Compiled code that belongs to another version of the library."""


class CheckpointError(HfLinattnError, ValueError):
    """A checkpoint that is damaged, foreign or made by a newer version."""


class DataError(HfLinattnError, ValueError):
    """Training or evaluation data that is missing, empty or malformed."""


def did_you_mean(name: str, known: Iterable[str], former: Mapping[str, str] | None = None) -> str:
    """Return the tail of an error message: the nearest known names, then all of them.

    former: names of before -> those of today, which are named where one of before is near.

    >>> did_you_mean("perfomer", ["linear", "performer"])
    '; did you mean performer? Known: linear, performer'
    >>> did_you_mean("flsh", ["linear", "mixed_chunk"], {"flash": "mixed_chunk"})
    '; did you mean mixed_chunk? Known: linear, mixed_chunk'
    """
    known, former = sorted(known), former or {}
    close = difflib.get_close_matches(name, [*known, *former], n=3, cutoff=0.65)
    nearest = list(dict.fromkeys(former.get(found, found) for found in close))
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
    return f"{hint} Known: {', '.join(known) or 'none'}"


@functools.cache
def warn_of_former_name(kind: str, former: str, name: str) -> None:
    """Say once in a process what something is called that was given under a name it had before."""
    message = f"{kind} {former!r} is now called {name!r}; the former name still works, write the new one"
    warnings.warn(message, FutureWarning, stacklevel=3)
