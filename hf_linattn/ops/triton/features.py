"""Feature maps by Triton: features of heads in half precision, in half precision, with nothing of theirs in float32.

What the maps' activations are differentiated by is in the features, so the backward pass needs nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..causal_linear import Features
from ..native.causal_sums import NativeMap
from ..native.library import dense_rows
from ..precision import wide
from .feature_kernels import write_features
from .launching import launch, precision, require_kernels

INPUTS, NUMBERS, MOST_ROWS = 16, 16384, 64  # of the heads' width at a time; in a tile of features, and its rows
OPTIONS = {"num_warps": 8, "num_stages": 2}  # more do not fit into shared memory


def softmax_pair_gradient(features: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of z where features [..., 2 m] are softmax(z) and softmax(-z)."""
    both, products = features.unflatten(-1, (2, -1)), (features * gradient).unflatten(-1, (2, -1))
    own, opposite = (products - both * products.sum(-1, keepdim=True)).unbind(-2)
    return own - opposite


GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of z, by features and their gradients
    "elu": lambda features, gradient: features.clamp(max=1) * gradient,
    "relu": lambda features, gradient: (features > 0) * gradient,
    "exponential": lambda features, gradient: features * gradient,
    "softmax_pair": softmax_pair_gradient,
}


def make_features(x: Tensor, native: NativeMap) -> Features:
    """Return the features of x [B, Hkv, N, D] or [B, Hkv, G, N, D] in the dtype of x, log scales in float32.

    Raises:
        OptionError: x is on a CPU, and Triton was not imported to interpret kernels there.
    """
    return Features(*_MakeFeatures.apply(x, native.weight, native.bias, native))


class _MakeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, native):
        features, log_scale = read(x, native)
        ctx.save_for_backward(x, weight, bias, features)
        ctx.native = native._replace(weight=None, bias=None)
        ctx.set_materialize_grads(False)
        return features, log_scale

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, log_gradient):
        x, weight, bias, features = ctx.saved_tensors
        of_z = GRADIENTS[ctx.native.activation](features, wide(gradient))
        of_x, of_weight, of_bias = of_z, None, None
        if weight is not None:
            of_z = of_z.to(x.dtype)
            of_x = of_z @ weight.to(x.dtype).mT
            of_weight = wide(x.mT @ of_z).sum_to_size(weight.shape).to(weight.dtype)
        if bias is not None:
            of_bias = of_z.sum(-2, dtype=torch.float32).sum_to_size(bias.shape).to(bias.dtype)
        if log_gradient is not None and ctx.native.quadratic:
            of_x = of_x + (2 * ctx.native.quadratic) * x * log_gradient[..., None]
        return of_x.to(x.dtype), of_weight, of_bias, None


def read(x: Tensor, native: NativeMap) -> tuple[Tensor, Tensor | None]:
    """Return features and log scales, if the map has them."""
    require_kernels(x)
    rows = dense_rows(x if x.dim() == 5 else x.unsqueeze(2))
    batch, heads, groups, length, input_size = rows.shape
    weight, bias = native.operands(heads, groups)
    size = input_size if native.weight is None else native.weight.shape[-1]
    columns = max(16, triton.next_power_of_2(size))
    features = x.new_empty(*x.shape[:-1], size * (2 if native.activation == "softmax_pair" else 1))
    scaled = native.activation == "exponential"
    log_scale = x.new_empty(x.shape[:-1], dtype=torch.float32) if scaled else None
    row_tile = min(MOST_ROWS, max(16, NUMBERS // columns))
    sizes: dict[str, Any] = {"ROWS": row_tile, "INPUTS": INPUTS, "COLUMNS": columns, **OPTIONS}
    grid = (batch * heads * groups, triton.cdiv(length, row_tile))
    launch(
        write_features, grid, rows,
        rows, *(features if other is None else other for other in (weight, bias)), features,
        features if log_scale is None else log_scale, *rows.stride()[:4],
        *((0, 0, 0) if weight is None else weight.stride()[:3]), *((0, 0) if bias is None else bias.stride()[:2]),
        heads, groups, length, native.quadratic, native.offset, INPUT_SIZE=input_size, SIZE=size, **sizes,
        ACTIVATION=native.activation, WEIGHED=weight is not None, BIASED=bias is not None, PRECISION=precision(),
    )  # fmt: skip
    return features, log_scale
