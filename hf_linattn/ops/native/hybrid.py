"""Causal hybrid attention from the two operations in C: what lies beyond the window, then the window on top of it.

The far part is kernel attention of query i with keys up to i - window_size: the C reads them as if they stood side by
side, and what the distance between them costs is added to the log of the far weights afterwards. Window and sinks are
softmax attention over blocks that begins with the far output as if it were one more key of that weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..chunk_sums import LinearState
from ..exponential import LOWEST
from .block_softmax import attend_blocks
from .causal_sums import can_read, mapped_attention, native_maps
from .library import empty_output

BLOCK_SIZE = 64


def can_attend(query: Tensor, key: Tensor, weights: Any) -> bool:
    """Whether the C knows maps and weights, no gradients are needed, and something lies beyond the window."""
    if torch.is_grad_enabled() or not can_read(query, key, None):
        return False
    beyond = key.shape[2] > weights.window_size + weights.num_sinks
    return beyond and weights.window_log is None and bool(native_maps(weights.query_map, weights.key_map))


def causal_hybrid_attention(query: Tensor, key: Tensor, value: Tensor, weights: Any) -> tuple[Tensor, LinearState]:
    """Return the output [B, H, N, Dv] of rows that start at position 0, and the sums over all that left the window.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. weights: a `HybridWeights`.
    """
    length, kv_heads, window, sinks = query.shape[2], key.shape[1], weights.window_size, weights.num_sinks
    query = query.unflatten(1, (kv_heads, -1))
    output = empty_output(query, value)
    maps, rate = native_maps(weights.query_map, weights.key_map), weights.decay_rate

    def read(rows: Tensor, first: int, last: int, state: LinearState | None, place: Tensor):
        keys, values = key[:, :, first:last], value[:, :, first:last]
        decay = None if rate is None else (-rate[:, None]).expand(keys.shape[:3])
        return mapped_attention(rows, keys, values, maps, None, decay, state, place)

    start = window + sinks
    state, far = read(query[:, :, :, start:], sinks, length - window, None, output[:, :, :, start:])
    # one more key has left the window of the token that will come
    last, nowhere = length - window, torch.empty_like(output[..., :1, :])
    state, _ = read(query[:, :, :, :1], last, last + 1, state, nowhere)
    far = far + weights.log_mix.view(kv_heads, -1, 1)
    log = query.new_full(query.shape[:4], LOWEST)
    log[..., start:] = far if rate is None else far - (rate * window).view(-1, 1, 1)
    for first, table, bias in _near(length, window, sinks, query):
        attend_blocks(
            query, key, value, bias, table, output,
            first=first, block_size=BLOCK_SIZE, shared=sinks, scaling=weights.scaling, log=log,
        )  # fmt: skip
    return output.flatten(1, 2), state


def _near(length: int, window: int, sinks: int, like: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the first of some query blocks, their table of key blocks, and one bias for each or for all of them."""
    blocks = torch.arange(-(-length // BLOCK_SIZE))
    behind = -(-(window - 1) // BLOCK_SIZE)  # blocks that the window reaches back
    table = blocks[:, None] + torch.arange(-behind, 1)
    own = blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    edge = behind + -(-sinks // BLOCK_SIZE) + 1  # behind these no window holds a sink
    for part in (slice(0, edge), slice(edge, None)):
        if len(blocks[part]):
            rows, shown = own[part], table[part]
            rows, columns = (rows, shown) if part.start == 0 else (rows[:1], shown[:1])
            columns = (columns[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
            distance = rows[:, :, None] - columns[:, None]
            seen = (distance >= 0) & (distance < window) & (columns >= sinks)[:, None]
            seen = torch.cat([torch.arange(sinks) <= rows[..., None], seen], dim=-1)[:, None]
            yield int(part.start), shown[:, None], torch.where(seen, like.new_zeros(()), like.new_full((), LOWEST))
