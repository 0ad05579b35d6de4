"""Counting instead of timing: the largest tensor an operation makes, and its floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Two products of all queries [B, H, Nq, D] with all keys; PyTorch counts this operator on GPUs only."""
    query, key, value = (getattr(x, "shape", x) for x in (query, key, value))
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])


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
    with FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: _attention_flops}) as counter:
        run()
    return counter.get_total_flops()
