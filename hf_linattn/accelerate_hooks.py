"""Hooks of accelerate, which load offloaded weights for a call: `device_map` with "cpu" or "disk", `cpu_offload`."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn


def loaded(module: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which all parts of a module have their weights.

    accelerate loads them for a call of the part that has them, but a mechanism hands weights of its parts to an
    operation without calling these.
    """
    # not with hasattr, which takes five times as long, in every step of decoding
    hooked = [part for part in module.modules() if part is not module and "_hf_hook" in part.__dict__]
    if not hooked:
        return nullcontext()
    stack = ExitStack()
    for part in hooked:
        hook: Any = part._hf_hook
        hook.pre_forward(part)
        stack.callback(hook.post_forward, part, None)
    return stack
