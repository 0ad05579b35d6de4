"""Memory that ran out: which errors say so, on GPUs and on CPUs, and for how large a tensor."""

from __future__ import annotations

import re

from .reading import one_line

# what PyTorch and NumPy say of memory that they did not get, on GPUs and on CPUs
NO_MEMORY = re.compile(r"(?i)out of memory|not enough memory|can't allocate memory|unable to allocate|bad_alloc")
TORCH_MEMORY = "OutOfMemoryError"  # by its name: commands that need no PyTorch ask, too
SIZE = re.compile(r"(?i)allocate (\d+(?:\.\d+)?) ?(bytes|[KMGTP]i?B)")
UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory for a tensor.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."))
    True
    """
    known = isinstance(error, MemoryError) or type(error).__name__ == TORCH_MEMORY
    return known or (isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error))))


def size_said(error: BaseException) -> str:
    """Return how large the tensor was for which there was no memory, or else what was said.

    >>> size_said(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."))
    'at a tensor of 2.15 GB'
    """
    found = SIZE.search(str(error))
    if found is None:
        return one_line(error)
    return f"at a tensor of {gigabytes(float(found[1]) * UNITS[found[2][0].upper()])}"


def gigabytes(count: float) -> str:
    """Return a number of bytes in GB, which are 10^9.

    >>> gigabytes(1_234_000_000)
    '1.23 GB'
    """
    return f"{count / 1e9:.2f} GB"
