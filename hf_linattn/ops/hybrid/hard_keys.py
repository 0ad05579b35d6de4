"""Hybrid attention whose state keeps a few keys out: those that it recalls worst (LoLA, arXiv 2505.23666).

Positions p = 0, 1, ... count a row's real tokens, of which the first S are sinks, and make blocks of C = 64. W is the
window, M the number of hard keys. Every key that a query in block n may see stands in one of four places, and which
depends on n and on the keys before it alone. With w = ceil((W - 1) / C):

    sinks      p < S                                   exact
    window     p >= S in the blocks n - w to n         exact: C w + 1 to C w + C tokens, W at the least
    hard keys  H_n, at most M of those before          exact
    state      all others before                       the far part, in the order in which they entered it

When the first query of block n + 1 comes, block n - w leaves the window. Its keys but the sinks, and those of H_n, are
ranked by |v - r| / |v|, where r is what the state before that block reads at key k: phi(k)^T S / phi(k)^T z, or by the
delta rule S^T k; without `relative_error` by |v - r|. The M with the largest error make H_(n + 1), earlier ones first
among equals; the others enter the state in the order of their positions. The choice has no gradient.

So all queries of a block see one state and one H. Their far part is one product, and a prefill is a loop over the
blocks that sorts keys, and a few products for several blocks at once. Steps, calls that go on after a state, padded
and packed rows go through the same places, and so through the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.grad_accumulator import Source
from ..common.precision import widened
from ..common.tracing import is_known
from ..linear.torch import chunks_at_once
from ..linear.types import CHUNK_SIZE
from .memory import Memory, MemoryRule, memory_rule
from .sums import Rows, chunked, exact_sums, in_order, make_rows, places, remember
from .types import HardKeyState, HybridCall, HybridWeights


class Tokens(NamedTuple):
    """Keys of each head that are in no state: key [B, Hkv, K, D], position [B, Hkv, K], -1 where there is none.

    parts: their `entries`, which end with the values. Those that are there stand in the order of their positions.
    """

    key: Tensor
    position: Tensor
    parts: tuple[Tensor, ...]


class Store(NamedTuple):
    """What a chunk of queries finds beyond the window."""

    memory: Memory
    hard: Tokens


class _Aligned(NamedTuple):
    """Rows by place, of which block n has those from C n on.

    query [B, Hkv, G, ., D] begins at place 0, key [B, Hkv, ., D] and value [B, Hkv, ., Dv] `old` places before it.
    begin: [B or 1], position of place 0. offset: [B or 1], place of the first query. last: [B or 1], block of the last
    real one. blocks: their number. back: blocks before a query's own in its window.
    """

    query: Source
    key: Source
    value: Source
    old: int
    begin: Tensor
    offset: Tensor
    last: Tensor
    blocks: int
    back: int


class _Near(NamedTuple):
    """Window of T chunks: key [B, Hkv, T, K, D], value [B, Hkv, T, K, Dv], their positions [B or 1, T, K].

    own: [B or 1, T, C], positions of the queries. begin: [B or 1, T], where the window begins.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    own: Tensor
    begin: Tensor


def run(call: HybridCall) -> tuple[Tensor, HardKeyState]:
    """Return the output [B, H, N, Dv] of a causal call and the state after the last real token of each row."""
    weights, rule = call.weights, memory_rule(call.weights)
    state = cast("HardKeyState | None", call.state)
    query, key, value = widened(call.query, call.key, call.value)
    rows = make_rows(query, key, value, weights, call.lengths, state)
    store = _first_store(rows, weights, rule, state)
    step = state is not None and call.lengths is None and key.shape[2] == 1
    output, store = _step(rows, weights, rule, store) if step else _read(rows, weights, rule, store, state is None)
    kept, hard = remember(rows, weights, store.memory, call.key.dtype), store.hard
    hard_key, hard_value = (x.to(call.key.dtype) for x in (hard.key, rule.values(hard.parts)))
    return output, HardKeyState(*kept, hard_key, hard_value, hard.position)


