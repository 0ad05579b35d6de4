"""Hybrid attention from two operations in C: what lies beyond the window, then the window on top of it.

The far part is kernel attention of query i with keys up to i - window_size, and if bidirectional from i + window_size
on: the C reads them as if they stood side by side, and what the distance between them costs is added to the log of the
far weights afterwards. Window and sinks are softmax attention over blocks that begins with the far output as if it
were one more key of that weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..causal_sums import weighed_attention
from ..chunk_sums import LinearState
from ..exponential import LOWEST
from ..sink import attenuate
from ..source import Source
from .block_softmax import Before, Keys, attend_blocks, continue_blocks
from .causal_step import strict_step
from .causal_sums import NATIVE_SUMS, can_read, native_maps
from .library import suits
from .mapped_attention import join, mapped_attention
from .memory import empty_output

BLOCK_SIZE = 64


def can_attend(query: Tensor, key: Tensor, weights: Any) -> bool:
    """Whether the C knows these weights and something lies beyond the window."""
    window, sinks = weights.window_size, weights.num_sinks
    beyond = key.shape[2] > window + sinks and window >= sinks
    return beyond and weights.window_log is None and can_read(query, key)


def can_step(query: Tensor, weights: Any, state: Any) -> bool:
    """Whether this is a token behind a window and sinks that are full, and the C knows these weights."""
    one = state is not None and query.shape[2] == 1 and weights.window_log is None and weights.reach > 0
    full = one and bool((state.length >= weights.num_sinks + weights.reach).all())
    return full and suits(query) and knows_maps(weights)


def knows_maps(weights: Any) -> bool:
    """Whether the C makes the features itself."""
    return bool(native_maps(weights.query_map, weights.key_map))


def trained_causal_hybrid_attention(
    query: Tensor, key: Tensor, value: Tensor, weights: Any
) -> tuple[Tensor, LinearState]:
    """`causal_hybrid_attention` with gradients, and with any maps."""
    length, window, sinks = query.shape[2], weights.window_size, weights.num_sinks
    start, sources = window + sinks, [Source(x) for x in (query.unflatten(1, (key.shape[1], -1)), key, value)]
    # one more key, which has left the window of the token that will come, with a query that is dropped
    rows = F.pad(sources[0].narrow(3, start, length - start), (0, 0, 0, 1))
    far_key, far_value = (source.narrow(2, sinks, length - start + 1) for source in sources[1:])
    far, far_log, state = _trained_far((rows, far_key, far_value), weights)
    return _beside_sink(*_trained_near(sources, weights, Before(far, far_log, start), causal=True), weights), state


def trained_hybrid_attention(
    query: Tensor, key: Tensor, value: Tensor, weights: Any, lengths: Tensor | None = None
) -> Tensor:
    """`hybrid_attention` with gradients, and with any maps; with `lengths` [B] of rows, with maps that the C knows."""
    length, window, sinks = query.shape[2], weights.window_size, weights.num_sinks
    heads = query.unflatten(1, (key.shape[1], -1)), key, value
    sources = [Source(x) for x in heads]
    first, last = (window + sinks, sinks, sinks), (0, window, window)  # of the queries, and of their far keys
    before = [x.narrow(-2, at, length - window - sinks) for x, at in zip(sources, first, strict=True)]
    after = [x.narrow(-2, at, length - window) for x, at in zip(sources, last, strict=True)]
    far, far_log, _ = _trained_far(before, weights)
    output, log = _trained_near(sources, weights, Before(far, far_log, window + sinks), False, lengths)
    mask = None if lengths is None else torch.arange(window, length) < lengths[:, None]
    far, far_log, _ = _trained_far(after, weights, reverse=True, mask=mask)
    return _beside_sink(*join(output, log, far, far_log), weights)


def _trained_far(
    heads: Sequence[Tensor], weights: Any, reverse: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, LinearState]:
    """Return the attention of query i to key i and all before it, or if `reverse` after it, its log, and all sums."""
    query, key, value = heads
    maps, rate = native_maps(weights.query_map, weights.key_map), weights.decay_rate
    decay = None if rate is None else (-rate[:, None]).expand(key.shape[:3])
    if maps:
        far, log, state = mapped_attention(query, key, value, maps, mask, decay, None, reverse=reverse)
    else:
        query, key, value = (x.flip(-2) if reverse else x for x in heads)
        features, query_log = weights.query_map(query)
        keys, log_scale = weights.key_map(key)
        if decay is not None and log_scale is None:
            log_scale = keys.new_zeros(keys.shape[:3])
        far, log, state = weighed_attention(NATIVE_SUMS, features, keys, log_scale, value, decay)
        log = log if query_log is None else log + query_log
        far, log = (far.flip(3), log.flip(3)) if reverse else (far, log)
    return far, _distant(log, weights), state


def _trained_near(
    sources: list[Source], weights: Any, before: Before, causal: bool, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention to what queries begin with, the window and the sinks, and its log."""
    query, key, value = (source.whole for source in sources)
    parts = list(_near(key.shape[2], weights.window_size, weights.num_sinks, query, causal, lengths))
    return attend_blocks(
        query, key, value, parts, block_size=BLOCK_SIZE, scaling=weights.scaling, causal=causal, before=before,
        sources=sources,
    )  # fmt: skip


