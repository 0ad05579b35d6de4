"""Pooling: sequences of any length cut into the same number of segments, and attention to what stands for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..common.fused_attention import fused_attention
from ..common.numerics import LOWEST
from ..common.precision import accum_dtype, wide
from ..common.sink_logit import softmax_beside

FEW = 16  # keys among which PyTorch's kernel without a mask answers a query of NaN with zero
QUERIES = 8192  # of all heads at a time: large enough for the products, small enough for the cache


def segment_sums(
    inputs: Sequence[Tensor], num_segments: int, lengths: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Cut every sequence of n tokens into P segments, token j into segment floor(j P / n), and sum them up.

    Args:
        inputs: tensors [B, H, N, .]. num_segments: P. lengths: [B], n of each row; None if it is N for all.

    Returns:
        The number of tokens in each segment [B, P] ([1, P] without lengths); the sums [B, H, P, .] of each input, in
        at least float32 unless a segment is one token.
    """
    length, device = inputs[0].shape[2], inputs[0].device
    sizes = torch.tensor([length], device=device) if lengths is None else lengths
    # segment p begins at the first j with j P >= p n
    bounds = -(-torch.arange(num_segments + 1, device=device) * sizes[:, None] // num_segments)
    counts = bounds.diff(dim=1)
    if lengths is None and length % num_segments == 0:  # nothing to gather
        cut = [x.unflatten(2, (num_segments, length // num_segments)) for x in inputs]
        return counts, [x[..., 0, :] if x.shape[3] == 1 else x.sum(3, dtype=accum_dtype(x)) for x in cut]
    longest = -(-length // num_segments)
    steps = torch.arange(longest, device=device)
    index = (bounds[:, :-1, None] + steps).clamp(max=length - 1)
    outside = (steps >= counts[..., None])[:, None, ..., None]
    sums = []
    for x in inputs:
        if lengths is None:
            parts = x.index_select(2, index.flatten())
        else:
            parts = x.gather(2, index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
        parts = parts.unflatten(2, (num_segments, longest)).masked_fill(outside, 0)
        sums.append(parts.sum(3, dtype=accum_dtype(x)))
    return counts, sums


def slot_attention(
    query: Tensor, slot_key: Tensor, slot_value: Tensor, counts: Tensor | None, scaling: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Return softmax_s(scaling q . slot_key_s + log counts_s) slot_value_s, a slot that counts nothing left out.

    Args:
        query: [B, H, N, D]. slot_key: [B, Hkv, k, D]. slot_value: [B, Hkv, k, Dv]; H is a multiple of Hkv. Queries in
            half precision are answered in it where all slots stand for as many tokens, else in float32.
        counts: [B or 1, k], tokens for which each slot stands; None if all stand for as many (beside a sink: for one).
        sink: [H], the score of one more slot without value (`hf_linattn.ops.common.sink_logit`).
    """
    batch, heads, length, _ = query.shape
    kernel = sink is None and slot_key.shape[3] == slot_value.shape[3]  # of other widths it would keep all scores
    query = query if kernel and counts is None else wide(query)  # half precision would round the logs of counts
    slot_key, slot_value = slot_key.to(query.dtype), slot_value.to(query.dtype)
    bias = None
    if counts is not None:
        bias = counts.clamp(min=1).to(query.dtype).log().masked_fill(counts == 0, LOWEST)[:, None, None]
    # the queries of a group stand together, beside their one set of slots
    rows = query.reshape(batch, slot_key.shape[1], -1, query.shape[3])
    if kernel:
        if bias is None and slot_key.shape[2] < FEW:
            bias = slot_key.new_zeros(1, 1, 1, slot_key.shape[2])
        output = fused_attention(rows, slot_key, slot_value, attn_mask=bias, scale=scaling)
        return output.reshape(batch, heads, length, -1)
    keys = slot_key.transpose(-1, -2) * scaling
    step = max(QUERIES // (batch * slot_key.shape[1]), 64)
    beside: Any = repeat(None)
    if sink is not None:
        beside = sink.view(slot_key.shape[1], -1, 1, 1).expand(-1, -1, length, -1).flatten(1, 2).split(step, dim=1)
    parts = []
    for part, score in zip(rows.split(step, dim=2), beside, strict=False):
        scores = part @ keys
        parts.append(softmax_beside(scores if bias is None else scores + bias, score) @ slot_value)
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output.reshape(batch, heads, length, -1)
