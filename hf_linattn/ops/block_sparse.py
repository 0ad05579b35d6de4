"""Softmax over the keys that a pattern lets a query see, block by block.

A pattern answers two questions: which key blocks a query block may need (`key_blocks`), and whether query i sees key j
(`sees`). The first is about speed, the second is the truth: a block named in vain costs time, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Pattern(Protocol):
    """Which keys a query sees, with all positions counted from the start of the sequence.

    """

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_global(self) -> int:
        """The first so many keys are seen by all, and their queries see all where attention is bidirectional."""
        ...

    @property
    def capacity(self) -> int | None:
        """How many past keys decoding must keep at most, beside the global ones; None: all of them."""
        ...

    def key_blocks(self, block: int, num_blocks: int) -> Iterable[int] | Tensor:
        """Return the blocks that queries of `block` may see: for all heads, or int64 [H, c] for each head.

        Doubles, and numbers outside 0 ... num_blocks - 1, are passed over.
        """
        ...

    def sees(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Return whether a query at [..., Nq, 1] sees a key at [..., 1, Nk], after the dimensions [B or 1, H or 1]."""
        ...

    def log_weight(self, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        """Return what is added to the scores of these pairs; None for nothing."""
        ...

    def needed(self, key_position: Tensor, position: Tensor) -> Tensor:
        """Return whether any query at `position` or later may see this key."""
        ...


class KeptKeys(NamedTuple):
    """What decoding must remember: the keys and values that later queries may see.

    key: [B, Hkv, M, D]. value: [B, Hkv, M, Dv]. position: [B, 1, M], counted from 1, 0 where empty. length: [B],
    tokens read.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    length: Tensor


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scaling: float,
    causal: bool,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return softmax attention over what `pattern` shows, for rows that start at position 0: [B, H, N, Dv].

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        lengths: [B], real tokens of each row; None if all are. A query without keys gets zero.
    """
    length, size = query.shape[2], pattern.block_size
    num_blocks = -(-length // size)
    outputs = []
    for block in range(num_blocks):
        span = slice(block * size, min((block + 1) * size, length))
        blocks = pattern.key_blocks(block, block + 1 if causal else num_blocks)
        limit = span.stop if causal else length
        global_keys = min(pattern.num_global, limit)
        position = _positions(blocks, size, limit, global_keys, query.device)
        keys, values = (_select(x, position, query.shape[1]) for x in (key, value))
        rows = torch.arange(span.start, span.stop, device=query.device)[:, None]
        columns = position.number[..., None, :]
        allowed = pattern.sees(rows[None, None], columns) | (columns < pattern.num_global)
        if causal:
            allowed = allowed & (columns <= rows)
        elif lengths is not None:
            allowed = allowed & (columns < lengths[:, None, None, None])
        if position.valid is not None:
            allowed = allowed & position.valid[..., None, :]
        log_weight = pattern.log_weight(rows[None, None], columns)
        outputs.append(masked_attention(query[:, :, span], keys, values, allowed, scaling, log_weight))
    output = torch.cat(outputs, dim=2)
    if causal or not pattern.num_global:
        return output
    allowed = torch.ones(1, 1, 1, length, dtype=torch.bool, device=query.device)
    if lengths is not None:
        allowed = torch.arange(length, device=query.device) < lengths[:, None, None, None]
    top = masked_attention(query[:, :, : pattern.num_global], key, value, allowed, scaling)
    return torch.cat([top, output[:, :, pattern.num_global :]], dim=2)


def continued_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    state: KeptKeys,
    *,
    scaling: float,
    lengths: Tensor | None = None,
) -> tuple[Tensor, KeptKeys]:
    """Return causal output and state for rows that go on after `state`, a block at a time; arguments as above."""
    outputs = []
    for start in range(0, query.shape[2], pattern.block_size):
        span = slice(start, start + pattern.block_size)
        new_key, new_value = key[:, :, span], value[:, :, span]
        count = _count(lengths, start, new_key)
        seen, steps = _extend(state, new_key, new_value, count)
        rows = (state.length[:, None] + steps)[:, None, :, None]
        columns = (seen.position - 1)[:, :, None]
        allowed = pattern.sees(rows, columns) | (columns < pattern.num_global)
        allowed = allowed & (columns >= 0) & (columns <= rows)
        log_weight = pattern.log_weight(rows, columns)
        outputs.append(masked_attention(query[:, :, span], seen.key, seen.value, allowed, scaling, log_weight))
        state = _forget(seen, pattern)
    return torch.cat(outputs, dim=2), state


def keep_keys(key: Tensor, value: Tensor, pattern: Pattern, lengths: Tensor | None = None) -> KeptKeys:
    """Return the state after rows that start at position 0."""
    batch, heads, _, width = key.shape
    empty = KeptKeys(
        key.new_zeros(batch, heads, 0, width),
        value.new_zeros(batch, heads, 0, value.shape[3]),
        torch.zeros(batch, 1, 0, dtype=torch.long, device=key.device),
        torch.zeros(batch, dtype=torch.long, device=key.device),
    )
    return _forget(_extend(empty, key, value, _count(lengths, 0, key))[0], pattern)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float, log_weight: Tensor | None = None
) -> Tensor:
    """Return softmax attention over the allowed pairs [B or 1, H or 1, Nq or 1, Nk]; an empty row is zero.

    Query heads that share a key/value head are multiplied together, so keys are never repeated.
    """
    batch, heads, rows, _ = query.shape
    shared = key.shape[1]
    groups = heads // shared
    folded = query.reshape(batch, shared, groups * rows, -1) * scaling
    scores = (folded @ key.transpose(-1, -2)).view(batch, heads, rows, -1)
    scores = scores if log_weight is None else scores + log_weight.to(scores.dtype)
    scores = scores.masked_fill(~allowed, float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - torch.where(top.isinf(), 0.0, top)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)
    return (weights.view(batch, shared, groups * rows, -1) @ value).view(batch, heads, rows, -1)


