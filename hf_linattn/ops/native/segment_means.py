"""Weighted means of the segments of sequences, by `segment_means.c`: any layout is read where it lies."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .library import Operand, call, dense_rows, operation

OPERANDS = ("row", "mean", "weight", "total")
SIZES = ("batches", "heads", "segments", "segment_size", "row_size", "threads")


class Problem(ctypes.Structure):
    """`struct problem` of segment_means.c."""

    _fields_ = (*((name, Operand) for name in OPERANDS), *((name, ctypes.c_int64) for name in SIZES))


def _means_like(rows: Any, weight: Any, size: int) -> Any:
    means = rows.new_empty(*rows.shape[:2], rows.shape[2] // size, rows.shape[3])
    return means, means[..., 0].clone()


@operation(fake=_means_like)
def segment_means(rows: Tensor, weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the means of every `size` rows under exp(weight), and the logs of what these weights add up to.

    Args:
        rows: [B, H, N, D]. weight: [B, H, N]. What does not fill a segment at the end is left out.

    Returns:
        [B, H, N // size, D]; [B, H, N // size].
    """
    batch, heads, length, width = rows.shape
    count, rows = length // size, dense_rows(rows)
    mean, total = rows.new_empty(batch, heads, count, width), rows.new_empty(batch, heads, count)
    operands = (Operand.of(x, False, False) for x in (rows, mean, weight, total))
    call("segment_means", Problem(*operands, batch, heads, count, size, width, torch.get_num_threads()))
    return mean, total


@register_flop_formula(torch.ops.hf_linattn.segment_means)
def _flops(rows: Any, weight: Any, size: int, *_: Any, **__: Any) -> int:
    batch, heads, length, width = rows
    return 2 * batch * heads * (length // size * size) * width
