"""The state of causal attention in bounded memory after rows that were read to their ends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.numerics import LOWEST
from ..common.padding import take
from ..common.precision import wide
from .segment_pool import Summary, pool, segment_size
from .types import MemoryState


class Pooled(NamedTuple):
    """The slots of segments of `unit` tokens, how many tokens are in them, and whether the C sums them up."""

    slots: Summary
    unit: int
    end: int
    compiled: bool


def state_after(
    tokens: Summary, lengths: Tensor | None, num_slots: int, block_size: int, pooled: Pooled | None, passed: int = 0
) -> MemoryState:
    """Return the state of rows that have been read to their ends.

    pooled: what the C summed up of them. passed: tokens before the first of the rows.
    """
    batch, _, length, _ = tokens.key.shape
    device = tokens.key.device
    if lengths is None:
        done = (passed + length) // block_size * block_size
        slots = (
            _completed(tokens, [done], num_slots, False)
            if pooled is None
            else _continued(tokens, done, num_slots, pooled, passed)
        )
        lengths = torch.full((batch,), passed + length, device=device)
    else:
        ends = [end // block_size * block_size for end in lengths.tolist()]
        slots = tokens.map(lambda x: wide(x[:, :, :0])).padded(num_slots)
        for unit in sorted({segment_size(end, num_slots) for end in ends}):
            chosen = [row for row, end in enumerate(ends) if segment_size(end, num_slots) == unit]
            rows = torch.tensor(chosen, device=device)
            own = tokens.map(lambda x: x[rows])  # noqa: B023 - called at once
            part = _completed(own, [ends[row] for row in chosen], num_slots, pooled is not None and pooled.compiled)
            slots = Summary(*(x.index_copy(0, rows, y) for x, y in zip(slots, part, strict=True)))
    start = lengths // block_size * block_size - passed
    key, value = (wide(take_from(x, start, lengths - passed, block_size)) for x in tokens[:2])
    return MemoryState(*slots, key, value, lengths.to(torch.int64))


def _continued(tokens: Summary, done: int, num_slots: int, pooled: Pooled, passed: int) -> Summary:
    """Sum up the first `done` tokens, most of which are in slots; `passed`: those before the first that is here."""
    unit = segment_size(done, num_slots)
    start = pooled.end // unit * unit
    rest = tokens.map(lambda x: x[:, :, start - passed : done - passed])
    rest = pool(rest.padded(-(-(done - start) // unit) * unit), unit, compiled=pooled.compiled)
    return pool(pooled.slots, unit // pooled.unit, compiled=pooled.compiled).joined(rest).padded(num_slots)


def _completed(tokens: Summary, ends: list[int], num_slots: int, compiled: bool) -> Summary:
    """Sum up rows, each up to its end (or all to one), in segments of one size."""
    longest = max(ends)
    unit = segment_size(longest, num_slots)
    taken = tokens.map(lambda x: x[:, :, :longest]).padded(-(-longest // unit) * unit)
    position = torch.arange(taken.key.shape[2], device=tokens.key.device)
    behind = (position >= torch.tensor(ends, device=position.device)[:, None])[:, None]
    weights = (x.masked_fill(behind, LOWEST) for x in taken[2:])
    pooled = pool(Summary(taken.key, taken.value, *weights), unit, compiled)
    empty = (pooled.key_weight <= LOWEST / 2)[..., None]  # of rows that ended earlier
    key, value = (x.masked_fill(empty, 0.0) for x in pooled[:2])
    return Summary(key, value, *pooled[2:]).padded(num_slots)


def take_from(x: Tensor, start: Tensor, end: Tensor, size: int) -> Tensor:
    """Return `size` positions of x [B, Hkv, N, D] from `start` [B] on, zero from `end` [B] on."""
    index = start[:, None] + torch.arange(size, device=x.device)
    taken = take(x, index.clamp(max=x.shape[2] - 1))
    return taken.masked_fill((index >= end[:, None])[:, None, :, None], 0.0)
