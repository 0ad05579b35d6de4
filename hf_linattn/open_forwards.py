"""Training forwards whose gradients are still to come: gradient checkpointing makes their layers again meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from .errors import PatchError
from .ops.common.tracing import is_watched


class OpenForward:
    """A forward whose backward pass has not run yet. Its graph alone holds it, and ends it where no pass comes."""


class OpenForwards(WeakSet[OpenForward]):
    """The open forwards of one model; a copy starts with none, as graphs are not copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenForwards, ()

    def begin(self, output: Any) -> None:
        """Add a forward until a gradient arrives at its output: no other one begins inside a backward pass."""
        if not (found := _awaited(output)):
            return
        forward = OpenForward()
        for x in found:
            x.register_hook(lambda gradient: self.discard(forward))
        self.add(forward)


def require_unswitched(model: nn.Module, output: Any, is_ours: Callable[[], bool]) -> None:
    """Have the backward pass of a forward raise `PatchError` where other attention would make its layers again."""
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return
    before = is_ours()

    def check(gradient: Tensor) -> None:
        if is_ours() != before:
            ran = "mechanisms" if before else "original attention"
            raise PatchError(
                f"this forward ran with the model's {ran}, and gradient checkpointing would make its layers again"
                " without; call backward() before original_attention(model) begins or ends, and before"
                " unpatch_model(model), or call gradient_checkpointing_disable()"
            )

    for x in _awaited(output):
        x.register_hook(check)


def _awaited(output: Any) -> list[Tensor]:
    """Return the tensors of an output at which gradients may arrive; none where a program is recorded."""
    values = output.values() if isinstance(output, dict) else _several(output)
    found = [x for value in values for x in _several(value) if isinstance(x, Tensor) and x.requires_grad]
    return [] if is_watched() else found


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