def causal_hybrid_attention(query: Tensor, key: Tensor, value: Tensor, weights: Any) -> tuple[Tensor, LinearState]:
    """Return the output [B, H, N, Dv] of rows that start at position 0, and the sums over all that left the window.

    Without gradients, which `trained_hybrid_attention` has.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. weights: a `HybridWeights`.
    """
    length, window = query.shape[2], weights.window_size
    heads = query.unflatten(1, (key.shape[1], -1)), key, value
    output = empty_output(heads[0], value)
    log, state = _before(*heads, weights, output)
    # one more key has left the window of the token that will come
    left, nowhere = slice(length - window, length - window + 1), torch.empty_like(output[..., :1, :])
    state, _ = _far(heads[0][:, :, :, :1], key[:, :, left], value[:, :, left], weights, state, nowhere)
    _read_near(*heads, weights, output, log, causal=True)
    return _beside_sink(output, log, weights), state


def hybrid_attention(query: Tensor, key: Tensor, value: Tensor, weights: Any) -> Tensor:
    """Return the bidirectional output [B, H, N, Dv] of unpadded rows; arguments as above."""
    length, window = query.shape[2], weights.window_size
    heads = query.unflatten(1, (key.shape[1], -1)), key, value
    output = empty_output(heads[0], value)
    log, _ = _before(*heads, weights, output)
    end = length - window  # only queries before this one have far keys after them
    rows, keys, values = heads[0][:, :, :, :end], key[:, :, window:], value[:, :, window:]
    after = empty_output(rows, value)
    _, log_after = _far(rows, keys, values, weights, None, after, reverse=True)
    both = min(window + weights.num_sinks, end)  # queries from this one on may have far keys before them, too
    output[:, :, :, :both] = after[:, :, :, :both]
    share = torch.sigmoid(log_after - log[..., :end])[..., both:, None]
    output[:, :, :, both:end].lerp_(after[:, :, :, both:], share)
    log[..., :end] = torch.logaddexp(log[..., :end], log_after)
    _read_near(*heads, weights, output, log, causal=False)
    return _beside_sink(output, log, weights)


