"""Rows that start at position 0 and are padded on the right only, out of rows with any padding and any packing.

A mechanism that counts positions (blocks, windows, sinks, slots) must give a packed or left-padded sequence what it
gives the sequence alone. Taking every sequence out into a row of its own makes that so by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .tracing import once


@dataclass(frozen=True)
class Sequences:
    """Some sequences of a batch of B rows with N tokens each.

    Attributes:
        index: [S, L], where each token stands in the batch flattened to B N tokens; 0 behind the end.
        lengths: [S], real tokens of each sequence.
        rows: [S], the row each sequence comes from.
        last: numbers of those that are the last of their rows, which the decoding state belongs to.
        places: where the real tokens stand in the batch, one after another. slots: where in the S L tokens here.
        starts: [S], where in its row each begins, if all have their tokens side by side; else None.
    """

    index: Tensor
    lengths: Tensor
    rows: Tensor
    last: Tensor
    places: Tensor
    slots: Tensor
    starts: Tensor | None

    @property
    def present(self) -> Tensor:
        """[S, L], true for real tokens."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.lengths[:, None]

    def take(self, x: Tensor) -> Tensor:
        """Return the sequences of x [B, H, N, D] as rows [S, H, L, D], zero behind the end."""
        rows = x.transpose(1, 2).flatten(0, 1)[self.index]
        # index 0 stands behind the end: a token of another row, whose numbers may not be finite
        return rows.masked_fill(~self.present[:, :, None, None], 0).transpose(1, 2)

    def put(self, rows: Tensor, into: Tensor) -> Tensor:
        """Return `into` [B, H, N, D] with these sequences' outputs [S, H, L, D] in their places."""
        flat = into.transpose(1, 2).flatten(0, 1)
        flat = flat.index_put((self.places,), rows.transpose(1, 2).flatten(0, 1)[self.slots])
        return flat.unflatten(0, (into.shape[0], into.shape[2])).transpose(1, 2)


def find_sequences(
    batch: int, length: int, key_padding_mask: Tensor | None, sequence_ids: Tensor | None, device: torch.device
) -> list[Sequences]:
    """Return every sequence of a batch: first those that begin their row, then the others by size.

    The first entry has one sequence for each row, empty where the row is. The others are grouped so that none is
    padded to more than twice its length: tokens and pads together stay below 2 B N however they are packed.

    What masks and ids say is read once; a CPU then works out the numbers, for which nothing has to be waited.
    """
    given = [x.expand(batch, -1).long() for x in (key_padding_mask, sequence_ids) if x is not None]
    read = torch.stack(given).cpu().unbind() if given else ()
    real = torch.ones(batch, length, dtype=torch.bool, device="cpu") if key_padding_mask is None else read[0].bool()
    ids = torch.zeros_like(real, dtype=torch.long) if sequence_ids is None else read[-1]
    rows, columns = real.nonzero(as_tuple=True)
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[1:] = (rows[1:] != rows[:-1]) | (ids[rows[1:], columns[1:]] != ids[rows[:-1], columns[:-1]])
    starts = begins.nonzero().flatten()
    owner = rows[starts]
    sizes = torch.diff(starts, append=starts.new_tensor([len(rows)]))
    heads = torch.ones_like(owner, dtype=torch.bool)
    heads[1:] = owner[1:] != owner[:-1]
    tails = torch.ones_like(heads)
    tails[:-1] = heads[1:]
    places = rows * length + columns

    first = torch.zeros(batch, 3, dtype=torch.long, device="cpu")  # start, size, whether last, of each row's first
    first[:, 2] = 1
    first[owner[heads]] = torch.stack([starts[heads], sizes[heads], tails[heads].long()], -1)
    numbers = torch.arange(batch, device="cpu")
    groups = [_gather(columns, places, first[:, 0], first[:, 1], numbers, first[:, 2], device)]
    later = ~heads
    scale = torch.log2(sizes.float()).floor().long()
    for exponent in scale[later].unique().tolist():
        chosen = later & (scale == exponent)
        groups.append(_gather(columns, places, starts[chosen], sizes[chosen], owner[chosen], tails[chosen], device))
    return groups


