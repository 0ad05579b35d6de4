"""What block-sparse softmax attention is called with, whatever computes it: a pattern, a state, the call itself.

A pattern answers two questions: which key blocks a query block may need (`key_table`), and whether query i sees key j
(`sees`). The first is about speed, the second is the truth: a block named in vain costs time, never a wrong result.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ..dispatch import PYTORCH, Policy


class Pattern(Protocol):
    """Which keys a query sees, with all positions counted from the start of the sequence."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_global(self) -> int:
        """How many of the first keys are seen by all queries."""
        ...

    @property
    def capacity(self) -> int | None:
        """How many past keys decoding must keep at most, beside the global ones; None: all of them."""
        ...

    @property
    def global_queries(self) -> bool:
        """Whether the first `num_global` queries see all keys where attention is bidirectional."""
        ...

    @property
    def window(self) -> int | None:
        """W where a query sees the global keys and those less than W tokens away, and nothing else matters."""
        ...

    @property
    def shifts(self) -> bool:
        """Whether a pair of query and key, both moved by a block, is seen and weighted as before."""
        ...

    @property
    def whole_blocks(self) -> bool:
        """Whether every key in the blocks of `key_table` is seen, as far as the direction of attention allows."""
        ...

    def key_table(self, num_blocks: int, causal: bool) -> Tensor:
        """Return the blocks that queries of each block may see, int64 [num_blocks, H or 1, c].

        Doubles, and numbers outside 0 ... num_blocks - 1 (causal: behind the own block), are passed over.
        """
        ...

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Return whether a query [B or 1, H or 1, Nq, 1] sees a key [B or 1, H or 1, 1, Nk]; its own it must see."""
        ...

    def log_weight(self, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        """Return what is added to the scores of these pairs; None for nothing."""
        ...

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        """Return whether any query at `position` or later may see this key."""
        ...


class KeptKeys(NamedTuple):
    """What decoding must remember: the keys and values that later queries may see, in the dtype in which they came.

    key: [B, Hkv, M, D]. value: [B, Hkv, M, Dv]. position: [B, 1, M], counted from 1, 0 where empty. length: [B],
    tokens read.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    length: Tensor


class RingKeys(KeptKeys):
    """`KeptKeys` where the pattern is a window of W tokens, at places that steps write to, in place.

    The first S = `num_global` tokens stand at their positions p, all others at S + (p - S) mod W; M is S + W.
    """


class BlockSoftmaxCall(NamedTuple):
    """One call of block-sparse attention, as `interface.block_sparse_attention` describes it.

    state: what a causal call goes on after. learned: whether the pattern has parameters that are in training. keep:
    whether a causal call from position 0 may return what is kept of its rows, of `ends` [B] real tokens, or all.
    starts: [B], the places where rows of `ends` tokens begin, which only kernels of a prompt read; None is place 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pattern: Pattern
    scaling: float
    causal: bool
    lengths: Tensor | None = None
    sink: Tensor | None = None
    state: KeptKeys | None = None
    learned: bool = False
    policy: Policy = PYTORCH
    keep: bool = False
    ends: Tensor | None = None
    starts: Tensor | None = None

    @property
    def in_window(self) -> bool:
        """Whether what is kept is no more than first keys, and a window of the last."""
        return self.pattern.window is not None and self.pattern.capacity == self.pattern.window - 1
