"""Kernel attention of features by Triton, with its gradients: what `CausalSums` of a GPU does.

The backward pass keeps the operands, the output, what it lacks for having been rounded, and a number per query: the
gradient of a query's weight is a sum of its output and that one's gradient, of which much cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.derivatives import first_order
from ..common.numerics import LOWEST
from ..common.precision import wide_dtype
from ..runtime.cpu import dense_rows
from ..runtime.output_pool import empty_output
from ..runtime.triton import kinds
from ..runtime.triton_row_products import row_products
from .autograd import CausalSums, decay_gradient, log_weight
from .torch import LinearState
from .triton_decode import step_attention
from .triton_features import make_features
from .triton_launch import causal_sums_backward_triton, causal_sums_triton, cut_for


def attend(
    sequence_ids: Tensor | None, output: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    log_scale: Tensor | None, log_decay: Tensor | None, state: LinearState | None, weighed: bool, causal: bool = True,
) -> tuple[Tensor, Tensor | None, LinearState]:  # fmt: skip
    """Return the attention, the log of its weights if `weighed`, and the state after; see `CausalSums.attend`."""
    starts = starts_back = None
    if sequence_ids is not None:
        starts, starts_back = sequence_starts(sequence_ids), sequence_starts(sequence_ids.flip(1))
    scaled = log_scale is not None or log_decay is not None
    kv, log_max = (None, _least(value, scaled)) if state is None else state
    operands = query, key, value, log_scale, log_decay, kv, log_max
    if output is not None:
        attended, log, *after = read(operands, starts, output, weighed, causal)[:4]
    else:
        attended, log, *after = _CausalAttention.apply(starts, starts_back, weighed, causal, *operands)
    return attended, log, LinearState(*after)


def attend_all(
    output: Tensor | None, query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None
) -> Tensor:  # fmt: skip
    """Return the attention of queries that see all keys; see `CausalSums.attend_all`."""
    return attend(None, output, query, key, value, log_scale, None, None, False, causal=False)[0]


def _least(value: Tensor, scaled: bool) -> Tensor:
    """The largest exponent of an empty state [B, Hkv]."""
    return value.new_full(value.shape[:2], LOWEST / 2 if scaled else 0.0, dtype=wide_dtype(value))


def sequence_starts(sequence_ids: Tensor) -> Tensor:
    """Return where the sequence of each token starts [B, N], int32."""
    begins = F.pad(sequence_ids[:, 1:] != sequence_ids[:, :-1], (1, 0))
    steps = torch.arange(begins.shape[1], device=begins.device, dtype=torch.int32)
    return torch.where(begins, steps, 0).cummax(1).values


def read(
    operands: Any, starts: Tensor | None, output: Tensor, weighed: bool, causal: bool, rest: Tensor | None = None
) -> Any:
    """Write the output and return it, the log of its weights, the state after, and what the backward pass keeps."""
    query, key, value, log_scale, log_decay, kv, log_max = operands
    factor = query.new_empty(query.shape[:4], dtype=torch.float32)
    top = torch.empty_like(factor) if weighed else None
    kv = None if kv is None else kv.contiguous()
    kv_after = factor.new_empty(*key.shape[:2], key.shape[-1], value.shape[-1] + 1)
    max_after = torch.empty_like(log_max)
    states = factor.new_empty(*key.shape[:2], cut_for(query, value).num_segments - causal, *kv_after.shape[2:])
    causal_sums_triton(
        query, key, value, log_scale, log_decay, output, rest, factor, top, kv, log_max, states, kv_after, max_after,
        starts, causal,
    )  # fmt: skip
    log = None if top is None else log_weight(factor, top)
    return output, log, kv_after, max_after, factor, top, states


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, starts, starts_back, weighed, causal, *operands):
        query, _, value = operands[:3]
        output = empty_output(query, value)
        rest = None if value.dtype == torch.float32 else torch.empty_like(output)
        output, log, kv_after, max_after, factor, top, states = read(operands, starts, output, True, causal, rest)
        ctx.save_for_backward(*operands, output, rest, kv_after, max_after, factor, top, states, starts, starts_back)
        ctx.causal = causal
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_after)
        return output, log if weighed else None, kv_after, max_after

    @staticmethod
    @first_order()
    def backward(ctx, d_output, d_log, d_kv, _):
        operands, kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        query, key, value, log_scale, log_decay, kv, log_max = operands
        output, rest, kv_after, max_after, factor, top, states, starts, starts_back = kept
        grad = torch.zeros_like(output) if d_output is None else dense_rows(d_output)
        extra = -row_products(grad, output, rest)
        extra = extra if d_log is None else extra + d_log
        (batch, heads, groups, length, key_size), value_size = query.shape, value.shape[-1]
        kind = value.dtype if groups == 1 else torch.float32  # of what is added up over groups
        d_query = torch.empty_like(query)
        d_key, d_value = (
            value.new_empty(batch, heads, groups, length, size, dtype=kind) for size in (key_size, value_size)
        )
        before, before_max = (factor.new_empty(batch, heads, groups, *shape) for shape in (kv_after.shape[2:], ()))
        d_max = torch.full_like(before_max, LOWEST / 2)
        d_state = None
        if d_kv is not None:  # part of the first group's only
            d_state = F.pad(d_kv[:, :, None], (*(0,) * 4, 0, groups - 1)).contiguous()
            d_max[:, :, 0] = -max_after
        causal_sums_backward_triton(
            query, key, value, log_scale, log_decay, grad, extra, factor, top, kv if ctx.causal else kv_after, log_max,
            states, d_state, d_max, d_query, d_key, d_value, before, before_max, starts, starts_back, ctx.causal,
        )  # fmt: skip
        d_key, d_value = (x.squeeze(2) if groups == 1 else x.sum(2).to(value.dtype) for x in (d_key, d_value))
        d_before = None
        if kv is not None:
            passed = 0 if log_decay is None else log_decay[:, :, :1]
            d_before = (before * (before_max + passed + log_max[:, :, None]).exp()[..., None, None]).sum(2)
        d_scale = None if log_scale is None and log_decay is None else row_products(key, d_key)
        d_decay = None if log_decay is None else decay_gradient(d_scale, d_log, factor, kv_after, d_kv)
        d_scale = None if log_scale is None else d_scale
        return None, None, None, None, d_query, d_key, d_value, d_scale, d_decay, d_before, None


TRITON_SUMS = CausalSums(attend, kinds, make_features, step_attention, attend_all)
