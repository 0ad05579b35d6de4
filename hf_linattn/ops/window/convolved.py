"""Attention over a band of keys whose scores are convolved along the keys before they become weights.

    s_ij  = scaling q_i . k_j    for the keys j that query i sees: i - left <= j <= i + right, pads left out; else 0
    s'_ij = sum_t w_t s_i,j+t    as often as there are rounds, each time with 0 again for what is not seen
    o_i   = sum_j p_ij v_j       p_i = softmax of s'_i over the keys that are seen, or s'_i itself

Blocks of C queries meet the K = C + left + right keys around them in one product [C, K]. Its rows are read C columns
long, one further each: with column d of row i for key i - left + d a convolution along the keys is the same for all
rows, a product with the matrix of its taps, and but for the ends of the sequence the band is its own mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.grad_accumulator import GradAccumulator
from ..common.numerics import LOWEST
from ..common.padding import take
from ..common.sink_logit import softmax_beside

BLOCK = 64  # queries per block; four times as many where each sees as many keys
PART = 128  # columns of a band that are convolved together
AT_ONCE = {"cpu": 1 << 20}  # elements of the scores of a few blocks: 4 MiB in float32
AT_ONCE_ELSEWHERE = 1 << 25


class BandState(NamedTuple):
    """What decoding must remember, of constant size.

    ring_key [B, Hkv, R, D], ring_value [B, Hkv, R, Dv]: the last R = window_size - 1 tokens, the newest last, zero
    before the first. length: [B], tokens read.
    """

    ring_key: Tensor
    ring_value: Tensor
    length: Tensor


class _Band(NamedTuple):
    """Which keys are seen: by query n of the call the places n ... n + width - 1, as far as these are real.

    size: C, queries per block. begin, end: the first real place and the one behind the last, numbers or [B, 1, 1, 1];
    end is None where no query sees that far.
    """

    size: int
    width: int
    begin: Tensor | int
    end: Tensor | int | None

    @property
    def columns(self) -> int:
        """Keys that the queries of a block see together."""
        return self.size + self.width - 1


def banded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor,
    *,
    reach: int,
    rounds: int,
    scaling: float,
    causal: bool,
    normalised: bool,
    lengths: Tensor | None = None,
    state: BandState | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return the output [B, H, N, Dv] of rows that follow `state` (None: that begin).

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv.
        kernel: [H, 2 t + 1], taps w_-t ... w_t. reach: how far a query sees, to both sides or (causal) to the left.
        rounds: how often the scores are convolved. normalised: whether p is a softmax.
        lengths: [B], real tokens at the start of each row; None if all are. What comes out behind them means nothing.
        sink: [H], beside which p is a softmax (`hf_linattn.ops.common.sink_logit`).

    Time O(N W (D + Dv + rounds min(W, 128 + 2 t))) for W = reach + 1 keys (bidirectional: 2 reach + 1), memory O(N W).
    """
    batch, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    # without earlier keys a band wider than the call would only see zeros
    left = reach if state is not None else min(reach, length - 1)
    right = 0 if causal else left
    size = min(BLOCK if left < 4 * BLOCK else 4 * BLOCK, length)
    count = -(-length // size)
    begin = left if state is None else (left - state.length.clamp(max=left)).view(-1, 1, 1, 1)
    end = None if causal else left + (length if lengths is None else lengths.view(-1, 1, 1, 1))
    band = _Band(size, left + 1 + right, begin, end)
    missing = count * size - length
    rings = (None, None) if state is None else state[:2]
    lined_up = (_line_up(x, y, left, missing + right) for x, y in zip((key, value), rings, strict=True))
    sources = [GradAccumulator(x) for x in lined_up]
    query = F.pad(query * scaling, (0, 0, 0, missing)).unflatten(2, (count, size))
    # heads first, so that each meets its own taps in one product; the queries of a group beside their block of keys
    query = query.unflatten(1, (kv_heads, -1)).permute(1, 0, 3, 2, 4, 5).flatten(3, 4)
    step = max(1, AT_ONCE.get(query.device.type, AT_ONCE_ELSEWHERE) // (batch * heads * size * band.columns))
    spans = list(_spans(band, left, count, length, lengths is not None, step))
    taps, outputs = _Taps(kernel, band.width), []
    beside = None if sink is None else sink.view(-1, 1, 1, 1, 1)
    for (first, last, masked), rows in zip(spans, query.split([b - a for a, b, _ in spans], dim=2), strict=True):
        keys, values = (_windows(source, band, first, last) for source in sources)
        scores = _to_band(rows @ keys.mT, band, heads // kv_heads)
        seen = _seen(band, first, last, rows) if masked else None
        weights = _weigh(scores, taps, seen, rounds, normalised, beside)
        outputs.append(_from_band(weights, band, heads // kv_heads) @ values)
    output = torch.cat(outputs, dim=2).unflatten(3, (-1, size)).permute(1, 0, 3, 2, 4, 5)
    return output.reshape(batch, heads, count * size, -1)[:, :, :length]


def keep_ring(
    key: Tensor, value: Tensor, reach: int, lengths: Tensor | None = None, state: BandState | None = None
) -> BandState:
    """Return the state after keys and values [B, Hkv, N, .], `lengths` of them real, that follow `state`."""
    batch, _, length, _ = key.shape
    rings = (None, None) if state is None else state[:2]
    start = max(0, length - reach) if lengths is None else 0
    joined = [_line_up(x[:, :, start:], y, reach, 0) for x, y in zip((key, value), rings, strict=True)]
    added = torch.full((batch,), length, device=key.device) if lengths is None else lengths
    if lengths is None:  # a state is never a view of what it was made from
        kept = [x[:, :, length - start :].clone() for x in joined]
    else:
        index = lengths[:, None] + torch.arange(reach, device=key.device)
        kept = [take(x, index) for x in joined]
    return BandState(kept[0], kept[1], added if state is None else state.length + added)


def _line_up(x: Tensor, ring: Tensor | None, before: int, behind: int) -> Tensor:
    """Return x [B, Hkv, N, D] behind the ring, or behind `before` zeros, and `behind` zeros."""
    x = F.pad(x, (0, 0, 0 if ring is not None else before, behind))
    return x if ring is None else torch.cat([ring, x], dim=2)


def _spans(
    band: _Band, left: int, count: int, length: int, ragged: bool, step: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield the first and last + 1 block of each part, and whether its band reaches beyond the ends of a sequence."""
    head = min(count, -(-left // band.size))
    tail = count
    if band.end is not None:
        tail = head if ragged else min(count, max(head, (left + length - band.columns) // band.size + 1))
    for start, stop, masked in ((0, head, True), (head, tail, False), (tail, count, True)):
        for first in range(start, stop, step):
            yield first, min(first + step, stop), masked


def _windows(source: GradAccumulator, band: _Band, first: int, last: int) -> Tensor:
    """Return the keys that T blocks of queries see, [Hkv, B, T, K, D]."""
    part = source.narrow(2, first * band.size, (last - first) * band.size + band.width - 1)
    return part.unfold(2, band.columns, band.size).permute(1, 0, 2, 4, 3).contiguous()


def _seen(band: _Band, first: int, last: int, like: Tensor) -> Tensor:
    """Return which columns of the band are keys [B or 1, T, C, W]."""
    row = torch.arange(first * band.size, last * band.size, device=like.device).view(1, -1, band.size, 1)
    place = row + torch.arange(band.width, device=like.device)
    seen = place >= band.begin
    return seen if band.end is None else seen & (place < band.end)


def _to_band(scores: Tensor, band: _Band, groups: int) -> Tensor:
    """Return the band [H, B, T, C, W] of scores [Hkv, B, T, G C, K]: row c begins at column c."""
    scores = scores.unflatten(3, (groups, band.size)).movedim(3, 1).flatten(-2)
    return scores.unfold(-1, band.width, band.columns + 1).flatten(0, 1)


def _from_band(weights: Tensor, band: _Band, groups: int) -> Tensor:
    """Return weights [Hkv, B, T, G C, K] for a band [H, B, T, C, W], zero beside it."""
    lines = F.pad(weights, (0, band.size)).flatten(-2)[..., : band.size * band.columns]
    return lines.unflatten(-1, (band.size, -1)).unflatten(0, (-1, groups)).movedim(1, 3).flatten(3, 4)


def _weigh(
    band: Tensor, taps: _Taps, seen: Tensor | None, rounds: int, normalised: bool, sink: Tensor | None
) -> Tensor:
    """Return the weights [H, B, T, C, W] of a band of scores; `seen` is None where all of it is."""
    hidden = None if seen is None else ~seen
    for _ in range(rounds):
        band = band if hidden is None else band.masked_fill(hidden, 0.0)
        band = taps.convolve(band)
    if hidden is not None:
        band = band.masked_fill(hidden, LOWEST if normalised else 0.0)
    return softmax_beside(band, sink) if normalised else band


class _Taps:
    """The convolution of rows of `width` columns with the kernels [H, 2 t + 1], P columns at a time.

    These take from no more than P + 2 t columns around them, which is a product with a part of one matrix [H, U, P]:
    entry (u, v) is tap number u - v, where u counts from t columns before the P.
    """

    def __init__(self, kernel: Tensor, width: int):
        self.width, self.part, self.radius = width, min(PART, width), kernel.shape[1] // 2
        behind = (width - 1) // self.part * self.part  # where the last P columns begin
        self.first = max(0, self.radius - behind)  # u of the first column that any of them takes from
        end = min(self.part + 2 * self.radius, width + self.radius)
        line = F.pad(kernel, (self.part - 1 - self.first, end - 1 - 2 * self.radius))
        self.matrix = GradAccumulator(line.unfold(1, end - self.first, 1).flip(1).mT)

    def convolve(self, band: Tensor) -> Tensor:
        """Return sum_t w_t band[..., d + t], zero beyond the ends, for band [H, ..., W]."""
        rows = GradAccumulator(band.reshape(band.shape[0], -1, self.width))
        if self.part == self.width:
            return (rows.whole @ self.matrix.whole).view(band.shape)
        columns = []
        for start in range(0, self.width, self.part):
            low, high = max(0, start - self.radius), min(self.width, start + self.part + self.radius)
            taps = self.matrix.narrow(1, low - start + self.radius - self.first, high - low)
            columns.append(rows.narrow(2, low, high - low) @ taps)
        return torch.cat(columns, dim=-1)[..., : self.width].reshape(band.shape)
