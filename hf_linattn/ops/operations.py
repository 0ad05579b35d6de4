"""What a backend brings: the operations that attention over long inputs is made of."""

from __future__ import annotations

from typing import Any, NamedTuple


class Operations(NamedTuple):
    """Each is None where there is nothing of the kind, which leaves it to the C, or to PyTorch.

    causal_sums: a `causal_sums.CausalSums`. block_softmax: a `block_softmax.BlockSoftmax`. mapped_attention: called as
    `native.mapped_attention.mapped_attention` is, from heads whose features it makes itself.
    """

    causal_sums: Any = None
    block_softmax: Any = None
    mapped_attention: Any = None


NOTHING = Operations()
