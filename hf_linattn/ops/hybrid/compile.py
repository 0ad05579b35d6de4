"""Causal hybrid attention in slabs, each by a program that torch.compile makes of `torch.run`."""

from __future__ import annotations

from torch import Tensor

from ..runtime.slabs import read_slabs, too_short
from . import torch as pytorch
from .types import HybridCall, HybridState, in_blocks


def unsupported(call: HybridCall) -> str | None:
    """Return why a call cannot be read slab by slab."""
    if reason := in_blocks(call):
        return reason
    if not call.causal:
        return "both directions"
    return "padded rows" if call.lengths is not None else too_short(call)


def run(call: HybridCall) -> tuple[Tensor, HybridState | None]:
    """Return the output [B, H, N, Dv] and the state after it."""
    return read_slabs(call, pytorch.run)
