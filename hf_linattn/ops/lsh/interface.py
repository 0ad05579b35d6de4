"""Softmax attention over keys found by hashing.

It returns the output [B, H, N, Dv], the log of its weights [B, H, N], and the `Lists` of keys, None for one token. The
log is `LOWEST` for a query that sees its own key alone, where that is seen only then.
"""

from __future__ import annotations

from ..dispatch import Operation
from . import cpu
from . import torch as pytorch
from .types import Earlier, Found, Lists, LshCall

__all__ = ["LSH", "Earlier", "Found", "Lists", "LshCall"]

LSH = Operation("lsh", cpu=cpu, torch=pytorch)
