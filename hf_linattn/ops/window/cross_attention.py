"""A window that moves over an encoder's tokens as the decoder goes on."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.exact_softmax import masked_attention

BLOCK = 64  # queries whose keys are fetched together, at least
FINEST = 10**6  # parts of a token in which a window moves on


class EncoderTokens(NamedTuple):
    """An encoder's tokens, the real ones of each row first, and how many queries have been answered.

    key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. length: [B], real tokens. position: [B], the next query's; the same in
    every row.
    """

    key: Tensor
    value: Tensor
    length: Tensor
    position: Tensor


def window_centre(position: Tensor, length: Tensor, keys_per_query: float) -> Tensor:
    """Return min(floor(i keys_per_query), n - 1) for queries at `position` [..., Nq] and n = `length` [..., 1].

    In integers, as float32 is too coarse and some GPUs have no float64: `keys_per_query` is the nearest fraction.
    """
    rate = Fraction(keys_per_query).limit_denominator(FINEST)
    centre = position * rate.numerator // rate.denominator
    return torch.minimum(centre, length - 1).clamp(min=0)


def moving_window_attention(
    query: Tensor,
    state: EncoderTokens,
    *,
    window_size: int,
    keys_per_query: float,
    scaling: float,
    sink: Tensor | None = None,
) -> tuple[Tensor, EncoderTokens]:
    """Return softmax attention to the keys less than `window_size` from each query's centre, and the state after it.

    Args:
        query: [B, H, Nq, D], the queries from `state.position` on; their centres are those of `window_centre`.
        sink: [H], see `hf_linattn.ops.common.sink_logit`.

    Returns:
        [B, H, Nq, Dv], zero in rows without tokens. Time O(Nq (window_size + keys_per_query) (D + Dv)).
    """
    count, device = query.shape[2], query.device
    size = min(max(BLOCK, window_size), count)
    blocks, total = -(-count // size), state.key.shape[2]
    position = (state.position[:, None] + torch.arange(blocks * size, device=device)).unflatten(1, (blocks, size))
    length = state.length[:, None, None]
    centre = window_centre(position, length, keys_per_query)  # [B, blocks, size]
    width = min(int((size - 1) * keys_per_query) + 2 * window_size, total)
    first = (centre[..., :1] - window_size + 1).clamp(min=0, max=max(total - width, 0))
    place = first + torch.arange(width, device=device)  # [B, blocks, width]
    # gathered once: the gradient of every gather is as large as all keys
    key, value = (_take(x, place) for x in (state.key, state.value))
    seen = ((centre[..., None] - place[:, :, None]).abs() < window_size) & (place < length)[:, :, None]
    seen = seen.flatten(0, 1)[:, None]
    query = F.pad(query, (0, 0, 0, blocks * size - count)).unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)
    output = masked_attention(query, key, value, seen, scaling, sink=sink)
    output = output.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :count]
    return output, state._replace(position=state.position + count)


def _take(x: Tensor, place: Tensor) -> Tensor:
    """Return the places [B, blocks, width] of x [B, Hkv, N, D] as [B blocks, Hkv, width, D]."""
    index = place.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index).unflatten(2, place.shape[1:]).transpose(1, 2).flatten(0, 1)
