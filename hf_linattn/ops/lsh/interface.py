"""Softmax attention over keys found by hashing."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import Operation
from . import cpu
from . import torch as pytorch
from .types import Earlier, Found, Lists, LshCall

__all__ = ["Earlier", "Found", "Lists", "LshCall", "bucket_attention"]

LSH = Operation("lsh", cpu=cpu, torch=pytorch)


def bucket_attention(call: LshCall) -> tuple[Tensor, Tensor, Lists | None]:
    """Return the output [B, H, N, Dv], the log of its weights [B, H, N], and the lists of keys, None for one token.

    The log is `LOWEST` for a query that sees its own key alone, where that is seen only then.
    """
    return LSH.run(call)
