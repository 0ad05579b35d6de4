"""Sums over many rows, some of them at a time, with the gradient made on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .ops.common.derivatives import first_order

ELEMENTS = 2**22  # of the logits of one chunk: 16 MiB in float32


class Prepared(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @first_order("a loss whose gradient was made beforehand has none; leave create_graph=True out")
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, None, *(outer[0] * gradient for gradient in ctx.gradients)


def chunk_rows(vocabulary: int) -> int:
    """Return how many positions' logits are held at a time.

    >>> chunk_rows(49_152)
    85
    """
    return max(1, ELEMENTS // vocabulary)


def sum_by_chunks(
    function: Callable[..., Tensor], size: int, rows: Tensor, *aligned: Tensor, parameters: Sequence[nn.Parameter] = ()
) -> Tensor:
    """Return the sum of `function` over chunks of `size` rows, with the exact gradient.

    The gradient of a chunk is taken as soon as its loss is known, so that what `function` makes of the rows is held
    for one chunk alone, and is computed once. It is that of `rows` and `parameters`, and of nothing else.

    Args:
        function: takes the rows [C, ...] of a chunk and those of `aligned`, and returns a scalar.
        rows: [T, ...]. aligned: tensors [T, ...] that are cut alike. parameters: what else `function` looks at.

    >>> rows = torch.arange(5.0, requires_grad=True)
    >>> total = sum_by_chunks(lambda chunk: chunk.square().sum(), 2, rows)
    >>> float(total), torch.autograd.grad(total, rows)[0].tolist()
    (30.0, [0.0, 2.0, 4.0, 6.0, 8.0])
    """
    chunks = list(zip(*(x.split(size) for x in (rows, *aligned)), strict=True))
    own = [p for p in (rows, *parameters) if p.requires_grad] if torch.is_grad_enabled() else []
    exact = [torch.promote_types(p.dtype, torch.float32) if p is not rows else p.dtype for p in own]
    gradients = [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(own, exact, strict=True)]
    total = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
    first = 0
    for chunk, *others in chunks:
        with torch.set_grad_enabled(bool(own)):
            chunk = chunk.detach().requires_grad_(bool(own) and rows.requires_grad)
            part = function(chunk, *others)
            if part.requires_grad:
                found = torch.autograd.grad(part, [chunk if p is rows else p for p in own], allow_unused=True)
                for p, gradient, new in zip(own, gradients, found, strict=True):
                    if new is not None:
                        (gradient[first : first + len(chunk)] if p is rows else gradient).add_(new)
        total = total + part.detach()
        first += len(chunk)
    return Prepared.apply(total, gradients, *own) if own else total
