"""Batches whose rows are of different adapters of PEFT: a mechanism reads all rows of a batch, and cannot mix its own.

PEFT refuses such a batch where it would call the copies that `modules_to_save` made. Mechanisms are called past that
wrapper, so what PEFT has told it is looked at here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from .errors import UnsupportedModeError

ARGUMENT = "adapter_names"  # what a hook of PEFT adds to the arguments of each wrapper, for the time of a forward


def refuse_mixed_adapters(wrapper: nn.Module) -> None:
    """Raise `UnsupportedModeError` if the forward that runs was given the adapter of each row."""
    adapters = next((hook.keywords[ARGUMENT] for _, hook in _hooks(wrapper)), None)
    if adapters is None:
        return
    for running in list(_running(wrapper)):
        for module in running.modules():  # PEFT leaves the hooks after an error, and every later batch would be mixed
            for handle, _ in list(_hooks(module)):
                del module._forward_pre_hooks[handle]
                module._forward_pre_hooks_with_kwargs.pop(handle, None)
    raise UnsupportedModeError(
        f"adapter_names={adapters!r} mixes adapters in a batch, and each has mechanisms of its own (modules_to_save);"
        " give each adapter a batch of its own, after set_adapter(name)"
    )


def _hooks(module: nn.Module) -> Iterator[tuple[int, Any]]:
    for handle, hook in module._forward_pre_hooks.items():
        if ARGUMENT in getattr(hook, "keywords", ()):
            yield handle, hook


def _running(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those whose methods run around it: what it is in, it does not know itself."""
    yield module
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(around := frame.f_locals.get("self"), nn.Module):
            yield around
        frame = frame.f_back
