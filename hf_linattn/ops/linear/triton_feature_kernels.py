"""Feature maps in Triton: heads are read once, features written once, in the precision of the heads; and back."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import HIDDEN, find_tile, load_rows


@triton.jit
def load_weight(
    weight, weight_row, weight_column, inputs, columns, INPUT_SIZE: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Rows [INPUTS, COLUMNS] of a weight, rounded to KIND, and where SPLIT what they lack for it."""
    inside = (inputs < INPUT_SIZE)[:, None] & (columns < SIZE)[None, :]
    place = weight + inputs.to(tl.int64)[:, None] * weight_row + columns[None, :] * weight_column
    whole = tl.load(place, mask=inside, other=0.0)
    if SPLIT:
        whole = whole.to(tl.float32)
    own = whole.to(KIND)
    rest = own
    if SPLIT:
        rest = (whole - own.to(tl.float32)).to(KIND)
    return own, rest


@triton.jit
def project(rows, weight, rest, result, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """result + rows (weight + rest) [ROWS, COLUMNS]."""
    result = tl.dot(rows, weight, result, input_precision=PRECISION)
    if SPLIT:
        result = tl.dot(rows, rest, result, input_precision=PRECISION)
    return result


@triton.jit
def store_rows(rows, row, length, columns, SIZE: tl.constexpr, width, values):
    """Write [ROWS, COLUMNS] of rows of `width` numbers."""
    inside = (row < length)[:, None] & (columns < SIZE)[None, :]
    tl.store(rows + row.to(tl.int64)[:, None] * width + columns[None, :], values, mask=inside)


@triton.jit
def elu_plus_one(x):
    """elu(x) + 1."""
    return tl.where(x > 0, x + 1, tl.exp(tl.where(x > 0, 0.0, x)))


@triton.jit
def relu(x):
    """relu(x); unlike `tl.maximum` it leaves NaN as it is."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def softmax_rows(values, columns, SIZE: tl.constexpr):
    """The softmax of the first SIZE of each row's columns; zero in the others."""
    values = tl.where((columns < SIZE)[None, :], values, float("-inf"))
    values = tl.exp(values - tl.max(values, 1)[:, None])
    return values / tl.sum(values, 1)[:, None]


@triton.jit
def write_activations(
    result, size, bias, mask, features, log_scale, bias_column, mask_token, row, length, columns, quadratic, offset,
    SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Features and log scales of some rows, from what their activation is of, without bias, and their squares."""
    if BIASED:
        place = bias + columns * bias_column
        result += tl.load(place, mask=columns < SIZE, other=0.0).to(tl.float32)[None]
    if ACTIVATION == "elu":
        result = elu_plus_one(result)
    elif ACTIVATION == "relu":
        result = relu(result)
    elif ACTIVATION == "exponential":
        result = tl.where((columns < SIZE)[None, :], result, float("-inf"))
        top = tl.max(result, 1)
        result = tl.exp(result - top[:, None])
        size = top + quadratic * size + offset
    if ACTIVATION != "exponential":
        size = tl.zeros_like(size)
    real = row < length
    if MASKED:
        real = tl.load(mask + row * mask_token, mask=row < length, other=0) != 0
        size = tl.where(real, size, HIDDEN)
    if SCALED:
        tl.store(log_scale + row, size, mask=row < length)
    if ACTIVATION == "softmax_pair":
        opposite = softmax_rows(-result, columns, SIZE)
        result = softmax_rows(result, columns, SIZE)
        if MASKED:
            result, opposite = tl.where(real[:, None], result, 0.0), tl.where(real[:, None], opposite, 0.0)
        store_rows(features, row, length, columns, SIZE, 2 * SIZE, result)
        store_rows(features + SIZE, row, length, columns, SIZE, 2 * SIZE, opposite)
    else:
        if MASKED:
            result = tl.where(real[:, None], result, 0.0)
        store_rows(features, row, length, columns, SIZE, SIZE, result)


@triton.jit
def write_features(
    x, weight, bias, mask, features, log_scale, x_batch, x_head, x_group, x_token, mask_batch, mask_token,
    weight_head, weight_group, weight_row, weight_column, bias_head, bias_group, bias_column,
    heads, groups, length, count, scale, quadratic, offset,
    INPUT_SIZE: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHED: tl.constexpr, BIASED: tl.constexpr,
    SPLIT: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The features of TILES ROWS tokens of one head, [count, SIZE], twice as wide for "softmax_pair".

    length: how many tokens there are; those behind them are zero. log_scale: [count], written where SCALED, zero but
    for "exponential". mask: tokens that have no features, and no log scale to speak of, where MASKED. ACTIVATION: as
    in `FeatureMapSpec`. SPLIT: whether the weight has more digits than heads, beside which a number of it counts as
    two.
    """
    sequence, part = find_tile(count, TILES * ROWS)
    batch, head, group = sequence // groups // heads, sequence // groups % heads, sequence % groups
    x += batch * x_batch + head * x_head + group * x_group
    columns = tl.arange(0, COLUMNS)
    weight += head * weight_head + group * weight_group
    bias += head * bias_head + group * bias_group
    kind: tl.constexpr = x.dtype.element_ty
    mask += batch * mask_batch
    features += sequence * count * (2 * SIZE if ACTIVATION == "softmax_pair" else SIZE)
    if WEIGHED and INPUTS >= INPUT_SIZE:  # one weight for all tiles
        inputs = tl.arange(0, INPUTS)
        whole, rest = load_weight(weight, weight_row, weight_column, inputs, columns, INPUT_SIZE, SIZE, kind, SPLIT)
    for tile in range(TILES):
        row = (part * TILES + tile) * ROWS + tl.arange(0, ROWS)
        if WEIGHED:
            result, size = tl.zeros([ROWS, COLUMNS], dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)
            for first in range(0, INPUT_SIZE, INPUTS):
                inputs = first + tl.arange(0, INPUTS)
                own = load_rows(x, x_token, row, length, inputs, INPUT_SIZE, False)
                if INPUTS < INPUT_SIZE:
                    whole, rest = load_weight(
                        weight, weight_row, weight_column, inputs, columns, INPUT_SIZE, SIZE, kind, SPLIT
                    )
                result = project(own, whole, rest, result, SPLIT, PRECISION)
                if ACTIVATION == "exponential":
                    own = own.to(tl.float32)
                    size += tl.sum(own * own, 1)
            result *= scale
        else:
            result = load_rows(x, x_token, row, length, columns, SIZE, False).to(tl.float32)
            size = tl.sum(result * result, 1)
        write_activations(
            result, size, bias, mask, features, log_scale + sequence * count, bias_column, mask_token, row, count,
            columns, quadratic, offset, SIZE, ACTIVATION, BIASED, MASKED, SCALED,
        )  # fmt: skip


@triton.jit
def feature_numbers(SIZE: tl.constexpr, COLUMNS: tl.constexpr, PAIRED: tl.constexpr):
    """Which features `features_of_row` returns at each place; the number of all features where there is none."""
    place = tl.arange(0, 2 * COLUMNS if PAIRED else COLUMNS)
    if PAIRED:  # as `tl.join` puts them
        place = tl.where(place // 2 < SIZE, place % 2 * SIZE + place // 2, 2 * SIZE)
    return place


@triton.jit
def features_of_row(
    x, weight, bias, weight_row, weight_column, bias_column, scale, quadratic, offset,
    INPUT_SIZE: tl.constexpr, SIZE: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr, WEIGHED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The features of one row of heads, in float32, in the order of `feature_numbers`, and its log scale or zero."""
    columns = tl.arange(0, COLUMNS)
    shown = columns < SIZE
    if WEIGHED:
        products, squares = tl.zeros([INPUTS, COLUMNS], dtype=tl.float32), tl.zeros([INPUTS], dtype=tl.float32)
        for part in range(0, INPUT_SIZE, INPUTS):
            inputs = part + tl.arange(0, INPUTS)
            own = tl.load(x + inputs, mask=inputs < INPUT_SIZE, other=0.0).to(tl.float32)
            place = weight + inputs.to(tl.int64)[:, None] * weight_row + columns[None, :] * weight_column
            inside = (inputs < INPUT_SIZE)[:, None] & shown[None, :]
            products += own[:, None] * tl.load(place, mask=inside, other=0.0).to(tl.float32)
            squares += own * own
        result = tl.sum(products, 0) * scale
    else:
        result = tl.load(x + columns, mask=shown, other=0.0).to(tl.float32)
        squares = result * result
    if BIASED:
        result += tl.load(bias + columns * bias_column, mask=shown, other=0.0).to(tl.float32)
    log_scale = 0.0
    if ACTIVATION == "elu":
        result = elu_plus_one(result)
    elif ACTIVATION == "relu":
        result = relu(result)
    elif ACTIVATION == "exponential":
        top = tl.max(tl.where(shown, result, float("-inf")), 0)
        result = tl.exp(tl.where(shown, result - top, float("-inf")))
        log_scale = top + quadratic * tl.sum(squares, 0) + offset
    if ACTIVATION == "softmax_pair":
        both = tl.where(shown[:, None], tl.join(result, -result), float("-inf"))
        both = tl.exp(both - tl.max(both, 0)[None, :])
        made = tl.reshape(both / tl.sum(both, 0)[None, :], [2 * COLUMNS])
    else:
        made = tl.where(shown, result, 0.0)
    return made, log_scale


@triton.jit
def slope_of_softmax(features, gradient):
    """The gradient of z where rows of features are softmax(z)."""
    products = features * gradient
    return products - features * tl.sum(products, 1)[:, None]


@triton.jit
def write_slopes(
    features, gradient, slopes, gradient_batch, gradient_head, gradient_group, gradient_token, heads, groups, length,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The gradients [length, SIZE] of z, of which features are an activation, by these and their own gradients."""
    sequence, tile = find_tile(length, ROWS)
    batch, head, group = sequence // groups // heads, sequence // groups % heads, sequence % groups
    width: tl.constexpr = 2 * SIZE if ACTIVATION == "softmax_pair" else SIZE
    row, columns = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    features += sequence * length * width
    gradient += batch * gradient_batch + head * gradient_head + group * gradient_group
    own = load_rows(features, width, row, length, columns, SIZE, False).to(tl.float32)
    given = load_rows(gradient, gradient_token, row, length, columns, SIZE, False).to(tl.float32)
    if ACTIVATION == "elu":
        own = tl.where(own > 1, 1.0, own) * given
    elif ACTIVATION == "relu":
        own = tl.where(own <= 0, 0.0, given)
    elif ACTIVATION == "exponential":
        own = own * given
    else:
        own = slope_of_softmax(own, given)
        opposite = load_rows(features + SIZE, width, row, length, columns, SIZE, False).to(tl.float32)
        given = load_rows(gradient + SIZE, gradient_token, row, length, columns, SIZE, False).to(tl.float32)
        own -= slope_of_softmax(opposite, given)
    store_rows(slopes + sequence * length * SIZE, row, length, columns, SIZE, SIZE, own)
