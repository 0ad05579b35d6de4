"""Kernels compiled for a GPU that is not there, and looked through for numbers that nothing has set."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

# of an aggregate or a vector that is filled piece by piece, the first piece goes into an undefined whole
FILLED = re.compile(r"\b(insertvalue|insertelement|shufflevector)\b")
UNSET = re.compile(r"\b(poison|undef)\b")


def compile_for(capability: int, source: Any, options: dict[str, Any]) -> Any:
    """Compile a kernel for an NVIDIA GPU.

    Raises:
        ValueError: it computes with a number that nothing has set, as a cast makes one of what its type cannot hold.
            Triton's interpreter has a number there, and a GPU has any.
    """
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = [line.strip() for line in compiled.asm["llir"].splitlines() if UNSET.search(line)]
    if found := [line for line in code if not FILLED.search(line)]:
        raise ValueError(f"{source.fn.__name__} for sm_{capability} computes with what nothing has set: {found[:3]}")
    return compiled
