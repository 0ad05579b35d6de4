"""A prompt of hybrid attention by Triton, without gradients: features, sums over far keys, the window, what is kept.

A query i meets the sums over keys up to i - window_size, as in `fused`. One query more than there are, of zeros, meets
the key that has left the window of the token to come, so that it is in the state. Rows may begin further on and end
earlier; each has only those of its keys among the far ones that have left its own window by then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.precision import widened
from ..common.tracing import once
from ..linear.triton import SUMS, own_maps
from ..linear.triton_features import read
from ..linear.types import LinearState
from ..window.autograd import Window
from ..window.triton import TRITON_WINDOW, Far, attend_prompt
from .triton_decode import remember
from .types import HybridCall, HybridState


def suits(call: HybridCall) -> bool:
    """Whether a call on a GPU is such a prompt."""
    prompt = call.causal and call.state is None and call.policy.inference
    return prompt and call.weights.window_log is None and TRITON_WINDOW.suits(*call[:3])


def attend(call: HybridCall) -> tuple[Tensor, HybridState]:
    """Return the output [B, H, N, Dv], zero for pads where `starts` are given, and the state."""
    query, key, value, weights, lengths = call[:5]
    far, sums = _far(call)
    ends = None if call.starts is None else lengths  # no query sees what stands behind it
    window = Window(weights.window_size, weights.num_sinks, True, ends)
    output = attend_prompt(query, key, value, window, weights.scaling, starts=call.starts, sink=weights.sink, far=far)
    kept = remember(key, value, weights.reach, weights.num_sinks, call.starts, lengths)
    ring_key, ring_value, sink_key, sink_value, length = kept
    return output, HybridState(ring_key, ring_value, sink_key, sink_value, sums.kv, sums.log_max, length)


def _far(call: HybridCall) -> tuple[Far | None, LinearState]:
    """Return what lies beyond the windows of queries, None where they are too short, and the sums over all of it."""
    query, key, value, weights = call[:4]
    near, rate = weights.reach + weights.num_sinks, weights.decay_rate  # keys of a row that have not left yet
    own = own_maps(weights.query_map, weights.key_map)
    count, key_map = key.shape[2] - near, own[1] if own else weights.key_map
    if count < 1:
        (features, log_scale), _ = SUMS.keys(key_map, *_heads(own, key[:, :, :1]), None, rate is not None)
        return None, LinearState.before(features.shape[-1], value, log_scale is not None)
    rows = query.unflatten(1, (key.shape[1], -1)).narrow(3, near + 1, count - 1)
    rows, key, value = _heads(own, rows, *(x.narrow(2, weights.num_sinks, count) for x in (key, value)))
    there = None if call.lengths is None else once(far_places, call.lengths, call.starts, count, near)
    decay = None if rate is None else (-rate[:, None]).expand(key.shape[:3])
    decay = decay if decay is None or there is None else decay * there[:, None]  # a pad takes nothing from the others
    features, query_log = read(rows, own[0].spec, count=count) if own else _with_zero(*weights.query_map(rows))
    (keys, log_scale), _ = SUMS.keys(key_map, key, there, decay is not None)
    output, log, sums = SUMS.weighed(features, keys, log_scale, value, decay)
    log = log if query_log is None else log + query_log
    return Far(output, log, near + 1, weights.log_mix, rate, weights.far_gate), sums


def _heads(own: list[Any], *heads: Tensor) -> tuple[Tensor, ...]:
    """Heads as maps take them: kernels as they are, PyTorch's operations in at least float32."""
    return heads if own else widened(*heads)


def _with_zero(values: Tensor, log_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Features with a row of zeros behind them."""
    return F.pad(values, (0, 0, 0, 1)), None if log_scale is None else F.pad(log_scale, (0, 1))


def far_places(lengths: Tensor, starts: Tensor | None, count: int, near: int) -> Tensor:
    """Return which of `count` places [B, count] have the tokens of rows, but for the last `near` of each."""
    place = torch.arange(count, device=lengths.device)
    end = lengths - near if starts is None else starts + lengths - near
    there = place < end[:, None]
    return there if starts is None else there & (place >= starts[:, None])
