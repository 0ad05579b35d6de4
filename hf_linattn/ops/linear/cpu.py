"""Causal kernel attention by csrc/linear: what `torch` computes, in one pass through the caches of a CPU.

Feature maps that can say what they are (`NativeMap`) are computed by the C too, chunk by chunk: see
`mapped_attention`. Where it gets features, `ops.causal_sums` has the gradients.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ...errors import UnsupportedModelError
from ..common.numerics import LOWEST
from ..common.padding import Packed
from ..runtime.cpu import KINDS, Operand, call, operation, product_parts, suits
from ..runtime.operands import require, size_of
from .autograd import CausalSums, attend_by_sums
from .torch import LEAST_WEIGHT

ACTIVATIONS = ("given", "elu", "relu", "exponential", "softmax_pair")  # `enum activation` of linear.h
PAIR = ACTIVATIONS.index("softmax_pair")
COLUMNS = 32  # a multiple of the width of any tile


class NativeMap(NamedTuple):
    """A feature map as linear_fwd.c knows it: an activation of z = scale x weight + bias, of z = x without weight.

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

    def operands(self, heads: int, groups: int) -> tuple[Tensor | None, Tensor | None]:
        """Weight [Hkv, G, D, columns] and bias [Hkv, G, m] for all heads, in float32."""
        weight, bias = self.scaled_weight(), self.bias
        if weight is None:
            return None, None
        missing = -weight.shape[-1] % COLUMNS
        weight = weight.detach().float()
        weight = (F.pad(weight, (0, missing)) if missing else weight).contiguous()
        bias = None if bias is None else for_all_heads(bias.detach().float(), heads, groups, 1)
        return for_all_heads(weight, heads, groups, 2), bias


def for_all_heads(x: Tensor, heads: int, groups: int, dims: int) -> Tensor:
    """View a parameter [*heads, ...] with `dims` dimensions of its own as that of every head, [Hkv, G, ...]."""
    x = x.unsqueeze(1) if x.dim() == dims + 1 else x
    return x.expand(heads, groups, *x.shape[-dims:])


class MapOperands(ctypes.Structure):
    """`feature_map` of linear.h."""

    _fields_ = (("weight", Operand), ("bias", Operand))

    @classmethod
    def of(cls, weight: Tensor | None, bias: Tensor | None) -> MapOperands:
        """Describe weight [Hkv, G, D, columns] and bias [Hkv, G, m]."""
        if weight is None:
            return cls()
        places = (
            Operand() if x is None else Operand(x.data_ptr(), 0, *x.stride()[:2], x.stride(2)) for x in (weight, bias)
        )
        return cls(*places)


OPERANDS = ("query", "key", "value", "sums", "log_scale", "log_decay", "row_scale", "factor", "top")
SEQUENCES = (("packed", ctypes.c_void_p), ("sequences", ctypes.c_int64))
STATES = ("state", "log_max", "state_after", "log_max_after")
SEGMENT = 512  # tokens between two checkpoints, as in linear.h
GROUPED = {"query", "sums", "row_scale", "factor", "top"}
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size", "normalise", "threads", "parts")
LEAST_FEATURES = 96  # with fewer of them products in exact parts do not pay
CHUNK, FEW = 64, 32  # tokens read at a time, and where products are of float32, as in causal_chunks.h


class LinearArgs(ctypes.Structure):
    """`struct linear_args` of linear.h."""

    _fields_ = (
        *((name, Operand) for name in OPERANDS),
        *SEQUENCES,
        *((name, ctypes.c_void_p) for name in (*STATES, "checkpoints")),
        *((name, ctypes.c_int64) for name in SIZES),
        ("query_map", MapOperands),
        ("key_map", MapOperands),
        *((name, ctypes.c_int64) for name in ("activation", "input_size", "bidirectional", "strict")),
        *((name, ctypes.c_float) for name in ("quadratic", "offset", "least_weight")),
        *((name, ctypes.c_int64) for name in ("continues", "leaves")),  # for the C to set
    )


def can_read(query: Tensor, key: Tensor) -> bool:
    """Whether there are sequences for half of the threads: each is read by one."""
    return suits(query, kinds=KINDS) and 2 * key.shape[:2].numel() >= torch.get_num_threads()


def parts_of(query: Tensor, num_features: int) -> int:
    """See `product_parts`."""
    return product_parts(query, exact=num_features >= LEAST_FEATURES)


