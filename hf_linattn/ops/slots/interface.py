"""Causal attention in bounded memory: a query sees its own block exactly and every completed block through k slots.

The slots divide the T completed tokens of a sequence into segments of equal size u(T), the smallest power of two with
k segments: as long as T <= k every token has a slot of its own; when they are full, neighbours merge in pairs and
half of the slots are free again. A slot holds the mean of its segment's keys and the mean of its values, weighted with
exp(log weight) of each token. A segment that stands for c tokens is seen with exp(q . mean key) c, so that equal keys
weigh alike wherever they stand; slots and block share one softmax.

u(T) and the segments depend on the position alone: what a query sees is the same whether the sequence is read at once
(large products over all blocks with one u), in parts, or token by token.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import PYTORCH, Operation, Policy
from . import cpu
from . import torch as pytorch
from .segment_pool import segment_size
from .types import MemoryState, SlotsCall, Writer

__all__ = ["MemoryState", "Writer", "bounded_memory_attention", "segment_size"]

SLOTS = Operation("slots", triton=f"{__package__}.triton", cpu=cpu, torch=pytorch)


def bounded_memory_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    writer: Writer,
    *,
    num_slots: int,
    block_size: int,
    scaling: float,
    lengths: Tensor | None = None,
    state: MemoryState | None = None,
    keep_state: bool = True,
    sink: Tensor | None = None,
    policy: Policy = PYTORCH,
) -> tuple[Tensor, MemoryState | None]:
    """Return the causal attention output and the state after the last token.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        writer: the log weights of keys.
        num_slots: k. block_size: C, a power of two. scaling: what q . k is multiplied by.
        lengths: [B], real tokens of each row; None if all are. state: what was read before.
        keep_state: whether rows that begin need a state; None else.
        sink: [H], the score of one more key without value (`hf_linattn.ops.common.sink_logit`).
        policy: which backends may do it.

    Returns:
        output [B, H, N, Dv], the state. Time O(N (k + C) (D + Dv)).
    """
    how = num_slots, block_size, scaling, lengths, state, keep_state, sink, policy
    return SLOTS.run(SlotsCall(query, key, value, writer, *how))
