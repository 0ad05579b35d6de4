"""Feature maps in Triton: the heads are read once, the features written once, in the precision of the heads."""

from __future__ import annotations

import triton
import triton.language as tl

from .causal_kernels import add_product, load_rows


@triton.jit
def project_rows(
    x, x_token, weight, weight_row, row, length, columns, INPUT_SIZE: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x weight [ROWS, COLUMNS] and |x|^2 [ROWS]."""
    result = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    size = tl.zeros([ROWS], dtype=tl.float32)
    for part in range(0, INPUT_SIZE, INPUTS):
        inputs = part + tl.arange(0, INPUTS)
        own = load_rows(x, x_token, row, length, inputs, INPUT_SIZE, False)
        factor = load_rows(weight, weight_row, inputs, INPUT_SIZE, columns, SIZE, False)
        result = add_product(own, factor, result, PRECISION)
        own = own.to(tl.float32)
        size += tl.sum(own * own, 1)
    return result, size


@triton.jit
def store_rows(rows, row, length, columns, SIZE: tl.constexpr, width, values):
    """Write [ROWS, COLUMNS] of rows of `width` numbers."""
    inside = (row < length)[:, None] & (columns < SIZE)[None, :]
    tl.store(rows + row.to(tl.int64)[:, None] * width + columns[None, :], values, mask=inside)


@triton.jit
def softmax_rows(values, columns, SIZE: tl.constexpr):
    """The softmax of the first SIZE of each row's columns; zero in the others."""
    values = tl.where((columns < SIZE)[None, :], values, float("-inf"))
    values = tl.exp(values - tl.max(values, 1)[:, None])
    return values / tl.sum(values, 1)[:, None]


@triton.jit
def write_features(
    x, weight, bias, features, log_scale,
    x_batch, x_head, x_group, x_token, weight_head, weight_group, weight_row, bias_head, bias_group,
    heads, groups, length, quadratic, offset,
    INPUT_SIZE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr, WEIGHED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The features of ROWS tokens of one head, [length, SIZE], twice as wide for "softmax_pair".

    log_scale: [length], written for "exponential". ACTIVATION: as in `NativeMap`.
    """
    sequence = tl.program_id(0).to(tl.int64)
    group = sequence % groups
    batch, head = sequence // groups // heads, sequence // groups % heads
    x += batch * x_batch + head * x_head + group * x_group
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if WEIGHED:
        weight += head * weight_head + group * weight_group
        result, size = project_rows(
            x, x_token, weight, weight_row, row, length, columns, INPUT_SIZE, SIZE, ROWS, INPUTS, COLUMNS, PRECISION
        )
    else:
        result = load_rows(x, x_token, row, length, columns, SIZE, False).to(tl.float32)
        size = tl.sum(result * result, 1)
    if BIASED:
        result += tl.load(bias + head * bias_head + group * bias_group + columns, mask=columns < SIZE, other=0.0)[None]
    features += sequence * length * (2 * SIZE if ACTIVATION == "softmax_pair" else SIZE)
    if ACTIVATION == "elu":
        result = tl.where(result > 0, result + 1, tl.exp(tl.minimum(result, 0.0)))
    elif ACTIVATION == "relu":
        result = tl.maximum(result, 0.0)
    elif ACTIVATION == "exponential":
        result = tl.where((columns < SIZE)[None, :], result, float("-inf"))
        top = tl.max(result, 1)
        result = tl.exp(result - top[:, None])
        tl.store(log_scale + sequence * length + row, top + quadratic * size + offset, mask=row < length)
    if ACTIVATION == "softmax_pair":
        store_rows(features, row, length, columns, SIZE, 2 * SIZE, softmax_rows(result, columns, SIZE))
        store_rows(features + SIZE, row, length, columns, SIZE, 2 * SIZE, softmax_rows(-result, columns, SIZE))
    else:
        store_rows(features, row, length, columns, SIZE, SIZE, result)
