"""What log scales and decays make of causal sums, worked out before the kernels run: factors, a number per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST


def running_max(value: Tensor, gain: Tensor) -> Tensor:
    """Return m_t = max(value_t, m_{t-1} + gain_t) along the last dimension, in steps of twice the distance each."""
    distance = 1
    while distance < value.shape[-1]:
        earlier = F.pad(value[..., :-distance], (distance, 0), value=LOWEST)
        value = torch.maximum(value, earlier + gain)
        gain = gain + F.pad(gain[..., :-distance], (distance, 0))
        distance *= 2
    return value


class Scales(NamedTuple):
    """What log scales and decays make of keys, queries and states, number by number; T chunks of S tokens.

    exponent: of the keys, counted from where their chunk begins. top: the largest exponent a query sees, counted so,
    and kept: what the state before its chunk weighs beside it. weight: of the keys as seen from the end of their
    chunk. All [B, H, T, S]. left: of a state at the end of a chunk [B, H, T]. after: the next state's largest exponent
    [B, H]. passed: what a token's own place adds to `top` [B, H, T, S].
    """

    exponent: Tensor
    top: Tensor
    kept: Tensor
    weight: Tensor
    left: Tensor
    after: Tensor
    passed: Tensor

    @classmethod
    def of(
        cls, size: int, log_scale: Tensor, log_decay: Tensor, log_max: Tensor, starts: Tensor | None = None
    ) -> Scales:
        """Work them out for log_scale and log_decay [B, H, N] after a state of the largest exponent `log_max`.

        size: S. starts: [B, T S], where the sequence of each place starts; None if rows hold one.
        """
        missing = (0, -log_scale.shape[-1] % size)
        log_scale = F.pad(log_scale, missing, value=LOWEST).unflatten(-1, (-1, size))
        passed = F.pad(log_decay, missing).unflatten(-1, (-1, size)).cumsum(-1)
        exponent, through = log_scale - passed, passed[..., -1]
        at_end, going_on, top, continues = exponent, through, exponent.cummax(-1).values, None
        if starts is not None:
            start = starts[:, None].unflatten(-1, (-1, size))
            last = start[..., -1:]
            carried = torch.cat([start[:, :, :1, :1], last[:, :, :-1]], dim=2)  # the sequence of the state before
            continues = start == carried
            at_end = exponent.masked_fill(start != last, LOWEST)
            going_on = through.masked_fill((last != carried)[..., 0], LOWEST)
            begins = F.pad(start[..., 1:] != start[..., :-1], (1, 0))
            top = running_max(exponent, torch.where(begins, LOWEST, 0.0).expand_as(exponent))
        own = (at_end.amax(-1) + through).clamp(min=LOWEST / 2)
        own = torch.cat([torch.maximum(own[..., :1], log_max[..., None] + going_on[..., :1]), own[..., 1:]], dim=-1)
        after = running_max(own, going_on)
        before = torch.cat([log_max[..., None], after[..., :-1]], dim=-1)
        seen = before[..., None] if continues is None else torch.where(continues, before[..., None], LOWEST)
        top = torch.maximum(top, seen).clamp(min=LOWEST / 2)
        return cls(
            exponent.contiguous(),
            top.contiguous(),
            (seen - top).exp().contiguous(),
            (at_end + (through - after)[..., None]).exp().contiguous(),
            (before + going_on - after).exp().contiguous(),
            after[..., -1],
            passed,
        )

    @classmethod
    def of_all(cls, size: int, log_scale: Tensor) -> Scales:
        """Scales where every query sees all keys: these as seen from the end, which is all there is to say."""
        largest = log_scale.amax(-1).clamp(min=LOWEST / 2)
        missing = (0, -log_scale.shape[-1] % size)
        seen = F.pad((log_scale - largest[..., None]).exp(), missing).unflatten(-1, (-1, size))
        whole = torch.ones_like(seen)
        return cls(seen, seen, whole, seen, whole[..., 0].contiguous(), largest, seen)

    def row_top(self, length: int, reverse: bool = False) -> Tensor:
        """The log of what the sums of every query were divided by [B, H, N]."""
        top = (self.top + self.passed).flatten(-2)[..., :length]
        return top.flip(-1) if reverse else top

    def through(self, chunks: int) -> Tensor:
        """What is left of a state after every segment of so many chunks [B, H, segments]."""
        missing = -self.left.shape[-1] % chunks
        return F.pad(self.left, (0, missing), value=1.0).unflatten(-1, (-1, chunks)).prod(-1).contiguous()
