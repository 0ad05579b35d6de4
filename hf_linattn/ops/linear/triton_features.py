"""Feature maps by Triton: features of heads in half precision, in half precision, with nothing of theirs in float32.

What the maps' activations are differentiated by is in the features, so the backward pass needs nothing else of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import first_order
from ..common.precision import wide
from ..runtime.cpu import dense_rows
from ..runtime.triton import is_large, launch, padded, precision, require_kernels, strides
from .interface import Features
from .triton_feature_kernels import write_features, write_slopes
from .types import FeatureMap, FeatureMapSpec, for_all_heads, specs_of

INPUT_BYTES = {True: 256, False: 64}  # of a row of heads at a time, by `is_large`
WEIGHT_BYTES = {True: 131072, False: 65536}  # of a weight at a time at most, by `is_large`
NUMBERS, MOST_ROWS = 16384, 64  # in a tile of features, and its rows
PAIR_NUMBERS = 8192  # the same of what "softmax_pair" is made from
TILES = 4  # of tokens in a program, where there are as many
OPTIONS, PAIR_OPTIONS = {"num_warps": 8, "num_stages": 2}, {"num_warps": 4, "num_stages": 2}
SLOPE_NUMBERS = 8192  # in a tile of gradients
ROW_NUMBERS = 4096  # in a tile of a weight that one row is multiplied with


class FeatureMaker(NamedTuple):
    """A feature map by Triton, see `make_features`."""

    spec: FeatureMapSpec

    def __call__(self, x: Tensor) -> Features:
        return make_features(x, self.spec)


def make_features(
    x: Tensor, spec: FeatureMapSpec, mask: Tensor | None = None, scaled: bool = False
) -> Features:  # fmt: skip
    """Return the features of x [B, Hkv, N, D] or [B, Hkv, G, N, D] in the dtype of x, log scales in float32.

    Args:
        mask: [B, N], true for real keys; the others have no features, as `types.masked` has it.
        scaled: whether there are log scales for sure.

    Raises:
        OptionError: x is on a CPU, and Triton was not imported to interpret kernels there.
    """
    if not torch.is_grad_enabled():
        return Features(*read(x, spec, mask, scaled))
    return Features(*_MakeFeatures.apply(x, spec.scaled_weight(), spec.bias, spec, mask, scaled))


class _MakeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: FeatureMapSpec, mask: Tensor | None,
        scaled: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        features, log_scale = read(x, spec, mask, scaled)
        ctx.save_for_backward(x, weight, bias, features)
        ctx.spec = spec._replace(weight=None, bias=None)
        ctx.set_materialize_grads(False)
        return features, log_scale

    @staticmethod
    @first_order()
    def backward(ctx: Any, gradient: Tensor, log_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, features = ctx.saved_tensors
        slopes = read_back(features, gradient, ctx.spec.activation)
        of_x, of_weight, of_bias = slopes, None, None
        if weight is not None:
            of_x = slopes @ weight.to(x.dtype).mT
            if ctx.needs_input_grad[1]:
                of_weight = wide(x.mT @ slopes).sum_to_size(weight.shape).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = slopes.sum(-2, dtype=torch.float32).sum_to_size(bias.shape).to(bias.dtype)
        if log_gradient is not None and ctx.spec.quadratic:
            of_x = of_x.addcmul(x, (2 * ctx.spec.quadratic * log_gradient[..., None]).to(x.dtype))
        return of_x, of_weight, of_bias, None, None, None


def input_tile(input_size: int, columns: int, itemsize: int, split: bool, large: bool) -> int:
    """Return how many inputs of heads of such numbers, and rows of a weight, a program has at a time."""
    most = WEIGHT_BYTES[large] // (columns * itemsize * (1 + split))
    return max(16, min(padded(input_size), INPUT_BYTES[large] // itemsize, most))


def row_tile(columns: int, numbers: int) -> int:
    """Return how many rows of `columns` numbers are in a tile of about `numbers`."""
    return min(MOST_ROWS, max(16, numbers // columns))


def stored(x: Tensor | None, heads: int, groups: int, dims: int) -> Tensor | None:
    """View a map's weight or bias as that of all heads; one of float64, which takes too much room, as float32."""
    return None if x is None else for_all_heads(x.float() if x.dtype == torch.float64 else x, heads, groups, dims)


def no_step(query_map: FeatureMap, key_map: FeatureMap) -> str | None:
    """Return why a step's kernel does not make the features of both maps."""
    maps = specs_of(query_map, key_map)
    if not maps:
        return "a feature map that its kernels do not know"
    query, key = ([x.weight is None, x.bias is None, *x._replace(weight=None, bias=None)] for x in maps)
    return None if query == key else "queries and keys with maps of other kinds"