def _first_store(rows: Rows, weights: HybridWeights, rule: MemoryRule, state: HardKeyState | None) -> Store:
    """Return what there is before the first token of a call."""
    if state is not None:
        key, value = widened(state.hard_key, state.hard_value)
        entries = rule.entries(key, value, state.hard_position)
        return Store(Memory(state.kv, state.log_max), Tokens(key, state.hard_position, entries))
    key, value = (
        x.whole.new_zeros(*x.whole.shape[:2], weights.num_hard_keys, x.whole.shape[3]) for x in (rows.key, rows.value)
    )
    nowhere = torch.full(key.shape[:3], -1, device=key.device)
    hard = Tokens(key, nowhere, rule.entries(key, value, nowhere))
    return Store(rule.empty(hard.parts), hard)


def sort_block(
    weights: HybridWeights, rule: MemoryRule, store: Store, block: Tokens, begin: Tensor, due: Tensor | None
) -> Store:
    """Return what there is after a block has left the window.

    begin: [B or 1], the first position still in the window. due: [B or 1], the rows whose block has left; others have
    no real key in it. None for all.
    """
    memory, hard = store
    most = hard.position.shape[2]
    position = torch.cat([hard.position, block.position], dim=2)
    parts = tuple(torch.cat(pair, dim=2) for pair in zip(hard.parts, block.parts, strict=True))
    with torch.no_grad():
        order = _ranked(weights, rule, memory, parts, position)
    kept, lost = order.split([most, CHUNK_SIZE], dim=2)
    passed = CHUNK_SIZE if due is None else CHUNK_SIZE * due[:, None]
    left = position.gather(2, lost)
    memory = rule.write(memory, _pick(parts, lost), left >= 0, begin[:, None, None] - left, passed)
    (key,) = _pick((torch.cat([hard.key, block.key], dim=2),), kept)
    return Store(memory, Tokens(key, position.gather(2, kept), _pick(parts, kept)))


def _ranked(
    weights: HybridWeights, rule: MemoryRule, memory: Memory, parts: tuple[Tensor, ...], position: Tensor
) -> Tensor:
    """Return the M keys that the state recalls worst and behind them the others, each in order: [B, Hkv, M + C]."""
    value = rule.values(parts)
    error = torch.linalg.vector_norm(value - rule.recall(parts, memory), dim=-1)
    if weights.relative_error:
        size = torch.linalg.vector_norm(value, dim=-1)
        error = error / torch.where(size == 0, math.inf, size)
    most = weights.num_hard_keys
    worst = error.masked_fill(position < 0, -math.inf).argsort(dim=-1, descending=True, stable=True)[..., :most]
    return torch.ones_like(position).scatter(2, worst, 0).argsort(dim=-1, stable=True)


def _pick(tensors: Sequence[Tensor], index: Tensor) -> tuple[Tensor, ...]:
    """Return of each tensor [B, Hkv, K, D] the entries at index [B, Hkv, L]."""
    return tuple(x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in tensors)


def _read(rows: Rows, weights: HybridWeights, rule: MemoryRule, store: Store, fresh: bool) -> tuple[Tensor, Store]:
    """Return the output of the tokens of each row, which begins if `fresh`, and what there is after them."""
    length = rows.key.whole.shape[2]
    aligned = _align_fresh(rows, weights) if fresh else _align(rows, weights)
    most = chunks_at_once(rows.query.whole.shape[:3].numel(), aligned.begin.device)
    outputs = []
    for start in range(0, aligned.blocks, most):
        numbers, stores = range(start, min(start + most, aligned.blocks)), []
        for left, block, due in leaving_blocks(numbers, aligned, weights, rule, fresh and not rows.padded):
            if block is not None:
                store = sort_block(weights, rule, store, block, aligned.begin + CHUNK_SIZE * left, due)
            stores.append(store)
        query, near = _window(aligned, start, len(stores))
        outputs.append(in_order(_attend(query, near, rows, weights, rule, stacked(stores))))
    output = torch.cat(outputs, dim=3)
    if fresh:
        return output.narrow(3, 0, length).flatten(1, 2), store
    place = aligned.offset[:, None] + torch.arange(length, device=output.device)
    index = place[:, None, None, :, None].expand(*output.shape[:3], -1, output.shape[4])
    return output.gather(3, index).flatten(1, 2), store


