"""Hybrid attention in C where no gradients are needed, the far output and the window on top of it in one memory.

What both read is that of `fused`. One token behind a full window takes a step. A window that counts in blocks is that
of `cpu_hard_keys`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_softmax.autograd import continue_blocks
from ..block_softmax.cpu import NATIVE_BLOCKS
from ..common.numerics import LOWEST
from ..common.precision import accum_dtype, widened
from ..linear.cpu import SUMS, few_sequences, mapped_attention, step_attention
from ..linear.types import FeatureMapSpec, LinearState, log_weight, specs_of
from ..runtime.cpu import KINDS, empty_output, refusal
from . import cpu_hard_keys, fused
from .fused import BLOCK_SIZE, Parts, beside_sink, can_let_in, distant, far_decay, gated, near_parts, remember
from .types import HardKeyState, HybridCall, HybridState, HybridWeights, window_alone


def unsupported(call: HybridCall) -> str | None:
    """Return why the C cannot compute a call."""
    if call.weights.blocks:
        return cpu_hard_keys.unsupported(call)
    if reason := refusal(call.query, kinds=KINDS):
        return reason
    if call.causal and call.lengths is not None:
        return "padded rows"
    if call.state is not None:
        return _stuck(call, call.state)
    return window_alone(call) or few_sequences(call.key)


def _stuck(call: HybridCall, state: HybridState) -> str | None:
    """Return why the C cannot go on from a state."""
    weights = call.weights
    if not call.policy.inference:
        return "tokens after a state with gradients or in training"
    if weights.window_log is not None:
        return "window_scale='maximum'"
    if not weights.reach:
        return "a window of one token"
    if not _knows_maps(weights):
        return "a feature map that the C does not know"
    # last: elsewhere than on a CPU a number that is looked at is waited for, and no graph can be captured
    full = bool((state.length >= weights.num_sinks + weights.reach).all())
    return None if full else "tokens after a state whose window is not full yet"


def run(call: HybridCall) -> tuple[Tensor, HybridState | HardKeyState | None]:
    """Return the output [B, H, N, Dv], and the state after a causal call."""
    if call.weights.blocks:
        return cpu_hard_keys.run(call)
    heads, weights = (call.query, call.key, call.value), call.weights.beside(call.key)
    if call.state is not None:
        output, after = continued_attention(*heads, weights, call.state)
        return output, HybridState(*after)
    if not call.policy.inference or call.lengths is not None or not _knows_maps(weights):
        return fused.attend(PARTS, call)
    if not call.causal:
        return _bidirectional_rows(*heads, weights), None
    output, sums = _causal_rows(*heads, weights)
    return output, HybridState(*remember(call.key, call.value, weights, sums))


def _knows_maps(weights: HybridWeights) -> bool:
    """Whether the C makes the features itself."""
    return bool(specs_of(weights.query_map, weights.key_map))


def _far_of_heads(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, mask: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, LinearState] | None:
    """`fused.Parts.far`."""
    maps = specs_of(weights.query_map, weights.key_map)
    if not maps:
        return None
    far, log, state = mapped_attention(
        query, key, value, maps, mask, far_decay(weights, key), None, weighed=True, reverse=reverse
    )
    return far, log, state


PARTS = Parts(NATIVE_BLOCKS, SUMS, far=_far_of_heads)


def _causal_rows(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, before: LinearState | None = None
) -> tuple[Tensor, LinearState]:
    """Return the output [B, H, N, Dv] of rows that start at position 0, and the sums over all that left the window.

    Without gradients, which `fused` has.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. weights: a `HybridWeights`.
        before: sums over more keys, between the sinks and the others, that have left the window of the last query
            without far keys of its own.
    """
    length, window = query.shape[2], weights.window_size
    heads = query.unflatten(1, (key.shape[1], -1)), key, value
    output = empty_output(heads[0], value)
    far = output if can_let_in(NATIVE_BLOCKS, weights) else empty_output(heads[0], value)
    log, state = _before(*heads, weights, far, before)
    # one more key has left the window of the token that will come
    left, nowhere = slice(length - window, length - window + 1), torch.empty_like(output[..., :1, :])
    state, _ = _far(heads[0][:, :, :, :1], key[:, :, left], value[:, :, left], weights, state, nowhere)
    start = window + weights.num_sinks - (before is not None)
    return _join_near(*heads, weights, output, far, log, start, causal=True), state


def _bidirectional_rows(query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights) -> Tensor:
    """Return the bidirectional output [B, H, N, Dv] of unpadded rows; arguments as above."""
    length, window = query.shape[2], weights.window_size
    heads = query.unflatten(1, (key.shape[1], -1)), key, value
    output = empty_output(heads[0], value)
    far = output if can_let_in(NATIVE_BLOCKS, weights) else empty_output(heads[0], value)
    log, _ = _before(*heads, weights, far)
    end = length - window  # only queries before this one have far keys after them
    rows, keys, values = heads[0][:, :, :, :end], key[:, :, window:], value[:, :, window:]
    after = empty_output(rows, value)
    _, log_after = _far(rows, keys, values, weights, None, after, reverse=True)
    both = min(window + weights.num_sinks, end)  # queries from this one on may have far keys before them, too
    far[:, :, :, :both] = after[:, :, :, :both]
    share = torch.sigmoid(log_after - log[..., :end])[..., both:, None].to(far.dtype)
    far[:, :, :, both:end].lerp_(after[:, :, :, both:], share)
    log[..., :end] = torch.logaddexp(log[..., :end], log_after)
    if far is not output and both < window + weights.num_sinks:
        far[:, :, :, both : window + weights.num_sinks] = 0  # queries without far keys
    return _join_near(*heads, weights, output, far, log, 0, causal=False)


def continued_attention(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, state: HybridState
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output [B, H, N, Dv] of tokens that go on after a `HybridState`, and what is in the next one.

    Every row has read more than the sinks and a window before them: what it kept of these stands before its tokens, as
    if nothing had been between. Without gradients, as `_causal_rows`.
    """
    count, sums, new = query.shape[2], LinearState(state.kv, state.log_max), [key, value]
    moved = min(count, weights.reach)
    rings = [torch.cat([x[:, :, moved:], y[:, :, -moved:]], dim=2) for x, y in zip(state[:2], new, strict=True)]
    old = (state.sink_key, state.ring_key), (state.sink_value, state.ring_value)
    if count == 1:
        query, *new = widened(query, key, value)
        key, value = (torch.cat([*kept, y], dim=2) for kept, y in zip(old, new, strict=True))  # widened by that
        output, sums = _step(query, key, value, weights, sums)
    else:
        key, value = (torch.cat([*(x.to(y.dtype) for x in kept), y], dim=2) for kept, y in zip(old, new, strict=True))
        output, sums = _go_on(query, key, value, weights, sums)
    return output, (*rings, state.sink_key, state.sink_value, *sums, state.length + count)


