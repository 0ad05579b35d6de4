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
among equals, which keys are whose 1 + |v - r| / |v|, or |v| + |v - r|, are the same to ERROR_BITS bits. The others
enter the state in the order of their positions. The choice has no gradient.

So all queries of a block see one state and one H. Their far part is one product, and a prefill is a loop over the
blocks that sorts keys, and a few products for several blocks at once. Steps, calls that go on after a state, padded
and packed rows go through the same places, and so through the same choices.

Training chooses for several blocks, then makes what they find once more, from the keys at the places that were chosen,
with gradients. The backward pass keeps these places and the state before the blocks, and makes all else again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_softmax.autograd import BlockSoftmax, Keys, attend_blocks
from ..common.grad_accumulator import GradAccumulator, rows_at
from ..common.made_again import made_again
from ..common.precision import widened
from ..common.tracing import is_known
from ..linear.torch import chunks_at_once
from ..linear.types import CHUNK_SIZE
from .fused import beside_sink
from .memory import Memory, MemoryRule, memory_rule
from .sums import Rows, Sums, chunked, exact_sums, in_order, make_rows, places, remember
from .types import ERROR_BITS, HardKeyState, HybridCall, HybridWeights


class Pool(NamedTuple):
    """All keys [B, Hkv, L, D] and values [B, Hkv, L, Dv] that a call may find."""

    key: GradAccumulator
    value: GradAccumulator

    def take(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return those at the places of each head [B, Hkv, K]."""
        return self.key.rows(place), self.value.rows(place)


class Tokens(NamedTuple):
    """Keys of each head that are in no state, in the order of their positions; without gradients.

    position: [B, Hkv, K], -1 where there is none. place: [B, Hkv, K], where they stand in the pool, anywhere if there
    is none. parts: their `entries`.
    """

    position: Tensor
    place: Tensor
    parts: tuple[Tensor, ...]


class Store(NamedTuple):
    """What there is beyond the window; without gradients."""

    memory: Memory
    hard: Tokens


class Entering(NamedTuple):
    """What enters the state when a block has left the window: position, place [B, Hkv, C], as those of `Tokens`.

    age, passed: what the rule of the state is told besides.
    """

    position: Tensor
    place: Tensor
    age: Tensor
    passed: Tensor | int


class Choice(NamedTuple):
    """What T blocks find: position, place [B, Hkv, T, M] of their hard keys, and what enters before the last ones."""

    position: Tensor
    place: Tensor
    entering: list[Entering]


class HardKeys(NamedTuple):
    """key [B, Hkv, .., M, D], value [B, Hkv, .., M, Dv] and position [B, Hkv, .., M], -1 where there is none."""

    key: Tensor
    value: Tensor
    position: Tensor


class Found(NamedTuple):
    """What T chunks of queries find beyond the window; T is the third dimension of each tensor."""

    memory: Memory
    hard: HardKeys


class _Job(NamedTuple):
    """What a call is computed with.

    again: whether the state is made once more after the choice, with gradients. blocks: as `run` gets it.
    """

    rows: Rows
    weights: HybridWeights
    rule: MemoryRule
    again: bool
    blocks: BlockSoftmax | None


class _Aligned(NamedTuple):
    """Rows by place, of which block n has those from C n on.

    query [B, Hkv, G, ., D] begins at place 0. pool: its keys and values, of which those of place 0 have number `old`.
    begin: [B or 1], position of place 0. offset: [B or 1], place of the first query. last: [B or 1], block of the last
    real one. blocks: their number. back: blocks before a query's own in its window. everywhere: whether a block that
    leaves a window leaves that of all rows.
    """

    query: GradAccumulator
    pool: Pool
    old: int
    begin: Tensor
    offset: Tensor
    last: Tensor
    blocks: int
    back: int
    everywhere: bool


class _At(NamedTuple):
    """Positions of T chunks of queries, own [B or 1, T, C], and where their windows begin, [B or 1, T]."""

    own: Tensor
    begin: Tensor


def run(call: HybridCall, blocks: BlockSoftmax | None = None) -> tuple[Tensor, HardKeyState]:
    """Return the output [B, H, N, Dv] of a causal call and the state after the last real token of each row.

    blocks: makes exact sums of rows from their start; None: PyTorch's operations do.
    """
    weights, state, dtype = call.weights, cast("HardKeyState | None", call.state), call.key.dtype
    query, key, value = widened(call.query, call.key, call.value)
    rows = make_rows(query, key, value, weights, call.lengths, state)
    job = _Job(rows, weights, memory_rule(weights, call.policy), not call.policy.inference, blocks)
    step = state is not None and call.lengths is None and key.shape[2] == 1
    output, memory, hard = _step(job, cast(HardKeyState, state)) if step else _read(job, state)
    kept = remember(rows, weights, memory, dtype)
    return output, HardKeyState(*kept, hard.key.to(dtype), hard.value.to(dtype), hard.position)


def _first_store(job: _Job, state: HardKeyState | None) -> Store:
    """Return what there is before the first token of a call, whose hard keys stand at the start of the pool."""
    rows, most = job.rows, job.weights.num_hard_keys
    if state is None:
        key, value = (x.whole.new_zeros(*x.whole.shape[:2], most, x.whole.shape[3]) for x in (rows.key, rows.value))
        position = torch.full(key.shape[:3], -1, device=key.device)
        place = torch.zeros_like(position)
    else:
        (key, value), position = widened(state.hard_key, state.hard_value), state.hard_position
        place = torch.arange(most, device=key.device).expand_as(position)
    entries = job.rule.entries(key, value, position)
    memory = job.rule.empty(entries) if state is None else Memory(state.kv, state.log_max)
    return Store(memory, Tokens(position, place, entries))


def sort_block(job: _Job, store: Store, block: Tokens, begin: Tensor, due: Tensor | None) -> tuple[Store, Entering]:
    """Return what there is after a block has left the window, and what entered the state.

    begin: [B or 1], the first position still in the window. due: [B or 1], the rows whose block has left; others have
    no real key in it. None for all.
    """
    memory, hard = store
    sizes = job.weights.num_hard_keys, CHUNK_SIZE
    position, place = (torch.cat(pair, dim=2) for pair in zip(hard[:2], block[:2], strict=True))
    parts = tuple(torch.cat(pair, dim=2) for pair in zip(hard.parts, block.parts, strict=True))
    order = _ranked(job.weights, job.rule, memory, parts, position)
    (position, lost_position), (place, lost_place) = (x.gather(2, order).split(sizes, 2) for x in (position, place))
    parts, lost = zip(*(rows_at(x, order).split(sizes, 2) for x in parts), strict=True)
    passed = CHUNK_SIZE if due is None else CHUNK_SIZE * due[:, None]
    entering = Entering(lost_position, lost_place, begin[:, None, None] - lost_position, passed)
    return Store(_enter(job.rule, memory, lost, entering), Tokens(position, place, parts)), entering


def _enter(rule: MemoryRule, memory: Memory, parts: tuple[Tensor, ...], entering: Entering) -> Memory:
    """Return the state after keys with such entries enter."""
    return rule.write(memory, parts, entering.position >= 0, entering.age, entering.passed)


def _enter_again(job: _Job, pool: Pool, entering: list[Entering], memory: Memory) -> list[Memory]:
    """Return the states after each of some blocks, with gradients."""
    if not entering:
        return []
    position, place = (torch.cat(x, dim=2) for x in list(zip(*entering, strict=True))[:2])
    entries = job.rule.entries(*pool.take(place), position)
    memories = []
    for lost, *parts in zip(entering, *(x.split(CHUNK_SIZE, 2) for x in entries), strict=True):
        memory = _enter(job.rule, memory, tuple(parts), lost)
        memories.append(memory)
    return memories


def _no_entries(job: _Job, pool: Pool) -> Tensor:
    """Return zero, with a gradient of zero for all that makes entries: data-parallel training waits for each."""
    first = torch.zeros(*pool.key.whole.shape[:2], 1, dtype=torch.long, device=pool.key.whole.device)
    return 0 * torch.stack([x.clamp(-1, 1).sum() for x in job.rule.entries(*pool.take(first), first)]).sum()


def _ranked(
    weights: HybridWeights, rule: MemoryRule, memory: Memory, parts: tuple[Tensor, ...], position: Tensor
) -> Tensor:
    """Return the M keys that the state recalls worst and behind them the others, each in order: [B, Hkv, M + C]."""
    value = rule.values(parts)
    error = torch.linalg.vector_norm(value - rule.recall(parts, memory), dim=-1)
    size = torch.linalg.vector_norm(value, dim=-1)
    if weights.relative_error:
        error = to_error_bits(1 + error / torch.where(size == 0, math.inf, size))
    else:
        error = to_error_bits(size + error) - to_error_bits(size)
    most = weights.num_hard_keys
    worst = error.masked_fill(position < 0, -math.inf).argsort(dim=-1, descending=True, stable=True)[..., :most]
    return torch.ones_like(position).scatter(2, worst, 0).argsort(dim=-1, stable=True)


def to_error_bits(x: Tensor) -> Tensor:
    """Return numbers that are not negative to ERROR_BITS bits, in float32.

    Equal tokens are recalled equally badly but for the last bits, which differ between a prompt and a step. So the
    errors of both are the same, and the earlier token stays hard.
    """
    dropped = 24 - ERROR_BITS
    bits = (x.float().view(torch.int32) + (1 << (dropped - 1))) & -(1 << dropped)
    return bits.view(torch.float32)


def _read(job: _Job, state: HardKeyState | None) -> tuple[Tensor, Memory, HardKeys]:
    """Return the output of the tokens of each row, and the state and the hard keys after them."""
    rows, store = job.rows, _first_store(job, state)
    aligned = _align_fresh(job) if state is None else _align(job, state)
    # windows overlap: of more blocks at once fewer keys are read twice, and in C no scores fill the cache
    most = chunks_at_once(rows.query.whole.shape[:3].numel(), aligned.begin.device) * (2 if job.blocks else 1)
    memory, outputs, entered = store.memory, [], False
    for start in range(0, aligned.blocks, most):
        store, choice, memories = _choose(job, aligned, range(start, min(start + most, aligned.blocks)), store)
        if job.again:
            read = functools.partial(_read_again, job, aligned, start, choice)
            output, *after = made_again(read, *memory) if aligned.blocks > most else read(*memory)
            memory = Memory(*after)
        else:
            output, memory = _read_blocks(job, aligned, start, choice, memories), store.memory
        outputs.append(output)
        entered = entered or bool(choice.entering)
    output, length = torch.cat(outputs, dim=3), rows.key.whole.shape[2]
    if job.again and not entered:
        output = output + _no_entries(job, aligned.pool)
    hard = _hard_keys(aligned.pool, store.hard)
    if state is None:
        return output.narrow(3, 0, length).flatten(1, 2), memory, hard
    place = aligned.offset[:, None] + torch.arange(length, device=output.device)
    index = place[:, None, None, :, None].expand(*output.shape[:3], -1, output.shape[4])
    return output.gather(3, index).flatten(1, 2), memory, hard


@torch.no_grad()
def _choose(job: _Job, aligned: _Aligned, numbers: range, store: Store) -> tuple[Store, Choice, list[Memory]]:
    """Return what there is after the queries of some blocks, what was chosen for each, and the states they find."""
    stores, entering = [], []
    for left, block, due in leaving_blocks(job, aligned, numbers):
        if block is not None:
            store, lost = sort_block(job, store, block, aligned.begin + CHUNK_SIZE * left, due)
            entering.append(lost)
        stores.append(store)
    position, place = (torch.stack(x, dim=2) for x in list(zip(*(x.hard for x in stores), strict=True))[:2])
    return store, Choice(position, place, entering), [x.memory for x in stores]


def _read_again(job: _Job, aligned: _Aligned, start: int, choice: Choice, *before: Tensor) -> tuple[Tensor, ...]:
    """Return the output of the blocks of a choice, made from the state `before` them, and the state after them."""
    memory, blocks = Memory(*before), choice.position.shape[2]
    memories = [memory] * (blocks - len(choice.entering))
    memories += _enter_again(job, aligned.pool, choice.entering, memory)
    return _read_blocks(job, aligned, start, choice, memories), *memories[-1]


def _read_blocks(job: _Job, aligned: _Aligned, start: int, choice: Choice, memories: list[Memory]) -> Tensor:
    """Return the output [B, Hkv, G, T C, Dv] of the blocks of a choice, which find such states."""
    blocks, position = len(memories), choice.position
    key, value = (x.unflatten(2, (blocks, -1)) for x in aligned.pool.take(choice.place.flatten(2)))
    memory = Memory(*(torch.stack(x, dim=2) for x in zip(*memories, strict=True)))
    return in_order(_attend_blocks(job, aligned, start, Found(memory, HardKeys(key, value, position))))


def _hard_keys(pool: Pool, hard: Tokens) -> HardKeys:
    """Return the keys and values of a store, zero where there is none."""
    key, value = (x.masked_fill((hard.position < 0)[..., None], 0.0) for x in pool.take(hard.place))
    return HardKeys(key, value, hard.position)


def _align_fresh(job: _Job) -> _Aligned:
    """Rows from their start."""
    rows = job.rows
    blocks = -(-rows.key.whole.shape[2] // CHUNK_SIZE)
    nothing = torch.zeros_like(rows.start)
    last = (rows.end - 1).div(CHUNK_SIZE, rounding_mode="floor")
    back = min(job.weights.blocks_back, blocks)  # nothing leaves a window of all blocks
    pool = Pool(rows.key, rows.value)
    return _Aligned(rows.query, pool, 0, nothing, nothing, last, blocks, back, not rows.padded)


def _align(job: _Job, state: HardKeyState) -> _Aligned:
    """Rows that go on, each from a place of its own in the block of its last token, or in the next one."""
    rows, kept = job.rows, job.weights.kept
    length = rows.key.whole.shape[2]
    begin = (rows.start - 1).div(CHUNK_SIZE, rounding_mode="floor") * CHUNK_SIZE
    offset = rows.start - begin  # from 1 to C
    old = kept - CHUNK_SIZE
    index = torch.arange(-old, CHUNK_SIZE + length, device=begin.device) + kept - offset[:, None]
    index = index.clamp(0, kept + length - 1)  # in old and new ones, by place

    def by_place(x: Tensor, first: int) -> Tensor:
        """x [B, Hkv, .., L, D], the old ones in front, from place `first` on."""
        chosen = index[:, first + old :].view(len(index), *[1] * (x.dim() - 3), -1, 1)
        return x.gather(-2, chosen.expand(*x.shape[:-2], -1, x.shape[-1]))

    rings = cast("tuple[Tensor, Tensor]", (rows.ring_key, rows.ring_value))
    whole = (torch.cat([x, y.whole], dim=2) for x, y in zip(rings, (rows.key, rows.value), strict=True))
    hard = widened(state.hard_key, state.hard_value)
    pool = Pool(*(GradAccumulator(torch.cat([x, by_place(y, -old)], dim=2)) for x, y in zip(hard, whole, strict=True)))
    query = GradAccumulator(by_place(F.pad(rows.query.whole, (0, 0, kept, 0)), 0))
    last, blocks = (offset + rows.end - 1) // CHUNK_SIZE, 1 + -(-length // CHUNK_SIZE)
    old, back = old + job.weights.num_hard_keys, job.weights.blocks_back
    return _Aligned(query, pool, old, begin, offset, last, blocks, back, False)


def leaving_blocks(
    job: _Job, aligned: _Aligned, numbers: range
) -> Iterator[tuple[int, Tokens | None, Tensor | None]]:
    """Yield for each query block where its window begins, in blocks, what leaves it then, and the rows where it does.

    For all of them there is None.
    """
    back = aligned.back
    # nothing before the first block of a call, nor before the row
    first = max(numbers.start, 1, 0 if aligned.old else back + 1)
    for number in range(numbers.start, min(first, numbers.stop)):
        yield number - back, None, None
    if first >= numbers.stop:
        return
    span = CHUNK_SIZE * (first - back - 1), CHUNK_SIZE * (numbers.stop - back - 1)
    key, value = (places(x, span[0] + aligned.old, span[1] + aligned.old, 2) for x in aligned.pool)
    place = torch.arange(*span, device=key.device)
    position = aligned.begin[:, None] + place
    position = position.masked_fill(position < job.weights.num_sinks, -1)
    parts = zip(*(x.split(CHUNK_SIZE, 2) for x in job.rule.entries(key, value, position[:, None])), strict=True)
    columns = zip(position.split(CHUNK_SIZE, 1), (place + aligned.old).split(CHUNK_SIZE), parts, strict=True)
    for number, (at, own, entries) in zip(range(first, numbers.stop), columns, strict=True):
        due = None if aligned.everywhere else aligned.last >= number
        at = at if due is None else at.masked_fill(~due[:, None], -1)
        shape = *key.shape[:2], CHUNK_SIZE
        yield number - back, Tokens(at[:, None].expand(shape), own.expand(shape), entries), due


def _attend_blocks(job: _Job, aligned: _Aligned, start: int, found: Found) -> Tensor:
    """Return the output of T blocks from number `start` on: [B, Hkv, T, G, C, Dv]."""
    blocks, before = found.hard.position.shape[2], CHUNK_SIZE * aligned.back
    first, last = CHUNK_SIZE * start, CHUNK_SIZE * (start + blocks)
    query = chunked(places(aligned.query, first, last, 3), blocks)
    key, value = (places(x, first - before + aligned.old, last + aligned.old, 2) for x in aligned.pool)
    begin = aligned.begin[:, None] + torch.arange(first - before, last - before, CHUNK_SIZE, device=query.device)
    at = _At(begin[..., None] + before + torch.arange(CHUNK_SIZE, device=query.device), begin)
    # from there on all hard keys are there, and no sink is in a window
    if job.blocks is not None and first - before >= job.weights.num_sinks + job.weights.num_hard_keys:
        exact = _sums_by_blocks(job, job.blocks, query, key, value, found.hard)
    else:
        key, value = (x.unfold(2, before + CHUNK_SIZE, CHUNK_SIZE).mT for x in (key, value))
        exact = _sums(job, query, key, value, at, found.hard)
    return _join(job, query, at, exact, found)


def _step(job: _Job, state: HardKeyState) -> tuple[Tensor, Memory, HardKeys]:
    """Return the output of one token of each row, and the state and the hard keys after it."""
    rows, weights = job.rows, job.weights
    start, ring = rows.start, cast("tuple[Tensor, Tensor]", (rows.ring_key, rows.ring_value))
    begin = start.div(CHUNK_SIZE, rounding_mode="floor") * CHUNK_SIZE - CHUNK_SIZE * weights.blocks_back
    due = (begin > 0) & (start % CHUNK_SIZE == 0)
    hard_key, hard_value = widened(state.hard_key, state.hard_value)
    memory, hard = Memory(state.kv, state.log_max), HardKeys(hard_key, hard_value, state.hard_position)
    # elsewhere than on a CPU a number that is looked at is waited for, and no graph can be captured
    if due.device.type != "cpu" or not is_known(due) or bool(due.any()):
        oldest = (x[:, :, :CHUNK_SIZE] for x in ring)
        pool = Pool(*(GradAccumulator(torch.cat(pair, dim=2)) for pair in zip(hard[:2], oldest, strict=True)))
        store, lost = _sort_ring(job, state, begin, due)
        memory = _enter_again(job, pool, [lost], memory)[0] if job.again else store.memory
        hard = _hard_keys(pool, store.hard)
    new = rows.key.whole, rows.value.whole
    key, value = (torch.cat(pair, dim=2)[:, :, None] for pair in zip(ring, new, strict=True))
    query, at = rows.query.whole[:, :, None], _At(start[:, None, None], begin[:, None])
    found = Found(Memory(*(x[:, :, None] for x in memory)), HardKeys(*(x[:, :, None] for x in hard)))
    output = _join(job, query, at, _sums(job, query, key, value, at, found.hard), found)
    return in_order(output).flatten(1, 2), memory, hard


@torch.no_grad()
def _sort_ring(job: _Job, state: HardKeyState, begin: Tensor, due: Tensor) -> tuple[Store, Entering]:
    """`sort_block` of the oldest tokens that are remembered, which stand behind the hard keys in the pool."""
    key, value = (cast(Tensor, x)[:, :, :CHUNK_SIZE] for x in (job.rows.ring_key, job.rows.ring_value))
    position = begin[:, None] + torch.arange(-CHUNK_SIZE, 0, device=begin.device)
    position = position.masked_fill((position < job.weights.num_sinks) | ~due[:, None], -1)[:, None]
    place = torch.arange(CHUNK_SIZE, device=begin.device) + job.weights.num_hard_keys
    shape, entries = key.shape[:3], job.rule.entries(key, value, position)
    block = Tokens(position.expand(shape), place.expand(shape), entries)
    return sort_block(job, _first_store(job, state), block, begin, due)


def _sums(job: _Job, query: Tensor, key: Tensor, value: Tensor, at: _At, hard: HardKeys) -> Sums:
    """Sum over sinks, hard keys and the window of T chunks: key [B, Hkv, T, K, D], value [B, Hkv, T, K, Dv].

    The last of them is that of the last query.
    """
    rows, sinks, own = job.rows, job.weights.num_sinks, at.own[..., None]
    shared = (x[:, :, None].expand(-1, -1, query.shape[2], -1, -1) for x in (rows.sink_key, rows.sink_value))
    absent = hard.position < 0
    kept = (x.masked_fill(absent[..., None], 0.0) for x in hard[:2])
    keys, values = (torch.cat(x, dim=3) for x in zip(shared, kept, (key, value), strict=True))
    to_come = torch.arange(sinks, device=own.device) > own
    position = at.own[..., -1:] + torch.arange(1 - key.shape[3], 1, device=own.device)
    position = position[:, :, None]
    outside = (position < sinks) | (position < at.begin[..., None, None]) | (position > own)
    missing = absent[:, :, :, None]  # [B, Hkv, T, 1, M]
    masks = to_come[:, None], missing, outside[:, None]
    shape = (max(len(missing), len(outside)), *missing.shape[1:3], outside.shape[2], -1)
    hidden = torch.cat([x.expand(shape) for x in masks], dim=-1)[:, :, :, None]
    return exact_sums(query, keys, values, [hidden], job.weights)


def _sums_by_blocks(
    job: _Job, blocks: BlockSoftmax, query: Tensor, key: Tensor, value: Tensor, hard: HardKeys
) -> Sums:
    """`_sums` where all keys are seen that come no later: key [B, Hkv, L, D] and value of all windows together."""
    rows, chunks = job.rows, query.shape[2]
    back = key.shape[2] // CHUNK_SIZE - chunks
    # no queries stand beside the first blocks
    parts = [Keys(0, torch.full((back, 1, 1), -1, device="cpu"), None)] if back else []
    for number, (own_key, own_value) in enumerate(zip(hard.key.unbind(2), hard.value.unbind(2), strict=True)):
        shared = torch.cat([rows.sink_key, own_key], dim=2), torch.cat([rows.sink_value, own_value], dim=2)
        table = torch.arange(number, number + back + 1, device="cpu")[None, None]
        parts.append(Keys(back + number, table, None, shared))
    query, how = F.pad(in_order(query), (0, 0, CHUNK_SIZE * back, 0)), job.weights.scaling
    output, log = attend_blocks(blocks, query, key, value, parts, block_size=CHUNK_SIZE, scaling=how, causal=True)
    output, log = beside_sink(output, log, job.weights)
    total, log = (chunked(x[..., CHUNK_SIZE * back :, :], chunks) for x in (output, log[..., None]))
    return Sums(total, torch.ones_like(log[..., 0]), log[..., 0])


def _join(job: _Job, query: Tensor, at: _At, exact: Sums, found: Found) -> Tensor:
    """Return the output of T chunks of queries from their exact sums: [B, Hkv, T, G, C, Dv]."""
    # whether any key is in the state
    entered = at.begin[:, None] - job.weights.num_sinks > (found.hard.position >= 0).sum(-1)
    return job.rule.join(exact, job.rule.read(query, found.memory, *at), job.weights, entered)
