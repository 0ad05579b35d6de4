"""What masks and positions say is found out once in a forward of a model, by its first layer, and not by each layer.

On a GPU every look at a number waits for all that is still to be computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .tracing import is_recorded

_FORWARDS = threading.local()  # its list `found`: what the forwards that run in this thread found, the innermost last


def begin_forward() -> None:
    """Begin a forward of a model, which `end_forward` ends, however it went."""
    if is_recorded():
        return
    if not hasattr(_FORWARDS, "found"):
        _FORWARDS.found = []
    _FORWARDS.found.append({})


def end_forward() -> None:
    """Forget what the innermost forward found."""
    if not is_recorded() and getattr(_FORWARDS, "found", None):
        _FORWARDS.found.pop()


def once(function: Callable[..., Any], *given: Any) -> Any:
    """Return function(*given), or what it returned in this forward for these very tensors and equal other arguments.

    Outside a forward, and where it is recorded, the function is called.
    """
    forwards = None if is_recorded() else getattr(_FORWARDS, "found", None)
    if not forwards:
        return function(*given)
    key = (function, *(id(x) if isinstance(x, Tensor) else x for x in given))
    if key not in forwards[-1]:
        forwards[-1][key] = given, function(*given)  # the tensors are kept, so that no others get their ids
    return forwards[-1][key][1]
