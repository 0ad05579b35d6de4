"""Hybrid attention from two operations: what lies beyond the window, then the window on top of it.

The far part is kernel attention of query i with keys up to i - window_size, and if bidirectional from i + window_size
on: these are read as if they stood side by side, and what the distance between them costs is added to the log of the
far weights afterwards. Window and sinks are softmax attention over blocks that begins with the far output as if it
were one more key of that weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_softmax.autograd import Before, BlockSoftmax, Keys, attend_blocks
from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST, fast_exp
from ..common.precision import accum_dtype, wide, widened
from ..common.sink_logit import attenuate
from ..common.tracing import is_watched
from ..linear.autograd import join
from ..linear.features import FeatureKernels
from ..linear.types import FeatureMap, LinearState, masked
from ..window.autograd import Window, attend_window
from .types import HybridCall, HybridState, HybridWeights

BLOCK_SIZE = 64
KEPT_WINDOW = 512  # of what is kept, 3 MB at most each


class Parts(NamedTuple):
    """What a backend makes hybrid attention of.

    blocks: the softmax of the window. sums: kernel attention to far keys by their features. own_maps: returns what
    makes features of both maps, from heads in any precision; nothing where PyTorch does. far: attention to far keys
    from heads, called with (query, key, value, weights, mask, reverse), returns the output, its log and all sums, None
    for maps that it does not know; None where there is nothing of the kind.
    """

    blocks: BlockSoftmax
    sums: FeatureKernels
    own_maps: Callable[[FeatureMap, FeatureMap], list[Any]] = lambda *_: []
    far: Callable[..., tuple[Tensor, Tensor, LinearState] | None] = lambda *_: None


def can_let_in(blocks: BlockSoftmax, weights: HybridWeights) -> bool:
    """Whether the operation of the window joins it with what is far, as far as the gate lets that in.

    The score of a sink belongs to the window, and is taken in after it: then the gate comes last.
    """
    return weights.far_gate is None or (blocks.gates and weights.sink is None)


def attend(parts: Parts, call: HybridCall) -> tuple[Tensor, HybridState | None]:
    """Return the output [B, H, N, Dv] of rows that start at position 0, and the state after a causal call."""
    heads, weights = call[:3], call.weights.beside(call.key)
    if not call.causal:
        return bidirectional_attention(parts, *heads, weights, call.lengths), None
    output, far_sums = causal_attention(parts, *heads, weights)
    return output, HybridState(*remember(call.key, call.value, weights, far_sums))


def causal_attention(
    parts: Parts, query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights
) -> tuple[Tensor, LinearState]:
    """Return the output [B, H, N, Dv] of rows that start at position 0, and the sums over all that left the window.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv].
    """
    length, window, sinks = query.shape[2], weights.window_size, weights.num_sinks
    start, sources = window + sinks, [GradAccumulator(x) for x in (query.unflatten(1, (key.shape[1], -1)), key, value)]
    rows = sources[0].narrow(3, start, length - start)
    far, far_log, state = _far(parts, (rows, *(x.narrow(2, sinks, length - start) for x in sources[1:])), weights)
    leaving = (x.narrow(2, length - window, 1) for x in sources[1:])  # from the window of the token that will come
    state = _with_key(parts, weights, state, *leaving)
    if not can_let_in(parts.blocks, weights):
        near = beside_sink(*_near(parts, sources, weights, None, causal=True), weights)
        return gated(*near, far, far_log, weights.gate, start).flatten(1, 2), state
    before = Before(far, far_log, start, weights.gate_of(key))
    near = _near(parts, sources, weights, before, causal=True)
    return beside_sink(*near, weights)[0].flatten(1, 2), state


def bidirectional_attention(
    parts: Parts, query: Tensor, key: Tensor, value: Tensor, weights: HybridWeights,
    lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the bidirectional output [B, H, N, Dv]; lengths: [B], real tokens at the start of each row."""
    length, window, sinks = query.shape[2], weights.window_size, weights.num_sinks
    heads = query.unflatten(1, (key.shape[1], -1)), key, value
    sources = [GradAccumulator(x) for x in heads]
    first, last = (window + sinks, sinks, sinks), (0, window, window)  # of the queries, and of their far keys
    before = [x.narrow(-2, at, length - window - sinks) for x, at in zip(sources, first, strict=True)]
    after = [x.narrow(-2, at, length - window) for x, at in zip(sources, last, strict=True)]
    far, far_log, _ = _far(parts, before, weights)
    mask = None if lengths is None else torch.arange(window, length, device=key.device) < lengths[:, None]
    far_after, log_after, _ = _far(parts, after, weights, reverse=True, mask=mask)
    if weights.far_gate is not None:
        far, far_log = join(*_from_start(far, far_log, window + sinks), far_after, log_after)
        if can_let_in(parts.blocks, weights):
            gated_far = Before(far, far_log, 0, weights.gate_of(key))
            return _near(parts, sources, weights, gated_far, False, lengths)[0].flatten(1, 2)
        near = beside_sink(*_near(parts, sources, weights, None, False, lengths), weights)
        return gated(*near, far, far_log, weights.gate).flatten(1, 2)
    output, log = _near(parts, sources, weights, Before(far, far_log, window + sinks), False, lengths)
    return beside_sink(*join(output, log, far_after, log_after), weights)[0].flatten(1, 2)


