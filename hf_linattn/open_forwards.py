"""Training forwards whose gradients are still to come: gradient checkpointing makes their layers again meanwhile."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import Tensor

from .ops.common.tracing import is_watched


class OpenForward:
    """A forward whose backward pass has not run yet. Its graph alone holds it, and ends it where no pass comes."""


class OpenForwards(WeakSet[OpenForward]):
    """The open forwards of one model; a copy starts with none, as graphs are not copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenForwards, ()

    def begin(self, output: Any) -> None:
        """Add a forward until a gradient arrives at its output: no other one begins inside a backward pass."""
        values = output.values() if isinstance(output, dict) else _several(output)
        found = [x for value in values for x in _several(value) if isinstance(x, Tensor) and x.requires_grad]
        if is_watched() or not found:
            return
        forward = OpenForward()
        for x in found:
            x.register_hook(lambda gradient: self.discard(forward))
        self.add(forward)


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
