"""What a backend brings: the operations that attention over long inputs is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .block_softmax import BlockSoftmax
from .causal_sums import CausalSums


class Operations(NamedTuple):
    """causal_sums: sums over keys, from features. block_softmax: softmax over key blocks.

    mapped_attention: called as `native.mapped_attention.mapped_attention` is, from heads whose features it makes
    itself; None if there is no such thing.
    """

    causal_sums: CausalSums
    block_softmax: BlockSoftmax
    mapped_attention: Callable[..., Any] | None = None