def _from_start(far: Tensor, log: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return what queries from `start` on have, for all: those before it have no weight."""
    return F.pad(far, (0, 0, start, 0)), F.pad(log, (start, 0), value=LOWEST)


def _far(
    parts: Parts, heads: Sequence[Tensor], weights: HybridWeights, reverse: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, LinearState]:
    """Return the attention of query i to key i and all before it, or if `reverse` after it, its log, and all sums."""
    made = parts.far(*heads, weights, mask, reverse)
    if made is None:
        own = parts.own_maps(weights.query_map, weights.key_map)
        query, key, value = (x.flip(-2) if reverse else x for x in (heads if own else widened(*heads)))
        mask = mask.flip(1) if reverse and mask is not None else mask
        query_map, key_map = own or (weights.query_map, weights.key_map)
        decay = far_decay(weights, key)
        features, query_log = query_map(query)
        keys, log_scale = masked(key_map(key), mask, decay is not None)
        far, log, state = parts.sums.weighed(features, keys, log_scale, value, decay)
        log = log if query_log is None else log + query_log
        made = (far.flip(3), log.flip(3), state) if reverse else (far, log, state)
    far, log, state = made
    return far, distant(log, weights), state


def far_decay(weights: HybridWeights, key: Tensor) -> Tensor | None:
    """Return the log decay of far keys [B, Hkv, N, D], [B, Hkv, N], None where there is none."""
    rate = weights.decay_rate
    return None if rate is None else (-rate[:, None]).expand(key.shape[:3])


def _with_key(
    parts: Parts, weights: HybridWeights, state: LinearState, key: Tensor, value: Tensor
) -> LinearState:
    """The sums over one more key [B, Hkv, 1, D]."""
    own = parts.own_maps(weights.query_map, weights.key_map)
    features, log_scale = own[1](key) if own else weights.key_map(wide(key))
    kv, log_max = state
    values = torch.cat([value, kv.new_ones(*value.shape[:3], 1)], dim=-1)
    if log_scale is not None or weights.decay_rate is not None:
        left = log_max if weights.decay_rate is None else log_max - weights.decay_rate
        own_log = kv.new_zeros(()) if log_scale is None else log_scale.squeeze(-1)
        log_max = torch.maximum(own_log.detach(), left.detach())
        kv = kv * fast_exp(left - log_max)[..., None, None]
        values = values * fast_exp(own_log - log_max)[..., None, None]
    return LinearState(torch.addcmul(kv, features.mT, values), log_max)


def remember(key: Tensor, value: Tensor, weights: HybridWeights, far_sums: LinearState) -> tuple[Tensor, ...]:
    """Return what is in the `HybridState` after whole rows [B, Hkv, N, D or Dv] whose far sums are known."""
    batch, _, length, _ = key.shape
    places = slice(length - weights.reach, length), slice(weights.num_sinks)
    # copies: views would keep all of a long prefill
    tokens = [x[:, :, place].clone() for place in places for x in (key, value)]
    return *tokens, *far_sums, torch.full((batch,), length, device=key.device)


def _near(
    parts: Parts, sources: list[GradAccumulator], weights: HybridWeights, before: Before | None, causal: bool,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention to what queries begin with, the window and the sinks, and its log."""
    query, key, value = (source.whole for source in sources)
    how: Any = {"scaling": weights.scaling, "before": before, "sources": sources}
    windows = parts.blocks.window
    if windows is not None and windows.suits(query, key, value):
        seen = Window(weights.window_size, weights.num_sinks, causal, lengths)
        return attend_window(windows, query, key, value, seen, **how)
    seen_parts = near_parts(key.shape[2], weights.window_size, weights.num_sinks, query, causal, lengths)
    return attend_blocks(
        parts.blocks, query, key, value, list(seen_parts), block_size=BLOCK_SIZE, causal=causal, **how
    )


def distant(log: Tensor, weights: HybridWeights) -> Tensor:
    """Return the log weights [B, Hkv, G, N] of far keys with their mix, and what the distance costs."""
    rate, log = weights.decay_rate, log + weights.log_mix.view(log.shape[1], -1, 1)
    return log if rate is None else log - (rate * weights.window_size).view(-1, 1, 1)


def beside_sink(output: Tensor, log: Tensor, weights: HybridWeights) -> tuple[Tensor, Tensor]:
    """Return the output [B, Hkv, G, N, Dv] and its log weights beside the sink, if there is one."""
    if weights.sink is None:
        return output, log
    sink = weights.sink.view(log.shape[1], -1, 1)
    return attenuate(output, log, sink), torch.logaddexp(log, sink.to(log.dtype))


def gated(near: Tensor, near_log: Tensor, far: Tensor, far_log: Tensor, gate: Tensor, start: int = 0) -> Tensor:
    """Return (1 - c) times the near output [B, Hkv, G, N, Dv] plus c times the joint; no far keys before `start`."""
    share = torch.sigmoid(far_log - near_log[..., start:]) * gate.view(near_log.shape[1], -1, 1)
    joint = torch.lerp(near[..., start:, :], far.to(near.dtype), share[..., None].to(near.dtype))
    return torch.cat([near[..., :start, :], joint], dim=-2) if start else joint


def near_parts(
    length: int, window: int, sinks: int, like: Tensor, causal: bool, lengths: Tensor | None = None
) -> Iterable[Keys]:
    """Return what the query blocks see, with one bias for each of the first and one for all others.

    With `lengths` [B] of rows every block has one of its own in every row. On a CPU, what is the same in every layer
    and step is made once.
    """
    plain = type(like) is Tensor and like.device.type == "cpu" and not is_watched()
    if plain and lengths is None and window <= KEPT_WINDOW:
        return _kept_parts(length, window, sinks, accum_dtype(like), causal)
    return _make_parts(length, window, sinks, like.device, accum_dtype(like), causal, lengths)


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def _kept_parts(length: int, window: int, sinks: int, dtype: torch.dtype, causal: bool) -> tuple[Keys, ...]:
    return tuple(_make_parts(length, window, sinks, torch.device("cpu"), dtype, causal, None))


def _make_parts(
    length: int, window: int, sinks: int, device: torch.device, dtype: torch.dtype, causal: bool,
    lengths: Tensor | None,
) -> Iterator[Keys]:  # fmt: skip
    arange = functools.partial(torch.arange, device=device)
    blocks = arange(-(-length // BLOCK_SIZE))
    behind = -(-(window - 1) // BLOCK_SIZE)  # blocks that the window reaches back
    table = blocks[:, None] + arange(-behind, 1 if causal else behind + 1)
    own = blocks[:, None] * BLOCK_SIZE + arange(BLOCK_SIZE)
    edge = behind + -(-sinks // BLOCK_SIZE) + 1 if lengths is None else len(blocks)  # behind these no window has sinks
    for part in (slice(0, edge), slice(edge, None)):
        if len(blocks[part]):
            rows, shown = own[part], table[part]
            rows, columns = (rows, shown) if part.start == 0 else (rows[:1], shown[:1])
            columns = (columns[..., None] * BLOCK_SIZE + arange(BLOCK_SIZE)).flatten(1)
            distance = rows[:, :, None] - columns[:, None]
            seen = (distance.abs() < window) & (columns >= sinks)[:, None]
            present = rows.new_ones(*rows.shape, sinks, dtype=torch.bool)
            if causal:
                seen, present = seen & (distance >= 0), present & (arange(sinks) <= rows[..., None])
            seen = torch.cat([present, seen], dim=-1)[:, None]
            if lengths is not None:
                columns = torch.cat([arange(sinks).expand(len(columns), -1), columns], dim=1)
                seen = seen & (columns[:, None, None] < lengths.view(-1, 1, 1, 1, 1))
            bias = torch.where(seen, rows.new_zeros((), dtype=dtype), rows.new_full((), LOWEST, dtype=dtype))
            yield Keys(int(part.start), shown[:, None], bias, sinks)
