"""The operation of csrc/hybrid: what it is called with, and what it costs."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..block_softmax.cpu import LEAST_KEYS
from ..linear.cpu_kernels import COLUMNS, MAP_WEIGHTS, PAIR, MapOperands
from ..linear.types import CHUNK_SIZE, LEAST_WEIGHT
from ..runtime.cpu import Operand, call, flop_formula, operation, product_parts, require, size_of

OPERANDS = (
    "query", "key", "value", "out", "ring_key", "ring_value", "sink_key", "sink_value", "hard_key", "hard_value",
    "hard_key_after", "hard_value_after",
)  # fmt: skip
GROUPED = {"query", "out", "query_features"}
PLACES = (
    "hard_position", "hard_position_after", "start", "end", "state", "log_max", "state_after", "log_max_after",
    "log_mix", "gate", "sink", "rate",
)  # fmt: skip
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size", "features")
ENTRIES = ("query_features", "key_features", "key_beta", "key_gate")
SETTINGS = ("sinks", "most", "back", "relative", "activation", "threads", "parts")


class HardKeysArgs(ctypes.Structure):
    """`struct hard_keys_args` of hard_keys.h."""

    _fields_ = (
        *((name, Operand) for name in OPERANDS),
        *((name, ctypes.c_void_p) for name in PLACES),
        ("query_map", MapOperands),
        ("key_map", MapOperands),
        *((name, Operand) for name in ENTRIES),
        *((name, ctypes.c_int64) for name in (*SIZES, *SETTINGS)),
        *((name, ctypes.c_float) for name in ("scaling", "quadratic", "offset", "least_weight")),
    )


def _describe(
    operands: dict[str, Any], back: int, relative: bool, scaling: float, activation: int, quadratic: float,
    offset: float,
) -> HardKeysArgs:  # fmt: skip
    query, sinks, most = operands["query"], operands["sink_key"].shape[2], operands["hard_key_after"].shape[2]
    parts = product_parts(query, exact=sinks + most + CHUNK_SIZE * (back + 1) >= LEAST_KEYS)
    sizes = *query.shape, operands["value"].shape[3], operands["state_after"].shape[2]
    settings = sinks, most, back, relative, activation, torch.get_num_threads(), parts
    weights = [operands[name] for name in MAP_WEIGHTS]
    return HardKeysArgs(
        **{name: Operand.of(operands[name], name in GROUPED, False) for name in OPERANDS + ENTRIES},
        **{name: None if operands[name] is None else operands[name].data_ptr() for name in PLACES},
        query_map=MapOperands.of(*weights[:2]),
        key_map=MapOperands.of(*weights[2:]),
        **dict(zip(SIZES + SETTINGS, sizes + settings, strict=True)),
        scaling=scaling,
        quadratic=quadratic,
        offset=offset,
        least_weight=LEAST_WEIGHT[torch.float32],
    )


@operation("out", "state_after", "log_max_after", "hard_key_after", "hard_value_after", "hard_position_after")
def hard_keys(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, start: Tensor, end: Tensor, ring_key: Tensor | None,
    ring_value: Tensor | None, sink_key: Tensor, sink_value: Tensor, hard_key: Tensor | None,
    hard_value: Tensor | None, hard_position: Tensor | None, state: Tensor | None, log_max: Tensor | None,
    state_after: Tensor, log_max_after: Tensor, hard_key_after: Tensor, hard_value_after: Tensor,
    hard_position_after: Tensor, log_mix: Tensor, gate: Tensor | None, sink: Tensor | None, rate: Tensor | None,
    back: int, relative: bool, scaling: float, query_weight: Tensor | None, query_bias: Tensor | None,
    key_weight: Tensor | None, key_bias: Tensor | None, activation: int, quadratic: float, offset: float,
    query_features: Tensor | None = None, key_features: Tensor | None = None, key_beta: Tensor | None = None,
    key_gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Work through one call of hard_keys.c; without gradients.

    Args:
        query: [B, Hkv, G, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. out: [B, Hkv, G, N, Dv], of which rows
            behind the last real token are not written.
        start, end: int64 [B], position of the first token, and how many are real.
        ring_key ... log_max: what is in a `HardKeyState`, the sinks with those of the call; None: nothing was read
            before, and sinks alone are there.
        state_after ... hard_position_after: what will be in the next one.
        log_mix, gate, sink: [Hkv, G], rate: [Hkv]: those of `HybridWeights`.
        back: blocks before a query's own in its window. relative: how errors are ranked.
        query_weight ... offset: `map_operands` of the two maps, and what else is in a `FeatureMapSpec`; unless the
            state is that of the delta rule.
        query_features: [B, Hkv, G, N, F], what queries read such a state with.
        key_features [B, Hkv, X, F], key_beta, key_gate [B, Hkv, X]: what keys write; those of the hard keys, the ring
            and the call, one behind the other, or of the call alone if nothing was read before. Without them no block
            may leave.
    """
    operands = {
        "query": query, "key": key, "value": value, "out": out, "start": start, "end": end, "ring_key": ring_key,
        "ring_value": ring_value, "sink_key": sink_key, "sink_value": sink_value, "hard_key": hard_key,
        "hard_value": hard_value, "hard_position": hard_position, "state": state, "log_max": log_max,
        "state_after": state_after, "log_max_after": log_max_after, "hard_key_after": hard_key_after,
        "hard_value_after": hard_value_after, "hard_position_after": hard_position_after, "log_mix": log_mix,
        "gate": gate, "sink": sink, "rate": rate, "query_weight": query_weight, "query_bias": query_bias,
        "key_weight": key_weight, "key_bias": key_bias, "query_features": query_features,
        "key_features": key_features, "key_beta": key_beta, "key_gate": key_gate,
    }  # fmt: skip
    require("hard_keys", "back", back, 0)
    features, ring, delta = size_of(state_after, 2), CHUNK_SIZE * (back + 1), query_features is not None
    columns = features // 2 if activation == PAIR else features
    before = 0 if ring_key is None else size_of(hard_key_after, 2) + ring
    sizes = [
        ("K", 2 * columns if activation == PAIR else features), ("W", size_of(value, 3) + (not delta)), ("M", columns),
        ("P", -(-columns // COLUMNS) * COLUMNS), ("E", ring), ("X", before + size_of(key, 2)),
    ]  # fmt: skip
    if query_weight is None and not delta:
        sizes.append(("D", columns))
    how = back, relative, scaling, activation, quadratic, offset
    call("hard_keys", operands, sizes, lambda: _describe(operands, *how))


@flop_formula(hard_keys)
def _flops(
    query: Any, value: Any, sink_key: Any, state_after: Any, hard_key_after: Any, back: int, query_weight: Any,
    key_weight: Any, **_: Any,
) -> int:  # fmt: skip
    """Exact keys that have a place, seen or not; reading the state for each query, recalling hard keys and those of a
    block by it, adding the latter to it; the maps."""
    (batch, heads, groups, length, input_size), value_size, features = query, value[-1], state_after[2]
    sinks, most = sink_key[2], hard_key_after[2]
    exact = groups * (sinks + most + CHUNK_SIZE * (back + 1)) * (input_size + value_size)
    recalled = 2 * CHUNK_SIZE + most if length > CHUNK_SIZE * (back + 1) else 0
    state = (groups + recalled / CHUNK_SIZE) * features * value_size
    weights = (query_weight, groups), (key_weight, 1)
    maps = sum(input_size * weight[-1] * number for weight, number in weights if weight)
    return int(2 * batch * heads * length * (exact + state + maps))