def _gather(
    columns: Tensor, places: Tensor, starts: Tensor, lengths: Tensor, rows: Tensor, last: Tensor, device: torch.device
) -> Sequences:
    """Write down where the tokens of the chosen sequences stand, given on a CPU."""
    steps = torch.arange(max(int(lengths.max()), 1), device="cpu")
    inside = steps < lengths[:, None]
    order = torch.where(inside, starts[:, None] + steps, 0)
    index = places[order] if len(places) else torch.zeros_like(order)
    index, slots = torch.where(inside, index, 0), inside.flatten().nonzero()[:, 0]
    column = columns[order] if len(columns) else torch.zeros_like(order)
    begins = torch.where(lengths > 0, column[:, 0], 0)
    together = bool(((column == begins[:, None] + steps) | ~inside).all())
    found = (index, lengths, rows, last.nonzero()[:, 0], index.flatten()[slots], slots, begins)
    index, lengths, rows, last, places, slots, begins = (x.contiguous().to(device) for x in found)
    return Sequences(index, lengths, rows, last, places, slots, begins if together else None)


class Packed(NamedTuple):
    """Sequences that lie in rows of N tokens one after another, all tokens belonging to one.

    places: int64 [S, 3], row, start and length of each, in order. last: [B], number of the last of each row.
    length: N.
    """

    places: Tensor
    last: Tensor
    length: int

    @classmethod
    def of(cls, sequence_ids: Tensor, batch: int) -> Packed:
        """List the sequences of ids [B, N] or [1, N], equal inside each."""
        ids = sequence_ids.expand(batch, -1)
        begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
        rows, starts = begins.nonzero(as_tuple=True)
        lengths = torch.diff(rows * ids.shape[1] + starts, append=rows.new_tensor([ids.numel()]))
        return cls(torch.stack([rows, starts, lengths], dim=1), begins.sum(1).cumsum(0) - 1, ids.shape[1])

    @property
    def begins(self) -> Tensor:
        """[B, N], whether a token is the first of its sequence."""
        rows, starts, _ = self.places.unbind(1)
        begins = torch.zeros(len(self.last), self.length, dtype=torch.bool, device=rows.device)
        begins[rows, starts] = True
        return begins

    def backwards(self) -> Packed:
        """The sequences of rows that are read from the last token to the first, listed in that order."""
        rows, starts, lengths = self.places.flip(0).unbind(1)
        places = torch.stack([rows, self.length - starts - lengths, lengths], dim=1)
        return Packed(places[rows.argsort(stable=True)], *self[1:])

    def shortened(self) -> Packed:
        """What is left of them without the last token of every row."""
        places = self.places.clone()
        places[self.last, 2] -= 1
        return Packed(places, self.last, self.length - 1)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the positions index [B, M] of x [B, H, N, D].

    Of a tensor that lies in order whole rows of D numbers are copied, several times as fast as number by number.
    """
    if x.is_contiguous():
        batch, heads, length, width = x.shape
        first = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * length
        taken = x.view(-1, width).index_select(0, (first + index[:, None]).flatten())
        return taken.view(batch, heads, index.shape[1], width)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def from_the_left(
    key: Tensor, value: Tensor, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return key and value [B, Hkv, N, .] with the real tokens of each row first, in order, and their number [B].

    What stands behind them is zero. Without a mask they are as they were, and the number is None.
    """
    if key_padding_mask is None:
        return key, value, None
    real = key_padding_mask.bool()
    order = (~real).long().argsort(dim=1, stable=True)
    lengths = real.sum(1)
    present = (torch.arange(real.shape[1], device=real.device) < lengths[:, None])[:, None, :, None]
    index = order[:, None, :, None]
    key, value = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) * present for x in (key, value))
    return key, value, lengths


def lengths_of(read: Tensor) -> list[int]:
    """Return how much rows have read [B], which is looked at once, however often it is asked in a forward."""
    return once(Tensor.tolist, read)


def first_of_block(read: Tensor, count: int, size: int) -> int:
    """Return which of `count` tokens begins a block of `size` in all rows that have read `read` [B] tokens.

    `count` where there is none, as the rows stand at different places in their blocks, or where less than a block
    would be left.
    """
    lengths = set(lengths_of(read)) if count >= size else set()
    first = -min(lengths, default=0) % size
    return first if len(lengths) == 1 and first + size <= count else count


def read_in_turn(
    heads: Sequence[Tensor], state: Any, first: int, before: Callable[..., Any], after: Callable[..., Any]
) -> tuple[Tensor, Any]:
    """Return output and state of heads whose first tokens are read by `before`, all others by `after`.

    Both are called with their part of the heads and a state, and return an output [B, H, N, Dv] and the next one.
    """
    outputs = []
    for attend, span in ((before, slice(0, first)), (after, slice(first, None))):
        part = [x[:, :, span] for x in heads]
        if part[0].shape[2]:
            output, state = attend(*part, state)
            outputs.append(output)
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0], state
