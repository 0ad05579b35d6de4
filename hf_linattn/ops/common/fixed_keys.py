"""Keys and values at fixed places: what a static cache holds where keys are kept, written in place token by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import UnsupportedModeError
from .tracing import is_known


def require_room(count: int, room: int) -> None:
    """Raise `UnsupportedModeError` for more tokens than there are places."""
    if count > room:
        raise UnsupportedModeError(
            f"past_key_values is a static cache with room for {room} tokens, and {count} were read; make it with a"
            " larger max_cache_len"
        )


class FixedKeys(NamedTuple):
    """Keys and values in memory that has room for all there will be.

    key: [B, Hkv, M, D]. value: [B, Hkv, M, Dv]. position: [B, 1, M], of each counted from 1; 0 where there is none, or
    none that is seen. length: [B], tokens read.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    length: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor, visible: Tensor | None, room: int) -> FixedKeys:
        """Return keys [B, Hkv, N, D] of the first N tokens, N at most `room`; visible: [B, N], None if all are."""
        batch, count = len(key), key.shape[2]
        place = torch.arange(1, count + 1, device=key.device).expand(batch, -1)
        position = place if visible is None else place * visible
        key, value = (F.pad(x, (0, 0, 0, room - count)) for x in (key, value))
        length = torch.full((batch,), count, dtype=torch.long, device=key.device)
        return cls(key, value, F.pad(position, (0, room - count))[:, None], length)

    def append(self, key: Tensor, value: Tensor, real: Tensor | None) -> Tensor:
        """Write one token of each row behind the others, at one place in all rows; return its position [B, 1, 1].

        key: [B, Hkv, 1, D]. value: [B, Hkv, 1, Dv]. real: [B, 1], false for pads; None if none are.

        Raises:
            UnsupportedModeError: all places are taken. On other devices than a CPU nobody looks: that would wait.
        """
        place, position = self.length[:1], self.length[:, None, None] + 1
        if place.device.type == "cpu" and is_known(place):
            require_room(int(place) + 1, self.key.shape[2])
        self.key.index_copy_(2, place, key.to(self.key.dtype))
        self.value.index_copy_(2, place, value.to(self.value.dtype))
        self.position.index_copy_(2, place, position if real is None else position * real[:, None])
        self.length.add_(1)
        return position
