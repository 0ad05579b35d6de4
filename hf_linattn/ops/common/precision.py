"""Heads in half precision: what reads them as they are sums up in float32, all else widens them first."""

from __future__ import annotations

import torch
from torch import Tensor


def accum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which states, logs and sums over x are kept: float32, or that of x if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Return x in at least float32, which it may be already."""
    return x.to(accum_dtype(x))


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply `wide` to every tensor."""
    return tuple(wide(x) for x in tensors)
