"""Causal attention in bounded memory by the C of block softmax and of segment means."""

from __future__ import annotations

from torch import Tensor

from ..block_softmax.cpu import NATIVE_BLOCKS
from ..common.padding import first_of_block, read_in_turn
from ..common.precision import widened
from ..runtime.cpu import KINDS, refusal
from . import causal_blocks
from . import torch as pytorch
from .types import MemoryState, SlotsCall


def unsupported(call: SlotsCall) -> str | None:
    """Return why the C cannot compute a call."""
    if reason := refusal(*call[:3], kinds=KINDS):
        return reason
    if call.state is None:
        return causal_blocks.open_in_training(call)
    if not call.policy.inference:
        return "tokens after a state with gradients or in training"
    if call.lengths is not None:
        return "padded rows after a state"
    return None if _first(call, call.state) < call.query.shape[2] else "no whole block after a state"


def run(call: SlotsCall) -> tuple[Tensor, MemoryState | None]:
    """Return the output [B, H, N, Dv], and the state after the last token."""
    if call.state is None:
        return causal_blocks.attend(NATIVE_BLOCKS, call, compiled=True)

    def part(query: Tensor, key: Tensor, value: Tensor) -> SlotsCall:
        return call._replace(query=query, key=key, value=value)

    return read_in_turn(
        widened(*call[:3]),
        call.state,
        _first(call, call.state),
        lambda *heads: pytorch.read_on(part(*heads[:3]), heads[3]),
        lambda *heads: causal_blocks.read_on(NATIVE_BLOCKS, part(*heads[:3]), heads[3], compiled=True),
    )


def _first(call: SlotsCall, state: MemoryState) -> int:
    """Return from which token on whole blocks are read."""
    return first_of_block(state.length, call.query.shape[2], call.block_size)
