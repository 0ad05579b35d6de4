"""What kernel attention is called with, whatever computes it: features, maps, the state, the call itself."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedModelError
from ..common.numerics import LOWEST
from ..common.precision import accum_dtype
from ..dispatch import PYTORCH, Policy

CHUNK_SIZE = 64
LEAST_WEIGHT = {dtype: torch.finfo(dtype).tiny ** 0.75 for dtype in (torch.float32, torch.float64)}  # 4e-29 in float32
# 2e-13 in float32: of a vector that is divided by its length, whose derivative, 1 / length ** 3, is a number then
LEAST_LENGTH = {dtype: torch.finfo(dtype).tiny ** (1 / 3) for dtype in (torch.float32, torch.float64)}


class Features(NamedTuple):
    """phi(x) = values * exp(log_scale): values [..., N, F], log_scale [..., N] or None where it is zero."""

    values: Tensor
    log_scale: Tensor | None = None


FeatureMap = Callable[[Tensor], Features]


class FeatureMapSpec(NamedTuple):
    """A feature map as kernels know it: an activation of z = scale x weight + bias, of z = x without weight.

    activation: `elu` (elu(z) + 1), `relu`, `exponential` (e^z, its log scale more by quadratic |x|^2 + offset) or
    `softmax_pair` ([softmax(z), softmax(-z)]). weight: [*heads, D, m]. bias: [*heads, m]. scale: 1 if None.
    """

    activation: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float | None = None
    quadratic: float = 0.0
    offset: float = 0.0

    def width(self, input_size: int) -> int:
        """How many features it makes of inputs of that size."""
        size = input_size if self.weight is None else self.weight.shape[-1]
        return size * (2 if self.activation == "softmax_pair" else 1)

    def scaled_weight(self) -> Tensor | None:
        """Scale times weight: a copy where there is a scale, as the next may be drawn before the backward pass."""
        return self.weight if self.weight is None or self.scale is None else self.weight.float() * self.scale


def spec_of(feature_map: Any) -> FeatureMapSpec | None:
    """Return a map as kernels know it, with the weights that it has now; None where they do not know it."""
    spec: FeatureMapSpec | None = getattr(feature_map, "spec", None)
    if spec is None or not feature_map.spec_weights:
        return spec
    weight, bias, *_ = *(attrgetter(place)(feature_map) for place in feature_map.spec_weights), None, None
    return spec._replace(weight=weight, bias=bias)


def specs_of(query_map: Any, key_map: Any) -> list[FeatureMapSpec]:
    """Return the two maps as kernels know them, nothing where they do not know them.

    Raises:
        UnsupportedModelError: they have no weights, which an operation would not notice.
    """
    both = (query_map,) if query_map is key_map else (query_map, key_map)
    maps: list[Any] = [spec_of(x) for x in both]
    if not all(maps):
        return []
    if any(x.is_meta for own in maps for x in (own.weight, own.bias) if x is not None):
        raise UnsupportedModelError(
            "a feature map has its weights on the device 'meta', where they have no values, and its inputs elsewhere;"
            " load them with from_pretrained, or move the model with to_empty and load_state_dict"
        )
    return [maps[0], maps[-1]]


def for_all_heads(x: Tensor, heads: int, groups: int, dims: int) -> Tensor:
    """View a parameter [*heads, ...] with `dims` dimensions of its own as that of every head, [Hkv, G, ...]."""
    x = x.unsqueeze(1) if x.dim() == dims + 1 else x
    return x.expand(heads, groups, *x.shape[-dims:])


class LinearState(NamedTuple):
    """All that is remembered of the keys read so far; constant size, float32 (float64 for float64 inputs).

    kv: [B, Hkv, F, Dv + 1], sum_j phi(k_j) [v_j, 1] exp(-log_max). log_max: [B, Hkv], the largest log scale so far,
    as seen from the last position.
    """

    kv: Tensor
    log_max: Tensor

    @classmethod
    def empty(cls, key: Tensor, value: Tensor, scaled: bool) -> LinearState:
        """The state before the first of keys [B, Hkv, ..., F] with values [B, Hkv, ..., Dv + 1]."""
        return cls.before(key.shape[-1], value[..., :-1], scaled)

    @classmethod
    def before(cls, num_features: int, value: Tensor, scaled: bool) -> LinearState:
        """The state before the first key, for values [B, Hkv, ..., Dv] without a column of ones, in any precision."""
        shape = *value.shape[:2], num_features, value.shape[-1] + 1
        kv = value.new_zeros(shape, dtype=accum_dtype(value))
        return cls(kv, kv.new_full(shape[:2], LOWEST / 2 if scaled else 0.0))

    @classmethod
    def before_map(cls, key_map: FeatureMapSpec, key: Tensor, value: Tensor, log_decay: Tensor | None) -> LinearState:
        """The state before the first of keys [B, Hkv, N, D], whose features a map is to make."""
        scaled = key_map.activation == "exponential" or log_decay is not None
        return cls.before(key_map.width(key.shape[-1]), value, scaled)


class LinearCall(NamedTuple):
    """One call of kernel attention, as `interface.causal_linear_attention` describes it.

    causal: whether a query sees no later key; one token of a causal call is a step of decoding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_map: FeatureMap
    key_map: FeatureMap
    key_padding_mask: Tensor | None = None
    sequence_ids: Tensor | None = None
    state: LinearState | None = None
    log_decay: Tensor | None = None
    causal: bool = True
    chunk_size: int = CHUNK_SIZE
    policy: Policy = PYTORCH

    @property
    def is_step(self) -> bool:
        """Whether this is one token of each row, as in decoding: it is taken into the state, and the state is read."""
        return self.causal and self.key.shape[2] == 1

    @property
    def grouped_query(self) -> Tensor:
        """The queries [B, Hkv, G, N, D], beside the keys that they share."""
        return self.query.unflatten(1, (self.key.shape[1], -1))


def masked(keys: Features, key_padding_mask: Tensor | None, scaled: bool = False) -> Features:
    """Features of a part of the keys, `scaled` for sure; a masked key has no weight and no say in the maximum."""
    values, log_scale = keys
    if scaled and log_scale is None:
        log_scale = values.new_zeros(values.shape[:-1], dtype=accum_dtype(values))
    if key_padding_mask is not None:
        hidden = ~key_padding_mask[:, None].bool()
        values = values.masked_fill(hidden[..., None], 0.0)
        log_scale = None if log_scale is None else log_scale.masked_fill(hidden, LOWEST)
    return Features(values, log_scale)


def log_weight(factor: Tensor, top: Any) -> Tensor:
    """Return the log of what the weights of each query add up to, `LOWEST` where that is nothing; no `top` is zero."""
    return torch.where(factor == 0, LOWEST, (0.0 if top is None else top) - factor.log())
