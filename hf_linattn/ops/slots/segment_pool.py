"""Weighted means of segments of a sequence, whose size grows with the tokens that are completed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.derivatives import one_at_a_time
from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST
from ..common.precision import wide
from .cpu_kernels import segment_means, segment_means_of_part


class Summary(NamedTuple):
    """S weighted means of tokens, or S tokens: key [..., S, D], value [..., S, Dv], and the logarithms [..., S] of the
    weights that were summed up for each, LOWEST where there are none."""

    key: Tensor
    value: Tensor
    key_weight: Tensor
    value_weight: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Summary:
        """Return the function of each part."""
        return Summary(*map(function, self))

    def joined(self, others: Summary) -> Summary:
        """Return these and behind them the others."""
        keys, values, *logs = zip(self, others, strict=True)
        return Summary(torch.cat(keys, -2), torch.cat(values, -2), *(torch.cat(pair, -1) for pair in logs))

    def split(self, size: int) -> list[Summary]:
        """Return parts of `size` rows each."""
        return [Summary(*parts) for parts in zip(*(x.split(size) for x in self), strict=True)]

    def padded(self, size: int) -> Summary:
        """Return `size` entries, the last of them without weight."""
        missing = size - self.key.shape[-2]
        if not missing:
            return self
        return Summary(
            *(F.pad(x, (0, 0, 0, missing)) for x in self[:2]),
            *(F.pad(x, (0, missing), value=LOWEST) for x in self[2:]),
        )


def segment_size(tokens: int, num_slots: int) -> int:
    """Return u(T), the smallest power of two with ceil(T / u) <= k."""
    return 1 << (max(-(-tokens // num_slots), 1) - 1).bit_length()


def find_runs(count: int, size: int, num_slots: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, the one after the last, u) of the blocks before which the slots have one size."""
    first = 0
    while first < count:
        unit = segment_size(first * size, num_slots)
        last = min(num_slots * unit // size + 1, count)
        yield first, last, unit
        first = last


def pool(tokens: Summary, size: int, compiled: bool = False) -> Summary:
    """Sum up every `size` tokens, in at least float32; `compiled`: [B, Hkv, N, .] on a CPU, which the C can read."""
    tokens = tokens.map(wide)
    if compiled:
        (key, key_total), (value, value_total) = map(segment_means, tokens[:2], tokens[2:], (size, size))
        return Summary(key, value, key_total, value_total)
    means, totals = [], []
    shape = (tokens.key.shape[-2] // size, size)
    for x, weight in zip(tokens[:2], tokens[2:], strict=True):
        weight = weight.unflatten(-1, shape)
        means.append((weight.softmax(-1)[..., None, :] @ x.unflatten(-2, shape))[..., 0, :])
        totals.append(weight.logsumexp(-1))
    return Summary(*means, *totals)


def pool_part(sources: Sequence[GradAccumulator], start: int, length: int, size: int, compiled: bool) -> Summary:
    """`pool` of `length` tokens from `start` on, of the sources of a summary."""
    if not compiled or sources[0].whole.dtype != torch.float32:
        return pool(Summary(*(source.narrow(2, start, length) for source in sources)), size, compiled)
    pairs = zip(sources[:2], sources[2:], strict=True)
    (key, key_total), (value, value_total) = (segment_means_of_part(*pair, size, start, length) for pair in pairs)
    return Summary(key, value, key_total, value_total)


def open_segments(tokens: Summary, first: int, last: int, per_segment: int, size: int) -> tuple[Tensor, Tensor]:
    """Return key and value [R, M, .] of the segment that is open before each block, of its completed blocks only.

    A running sum over the blocks of a segment, by doubling: every entry is made of earlier ones.
    """
    aligned = first // per_segment * per_segment
    blocks = pool(tokens.map(lambda x: x[:, aligned * size : last * size]), size)
    segments = blocks.padded(-(-(last - aligned) // per_segment) * per_segment)
    segments = segments.map(lambda x: x.unflatten(1, (-1, per_segment)))
    step = 1
    while step < per_segment:
        segments = _combine(segments, _delayed(segments, step))
        step *= 2
    before = _delayed(segments, 1).map(lambda x: x.flatten(1, 2)[:, first - aligned : last - aligned])
    return before.key, before.value


def _delayed(segments: Summary, steps: int) -> Summary:
    """Move the entries of each segment [R, S, P, .] back by `steps`, filling up with nothing."""
    size = segments.key.shape[2] - steps
    return Summary(
        *(F.pad(x[:, :, :size], (0, 0, steps, 0)) for x in segments[:2]),
        *(F.pad(x[:, :, :size], (steps, 0), value=LOWEST) for x in segments[2:]),
    )


def _combine(left: Summary, right: Summary) -> Summary:
    """Sum up entry by entry."""
    means, totals = [], []
    for x, y, a, b in zip(left[:2], right[:2], left[2:], right[2:], strict=True):
        total = torch.logaddexp(a, b)
        means.append(x * (a - total).exp()[..., None] + y * (b - total).exp()[..., None])
        totals.append(total)
    return Summary(*means, *totals)


def products_with_rows(vectors: Tensor, rows: GradAccumulator) -> Tensor:
    """Return vectors rows^T [B, H, M, N], of vectors [H or 1, M, D] and a source of rows [B, H, N, D]."""
    if rows.gradient is None:
        return vectors @ rows.whole.mT
    return _ProductsWithRows.apply(vectors, rows.whole, rows.gradient)


class _ProductsWithRows(torch.autograd.Function):
    """Adds the gradient of the rows to that of their source: apart from it, it would be as large and soon be added."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, rows: Tensor, source: Any) -> Tensor:
        ctx.save_for_backward(vectors, rows)
        ctx.source = source
        return vectors @ rows.mT

    @staticmethod
    @one_at_a_time
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        vectors, rows = ctx.saved_tensors
        d_vectors = (gradient @ rows).sum_to_size(vectors.shape)
        vectors = vectors.expand(rows.shape[1], -1, -1)
        total = ctx.source.begun(rows)
        for row, own in enumerate(gradient.mT.unbind()):
            total[row].baddbmm_(own, vectors)
        return d_vectors, None, None