class _Positions(NamedTuple):
    """Key positions [1, 1 or H, K]; `valid`, of that shape, if some stand for nothing; `span` if they are a slice."""

    number: Tensor
    valid: Tensor | None
    span: slice | None


def _positions(blocks: Any, size: int, limit: int, global_keys: int, device: torch.device) -> _Positions:
    """Turn block numbers into key positions below `limit`, each once, the global ones first."""
    if isinstance(blocks, Tensor):
        return _positions_by_head(blocks.to(device), size, limit, global_keys)
    wanted = set(blocks) | set(range(-(-global_keys // size)))
    numbers = sorted(number for number in wanted if 0 <= number * size < limit)
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        span = slice(first * size, min((last + 1) * size, limit))
        return _Positions(torch.arange(span.start, span.stop, device=device)[None, None], None, span)
    starts = torch.tensor(numbers, device=device)[:, None] * size
    index = (starts + torch.arange(size, device=device)).flatten()
    return _Positions(index[index < limit][None, None], None, None)


def _positions_by_head(blocks: Tensor, size: int, limit: int, global_keys: int) -> _Positions:
    """The same for block numbers [H, c] that differ between heads; what is no key of its own is not valid."""
    shared = torch.arange(-(-global_keys // size), device=blocks.device).expand(blocks.shape[0], -1)
    numbers = torch.cat([shared, blocks], dim=1).sort(dim=1).values
    doubled = F.pad(numbers[:, 1:] == numbers[:, :-1], (1, 0))
    index = (numbers[..., None] * size + torch.arange(size, device=blocks.device)).flatten(1)
    valid = (~doubled).repeat_interleave(size, dim=1) & (index >= 0) & (index < limit)
    return _Positions(index.clamp(0, limit - 1)[None], valid[None], None)


def _select(x: Tensor, position: _Positions, num_heads: int) -> Tensor:
    """Return the rows of x [B, Hkv, N, D] at the key positions: a view where they are a slice."""
    if position.span is not None:
        return x[:, :, position.span]
    if position.valid is None:
        return x[:, :, position.number[0, 0]]
    owner = torch.arange(num_heads, device=x.device) // (num_heads // x.shape[1])
    return x[:, owner[:, None], position.number[0]]


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
