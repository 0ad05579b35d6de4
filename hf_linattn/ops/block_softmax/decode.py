"""Block-sparse attention that goes on after what was read before, and what is kept of that: keys still to be seen."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST, bounded
from ..common.padding import first_of_block, read_in_turn
from ..common.precision import wide, widened
from ..common.sink_logit import attenuate
from ..slots.causal import take
from .autograd import BlockSoftmax, attend_blocks
from .cpu import NATIVE_BLOCKS
from .patterns import Part, Pattern, add_log_weight, biased_attention, find_keys, is_weighted, make_parts


class KeptKeys(NamedTuple):
    """What decoding must remember: the keys and values that later queries may see.

    key: [B, Hkv, M, D]. value: [B, Hkv, M, Dv]. position: [B, 1, M], counted from 1, 0 where empty. length: [B],
    tokens read.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    length: Tensor


def continued_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    state: KeptKeys,
    *,
    scaling: float,
    lengths: Tensor | None = None,
    use_native: bool = False,
    blocks: BlockSoftmax | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, KeptKeys]:
    """Return causal output [B, H, N, Dv] and state for rows that go on after `state`.

    Arguments as in `block_sparse.block_sparse_attention`. Rows that have all read as much are read as long ones are
    from their start, but for the rest of the open block; others a block at a time.
    """
    blocks = NATIVE_BLOCKS if blocks is None and use_native else blocks
    first = _first_in_place(blocks, query, key, value, pattern, state, lengths)
    how: Any = {"pattern": pattern, "scaling": scaling, "sink": sink}
    before = functools.partial(_attend_block_by_block, **how, lengths=lengths)
    after = functools.partial(_attend_in_place, **how, blocks=blocks)
    return read_in_turn((query, key, value), state, first, before, after)


def _first_in_place(
    blocks: BlockSoftmax | None, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, state: KeptKeys,
    lengths: Tensor | None,
) -> int:  # fmt: skip
    """Return from which token on an operation can do it: after the open block, all tokens where it cannot."""
    trained = torch.is_grad_enabled() and is_weighted(pattern, query)
    if blocks is None or lengths is not None or trained or not blocks.suits(query, key, value):
        return query.shape[2]
    return first_of_block(state.length, query.shape[2], pattern.block_size)


