"""Keys and values that grow token by token, without a copy of all of them with every step."""

from __future__ import annotations

import torch
from torch import Tensor

from .tracing import is_watched

ROOM = "_hf_linattn_room"  # the attribute of a tensor that is the beginning of a `Room`
SPARE = 256  # tokens that a room has places for beyond those it is made for


class Room:
    """Memory [B, H, M + SPARE, D], or without the D, of which several tensors may be the beginning.

    `end` holds the number of the first place that nobody has written to; it is taken out by who writes there. Only one
    tensor can so be grown in place, and it stays what it was; another one that ends earlier gets a room of its own.
    """

    def __init__(self, kept: Tensor, dim: int, more: int):
        length = kept.shape[dim]
        self.buffer = kept.new_empty((*kept.shape[:dim], length + more + SPARE, *kept.shape[dim + 1 :]))
        self.buffer.narrow(dim, 0, length).copy_(kept)
        self.end = {length}

    def take(self, length: int, end: int, dim: int) -> bool:
        """Take the places from `length` to `end`, if they are there and free."""
        if end > self.buffer.shape[dim] or self.buffer.is_inference() != torch.is_inference_mode_enabled():
            return False
        try:
            self.end.remove(length)  # in one step, as threads may go on from one tensor
        except KeyError:
            return False
        return True


def grown(kept: Tensor, new: Tensor, dim: int = 2) -> Tensor:
    """Return `kept` with `new` behind it in dimension `dim`, as `torch.cat` does; both stay as they are.

    Without gradients what is returned has room behind it, so that the next one is written there and nothing is copied.

    >>> grown(torch.zeros(1, 1, 2, 3), torch.ones(1, 1, 1, 3))[0, 0, :, 0]
    tensor([0., 0., 1.])
    """
    if torch.is_grad_enabled() or is_watched() or kept.dtype != new.dtype:
        return torch.cat([kept, new], dim)
    length, more = kept.shape[dim], new.shape[dim]
    end, room = length + more, getattr(kept, ROOM, None)
    if room is None or not room.take(length, end, dim):
        room = Room(kept, dim, more)
        room.take(length, end, dim)
    room.buffer.narrow(dim, length, more).copy_(new)
    longer = room.buffer.narrow(dim, 0, end)
    setattr(longer, ROOM, room)
    room.end.add(end)
    return longer


def held_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor, with those of the room behind it."""
    room = getattr(x, ROOM, None)
    held = x if room is None else room.buffer
    return held.numel() * held.element_size()
