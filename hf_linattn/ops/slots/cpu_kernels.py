"""Weighted means of the segments of sequences, by `segment_mean.c`: any layout is read where it lies."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..common.derivatives import first_order
from ..common.grad_accumulator import GradAccumulator
from ..runtime.cpu import Operand, call, dense_rows, flop_formula, operation, require, size_of

OPERANDS = ("row", "mean", "weight", "total", "d_row", "d_mean", "d_weight", "d_total")
SIZES = ("batches", "heads", "segments", "segment_size", "row_size", "threads")


class SegmentMeanArgs(ctypes.Structure):
    """`struct segment_mean_args` of segment_mean.c."""

    _fields_ = (*((name, Operand) for name in OPERANDS), *((name, ctypes.c_int64) for name in SIZES))


def segment_means(rows: Tensor, weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the means of every `size` rows under exp(weight), and the logs of what these weights add up to.

    Args:
        rows: [B, H, N, D]. weight: [B, H, N]. What does not fill a segment at the end is left out.

    Returns:
        [B, H, N // size, D]; [B, H, N // size].
    """
    return _SegmentMeans.apply(dense_rows(rows), weight, size, 0, rows.shape[2], None, None)


def segment_means_of_part(
    rows: GradAccumulator, weight: GradAccumulator, size: int, start: int, length: int
) -> tuple[Tensor, Tensor]:
    """Return those of `length` rows from `start` on; their gradients are added up where those of all rows are."""
    where = rows.gradient, weight.gradient
    return _SegmentMeans.apply(dense_rows(rows.whole), weight.whole, size, start, length, *where)


@operation("mean", "total")
def segment_means_forward(rows: Tensor, weight: Tensor, mean: Tensor, total: Tensor, size: int) -> None:
    """Write means and totals."""
    _run("segment_means", {"row": rows, "weight": weight, "mean": mean, "total": total}, size)


@operation("d_rows", "d_weight")
def segment_means_backward(
    rows: Tensor, weight: Tensor, mean: Tensor, total: Tensor, d_mean: Tensor, d_total: Tensor, d_rows: Tensor,
    d_weight: Tensor, size: int,
) -> None:  # fmt: skip
    """Add to the gradients of all rows that are in a segment, and of their weights."""
    operands = {"row": rows, "weight": weight, "mean": mean, "total": total}
    gradients = {"d_mean": d_mean, "d_total": d_total, "d_row": d_rows, "d_weight": d_weight}
    _run("segment_means_backward", operands | gradients, size)


def _run(function: str, operands: dict[str, Tensor], size: int) -> None:
    require(function, "size", size, 1)

    def describe() -> SegmentMeanArgs:
        described = {name: Operand.of(x, False, False) for name, x in operands.items()}
        batch, heads, count, width = operands["mean"].shape
        sizes = zip(SIZES, (batch, heads, count, size, width, torch.get_num_threads()), strict=True)
        return SegmentMeanArgs(**described, **dict(sizes))

    call(function, operands, [("L", size_of(operands["mean"], 2) * size)], describe)


@flop_formula(segment_means_forward)
def _flops(rows: Any, **_: Any) -> int:
    batch, heads, length, width = rows
    return 2 * batch * heads * length * width


@flop_formula(segment_means_backward)
def _backward_flops(rows: Any, **_: Any) -> int:
    return 2 * _flops(rows)


class _SegmentMeans(torch.autograd.Function):
    """Of some of the rows; gradients go where they are said to be added up, or on."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, size: int, start: int, length: int, *where: Any
    ) -> tuple[Tensor, Tensor]:
        part, of_part = rows.narrow(2, start, length), weight.narrow(2, start, length)
        count = length // size
        mean, total = rows.new_empty(*rows.shape[:2], count, rows.shape[3]), rows.new_empty(*rows.shape[:2], count)
        segment_means_forward(part, of_part, mean, total, size)
        ctx.save_for_backward(rows, weight, mean, total)
        ctx.size, ctx.place, ctx.where = size, (2, start, length), where
        return mean, total

    @staticmethod
    @first_order()
    def backward(ctx: Any, d_mean: Tensor, d_total: Tensor) -> tuple[Tensor | None, ...]:
        *heads, mean, total = ctx.saved_tensors
        pairs = list(zip(heads, ctx.where, strict=True))
        gradients = [torch.zeros_like(x) if where is None else where.begun(x) for x, where in pairs]
        parts = [x.narrow(*ctx.place) for x in (*heads, *gradients)]
        segment_means_backward(*parts[:2], mean, total, dense_rows(d_mean), d_total, *parts[2:], ctx.size)
        handed_on = (None if x is not None else d for x, d in zip(ctx.where, gradients, strict=True))
        return *handed_on, None, None, None, None, None
