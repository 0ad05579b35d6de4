"""The functions of csrc/linear: what each is called with, and what it costs, as FLOP counters count it."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import OperandError
from ..runtime import cpu as library
from ..runtime.cpu import Operand, flop_formula, operation
from .types import LEAST_WEIGHT

ACTIVATIONS = ("given", "elu", "relu", "exponential", "softmax_pair")  # `enum activation` of linear.h
PAIR = ACTIVATIONS.index("softmax_pair")
COLUMNS = 32  # a multiple of the width of any tile


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
CHUNK, FEW = 64, 32  # tokens read at a time, and where products are of float32, as in csrc/linear/linear.h
GROUPED = {"query", "sums", "row_scale", "factor", "top"}
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size", "normalise", "threads", "parts")
LEAST_FEATURES = 96  # with fewer of them products in exact parts do not pay


class LinearArgs(ctypes.Structure):
    """`struct linear_args` of linear.h."""

    _fields_ = (
        *((name, Operand) for name in OPERANDS),
        *SEQUENCES,
        *((name, ctypes.c_void_p) for name in (*STATES, "kept_states")),
        *((name, ctypes.c_int64) for name in SIZES),
        ("query_map", MapOperands),
        ("key_map", MapOperands),
        *((name, ctypes.c_int64) for name in ("activation", "input_size", "bidirectional", "strict")),
        *((name, ctypes.c_float) for name in ("quadratic", "offset", "least_weight")),
        *((name, ctypes.c_int64) for name in ("continues", "leaves")),  # for the C to set
    )


def parts_of(query: Tensor, num_features: int) -> int:
    """See `product_parts`."""
    return library.product_parts(query, exact=num_features >= LEAST_FEATURES)


def describe(
    operands: dict[str, Any], states: tuple[Tensor | None, ...], maps: tuple[Tensor | None, ...], activation: int,
    quadratic: float, offset: float, normalise: bool = True, reverse: bool = False, bidirectional: bool = False,
    strict: bool = False, packed: Tensor | None = None, checkpoints: Tensor | None = None,
) -> LinearArgs:  # fmt: skip
    """Describe a problem by the tensors named in `OPERANDS` and `STATES` and the operands of its maps.

    packed: places of the `padding.Packed` of its rows, read from the last token to the first if `reverse`.
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
        kept_states=None if checkpoints is None else checkpoints.data_ptr(),
        packed=None if packed is None else packed.data_ptr(),
        sequences=0 if packed is None else len(packed),
    )


MAP_WEIGHTS = ("query_weight", "query_bias", "key_weight", "key_bias")


