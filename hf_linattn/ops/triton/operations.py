"""All operations in Triton."""

from __future__ import annotations

from ..operations import Operations
from .block_softmax import TRITON_BLOCKS
from .causal_attention import TRITON_SUMS
from .hybrid_step import step_attention

TRITON = Operations(TRITON_SUMS, TRITON_BLOCKS, hybrid_step=step_attention)
