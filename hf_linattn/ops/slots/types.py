"""What causal attention in bounded memory is called with, whatever computes it: its state, the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..common.grad_accumulator import GradAccumulator
from ..dispatch import PYTORCH, Policy


class MemoryState(NamedTuple):
    """All that is remembered of the keys read so far; constant size, float32 (float64 for float64 inputs).

    slot_key [B, Hkv, k, D], slot_value [B, Hkv, k, Dv], key_weight, value_weight [B, Hkv, k]: the `Summary` of the
    completed blocks. key [B, Hkv, C, D], value [B, Hkv, C, Dv]: the block not completed yet. length [B]: tokens read.
    """

    slot_key: Tensor
    slot_value: Tensor
    key_weight: Tensor
    value_weight: Tensor
    key: Tensor
    value: Tensor
    length: Tensor


# log weights [B, Hkv, N] with which tokens [B, Hkv, N, D] are written, of their keys and of their values
Writer = Callable[[GradAccumulator], tuple[Tensor, Tensor]]


class SlotsCall(NamedTuple):
    """One call of causal attention in bounded memory, as `interface.bounded_memory_attention` describes it."""

    query: Tensor
    key: Tensor
    value: Tensor
    writer: Writer
    num_slots: int
    block_size: int
    scaling: float
    lengths: Tensor | None = None
    state: MemoryState | None = None
    keep_state: bool = True
    sink: Tensor | None = None
    policy: Policy = PYTORCH