def hybrid_step(
    query: Tensor, key: Tensor, value: Tensor, weights: Any, state: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output [B, H, 1, Dv] of one token of each row, and what is in the next `HybridState`.

    Every row has read more than the sinks and a window before it. Without gradients, as `causal_hybrid_attention`.
    """
    sinks, rate = weights.num_sinks, weights.decay_rate
    grouped = query.unflatten(1, (key.shape[1], -1))
    decay = None if rate is None else (-rate[:, None]).expand(key.shape[:3])
    leaving = state.ring_key[:, :, :1], state.ring_value[:, :, :1]
    maps, sums = native_maps(weights.query_map, weights.key_map), LinearState(state.kv, state.log_max)
    far, far_log, sums = strict_step(grouped, *leaving, maps, decay, sums)
    far_log = far_log + weights.log_mix.view(key.shape[1], -1, 1)
    far_log = far_log if rate is None else far_log - (rate * weights.reach).view(-1, 1, 1)
    keys = torch.cat([state.sink_key, state.ring_key, key], dim=2)
    values = torch.cat([state.sink_value, state.ring_value, value], dim=2)
    scores = (grouped.squeeze(3) @ keys.mT).mul_(weights.scaling)
    near_log = scores.logsumexp(-1, keepdim=True)
    near = scores.sub_(near_log).exp_() @ values
    output = near.lerp_(far.squeeze(3), torch.sigmoid(far_log - near_log))[..., None, :]
    output = _beside_sink(output, torch.logaddexp(near_log, far_log), weights)
    rings = (x[:, :, sinks + 1 :].clone() for x in (keys, values))
    return output, (*rings, state.sink_key, state.sink_value, *sums, state.length + 1)


def _before(query: Tensor, key: Tensor, value: Tensor, weights: Any, output: Tensor) -> tuple[Tensor, LinearState]:
    """Write the attention to far keys before each query; return the log of its weight [B, Hkv, G, N], and a state."""
    window, sinks = weights.window_size, weights.num_sinks
    start, span = window + sinks, slice(sinks, key.shape[2] - window)
    log = query.new_full(query.shape[:4], LOWEST)
    rows, keys, values = query[:, :, :, start:], key[:, :, span], value[:, :, span]
    state, log[..., start:] = _far(rows, keys, values, weights, None, output[:, :, :, start:])
    return log, state


def _far(query, key, value, weights: Any, state: LinearState | None, place: Tensor, reverse: bool = False):
    """Write the attention of query i to key i and all before it, or if `reverse` after it; return state and log."""
    maps, rate = native_maps(weights.query_map, weights.key_map), weights.decay_rate
    decay = None if rate is None else (-rate[:, None]).expand(key.shape[:3])
    _, far, state = mapped_attention(query, key, value, maps, None, decay, state, place, reverse=reverse)
    return state, _distant(far, weights)


def _distant(log: Tensor, weights: Any) -> Tensor:
    """Return the log weights [B, Hkv, G, N] of far keys with their mix, and what the distance costs."""
    rate, log = weights.decay_rate, log + weights.log_mix.view(log.shape[1], -1, 1)
    return log if rate is None else log - (rate * weights.window_size).view(-1, 1, 1)


def _beside_sink(output: Tensor, log: Tensor, weights: Any) -> Tensor:
    """Return the joint output [B, H, N, Dv], beside the sink if there is one."""
    sink = None if weights.sink is None else weights.sink.view(log.shape[1], -1, 1)
    return attenuate(output, log, sink).flatten(1, 2)


def _read_near(query, key, value, weights: Any, output: Tensor, log: Tensor, causal: bool) -> None:
    """Go on from the far output with the window and the sinks; `log` becomes that of all weights."""
    window, sinks = weights.window_size, weights.num_sinks
    for part in _near(key.shape[2], window, sinks, query, causal):
        continue_blocks(
            query, key, value, part, output, log, block_size=BLOCK_SIZE, scaling=weights.scaling, causal=causal
        )


def _near(
    length: int, window: int, sinks: int, like: Tensor, causal: bool, lengths: Tensor | None = None
) -> Iterator[Keys]:
    """Yield what the query blocks see, with one bias for each of the first and one for all others.

    With `lengths` [B] of rows every block has one of its own in every row.
    """
    blocks = torch.arange(-(-length // BLOCK_SIZE))
    behind = -(-(window - 1) // BLOCK_SIZE)  # blocks that the window reaches back
    table = blocks[:, None] + torch.arange(-behind, 1 if causal else behind + 1)
    own = blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    edge = behind + -(-sinks // BLOCK_SIZE) + 1 if lengths is None else len(blocks)  # behind these no window has sinks
    for part in (slice(0, edge), slice(edge, None)):
        if len(blocks[part]):
            rows, shown = own[part], table[part]
            rows, columns = (rows, shown) if part.start == 0 else (rows[:1], shown[:1])
            columns = (columns[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
            distance = rows[:, :, None] - columns[:, None]
            seen = (distance.abs() < window) & (columns >= sinks)[:, None]
            present = torch.ones(*rows.shape, sinks, dtype=torch.bool)
            if causal:
                seen, present = seen & (distance >= 0), present & (torch.arange(sinks) <= rows[..., None])
            seen = torch.cat([present, seen], dim=-1)[:, None]
            if lengths is not None:
                columns = torch.cat([torch.arange(sinks).expand(len(columns), -1), columns], dim=1)
                seen = seen & (columns[:, None, None] < lengths.view(-1, 1, 1, 1, 1))
            bias = torch.where(seen, like.new_zeros(()), like.new_full((), LOWEST))
            yield Keys(int(part.start), shown[:, None], bias, sinks)