def native_maps(query_map: Any, key_map: Any) -> list[NativeMap]:
    """Return the two maps as the C knows them, nothing where it does not know them.

    Raises:
        UnsupportedModelError: they have no weights, which an operation would not notice.
    """
    both = (query_map,) if query_map is key_map else (query_map, key_map)
    maps: list[Any] = [getattr(x, "native", lambda: None)() for x in both]
    if not all(maps):
        return []
    if any(x.is_meta for own in maps for x in (own.weight, own.bias) if x is not None):
        raise UnsupportedModelError(
            "a feature map has its weights on the device 'meta', where they have no values, and its inputs elsewhere;"
            " load them with from_pretrained, or move the model with to_empty and load_state_dict"
        )
    return [maps[0], maps[-1]]


def describe(
    operands: dict[str, Any], states: tuple[Tensor | None, ...], maps: tuple[Tensor | None, ...], activation: int,
    quadratic: float, offset: float, normalise: bool = True, reverse: bool = False, bidirectional: bool = False,
    strict: bool = False, packed: Tensor | None = None, checkpoints: Tensor | None = None,
) -> LinearArgs:  # fmt: skip
    """Describe a problem by the tensors named in `OPERANDS` and `STATES` and the operands of its maps.

    packed: places of the `sequences.Packed` of its rows, read from the last token to the first if `reverse`.
    checkpoints: as `make_checkpoints` returns them.
    """
    query, value = operands["query"], operands["value"]
    query_weight, query_bias, key_weight, key_bias = maps
    key_size = cast(Tensor, states[2]).shape[2]
    how = normalise, torch.get_num_threads(), parts_of(query, key_size)
    sizes = (*query.shape[:4], key_size, value.shape[-1], *how)
    return LinearArgs(
        **{name: Operand.of(operand, name in GROUPED, reverse) for name, operand in operands.items()},
        **{name: None if x is None else x.data_ptr() for name, x in zip(STATES, states, strict=True)},
        **dict(zip(SIZES, sizes, strict=True)),
        query_map=MapOperands.of(query_weight, query_bias),
        key_map=MapOperands.of(key_weight, key_bias),
        activation=activation,
        input_size=query.shape[-1],
        bidirectional=bidirectional,
        strict=strict,
        quadratic=quadratic,
        offset=offset,
        least_weight=LEAST_WEIGHT[torch.float32],
        checkpoints=None if checkpoints is None else checkpoints.data_ptr(),
        packed=None if packed is None else packed.data_ptr(),
        sequences=0 if packed is None else len(packed),
    )


MAPPED = ("query_weight", "query_bias", "key_weight", "key_bias")


