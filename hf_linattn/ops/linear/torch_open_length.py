"""What goes from chunk to chunk where nobody knows yet how many there are: in programs for every length.

A loop over chunks would be one over those of the example. Here the share that chunk s has in the state after chunk t
is an entry of a matrix [T, T], T = N / C. Beside what is linear in N a program takes time in N^2 / C^2 then, which
counts from about C^2 = 4,096 tokens on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST


class Passage:
    """How much of each chunk there is in the state after each other.

    Args:
        like: [B, Hkv, T, ...]. largest: [B, Hkv, T], the largest log scale of the keys of each chunk, None if there
            are none. passed: [B or 1, Hkv or 1, T], log of what is lost in each chunk. log_max: [B, Hkv], of the first
            state. goes_on: [B, 1, T], false where the state before a chunk is dropped; None: nowhere.

    Attributes:
        before, after: [B, Hkv, T], the largest log scales before and after each chunk, None without log scales.
    """

    def __init__(
        self, like: Tensor, largest: Tensor | None, passed: Tensor | None, log_max: Tensor, goes_on: Tensor | None
    ):
        count = like.shape[2]
        number = torch.arange(-1, count, device=like.device)  # the first state is that after chunk -1
        joint = (number[None, :] <= number[:, None])[None, None]
        if goes_on is not None:
            dropped = F.pad((~goes_on).long().cumsum(-1), (1, 0))
            joint = joint & (dropped[..., :, None] == dropped[..., None, :])
        self.before = self.after = self.share = None
        if largest is None:
            self.share = None if goes_on is None else joint.to(like.dtype)
            return
        # in float64: what was lost since the first token may be large, what was between two chunks need not be
        lost = torch.zeros_like(largest, dtype=torch.float64) if passed is None else passed.double().cumsum(-1)
        lost = F.pad(lost.expand(largest.shape), (1, 0))
        own = torch.cat([log_max[..., None], largest.clamp(min=LOWEST / 2)], dim=-1).double() - lost.detach()
        level = own[..., None, :].masked_fill(~joint, LOWEST).amax(-1)
        after = (level + lost.detach()).to(like.dtype)
        difference = (after.double() - lost)[..., None, :] - (after.double() - lost)[..., :, None]
        self.share = difference.masked_fill(~joint, LOWEST).exp().to(like.dtype)
        self.before, self.after = after[..., :-1], after[..., 1:]

    def read_and_fold(self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products with the state before each chunk [B, Hkv, T, G C, Dv + 1], and the last state.

        query: [B, Hkv, T, G C, F]. key: [B, Hkv, T, C, F]. value: [B, Hkv, T, C, Dv + 1], as seen from the end of the
        chunk. kv: [B, Hkv, F, Dv + 1], the first state.
        """
        every = torch.cat([kv[:, :, None], key.mT @ value], dim=2)
        if self.share is None:
            every = every.cumsum(2)
        else:
            every = (self.share @ every.flatten(3)).unflatten(3, tuple(kv.shape[2:]))
        return query @ every[:, :, :-1], every[:, :, -1]


class OpenChunks:
    """Chunks of `size` tokens of which nobody knows how many there are; the last ones are filled with hidden tokens.

    At least two more than there are tokens for: of one chunk a program would be one for one chunk. By index, as
    torch.export cannot tell that padded sizes go with every length.
    """

    def __init__(self, length: int, size: int, device: torch.device):
        count = (length + (size - 1)) // size + 2
        number = torch.arange(count, device=device)[:, None] * size + torch.arange(size, device=device)
        self.index, self.real = number.clamp(max=length - 1), number < length
        self.order = torch.arange(length, device=device)

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return x with its dimension of N tokens as two, [T, C]."""
        return x[(slice(None),) * dim + (self.index,)]

    def without_filling(self, chunks: Any) -> Any:
        """Return the `Chunks` (torch.py) with filling keys hidden; nothing is forgotten after them either."""
        scale, decay = chunks.log_scale, chunks.log_decay
        scale = None if scale is None else scale.masked_fill(~self.real, LOWEST)
        decay = None if decay is None else decay * self.real
        return chunks._replace(key=chunks.key * self.real[..., None], log_scale=scale, log_decay=decay)

    def joined(self, x: Tensor, dim: int) -> Tensor:
        """Return x [..., T C, ...], flattened in this dimension, without the tokens that were not there."""
        return x.index_select(dim, self.order)


def cut_whole(size: int, x: Tensor, dim: int) -> Tensor:
    """Return x with a dimension of whole chunks, or of one that is shorter, as two, as `OpenChunks.cut` does."""
    return x.unflatten(dim, (-1, min(size, x.shape[dim])))
