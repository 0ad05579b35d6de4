"""Counting instead of timing: the largest tensor an operation makes, and its floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class LargestTensor(TorchDispatchMode):
    """Watches every operator and keeps the element count of the largest tensor that came out of one."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def largest_tensor(run: Callable[[], object]) -> int:
    """Return the element count of the largest tensor made while `run()` ran, its backward passes included."""
    with LargestTensor() as watch:
        run()
    return watch.numel


def flops_of(run: Callable[[], object]) -> int:
    """Return the floating-point operations of the matrix products in `run()`."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
