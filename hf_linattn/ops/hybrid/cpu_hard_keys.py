"""`hard_keys` in C where no gradients are needed: prefill, what goes on after a state, and steps, in any padding.

One pass sorts a block and reads the queries that follow. What ranks a key is worked out in the same order wherever it
stands, so that all of them choose the same keys, to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.precision import accum_dtype, wide
from ..linear.cpu import few_sequences, map_operands
from ..linear.types import native_maps
from ..runtime.cpu import KINDS, dense_rows, refusal
from ..runtime.output_pool import empty_output
from .cpu_kernels import hard_keys
from .memory import Memory
from .sums import make_rows, remember
from .types import HardKeyState, HybridCall, HybridWeights


def unsupported(call: HybridCall) -> str | None:
    """Return why the C cannot compute a call whose window counts in blocks."""
    weights = call.weights
    if weights.delta_rule:
        return "a state by the delta rule"
    if reason := refusal(call.query, kinds=KINDS):
        return reason
    if not call.policy.inference:
        return "hard keys with gradients or in training"
    if weights.window_log is not None:
        return "window_scale='maximum'"
    if not native_maps(weights.query_map, weights.key_map):
        return "a feature map that the C does not know"
    return few_sequences(call.key)


def run(call: HybridCall) -> tuple[Tensor, HardKeyState]:
    """Return the output [B, H, N, Dv] and the state after the last real token of each row."""
    (query, key, value), weights, state = (dense_rows(x) for x in call[:3]), call.weights, call.state
    rows = make_rows(query, key, value, weights, call.lengths, state)
    grouped, batch = query.unflatten(1, (key.shape[1], -1)), len(key)
    output = empty_output(grouped, value)
    if call.lengths is not None:
        output.zero_()  # behind the last real token
    after = _empty_state(key, value, weights)
    tokens = (None,) * 2 if state is None else state[:2]
    before = (None,) * 5 if state is None else [x.contiguous() for x in (*state[7:], *state[4:6])]
    places = (x.expand(batch).contiguous() for x in (rows.start, rows.end))
    how = weights.blocks_back, weights.relative_error, weights.scaling, *_maps(grouped, key, weights)
    hard_keys(
        grouped, key, value, output, *places, *tokens, rows.sink_key, rows.sink_value, *before, *after,
        *_shares(weights, key), *how,
    )  # fmt: skip
    kv, log_max, *hard = after
    kept = remember(rows, weights, Memory(kv, log_max), key.dtype)
    return output.flatten(1, 2), HardKeyState(*kept, *hard)


def _maps(query: Tensor, key: Tensor, weights: HybridWeights) -> tuple:
    """Return what describes the feature maps of queries [B, Hkv, G, N, D] and keys [B, Hkv, N, D]."""
    return map_operands(query, key, native_maps(weights.query_map, weights.key_map), None)[1]


def _shares(weights: HybridWeights, key: Tensor) -> list[Tensor | None]:
    """Return g, c and the score of a sink [Hkv, G], and r [Hkv]."""
    by_head = weights.log_mix, None if weights.far_gate is None else weights.gate, weights.sink
    shared = [None if x is None else wide(x).reshape(key.shape[1], -1).contiguous() for x in by_head]
    return [*shared, None if weights.decay_rate is None else wide(weights.decay_rate).contiguous()]


def _empty_state(key: Tensor, value: Tensor, weights: HybridWeights) -> tuple[Tensor, ...]:
    """Return memory for kv, log_max, hard keys, their values and positions."""
    rows, features = key.shape[:2], native_maps(weights.query_map, weights.key_map)[1].width(key.shape[3])
    kv = key.new_empty(*rows, features, value.shape[3] + 1, dtype=accum_dtype(key))
    hard = (x.new_empty(*rows, weights.num_hard_keys, x.shape[3]) for x in (key, value))
    position = torch.empty(*rows, weights.num_hard_keys, dtype=torch.long, device=key.device)
    return kv, kv.new_empty(rows), *hard, position
