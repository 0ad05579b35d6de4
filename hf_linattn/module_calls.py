"""The calls of attention modules that run now, each in its own thread: what hooks hand to the attention function.

Nothing of a call is kept on a module or a mechanism, so calls of one model may overlap: in threads, or one inside
another.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn


class ModuleCall:
    """One call of an attention module: the cache layer that belongs to it, None without a cache.

    consumed: whether the new keys in it were attended to, by a mechanism that keeps a state of them.
    """

    def __init__(self, module: nn.Module):
        self.module, self.consumed = module, False
        self.layer: Any = None


_RUNNING = threading.local()  # its list `calls`: the innermost last


def begin_call(module: nn.Module) -> ModuleCall:
    """Return a new call of `module`, which is the innermost of this thread until `end_call`."""
    calls = getattr(_RUNNING, "calls", None)
    if calls is None:
        calls = _RUNNING.calls = []
    calls.append(ModuleCall(module))
    return calls[-1]


def current_call(module: nn.Module) -> ModuleCall | None:
    """Return the call of `module` that runs in this thread; None where it was called past its hooks."""
    calls = getattr(_RUNNING, "calls", None)
    return calls[-1] if calls and calls[-1].module is module else None


def end_call(module: nn.Module) -> None:
    """Forget the innermost call, which is of `module`."""
    calls = getattr(_RUNNING, "calls", None)
    if calls and calls[-1].module is module:
        calls.pop()
