"""Products of the rows of two tensors in Triton, read once in their own precision: for the weights of gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..linear.triton_kernels import multiply_rows
from .triton import launch, padded, strides

ROWS = 32  # in a program


def row_products(
    x: Tensor, y: Tensor, rest: Tensor | None = None, beside: Tensor | None = None, negative: bool = False
) -> Tensor:
    """Return sum_d x_d (y_d + rest_d) in float32 for x, y, rest [B, Hkv, (G,) N, D]; y and rest lie alike.

    Its negative if `negative`, and `beside` [B, Hkv, (G,) N] more.
    """
    *heads, length, size = x.shape
    products = x.new_empty(*heads, length, dtype=torch.float32)
    columns = padded(size)
    beside = beside if beside is None else beside.to(torch.float32).contiguous()
    launch(
        multiply_rows, (math.prod(heads) * -(-length // ROWS),), x, x, y, y if rest is None else rest,
        products if beside is None else beside, products,
        *strides(x), *strides(y), heads[1], math.prod(heads[2:]), length, SIZE=size, ROWS=ROWS,
        COLUMNS=columns, EXACT=rest is not None, NEGATIVE=negative, BESIDE=beside is not None,
    )  # fmt: skip
    return products
