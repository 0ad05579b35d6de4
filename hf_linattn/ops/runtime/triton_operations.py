"""All operations in Triton."""

from __future__ import annotations

from ..block_softmax.triton import TRITON_BLOCKS
from ..dispatch import Operations
from ..hybrid.triton_decode import step_attention
from ..linear.triton import TRITON_SUMS

TRITON = Operations(TRITON_SUMS, TRITON_BLOCKS, hybrid_step=step_attention)
