"""Causal attention in bounded memory by Triton's block softmax: of rows that begin."""

from __future__ import annotations

from torch import Tensor

from ..block_softmax.triton import TRITON_BLOCKS, no_blocks
from . import causal_blocks
from .types import MemoryState, SlotsCall


def unsupported(call: SlotsCall) -> str | None:
    """Return why there are no kernels for a call."""
    if call.state is not None:
        return "tokens after a state"
    return no_blocks(*call[:3]) or causal_blocks.open_in_training(call)


def run(call: SlotsCall) -> tuple[Tensor, MemoryState | None]:
    """Return the output [B, H, N, Dv], and the state after the last token."""
    return causal_blocks.attend(TRITON_BLOCKS, call, compiled=False)
