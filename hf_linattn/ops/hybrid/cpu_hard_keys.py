"""`hard_keys` in C: prefill, what goes on after a state, and steps, in any padding.

One pass sorts a block and reads the queries that follow. What ranks a key is worked out in the same order wherever it
stands, so that all of them choose the same keys, to the last bit. What a state by the delta rule is read and written
with comes from PyTorch. In training the C reads exact keys and writes by the delta rule, and PyTorch does all else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..block_softmax.cpu import NATIVE_BLOCKS
from ..common.precision import accum_dtype, wide
from ..linear.cpu import few_sequences, map_operands
from ..linear.types import CHUNK_SIZE, specs_of
from ..runtime.cpu import KINDS, dense_rows, empty_output, refusal
from . import hard_keys as pytorch
from .cpu_kernels import hard_keys
from .memory import Memory
from .sums import Rows, make_rows, remember
from .types import HardKeyState, HybridCall, HybridWeights


def unsupported(call: HybridCall) -> str | None:
    """Return why the C cannot compute a call whose window counts in blocks."""
    weights = call.weights
    if reason := refusal(call.query, kinds=KINDS):
        return reason
    if weights.window_log is not None:
        return "window_scale='maximum'"
    if not call.policy.inference and call.state is not None:
        return "tokens after a state with gradients or in training"
    if call.policy.inference and not weights.delta_rule and not specs_of(weights.query_map, weights.key_map):
        return "a feature map that the C does not know"
    return few_sequences(call.key)


def run(call: HybridCall) -> tuple[Tensor, HardKeyState]:
    """Return the output [B, H, N, Dv] and the state after the last real token of each row."""
    if not call.policy.inference:
        return pytorch.run(call._replace(weights=call.weights.beside(call.key)), NATIVE_BLOCKS)
    (query, key, value), weights, state = (dense_rows(x) for x in call[:3]), call.weights, call.state
    rows = make_rows(query, key, value, weights, call.lengths, state)
    grouped, batch = rows.query.whole, len(key)
    output = empty_output(grouped, value)
    if call.lengths is not None:
        output.zero_()  # behind the last real token
    tokens = (None,) * 2 if state is None else state[:2]
    before = (None,) * 5 if state is None else [x.contiguous() for x in (*state[7:], *state[4:6])]
    places = (x.expand(batch).contiguous() for x in (rows.start, rows.end))
    maps, entries, width = (_of_delta_rule if weights.delta_rule else _of_kernel)(rows, weights, state)
    after = _empty_state(key, value, weights, *width)
    how = weights.blocks_back, weights.relative_error, weights.scaling, *maps
    hard_keys(
        grouped, key, value, output, *places, *tokens, rows.sink_key, rows.sink_value, *before, *after,
        *_shares(weights, key), *how, *entries,
    )  # fmt: skip
    kv, log_max, *hard = after
    kept = remember(rows, weights, Memory(kv, log_max), key.dtype)
    return output.flatten(1, 2), HardKeyState(*kept, *hard)


def _of_kernel(rows: Rows, weights: HybridWeights, state: Any) -> tuple[Any, Any, Any]:
    """Return what describes the feature maps, nothing else, and how many features and columns the state has."""
    query, key, value = (x.whole for x in rows[:3])
    maps = specs_of(weights.query_map, weights.key_map)
    return map_operands(query, key, maps, None)[1], (), (maps[1].width(key.shape[3]), value.shape[3] + 1)


def _of_delta_rule(rows: Rows, weights: HybridWeights, state: HardKeyState | None) -> tuple[Any, Any, Any]:
    """Return that no maps are described, what queries read and keys write, and how large the state is."""
    query, key, value = (x.whole for x in rows[:3])
    maps: Any = weights.query_map, weights.key_map  # of tokens at positions, see `memory.DeltaMemory`
    position = rows.start[:, None] + torch.arange(key.shape[2], device=key.device)
    features = dense_rows(maps[0](wide(query), position))
    entries: list[Tensor | None] = [features, None, None, None]
    if _any_leaves(rows, weights):
        position = position[:, None]
        if state is not None:
            ring = rows.start[:, None] + torch.arange(-weights.kept, 0, device=key.device)
            old = state.hard_position, *(x.expand(*key.shape[:2], -1) for x in (ring[:, None], position))
            position = torch.cat(old, dim=2)
            key = torch.cat([wide(x) for x in (state.hard_key, state.ring_key, key)], dim=2)
        written, beta, log_gate = maps[1](wide(key), position)
        entries[1:] = dense_rows(written), beta, log_gate
    none = (*(None,) * 4, 0, 0.0, 0.0)
    return none, entries, (features.shape[-1], value.shape[3])


def _any_leaves(rows: Rows, weights: HybridWeights) -> bool:
    """Whether a block leaves the window of any row."""
    before = (rows.start - 1).clamp(min=0) // CHUNK_SIZE
    last = (rows.start + rows.end - 1) // CHUNK_SIZE
    return bool(((rows.end > 0) & (last > before.clamp(min=weights.blocks_back))).any())


def _shares(weights: HybridWeights, key: Tensor) -> list[Tensor | None]:
    """Return g, c and the score of a sink [Hkv, G], and r [Hkv]."""
    by_head = weights.log_mix, None if weights.far_gate is None else weights.gate, weights.sink
    shared = [None if x is None else wide(x).reshape(key.shape[1], -1).contiguous() for x in by_head]
    return [*shared, None if weights.decay_rate is None else wide(weights.decay_rate).contiguous()]


def _empty_state(key: Tensor, value: Tensor, weights: HybridWeights, features: int, width: int) -> tuple[Tensor, ...]:
    """Return memory for kv, log_max, hard keys, their values and positions."""
    rows, most = key.shape[:2], weights.num_hard_keys
    kv = key.new_empty(*rows, features, width, dtype=accum_dtype(key))
    hard = (x.new_empty(*rows, most, x.shape[3]) for x in (key, value))
    return kv, kv.new_empty(rows), *hard, torch.empty(*rows, most, dtype=torch.long, device=key.device)