def all_operands(
    named: dict[str, Any], states: tuple[Tensor | None, ...], maps: tuple[Tensor | None, ...],
    packed: Tensor | None = None, checkpoints: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Name the operands of `describe` as `operands.FORMS` does."""
    rest = dict(zip(STATES, states, strict=True)) | dict(zip(MAP_WEIGHTS, maps, strict=True))
    return named | rest | {"packed": packed, "checkpoints": checkpoints}


def sizes_of(
    operands: dict[str, Any], activation: int, normalise: bool = True, bidirectional: bool = False
) -> list[tuple[str, int]]:
    """Return the sizes that follow from each other, by their names in `operands.FORMS`.

    Raises:
        OperandError: there is no such activation, or it makes two features of each column and these are odd.
    """
    query, packed = operands["query"], operands["packed"]
    library.require("causal_sums", "activation", activation, 0, len(ACTIVATIONS))
    features, width = library.size_of(operands["state_after"], 2), library.size_of(operands["value"], 3) + normalise
    columns = features // 2 if activation == PAIR else features
    rows, length = library.size_of(query, 0), library.size_of(query, 3)
    sequences = rows if packed is None else library.size_of(packed, 0)
    keys, values = (-(-size // COLUMNS) * COLUMNS for size in (features, width - normalise))
    sizes = [("K", columns * 2 if activation == PAIR else features), ("W", width), ("M", columns)]
    sizes += [("P", -(-columns // COLUMNS) * COLUMNS), ("X", rows * places_of(length)), ("Y", keys * (values + 1) + 1)]
    sizes += [("B", rows), ("S", sequences if bidirectional else rows)]
    return sizes if operands["query_weight"] is not None else [*sizes, ("D", columns)]


def places_of(length: int) -> int:
    """Return how many checkpoints a row has, whatever sequences lie in it: none before the first tokens of one."""
    return max(length - 1, 0) // SEGMENT


def make_checkpoints(query: Tensor, num_features: int, value_size: int) -> Tensor:
    """Return memory for the states where a backward pass goes on; query: [B, Hkv, G, N, D]."""
    batch, heads, _, length, _ = query.shape
    keys, values = (-(-size // COLUMNS) * COLUMNS for size in (num_features, value_size))
    return query.new_empty(batch * places_of(length), heads, keys * (values + 1) + 1, dtype=torch.float32)


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
        query_weight ... offset: `map_operands` of the two maps, and what else is in a `FeatureMapSpec`.
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
    library.call("causal_sums", everything, sizes, lambda: describe(named, states, maps, *how, **settings))


GRADIENTS = ("d_sums", "d_log", "d_query", "d_key", "d_value", "d_scale")
GROUPED_GRADIENTS = {"d_sums", "d_log", "d_query"}
PLACES = ("d_query_weight", "d_query_bias", "d_key_weight", "d_key_bias", "d_state", "d_before")


class LinearBackwardArgs(ctypes.Structure):
    """`struct linear_bwd_args` of linear_bwd.c."""

    _fields_ = (
        ("forward", LinearArgs),
        *((name, Operand) for name in GRADIENTS),
        *((name, ctypes.c_void_p) for name in PLACES),
    )


@operation(*GRADIENTS[2:], *PLACES[:4], "d_before")
def causal_sums_backward(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None, sums: Tensor,
    factor: Tensor, state: Tensor | None, log_max: Tensor | None, state_after: Tensor, log_max_after: Tensor,
    query_weight: Tensor | None, query_bias: Tensor | None, key_weight: Tensor | None, key_bias: Tensor | None,
    activation: int, quadratic: float, offset: float, bidirectional: bool, packed: Tensor | None,
    checkpoints: Tensor | None, d_sums: Tensor, d_log: Tensor | None, d_query: Tensor, d_key: Tensor,
    d_value: Tensor, d_scale: Tensor, d_query_weight: Tensor | None, d_query_bias: Tensor | None,
    d_key_weight: Tensor | None, d_key_bias: Tensor | None, d_state: Tensor | None, d_before: Tensor | None,
    reverse: bool,
) -> None:  # fmt: skip
    """Write the gradients of a call of `causal_sums`, each shaped as what it belongs to.

    Args:
        checkpoints: as it left them; None where every query sees all keys.
        d_sums, d_log, d_state: gradients of the output, of the log of its weights and of the last state.
        d_scale: [B, Hkv, N], of the log scales of the keys. d_before: of the first state.
        reverse: whether tokens were read from the last to the first.
        d_query_weight: [B, Hkv, G, D, m]. d_query_bias: [B, Hkv, G, m]. d_key_weight, d_key_bias: without G.
    """
    forward = dict.fromkeys(OPERANDS)
    forward |= {"query": query, "key": key, "value": value, "sums": sums, "factor": factor}
    forward |= {"log_scale": log_scale, "log_decay": log_decay}
    states, maps = (state, log_max, state_after, log_max_after), (query_weight, query_bias, key_weight, key_bias)
    gradients = dict(zip(GRADIENTS, (d_sums, d_log, d_query, d_key, d_value, d_scale), strict=True))
    learned = (d_query_weight, d_query_bias, d_key_weight, d_key_bias, d_state, d_before)
    places = dict(zip(PLACES, learned, strict=True))
    settings: dict[str, Any] = {"reverse": reverse, "bidirectional": bidirectional, "packed": packed}
    settings |= {"checkpoints": checkpoints}
    operands = all_operands(forward, states, maps, packed, checkpoints)
    if checkpoints is None and not bidirectional:
        raise OperandError("causal_sums_backward: there are no 'checkpoints'; hand over those of causal_sums")

    def describe_both() -> LinearBackwardArgs:
        return LinearBackwardArgs(
            forward=describe(forward, states, maps, activation, quadratic, offset, **settings),
            **{name: Operand.of(x, name in GROUPED_GRADIENTS, reverse) for name, x in gradients.items()},
            **{name: None if x is None else x.data_ptr() for name, x in places.items()},
        )

    sizes = sizes_of(operands, activation, bidirectional=bidirectional)
    library.call("causal_sums_backward", operands | gradients | places, sizes, describe_both)


@operation("sums", "factor", "top", "state_after", "log_max_after")
def causal_step(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None, sums: Tensor,
    factor: Tensor | None, top: Tensor | None, state: Tensor, log_max: Tensor, state_after: Tensor,
    log_max_after: Tensor, query_weight: Tensor | None, query_bias: Tensor | None, key_weight: Tensor | None,
    key_bias: Tensor | None, activation: int, quadratic: float, offset: float, strict: bool,
) -> None:  # fmt: skip
    """`causal_sums` of one token, normalised; arguments as there. A query sees its own key unless `strict`."""
    operands = (query, key, value, sums, log_scale, log_decay, None, factor, top)
    states, maps = (state, log_max, state_after, log_max_after), (query_weight, query_bias, key_weight, key_bias)
    named = dict(zip(OPERANDS, operands, strict=True))
    everything = all_operands(named, states, maps)
    sizes, how = [*sizes_of(everything, activation), ("N", 1)], (activation, quadratic, offset)
    library.call("causal_step", everything, sizes, lambda: describe(named, states, maps, *how, strict=strict))


def chunk_size(query: Tensor, num_features: int) -> int:
    """Return how many tokens the C reads at a time."""
    return CHUNK if parts_of(query, num_features) else FEW


def _map_flops(query: Tensor, query_weight: Tensor | None, key_weight: Tensor | None) -> int:
    """Products with the weights of the maps, for one key and its queries."""
    weights = (query_weight, query.shape[2]), (key_weight, 1)
    return sum(2 * query.shape[-1] * weight.shape[-1] * number for weight, number in weights if weight is not None)


@flop_formula(causal_sums, get_raw=True)
def _flops(
    query: Tensor, value: Tensor, state_after: Tensor, query_weight: Tensor | None, key_weight: Tensor | None,
    bidirectional: bool, **_: Any,
) -> int:  # fmt: skip
    """If causal half of the pairs inside a chunk, twice; reading the state for every query, adding every key to it;
    the maps."""
    (batch, heads, groups, length), value_size, key_size = query.shape[:4], value.shape[-1], state_after.shape[2]
    maps = _map_flops(query, query_weight, key_weight)
    pairs = 0 if bidirectional else groups * chunk_size(query, key_size) * (key_size + value_size)
    return batch * heads * length * (pairs + 2 * (groups + 1) * key_size * value_size + maps)


@flop_formula(causal_sums_backward, get_raw=True)
def _backward_flops(
    query: Tensor, value: Tensor, state_after: Tensor, query_weight: Tensor | None, key_weight: Tensor | None,
    bidirectional: bool, d_query_weight: Tensor | None, **_: Any,
) -> int:  # fmt: skip
    """Pairs inside a chunk five times; a state read once, another folded and read twice; if causal the first is folded
    too, for all chunks of a segment but the last; the maps."""
    (batch, heads, groups, length), value_size, key_size = query.shape[:4], value.shape[-1], state_after.shape[2]
    chunk = chunk_size(query, key_size)
    learned = 2 if d_query_weight is None else 3  # features, what they are made of, the weight itself
    maps = learned * _map_flops(query, query_weight, key_weight)
    pairs = 0 if bidirectional else groups * chunk * (3 * key_size + 2 * value_size)
    state = 2 * key_size * value_size
    folded = 0 if bidirectional else state * (SEGMENT - chunk) // SEGMENT
    return batch * heads * length * (pairs + (2 * groups + 2) * state + folded + maps)


@flop_formula(causal_step, get_raw=True)
def _step_flops(query: Tensor, state: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, **_: Any) -> int:
    """Adding the key to the state, reading it for every query, the maps."""
    batch, heads, groups = query.shape[:3]
    maps = _map_flops(query, query_weight, key_weight)
    return batch * heads * (2 * (groups + 1) * state.shape[2:].numel() + maps)