def _go_on(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, sums: LinearState
) -> tuple[Tensor, LinearState]:
    """Several queries at the end of a row of sinks, window and new tokens."""
    kept = key.shape[2] - query.shape[2]
    output, sums = _causal_rows(F.pad(query, (0, 0, kept, 0)), key, value, weights, sums)
    return output[:, :, kept:], sums


def _step(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, sums: LinearState
) -> tuple[Tensor, LinearState]:
    """One query at the end of such a row."""
    sinks, rate = weights.num_sinks, weights.decay_rate
    grouped = query.unflatten(1, (key.shape[1], -1))
    decay = None if rate is None else (-rate[:, None]).expand(*key.shape[:2], 1)
    leaving = key[:, :, sinks : sinks + 1], value[:, :, sinks : sinks + 1]
    maps = specs_of(weights.query_map, weights.key_map)
    far, far_log, sums = _strict_step(grouped, *leaving, maps, decay, sums)
    far_log = far_log + weights.log_mix.view(key.shape[1], -1, 1)
    far_log = far_log if rate is None else far_log - (rate * weights.reach).view(-1, 1, 1)
    scores = (grouped.squeeze(3) @ key.mT).mul_(weights.scaling)
    near_log = scores.logsumexp(-1, keepdim=True)
    near = scores.sub_(near_log).exp_() @ value
    if weights.far_gate is not None:
        near, near_log = beside_sink(near[..., None, :], near_log, weights)
        return gated(near, near_log, far, far_log, weights.gate).flatten(1, 2), sums
    output = near.lerp_(far.squeeze(3), torch.sigmoid(far_log - near_log))[..., None, :]
    return beside_sink(output, torch.logaddexp(near_log, far_log), weights)[0].flatten(1, 2), sums


