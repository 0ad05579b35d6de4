"""Softmax over the keys that a pattern lets a query see, block by block, in time linear in the blocks it names."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import PYTORCH, Operation, Policy
from . import cpu
from . import torch as pytorch
from .decode import keep_keys
from .ring import in_ring
from .types import BlockSoftmaxCall, KeptKeys, Pattern

__all__ = [
    "KeptKeys", "Pattern", "attention_in_place", "block_sparse_attention", "continued_attention", "in_ring",
    "keep_keys",
]  # fmt: skip

BLOCK_SOFTMAX = Operation("block_softmax", triton=f"{__package__}.triton", cpu=cpu, torch=pytorch)


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scaling: float,
    causal: bool,
    lengths: Tensor | None = None,
    sink: Tensor | None = None,
    learned: bool = False,
    policy: Policy = PYTORCH,
) -> Tensor:
    """Return softmax attention over what `pattern` shows, for rows that start at position 0: [B, H, N, Dv].

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        lengths: [B], real tokens of each row; None if all are. A query without keys gets zero.
        sink: [H], the score of one more key without value, which all queries see (`hf_linattn.ops.common.sink_logit`).
        learned: whether the pattern has parameters that are in training.
        policy: which backends may do it.
    """
    where = lengths, sink, None, learned, policy
    return BLOCK_SOFTMAX.run(BlockSoftmaxCall(query, key, value, pattern, scaling, causal, *where))[0]


def attention_in_place(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    lengths: Tensor,
    starts: Tensor,
    *,
    scaling: float,
    sink: Tensor | None = None,
    learned: bool = False,
    policy: Policy = PYTORCH,
) -> tuple[Tensor, KeptKeys] | None:
    """Return causal output and state of rows of `lengths` [B] tokens that begin at places `starts` [B]; pads get zero.

    None where no kernels read such rows. Arguments as above.
    """
    where = None, sink, None, learned, policy, True, lengths, starts
    found: tuple[Tensor, KeptKeys] | None = BLOCK_SOFTMAX.run_kernels(
        BlockSoftmaxCall(query, key, value, pattern, scaling, True, *where)
    )
    return found


def continued_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    state: KeptKeys | None,
    *,
    scaling: float,
    lengths: Tensor | None = None,
    sink: Tensor | None = None,
    learned: bool = False,
    policy: Policy = PYTORCH,
) -> tuple[Tensor, KeptKeys]:
    """Return causal output [B, H, N, Dv] and state for rows that go on after `state`, None at position 0; see above.

    Behind its length a row has pads only, which no real query of a row from position 0 sees.
    """
    where = (lengths, sink, state, learned, policy) if state else (None, sink, None, learned, policy, True, lengths)
    output, after = BLOCK_SOFTMAX.run(BlockSoftmaxCall(query, key, value, pattern, scaling, True, *where))
    return output, keep_keys(key, value, pattern, lengths) if after is None else after