def _align_fresh(rows: Rows, weights: HybridWeights) -> _Aligned:
    """Rows from their start."""
    blocks = -(-rows.key.whole.shape[2] // CHUNK_SIZE)
    nothing = torch.zeros_like(rows.start)
    last = (rows.end - 1).div(CHUNK_SIZE, rounding_mode="floor")
    back = min(weights.blocks_back, blocks)  # nothing leaves a window of all blocks
    return _Aligned(rows.query, rows.key, rows.value, 0, nothing, nothing, last, blocks, back)


def _align(rows: Rows, weights: HybridWeights) -> _Aligned:
    """Rows that go on, each from a place of its own in the block of its last token, or in the next one."""
    length, kept = rows.key.whole.shape[2], weights.kept
    begin = (rows.start - 1).div(CHUNK_SIZE, rounding_mode="floor") * CHUNK_SIZE
    offset = rows.start - begin  # from 1 to C
    old = kept - CHUNK_SIZE
    index = torch.arange(-old, CHUNK_SIZE + length, device=begin.device) + kept - offset[:, None]
    index = index.clamp(0, kept + length - 1)  # in old and new ones, by place

    def by_place(x: Tensor, first: int) -> Source:
        """x [B, Hkv, .., L, D], the old ones in front, from place `first` on."""
        chosen = index[:, first + old :].view(len(index), *[1] * (x.dim() - 3), -1, 1)
        return Source(x.gather(-2, chosen.expand(*x.shape[:-2], -1, x.shape[-1])))

    rings = cast("tuple[Tensor, Tensor]", (rows.ring_key, rows.ring_value))
    whole = (torch.cat([x, y.whole], dim=2) for x, y in zip(rings, (rows.key, rows.value), strict=True))
    key, value = (by_place(x, -old) for x in whole)
    query = by_place(F.pad(rows.query.whole, (0, 0, kept, 0)), 0)
    last, blocks = (offset + rows.end - 1) // CHUNK_SIZE, 1 + -(-length // CHUNK_SIZE)
    return _Aligned(query, key, value, old, begin, offset, last, blocks, weights.blocks_back)


def leaving_blocks(
    numbers: range, aligned: _Aligned, weights: HybridWeights, rule: MemoryRule, everywhere: bool
) -> Iterator[tuple[int, Tokens | None, Tensor | None]]:
    """Yield for each query block where its window begins, in blocks, what leaves it then, and the rows where it does.

    everywhere: whether that is all of them, for which there is None.
    """
    back = aligned.back
    # nothing before the first block of a call, nor before the row
    first = max(numbers.start, 1, 0 if aligned.old else back + 1)
    for number in range(numbers.start, min(first, numbers.stop)):
        yield number - back, None, None
    if first >= numbers.stop:
        return
    span = CHUNK_SIZE * (first - back - 1), CHUNK_SIZE * (numbers.stop - back - 1)
    key, value = (places(x, span[0] + aligned.old, span[1] + aligned.old, 2) for x in (aligned.key, aligned.value))
    position = aligned.begin[:, None] + torch.arange(*span, device=key.device)
    position = position.masked_fill(position < weights.num_sinks, -1)
    parts = zip(*(x.split(CHUNK_SIZE, 2) for x in rule.entries(key, value, position[:, None])), strict=True)
    columns = zip(key.split(CHUNK_SIZE, 2), position.split(CHUNK_SIZE, 1), parts, strict=True)
    for number, (own, at, entries) in zip(range(first, numbers.stop), columns, strict=True):
        due = None if everywhere else aligned.last >= number
        at = at if due is None else at.masked_fill(~due[:, None], -1)
        yield number - back, Tokens(own, at[:, None].expand(own.shape[:3]), entries), due


def _window(aligned: _Aligned, start: int, blocks: int) -> tuple[Tensor, _Near]:
    """Return the queries [B, Hkv, T, G, C, D] and the window of T blocks from number `start` on."""
    size, before = CHUNK_SIZE * (aligned.back + 1), CHUNK_SIZE * aligned.back
    first, last = CHUNK_SIZE * start, CHUNK_SIZE * (start + blocks)
    query = chunked(places(aligned.query, first, last, 3), blocks)
    span = first - before + aligned.old, last + aligned.old
    key, value = (places(x, *span, 2).unfold(2, size, CHUNK_SIZE).mT for x in (aligned.key, aligned.value))
    begin = aligned.begin[:, None] + torch.arange(first - before, last - before, CHUNK_SIZE, device=key.device)
    position = begin[..., None] + torch.arange(size, device=key.device)
    return query, _Near(key, value, position, position[..., before:], begin)


def _step(rows: Rows, weights: HybridWeights, rule: MemoryRule, store: Store) -> tuple[Tensor, Store]:
    """Return the output of one token of each row and what there is after it."""
    start, ring = rows.start, cast("tuple[Tensor, Tensor]", (rows.ring_key, rows.ring_value))
    begin = start.div(CHUNK_SIZE, rounding_mode="floor") * CHUNK_SIZE - CHUNK_SIZE * weights.blocks_back
    due = (begin > 0) & (start % CHUNK_SIZE == 0)
    # elsewhere than on a CPU a number that is looked at is waited for, and no graph can be captured
    if due.device.type != "cpu" or not is_known(due) or bool(due.any()):
        key, value = (x[:, :, :CHUNK_SIZE] for x in ring)
        position = begin[:, None] + torch.arange(-CHUNK_SIZE, 0, device=begin.device)
        position = position.masked_fill((position < weights.num_sinks) | ~due[:, None], -1)
        block = Tokens(key, position[:, None].expand(key.shape[:3]), rule.entries(key, value, position[:, None]))
        store = sort_block(weights, rule, store, block, begin, due)
    new = rows.key.whole, rows.value.whole
    key, value = (torch.cat(pair, dim=2)[:, :, None] for pair in zip(ring, new, strict=True))
    position = start[:, None] + torch.arange(1 - key.shape[3], 1, device=start.device)
    near = _Near(key, value, position[:, None], start[:, None, None], begin[:, None])
    output = _attend(rows.query.whole[:, :, None], near, rows, weights, rule, stacked([store]))
    return in_order(output).flatten(1, 2), store


def stacked(stores: list[Store]) -> Store:
    """Return what T chunks find, each tensor with T as its third dimension."""
    memories, hard = zip(*stores, strict=True)
    keys, positions, parts = zip(*hard, strict=True)
    memory = Memory(*(torch.stack(x, dim=2) for x in zip(*memories, strict=True)))
    entries = tuple(torch.stack(x, dim=2) for x in zip(*parts, strict=True))
    return Store(memory, Tokens(torch.stack(keys, dim=2), torch.stack(positions, dim=2), entries))


def _attend(query: Tensor, near: _Near, rows: Rows, weights: HybridWeights, rule: MemoryRule, store: Store) -> Tensor:
    """Return the output of T chunks of queries: [B, Hkv, T, G, C, Dv]."""
    chunks, own, hard = query.shape[2], near.own[..., None], store.hard
    sinks = [x[:, :, None].expand(-1, -1, chunks, -1, -1) for x in (rows.sink_key, rows.sink_value)]
    keys = torch.cat([sinks[0], hard.key, near.key], dim=3)
    values = torch.cat([sinks[1], rule.values(hard.parts), near.value], dim=3)
    to_come = torch.arange(weights.num_sinks, device=own.device) > own
    position = near.position[:, :, None]
    outside = (position < weights.num_sinks) | (position < near.begin[..., None, None]) | (position > own)
    missing = (hard.position < 0)[:, :, :, None]  # [B, Hkv, T, 1, M]
    masks = to_come[:, None], missing, outside[:, None]
    shape = (max(len(missing), len(outside)), missing.shape[1], chunks, outside.shape[2], -1)
    hidden = torch.cat([x.expand(shape) for x in masks], dim=-1)[:, :, :, None]
    exact = exact_sums(query, keys, values, [hidden], weights)
    entered = near.begin[:, None] - weights.num_sinks > (hard.position >= 0).sum(-1)  # whether any key is in the state
    return rule.join(exact, rule.read(query, store.memory, near.own, near.begin), weights, entered)