def _before(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, output: Tensor, state: LinearState | None = None
) -> tuple[Tensor, LinearState]:
    """Write the attention to far keys before each query; return the log of its weight [B, Hkv, G, N], and a state."""
    window, sinks = weights.window_size, weights.num_sinks
    start, span = window + sinks, slice(sinks, key.shape[2] - window)
    log = query.new_full(query.shape[:4], LOWEST, dtype=accum_dtype(query))
    rows, keys, values = query[:, :, :, start:], key[:, :, span], value[:, :, span]
    if state is not None:  # one query more has far keys
        last, maps = slice(start - 1, start), specs_of(weights.query_map, weights.key_map)
        one, own_key, own_value = widened(query[:, :, :, last], keys[:, :, :1], values[:, :, :1])
        output[:, :, :, last], far_log, _ = _strict_step(one, own_key, own_value, maps, None, state)
        log[..., last] = distant(far_log, weights)
    state, log[..., start:] = _far(rows, keys, values, weights, state, output[:, :, :, start:])
    return log, state


def _far(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, state: LinearState | None, place: Tensor,
    reverse: bool = False,
) -> tuple[LinearState, Tensor]:  # fmt: skip
    """Write the attention of query i to key i and all before it, or if `reverse` after it; return state and log."""
    maps, rate = specs_of(weights.query_map, weights.key_map), weights.decay_rate
    decay = None if rate is None else (-rate[:, None]).expand(key.shape[:3])
    _, far, state = mapped_attention(query, key, value, maps, None, decay, state, place, reverse=reverse)
    return state, distant(far, weights)


def _join_near(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, output: Tensor, far: Tensor, log: Tensor,
    start: int, causal: bool,
) -> Tensor:  # fmt: skip
    """Return the output [B, H, N, Dv], made in `output`, where `far` stands already unless it is joined afterwards.

    log: [B, Hkv, G, N], that of far weights; it is overwritten. start: the first query that has far keys.
    """
    if far is output:
        _read_near(query, key, value, weights, output, log, causal, weights.gate_of(key))
        return beside_sink(output, log, weights)[0].flatten(1, 2)
    near_log = torch.empty_like(log)
    _read_near(query, key, value, weights, output, near_log, causal, begin=True)
    output, near_log = beside_sink(output, near_log, weights)
    share = torch.sigmoid(log - near_log).mul_(weights.gate.view(log.shape[1], -1, 1))[..., start:, None]
    output[:, :, :, start:].lerp_(far[:, :, :, start:].to(output.dtype), share.to(output.dtype))  # float32 by a sink
    return output.flatten(1, 2)


def _read_near(
    query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights, output: Tensor, log: Tensor, causal: bool,
    gate: Tensor | None = None, begin: bool = False,
) -> None:  # fmt: skip
    """Read the window and the sinks, from what stands in `output` and `log` on unless to `begin`; write both."""
    window, sinks = weights.window_size, weights.num_sinks
    for part in near_parts(key.shape[2], window, sinks, query, causal):
        continue_blocks(
            NATIVE_BLOCKS, query, key, value, part, output, log, block_size=BLOCK_SIZE, scaling=weights.scaling,
            causal=causal, begin=begin, gate=gate,
        )  # fmt: skip


def _strict_step(
    query: Tensor, key: Tensor, value: Tensor, maps: list[FeatureMapSpec], log_decay: Tensor | None, state: LinearState
) -> tuple[Tensor, Tensor, LinearState]:
    """`step_attention` to what was there before the key; with the log of the weights of each query [B, Hkv, G, 1]."""
    factor, top = query.new_empty(2, *query.shape[:4]).unbind()
    how: Any = {"key_padding_mask": None, "log_decay": log_decay, "state": state, "written": (factor, top)}
    output, after = step_attention(query, key, value, maps, **how)
    return output, log_weight(factor, top), after
