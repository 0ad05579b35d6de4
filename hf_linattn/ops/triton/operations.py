"""All operations in Triton."""

from __future__ import annotations

from ..operations import Operations
from .block_softmax import TRITON_BLOCKS
from .causal_attention import TRITON_SUMS

TRITON = Operations(TRITON_SUMS, TRITON_BLOCKS)
