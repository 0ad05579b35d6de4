"""Counting instead of timing: elements that operations make or write, and their floating-point operations."""

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


class Elements(TorchDispatchMode):
    """Watches every operator: the element counts of the largest tensor that came out of one, and of all it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counts = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *counts])
        if func is torch.ops.aten.index_add_.default:
            self.written += args[3].numel()  # it returns the whole, and writes where it adds
        elif not func.is_view:
            self.written += sum(counts)
        return result


def largest_tensor(run: Callable[[], object]) -> int:
    """Return the element count of the largest tensor made while `run()` ran, its backward passes included."""
    with Elements() as watch:
        run()
    return watch.largest


def elements_written(run: Callable[[], object]) -> int:
    """Return how many elements the operations in `run()` wrote: what passes over memory without a product cost."""
    with Elements() as watch:
        run()
    return watch.written


def flops_of(run: Callable[[], object]) -> int:
    """Return the floating-point operations of the matrix products in `run()`."""
    with FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: _attention_flops}) as counter:
        run()
    return counter.get_total_flops()
