"""All operations in C."""

from __future__ import annotations

from ..operations import Operations
from .block_softmax import NATIVE_BLOCKS
from .causal_sums import NATIVE_SUMS
from .mapped_attention import mapped_attention

NATIVE = Operations(NATIVE_SUMS, NATIVE_BLOCKS, mapped_attention)
