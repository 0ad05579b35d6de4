"""Feature maps by Triton: features of heads in half precision, in half precision, with nothing of theirs in float32.

What the maps' activations are differentiated by is in the features, so the backward pass needs nothing else of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..common.derivatives import first_order
from ..common.precision import wide
from ..runtime.cpu import dense_rows
from ..runtime.triton import is_large, launch, padded, precision, require_kernels, strides
from .interface import Features
from .triton_feature_kernels import write_features, write_slopes
from .types import NativeMap, for_all_heads

INPUT_BYTES = {True: 256, False: 64}  # of a row of heads at a time, by `is_large`
WEIGHT_BYTES = {True: 131072, False: 65536}  # of a weight at a time at most, by `is_large`
NUMBERS, MOST_ROWS = 16384, 64  # in a tile of features, and its rows
PAIR_NUMBERS = 8192  # the same of what "softmax_pair" is made from
TILES = 4  # of tokens in a program, where there are as many
OPTIONS, PAIR_OPTIONS = {"num_warps": 8, "num_stages": 2}, {"num_warps": 4, "num_stages": 2}
SLOPE_NUMBERS = 8192  # in a tile of gradients


def make_features(x: Tensor, native: NativeMap) -> Features:
    """Return the features of x [B, Hkv, N, D] or [B, Hkv, G, N, D] in the dtype of x, log scales in float32.

    Raises:
        OptionError: x is on a CPU, and Triton was not imported to interpret kernels there.
    """
    if not torch.is_grad_enabled():
        return Features(*read(x, native))
    return Features(*_MakeFeatures.apply(x, native.scaled_weight(), native.bias, native))


class _MakeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, native):
        features, log_scale = read(x, native)
        ctx.save_for_backward(x, weight, bias, features)
        ctx.native = native._replace(weight=None, bias=None)
        ctx.set_materialize_grads(False)
        return features, log_scale

    @staticmethod
    @first_order()
    def backward(ctx, gradient, log_gradient):
        x, weight, bias, features = ctx.saved_tensors
        slopes = read_back(features, gradient, ctx.native.activation)
        of_x, of_weight, of_bias = slopes, None, None
        if weight is not None:
            of_x = slopes @ weight.to(x.dtype).mT
            if ctx.needs_input_grad[1]:
                of_weight = wide(x.mT @ slopes).sum_to_size(weight.shape).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = slopes.sum(-2, dtype=torch.float32).sum_to_size(bias.shape).to(bias.dtype)
        if log_gradient is not None and ctx.native.quadratic:
            of_x = of_x.addcmul(x, (2 * ctx.native.quadratic * log_gradient[..., None]).to(x.dtype))
        return of_x, of_weight, of_bias, None


def input_tile(input_size: int, columns: int, itemsize: int, split: bool, large: bool) -> int:
    """Return how many inputs of heads of such numbers, and rows of a weight, a program has at a time."""
    most = WEIGHT_BYTES[large] // (columns * itemsize * (1 + split))
    return max(16, min(padded(input_size), INPUT_BYTES[large] // itemsize, most))


def row_tile(columns: int, numbers: int) -> int:
    """Return how many rows of so many columns are in a tile of about so many numbers."""
    return min(MOST_ROWS, max(16, numbers // columns))


def stored(x: Tensor | None, heads: int, groups: int, dims: int) -> Tensor | None:
    """View a map's weight or bias as that of all heads; one of float64, which takes too much room, as float32."""
    return None if x is None else for_all_heads(x.float() if x.dtype == torch.float64 else x, heads, groups, dims)


def read(x: Tensor, native: NativeMap) -> tuple[Tensor, Tensor | None]:
    """Return features and log scales, if the map has them."""
    require_kernels(x)
    rows = dense_rows(x if x.dim() == 5 else x.unsqueeze(2))
    batch, heads, groups, length, input_size = rows.shape
    weight, bias = stored(native.weight, heads, groups, 2), stored(native.bias, heads, groups, 1)
    size = input_size if weight is None else weight.shape[-1]
    columns = padded(size)
    features = x.new_empty(*x.shape[:-1], native.width(input_size))
    scaled = native.activation == "exponential"
    log_scale = x.new_empty(x.shape[:-1], dtype=torch.float32) if scaled else None
    split = weight is not None and torch.finfo(weight.dtype).eps < torch.finfo(x.dtype).eps
    paired = native.activation == "softmax_pair"
    tile = min(padded(length), row_tile(columns, PAIR_NUMBERS if paired else NUMBERS))
    tiles = max(1, min(TILES, length // tile))
    inputs = input_tile(input_size, columns, x.itemsize, split, is_large(x.device))
    sizes: dict[str, Any] = {"TILES": tiles, "ROWS": tile, "INPUTS": inputs, "COLUMNS": columns}
    sizes |= PAIR_OPTIONS if paired else OPTIONS
    launch(
        write_features, (batch * heads * groups, -(-length // (tile * tiles))), rows,
        rows, *(features if other is None else other for other in (weight, bias)), features,
        features if log_scale is None else log_scale, *rows.stride()[:4],
        *((0,) * 4 if weight is None else weight.stride()), *((0,) * 3 if bias is None else bias.stride()),
        heads, groups, length, 1.0 if native.scale is None else native.scale, native.quadratic, native.offset,
        INPUT_SIZE=input_size, SIZE=size, **sizes,
        ACTIVATION=native.activation, WEIGHED=weight is not None, BIASED=bias is not None, SPLIT=split,
        PRECISION=precision(),
    )  # fmt: skip
    return features, log_scale


def read_back(features: Tensor, gradient: Tensor, activation: str) -> Tensor:
    """Return the gradients of z [B, Hkv, (G,) N, m], of which features are an activation, in their dtype."""
    gradient = dense_rows(gradient)
    *heads, length, width = features.shape
    size = width // 2 if activation == "softmax_pair" else width
    columns = padded(size)
    slopes, tile = features.new_empty(*heads, length, size), row_tile(columns, SLOPE_NUMBERS)
    launch(
        write_slopes, (math.prod(heads), -(-length // tile)), features, features, gradient, slopes,
        *strides(gradient), heads[1], math.prod(heads[2:]), length, SIZE=size, ROWS=tile, COLUMNS=columns,
        ACTIVATION=activation,
    )  # fmt: skip
    return slopes
