"""All operations in C."""

from __future__ import annotations

from ..block_softmax.cpu import NATIVE_BLOCKS
from ..dispatch import Operations
from ..linear.cpu import NATIVE_SUMS
from ..linear.cpu_fused import mapped_attention

NATIVE = Operations(NATIVE_SUMS, NATIVE_BLOCKS, mapped_attention)