def all_operands(
    named: dict[str, Any], states: tuple[Tensor | None, ...], maps: tuple[Tensor | None, ...],
    packed: Tensor | None = None, checkpoints: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Name the operands of `describe` as `operands.FORMS` does."""
    rest = dict(zip(STATES, states, strict=True)) | dict(zip(MAPPED, maps, strict=True))
    return named | rest | {"packed": packed, "checkpoints": checkpoints}


def sizes_of(
    operands: dict[str, Any], activation: int, normalise: bool = True, bidirectional: bool = False
) -> list[tuple[str, int]]:
    """Return the sizes that follow from each other, by their names in `operands.FORMS`.

    Raises:
        OperandError: there is no such activation, or it makes two features of each column and these are odd.
    """
    query, packed = operands["query"], operands["packed"]
    require("causal_sums", "activation", activation, 0, len(ACTIVATIONS))
    features, width = size_of(operands["state_after"], 2), size_of(operands["value"], 3) + normalise
    columns = features // 2 if activation == PAIR else features
    rows, length = size_of(query, 0), size_of(query, 3)
    sequences = rows if packed is None else size_of(packed, 0)
    places = rows * -(-length // SEGMENT) + sequences
    keys, values = (-(-size // COLUMNS) * COLUMNS for size in (features, width - normalise))
    sizes = [("K", columns * 2 if activation == PAIR else features), ("W", width), ("M", columns)]
    sizes += [("P", -(-columns // COLUMNS) * COLUMNS), ("X", places), ("Y", keys * (values + 1) + 1), ("B", rows)]
    sizes.append(("S", sequences if bidirectional else rows))
    return sizes if operands["query_weight"] is not None else [*sizes, ("D", columns)]


def make_checkpoints(query: Tensor, num_features: int, value_size: int, packed: Tensor | None) -> Tensor:
    """Return memory for the states before every `SEGMENT` tokens of each sequence, where a backward pass goes on.

    query: [B, Hkv, G, N, D]. packed: places of the sequences, None for one in every row.
    """
    batch, heads, _, length, _ = query.shape
    places = batch * -(-length // SEGMENT) + (batch if packed is None else len(packed))
    keys, values = (-(-size // COLUMNS) * COLUMNS for size in (num_features, value_size))
    return query.new_empty(places, heads, keys * (values + 1) + 1, dtype=torch.float32)


@operation("sums", "factor", "top", "state_after", "log_max_after", "checkpoints")
def causal_sums(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None,
    row_scale: Tensor | None, sums: Tensor, factor: Tensor, top: Tensor, state: Tensor | None, log_max: Tensor | None,
    state_after: Tensor, log_max_after: Tensor, normalise: bool, reverse: bool, query_weight: Tensor | None = None,
    query_bias: Tensor | None = None, key_weight: Tensor | None = None, key_bias: Tensor | None = None,
    activation: int = 0, quadratic: float = 0.0, offset: float = 0.0, bidirectional: bool = False,
    packed: Tensor | None = None, checkpoints: Tensor | None = None,
) -> None:  # fmt: skip
    """Work through one call of linear_fwd.c.

    Args:
        query: [B, Hkv, G, N, K]. key: [B, Hkv, N, K]. value: [B, Hkv, N, Dv]. log_scale, log_decay: [B, Hkv, N].
            With an activation that is not `given` query and key are [..., D], and K is the number of features.
        row_scale: [B, Hkv, G, N]; where not None, `sums` are multiplied by exp(row_scale + top).
        sums: [B, Hkv, G, N, Dv]. factor: [B, Hkv, G, N], what they were multiplied by. top: [B, Hkv, G, N].
        state: [B, Hkv, K, Dv], with one more column where `normalise`. log_max: [B, Hkv]. Both contiguous, as is what
            they become; None: nothing was read before.
        reverse: whether to read the tokens from the last to the first.
        query_weight ... offset: `NativeMap.operands` of the two maps, and what else is in a `NativeMap`.
        bidirectional: whether every query sees all keys of its sequence.
        packed: int64 [S, 3], row, start and length of sequences that lie in the rows one after another, counted as
            they are read, in the order of the rows. The state before belongs to the first of each row, that after to
            the last; where every query sees all keys, those after are [S, Hkv, ...].
        checkpoints: where to keep the states that `make_checkpoints` has room for; None: nowhere.
    """
    operands = (query, key, value, sums, log_scale, log_decay, row_scale, factor, top)
    states, maps = (state, log_max, state_after, log_max_after), (query_weight, query_bias, key_weight, key_bias)
    named = dict(zip(OPERANDS, operands, strict=True))
    settings: dict[str, Any] = {"normalise": normalise, "reverse": reverse, "bidirectional": bidirectional}
    settings |= {"packed": packed, "checkpoints": checkpoints}
    everything = all_operands(named, states, maps, packed, checkpoints)
    sizes = sizes_of(everything, activation, normalise, bidirectional)
    how = activation, quadratic, offset
    call("causal_sums", everything, sizes, lambda: describe(named, states, maps, *how, **settings))


def packed_rows(sequence_ids: Tensor) -> tuple[Any, ...]:
    """Return what `causal_sums` of features is called with for rows that hold several sequences, ids [B, N]."""
    maps = (None,) * 4
    return (*maps, ACTIVATIONS.index("given"), 0.0, 0.0, False, Packed.of(sequence_ids, len(sequence_ids)).places)


NATIVE_SUMS = CausalSums(functools.partial(attend_by_sums, causal_sums, packed_rows))


@register_flop_formula(torch.ops.hf_linattn.causal_sums, get_raw=True)
def _flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **__: Any) -> int:
    """If causal half of the pairs inside a chunk, twice; reading the state for every query, adding every key to it;
    the maps."""
    (batch, heads, groups, length, input_size), value_size, key_size = query.shape, value.shape[-1], rest[8].shape[2]
    weights, bidirectional = zip(rest[12:16:2], (groups, 1), strict=False), any(rest[19:20])
    maps = [2 * input_size * weight.shape[-1] * number for weight, number in weights if weight is not None]
    pairs = 0 if bidirectional else groups * chunk_size(query, key_size) * (key_size + value_size)
    return batch * heads * length * (pairs + 2 * (groups + 1) * key_size * value_size + sum(maps))


def chunk_size(query: Tensor, num_features: int) -> int:
    """Return how many tokens the C reads at a time."""
    return CHUNK if parts_of(query, num_features) else FEW


def map_operands(
    query: Tensor, key: Tensor, maps: list[NativeMap], key_padding_mask: Tensor | None
) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Return the log scales of hidden keys, and what describes the maps."""
    query_map, key_map = maps
    kv_heads, groups = query.shape[1:3]
    hidden = None
    if key_padding_mask is not None:
        hidden = torch.where(key_padding_mask.bool(), 0.0, LOWEST)[:, None].expand(key.shape[:3])
    of_query = query_map.operands(kv_heads, groups)
    of_key = of_query if query_map is key_map else key_map.operands(kv_heads, 1)
    activation = ACTIVATIONS.index(key_map.activation)
    return hidden, (*of_query, *of_key, activation, key_map.quadratic, key_map.offset)