class OneRow(NamedTuple):
    """What a kernel of one token needs to make features itself: see `triton_feature_kernels.features_of_row`.

    weights: weight and bias of queries [Hkv, G, D, m] and [Hkv, G, m], then those of keys [Hkv, D, m] and [Hkv, m].
    numbers: scale, quadratic, offset. sizes: what kernels are compiled for. width: F.
    """

    weights: list[Tensor | None]
    numbers: tuple[float, float, float]
    sizes: dict[str, Any]
    width: int

    @classmethod
    def of(cls, maps: Sequence[FeatureMapSpec], heads: int, groups: int, input_size: int) -> OneRow:
        """Of the maps of queries and of keys, which are alike but for their weights."""
        query, key = maps
        of_keys = stored(key.weight, heads, 1, 2), stored(key.bias, heads, 1, 1)
        weights = [stored(query.weight, heads, groups, 2), stored(query.bias, heads, groups, 1)]
        weights += [None if x is None else x[:, 0] for x in of_keys]
        size = input_size if key.weight is None else key.weight.shape[-1]
        columns = padded(size)
        inputs = max(1, min(padded(input_size), ROW_NUMBERS // columns))
        sizes: dict[str, Any] = {"INPUT_SIZE": input_size, "SIZE": size, "INPUTS": inputs, "COLUMNS": columns}
        sizes |= {"ACTIVATION": key.activation, "WEIGHED": key.weight is not None, "BIASED": key.bias is not None}
        numbers = 1.0 if key.scale is None else key.scale, key.quadratic, key.offset
        return cls(weights, numbers, sizes, key.width(input_size))

    @property
    def tile(self) -> int:
        """How many features are in a tile of them."""
        return self.sizes["COLUMNS"] * (2 if self.sizes["ACTIVATION"] == "softmax_pair" else 1)

    def steps(self) -> list[int]:
        """Numbers from one head, group, row and column of each weight to the next, and of each bias."""
        given = zip(self.weights, (4, 3, 3, 2), strict=True)
        return [step for x, dims in given for step in ((0,) * dims if x is None else x.stride())]


def read(
    x: Tensor, spec: FeatureMapSpec, mask: Tensor | None = None, scaled: bool = False, count: int | None = None
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return features and log scales, if the map has them or they are `scaled`.

    count: how many tokens they are of, those behind the last of x zero; None for all of x.
    """
    require_kernels(x)
    rows = dense_rows(x if x.dim() == 5 else x.unsqueeze(2))
    batch, heads, groups, length, input_size = rows.shape
    weight, bias = stored(spec.weight, heads, groups, 2), stored(spec.bias, heads, groups, 1)
    size = input_size if weight is None else weight.shape[-1]
    columns, count = padded(size), length if count is None else count
    features = x.new_empty(*x.shape[:-2], count, spec.width(input_size))
    scaled = scaled or spec.activation == "exponential"
    mask = mask if mask is None or mask.dtype == torch.bool else mask.bool()
    log_scale = x.new_empty(features.shape[:-1], dtype=torch.float32) if scaled else None
    split = weight is not None and torch.finfo(weight.dtype).eps < torch.finfo(x.dtype).eps
    paired = spec.activation == "softmax_pair"
    tile = min(padded(count), row_tile(columns, PAIR_NUMBERS if paired else NUMBERS))
    tiles = max(1, min(TILES, count // tile))
    inputs = input_tile(input_size, columns, x.itemsize, split, is_large(x.device))
    sizes: dict[str, Any] = {"TILES": tiles, "ROWS": tile, "INPUTS": inputs, "COLUMNS": columns}
    sizes |= PAIR_OPTIONS if paired else OPTIONS
    launch(
        write_features, (batch * heads * groups * -(-count // (tile * tiles)),), rows,
        rows, *(features if other is None else other for other in (weight, bias, mask)), features,
        features if log_scale is None else log_scale, *rows.stride()[:4], *((0, 0) if mask is None else mask.stride()),
        *((0,) * 4 if weight is None else weight.stride()), *((0,) * 3 if bias is None else bias.stride()),
        heads, groups, length, count, 1.0 if spec.scale is None else spec.scale, spec.quadratic, spec.offset,
        INPUT_SIZE=input_size, SIZE=size, **sizes,
        ACTIVATION=spec.activation, WEIGHED=weight is not None, BIASED=bias is not None, SPLIT=split,
        MASKED=mask is not None, SCALED=scaled, PRECISION=precision(),
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
        write_slopes, (math.prod(heads) * -(-length // tile),), features, features, gradient, slopes,
        *strides(gradient), heads[1], math.prod(heads[2:]), length, SIZE=size, ROWS=tile, COLUMNS=columns,
        ACTIVATION=activation,
    )  # fmt: skip
    return slopes