def _attend_in_place(
    query, key, value, state: KeptKeys, pattern: Pattern, scaling: float, sink: Tensor | None, blocks: Any
) -> tuple[Tensor, KeptKeys]:
    """Put the blocks that are still seen before the new ones, in order, and read these where they then are."""
    size, start = pattern.block_size, int(state.length[0])
    begun, end = start // size, start + query.shape[2]
    parts = [_after(part, begun) for part in make_parts(query, key, pattern, size, end, True) if _end(part) > begun]
    named = [part.table.flatten() for part in parts] + [torch.arange(-(-pattern.num_global // size)).to(query.device)]
    old = torch.cat(named).unique()
    old = old[(old >= 0) & (old < begun)]
    place = torch.full((-(-end // size) + 1,), -1, device=query.device)  # of every block in the row, the last is none
    place[old] = torch.arange(len(old), device=query.device)
    place[begun:-1] = torch.arange(len(old), len(place) - 1 - begun + len(old), device=query.device)
    seen = [
        x._replace(first=x.first - begun + len(old), table=place[x.table])
        for x in (find_keys(pattern, part, True, None, query) for part in parts)
    ]
    position = (old[:, None] * size + torch.arange(size, device=query.device)).flatten()
    kept = _find(state, position, start)
    keys, values = (
        torch.cat([take(x, kept).to(new.dtype), new], dim=2) for x, new in ((state.key, key), (state.value, value))
    )
    grouped = F.pad(query, (0, 0, len(position), 0)).unflatten(1, (key.shape[1], -1))
    output, log = attend_blocks(blocks, grouped, keys, values, seen, block_size=size, scaling=scaling, causal=True)
    output, log = (x[:, :, :, len(position) :] for x in (output, log))
    output = attenuate(output.flatten(1, 2), log.flatten(1, 2), None if sink is None else sink[:, None])
    return output, _forget(_extend(state, wide(key), wide(value), _count(None, 0, key))[0], pattern)


def _end(part: Part) -> int:
    """The block behind the last of a part."""
    return part.first + len(part.table)


def _after(part: Part, begun: int) -> Part:
    """What is left of a part from block `begun` on."""
    passed = max(begun - part.first, 0)
    return part._replace(first=part.first + passed, table=part.table[passed:])


def _find(state: KeptKeys, position: Tensor, length: int) -> Tensor:
    """Return where the state has the keys at these positions [B, M]; anywhere, if none will be seen any more."""
    places = torch.arange(state.position.shape[2], device=position.device).expand(len(state.length), -1)
    known = torch.zeros(len(places), length + 1, dtype=torch.long, device=position.device)
    return known.scatter(1, state.position[:, 0], places)[:, position + 1]


def _attend_block_by_block(
    query, key, value, state: KeptKeys, pattern: Pattern, scaling: float, sink: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, KeptKeys]:
    """Read on a block at a time: every row stands at a place of its own."""
    outputs, (query, key, value) = [], widened(query, key, value)
    if query.shape[2] > 1:  # a single token has none to come
        query, key = bounded(query), bounded(key)
    for start in range(0, query.shape[2], pattern.block_size):
        span = slice(start, start + pattern.block_size)
        new_key, new_value = key[:, :, span], value[:, :, span]
        count = _count(lengths, start, new_key)
        seen, steps = _extend(state, new_key, new_value, count)
        rows = (state.length[:, None] + steps)[:, None, :, None]
        columns = (seen.position - 1)[:, :, None]
        allowed = pattern.sees(rows, columns) | (columns < pattern.num_global)
        allowed = allowed & (columns >= 0) & (columns <= rows)
        bias = torch.where(allowed, query.new_zeros(()), query.new_full((), LOWEST))
        bias = add_log_weight(bias, pattern.log_weight(rows, columns))
        outputs.append(biased_attention(query[:, :, span], seen.key, seen.value, bias, scaling, True, sink))
        state = _forget(seen, pattern)
    return torch.cat(outputs, dim=2), state


def keep_keys(key: Tensor, value: Tensor, pattern: Pattern, lengths: Tensor | None = None) -> KeptKeys:
    """Return the state after rows that start at position 0."""
    count = _count(lengths, 0, key)
    steps = torch.arange(key.shape[2], device=key.device)
    position = torch.where(steps < count[:, None], steps + 1, 0)[:, None]
    if pattern.capacity is None:  # a state is never a view of what it was made from
        key, value = key.clone(), value.clone()
    kept = _forget(KeptKeys(key, value, position, count), pattern)
    return kept._replace(key=wide(kept.key), value=wide(kept.value))


def _count(lengths: Tensor | None, start: int, key: Tensor) -> Tensor:
    """Real tokens [B] among those of `key`, which stand behind the first `start`."""
    if lengths is None:
        return torch.full(key.shape[:1], key.shape[2], dtype=torch.long, device=key.device)
    return (lengths - start).clamp(0, key.shape[2])


def _extend(state: KeptKeys, key: Tensor, value: Tensor, count: Tensor) -> tuple[KeptKeys, Tensor]:
    """Put `count` [B] new keys behind the kept ones; return also the numbers of the steps [N]."""
    steps = torch.arange(key.shape[2], device=key.device)
    new = torch.where(steps < count[:, None], state.length[:, None] + steps + 1, 0)
    joined = KeptKeys(
        torch.cat([state.key, key], dim=2),
        torch.cat([state.value, value], dim=2),
        torch.cat([state.position, new[:, None]], dim=2),
        state.length + count,
    )
    return joined, steps


def _forget(state: KeptKeys, pattern: Pattern) -> KeptKeys:
    """Keep what later queries may see, in a state that always has room for the most there can be."""
    if pattern.capacity is None:
        return state
    position, next_position = state.position - 1, state.length[:, None, None]
    wanted = pattern.needed(position, next_position) | (position < pattern.num_global)
    wanted = wanted & (position >= 0)
    room = pattern.capacity + pattern.num_global
    order = torch.argsort((~wanted).to(torch.uint8), dim=-1, stable=True)[..., :room]
    missing = room - order.shape[2]
    kept = wanted.gather(2, order)

    def choose(x: Tensor) -> Tensor:
        chosen = x.gather(2, order[..., None].expand(-1, x.shape[1], -1, x.shape[3]))
        return F.pad(chosen * kept[..., None], (0, 0, 0, missing))

    kept_position = F.pad(state.position.gather(2, order) * kept, (0, missing))
    return KeptKeys(choose(state.key), choose(state.value), kept_position, state.length)
