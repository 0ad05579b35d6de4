"""What log scales and decays make of causal sums, worked out before the kernels run: factors, a number per token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST
from ..runtime.triton import launch
from .triton_scale_kernels import write_scales

TILE = 4096  # tokens of a sequence at a time


class Scales(NamedTuple):
    """What log scales and decays make of keys, queries and states, number by number; T chunks of S tokens.

    exponent: of the keys, counted from where their chunk begins. top: the largest exponent a query sees, counted so,
    and kept: what the state before its chunk weighs beside it. weight: of the keys as seen from the end of their
    chunk. All [B, H, T, S]. left: of a state at the end of a chunk [B, H, T]. through: the same of a segment
    [B, H, segments]. after: the next state's largest exponent [B, H].
    """

    exponent: Tensor
    top: Tensor
    kept: Tensor
    weight: Tensor
    left: Tensor
    through: Tensor
    after: Tensor

    @classmethod
    def of(
        cls, cut: Any, like: Tensor, log_scale: Tensor | None, log_decay: Tensor | None, log_max: Tensor | None,
        starts: Tensor | None = None, after: Tensor | None = None, row_top: Tensor | None = None,
    ) -> Scales:  # fmt: skip
        """Work them out in one launch for keys `like` [B, H, N, F] after a state of the largest exponent `log_max`.

        Args:
            cut: a `Cut`. log_scale, log_decay: [B, H, N]. log_max: [B, H], None for an empty state.
            starts: [B, T S], where the sequence of each place starts; None if rows hold one.
            after: where `after` is written. row_top: [B, H, G, N], the log of what the sums of every query were
                divided by, is written.
        """
        batch, heads, length = like.shape[:3]
        made = cls._empty(cut, like, batch, heads, after)
        made._write(cut, length, log_scale, log_decay, log_max, starts, row_top=row_top)
        return made

    @classmethod
    def of_queries(
        cls, cut: Any, factor: Tensor, top: Tensor | None, log_scale: Tensor | None, log_decay: Tensor | None,
        log_max: Tensor | None, starts: Tensor | None, after: Tensor, row_factor: Tensor,
    ) -> Scales:  # fmt: skip
        """Scales of queries [B, H, G, N] that are read as keys from the end, with log scales log(factor) - top.

        log_scale, log_decay: [B, H, N], of the keys. log_max, after: [B, H, G]. row_factor: [B, H, G, N], what sums
        are multiplied by, is written.
        """
        batch, heads, groups, length = factor.shape
        made = cls._empty(cut, factor, batch, heads * groups, after)
        rest: dict[str, Any] = {"factor": factor, "top": top, "row_factor": row_factor, "repeats": groups}
        made._write(cut, length, log_scale, log_decay, log_max, starts, **rest)
        return made

    @classmethod
    def _empty(cls, cut: Any, like: Tensor, batch: int, heads: int, after: Tensor | None) -> Scales:
        tokens, chunks, segments, one = (
            (batch, heads, *rest) for rest in ((cut.num_chunks, cut.rows), (cut.num_chunks,), (cut.num_segments,), ())
        )
        made = [like.new_empty(x, dtype=torch.float32) for x in (*(tokens,) * 4, chunks, segments)]
        return cls._make([*made, like.new_empty(one, dtype=torch.float32) if after is None else after])

    def _write(
        self, cut: Any, length: int, log_scale: Tensor | None, log_decay: Tensor | None, log_max: Tensor | None,
        starts: Tensor | None, factor: Tensor | None = None, top: Tensor | None = None, row_top: Tensor | None = None,
        row_factor: Tensor | None = None, repeats: int = 1,
    ) -> None:  # fmt: skip
        batch, heads = self.left.shape[:2]
        log_scale, log_max = (x if x is None else x.contiguous() for x in (log_scale, log_max))
        unused = self.left  # a placeholder for what is not there
        given = (log_scale, log_decay, log_max, factor, top, starts, *self, row_top, row_factor)
        chunks = max(1, min(TILE // cut.rows, triton.next_power_of_2(cut.num_chunks)))
        launch(
            write_scales, (batch * heads,), self.left, *(unused if x is None else x for x in given),
            *((0,) * 3 if log_decay is None else log_decay.stride()), heads, repeats,
            1 if row_top is None else row_top.shape[2], length, cut.num_chunks, cut.chunks, cut.num_segments,
            SIZE=cut.rows, CHUNKS=chunks, SEGMENT=triton.next_power_of_2(cut.chunks), SCALED=log_scale is not None,
            DECAYED=log_decay is not None, SHARES=factor is not None, TOPPED=top is not None,
            PACKED=starts is not None, BEGINS=log_max is not None, TOPS=row_top is not None,
            FACTORS=row_factor is not None, REVERSE=factor is not None, num_warps=8,
        )  # fmt: skip

    @classmethod
    def of_all(cls, size: int, log_scale: Tensor) -> Scales:
        """Scales where every query sees all keys: these as seen from the end, which is all there is to say."""
        log_scale = log_scale.contiguous()  # kernels read one row after the other
        largest = log_scale.amax(-1).clamp(min=LOWEST / 2)
        missing = (0, -log_scale.shape[-1] % size)
        seen = F.pad((log_scale - largest[..., None]).exp(), missing).unflatten(-1, (-1, size))
        whole = torch.ones_like(seen)
        none = whole[..., 0].contiguous()
        return cls(seen, seen, whole, seen, none, none, largest)
