"""Causal kernel attention in slabs, each by a program that torch.compile makes of `torch.run`."""

from __future__ import annotations

from torch import Tensor

from ..runtime.slabs import read_slabs, too_short
from . import torch as pytorch
from .types import LinearCall, LinearState


def unsupported(call: LinearCall) -> str | None:
    """Return why a call cannot be read slab by slab."""
    if not call.causal:
        return "both directions"
    if call.key_padding_mask is not None or call.sequence_ids is not None:
        return "padded or packed rows"
    return too_short(call)


def run(call: LinearCall) -> tuple[Tensor, LinearState | None]:
    """Return the output [B, H, N, Dv] and the state after it."""
    return read_slabs(call, pytorch.run)
