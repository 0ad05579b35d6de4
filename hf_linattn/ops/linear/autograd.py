"""Causal kernel attention by causal sums over features, in C or in Triton, and its gradients in terms of such sums.

The backward pass keeps nothing of the size of the pairs and no state but the last: with the values v_j = [v_j, 1], the
gradients g_i = [dL/do_i, -dL/do_i . o_i] and w_i, the sum of the weights of query i,

    dL/dphi(q_i) = 1 / w_i sum_{j <= i} (g_i . v_j) phi(k_j)    dL/dphi(k_j) = sum_{i >= j} (v_j . g_i) phi(q_i) / w_i
    dL/dv_j      = sum_{i >= j} (phi(k_j) . phi(q_i)) g_i / w_i

are causal sums again, the last two read from the end; 1 / w_i is a scale of the row, and of what is read as a key,
beside those of the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.derivatives import first_order
from ..common.numerics import LOWEST
from ..common.precision import wide_dtype
from ..runtime.cpu import dense_rows
from ..runtime.output_pool import empty_output
from .torch import LinearState


class CausalSums(NamedTuple):
    """What forms causal sums over features.

    attend: called with (sequence_ids, output, query, key, value, log_scale, log_decay, state, weighed), see
        `causal_attention`, returns the output, the log of its weights if `weighed`, and the state after the last key.
    kinds: returns the dtypes that features may have, which are then rounded to that of the values.
    make_features: returns the features of heads by a `NativeMap`, in the dtype of the heads; None if PyTorch does.
    step: called with (query, key, log_scale, value, log_decay, key_padding_mask, state), of one token of features so
        made, returns the output and the state after it, without gradients; there where `make_features` is.
    attend_all: called with (output, query, key, value, log_scale), returns the output where every query sees all keys.
    """

    attend: Callable[..., tuple[Tensor, Tensor | None, LinearState]]
    kinds: Callable[[], Sequence[torch.dtype]] = lambda: (torch.float32,)
    make_features: Callable[..., Any] | None = None
    step: Callable[..., tuple[Tensor, LinearState]] | None = None
    attend_all: Callable[..., Tensor] | None = None


def causal_attention(
    causal_sums: CausalSums,
    query: Tensor,
    key: Tensor,
    log_scale: Tensor | None,
    value: Tensor,
    log_decay: Tensor | None,
    state: LinearState | None,
    output: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """Return the causal attention output [B, Hkv, G, N, Dv], and the state after the last key.

    Args:
        causal_sums: forms the sums.
        query: [B, Hkv, G, N, F], after the feature map. key: [B, Hkv, N, F], also masked. log_scale: [B, Hkv, N].
        value: [B, Hkv, N, Dv], in the dtype of the output, which may be half precision.
        log_decay: [B, Hkv, N]; with it there is a scale. state: what was read before.
        output: where to write it, if no gradients are needed.
        sequence_ids: [B, N], equal inside a packed sequence; there are log scales then. The state before belongs to
            the first sequence of each row, the state after to the last.
    """
    heads = _heads(causal_sums, query, key, value)
    output, _, after = causal_sums.attend(sequence_ids, output, *heads, log_scale, log_decay, state, False)
    return output, after


def weighed_attention(
    causal_sums: CausalSums,
    query: Tensor,
    key: Tensor,
    log_scale: Tensor | None,
    value: Tensor,
    log_decay: Tensor | None,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, LinearState]:
    """`causal_attention` from the start, with the log of what the weights of each query add up to [B, Hkv, G, N]."""
    heads = _heads(causal_sums, query, key, value)
    output, log, after = causal_sums.attend(sequence_ids, None, *heads, log_scale, log_decay, None, True)
    return output, cast(Tensor, log), after


def full_attention(
    causal_sums: CausalSums, query: Tensor, key: Tensor, log_scale: Tensor | None, value: Tensor, output: Tensor | None
) -> Tensor:
    """Return the output [B, Hkv, G, N, Dv] where every query sees all keys; arguments as above."""
    attend_all = cast(Callable[..., Tensor], causal_sums.attend_all)
    return attend_all(output, *_heads(causal_sums, query, key, value), log_scale)


def _heads(causal_sums: CausalSums, *heads: Tensor) -> Iterator[Tensor]:
    """Return query, key and value, the last, in a dtype that the sums are formed of, dense."""
    kind = heads[-1].dtype if heads[-1].dtype in causal_sums.kinds() else wide_dtype(heads[-1])
    return (dense_rows(x.to(kind)) for x in heads)


def attend_by_sums(
    operation: Callable[..., None],
    pack: Callable[[Tensor], tuple[Any, ...]],
    sequence_ids: Tensor | None,
    output: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_scale: Tensor | None,
    log_decay: Tensor | None,
    state: LinearState | None,
    weighed: bool,
) -> tuple[Tensor, Tensor | None, LinearState]:
    """`CausalSums.attend` by an operation that is called as `cpu.causal_sums` is.

    pack: what it is called with besides, for rows that hold several sequences; ids [B, N] as the tokens are read.
    """
    if state is None:
        state = LinearState.before(key.shape[-1], value, log_scale is not None)
    heads = (query, key, value, log_scale, log_decay, *state)
    packing = () if sequence_ids is None else pack(sequence_ids)
    if output is not None and not weighed:
        _, *after, _, _ = read(operation, heads, sums=output, rest=packing)
        return output, None, LinearState(*after)
    backwards = () if sequence_ids is None else pack(sequence_ids.flip(1))
    attended, log, *after = _CausalAttention.apply(operation, packing, backwards, *heads)
    return attended, log, LinearState(*after)


def log_weight(factor: Tensor, top: Tensor) -> Tensor:
    """Return the log of what the weights of each query add up to, `LOWEST` where that is nothing."""
    return torch.where(factor > 0, top - factor.log(), LOWEST)


def read(
    operation: Callable[..., None], heads: Any, normalise=True, reverse=False, row_scale=None, sums=None, rest=(),
    after=None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return sums, state, log_max, factor and top for (query, ..., kv, log_max), which stay as they are.

    sums: where to write them; None: in new memory. after: where to write the state and log_max; None: in memory as
    there is before, for which kv and log_max must be there.
    """
    query, key, value, log_scale, log_decay, kv, log_max = heads
    sums = empty_output(query, value) if sums is None else sums
    factor, top = query.new_empty(2, *query.shape[:4], dtype=wide_dtype(query)).unbind()
    before: list[Any] = [x if x is None else x.contiguous() for x in (kv, log_max)]
    after = tuple(x.new_empty(x.shape) for x in before) if after is None else after
    operands = (query, key, value, log_scale, log_decay, row_scale, sums, factor, top, *before, *after)
    operation(*operands, normalise, reverse, *rest)
    return sums, *after, factor, top


def decay_gradient(
    d_scale: Tensor, d_log: Tensor | None, factor: Tensor, kv_after: Tensor, d_kv: Tensor | None, reverse: bool = False
) -> Tensor:
    """Return the gradient of log_decay [B, Hkv, N] from those of the keys' log scales, of the log and of the state.

    A decay multiplies all weights of earlier keys in later queries, whose gradients add up to that of the query's log,
    and in the last state; without those of the keys that come no earlier. Those of a packed sequence that leaves no
    state add up to zero, so that the ones before it do not notice.
    """
    gradient = d_scale.double()
    if d_log is not None:
        gradient = gradient - torch.where(factor > 0, d_log, 0.0).double().sum(2)
    later = -gradient.cumsum(-1) if reverse else -gradient.flip(-1).cumsum(-1).flip(-1)
    of_state = 0.0 if d_kv is None else (kv_after * d_kv).double().sum((-1, -2))[..., None]
    return (later + of_state).to(d_scale.dtype)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operation, packing, backwards, query, key, value, log_scale, log_decay, kv, log_max):
        heads = (query, key, value, log_scale, log_decay, kv, log_max)
        output, *after, factor, top = read(operation, heads, rest=packing)
        ctx.save_for_backward(query, key, value, log_scale, log_decay, kv, log_max, output, *after, factor, top)
        ctx.operation, ctx.packing, ctx.backwards = operation, packing, backwards
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(after[1])
        return output, log_weight(factor, top), *after

    @staticmethod
    @first_order()
    def backward(ctx, d_output, d_log, d_kv, _):
        query, key, value, log_scale, log_decay, kv, log_max, output, kv_after, max_after, factor, top = (
            ctx.saved_tensors
        )
        operation, size = ctx.operation, value.shape[-1]
        d_output = torch.zeros_like(output) if d_output is None else d_output
        of_weight = -(d_output * output).sum(-1, keepdim=True)
        grad = torch.cat([d_output, of_weight if d_log is None else of_weight + d_log[..., None]], dim=-1)
        value = F.pad(value, (0, 1), value=1.0)
        # a query without weight has no gradient; as a key that is read from the end it must not be the largest
        share = torch.where(factor > 0, factor.log() - top, LOWEST)
        heads = (grad, value, key, log_scale, log_decay, kv.mT, log_max)
        d_query = read(operation, heads, normalise=False, row_scale=share, rest=ctx.packing)[0]
        # between two tokens that are read backwards comes the decay of the later one
        decay = None if log_decay is None else F.pad(log_decay[:, :, 1:], (0, 1))
        own = torch.zeros_like(share[:, :, 0]) if log_scale is None else log_scale
        from_end = {"normalise": False, "reverse": True, "row_scale": own[:, :, None], "rest": ctx.backwards}
        parts = []
        # the gradient of the last state is part of the first group's only; the largest exponent there is none without
        left = torch.zeros_like(kv) if d_kv is None else d_kv
        left_max = torch.full_like(log_max, LOWEST / 2) if d_kv is None else -max_after
        for query_part, grad_part, scale in zip(query.unbind(2), grad.unbind(2), share.unbind(2), strict=True):
            values = (key[:, :, None], query_part, grad_part[..., :size], scale, decay, left[..., :size], left_max)
            keys = (value[:, :, None], grad_part, query_part, scale, decay, left.mT, left_max)
            d_value, *_ = read(operation, values, **from_end)
            d_key, before, before_max, *_ = read(operation, keys, **from_end)
            passed = 0 if log_decay is None else log_decay[:, :, 0]
            d_before = before.mT * (before_max + passed + log_max).exp()[..., None, None]
            parts.append((d_key.squeeze(2), d_value.squeeze(2), d_before))
            left, left_max = torch.zeros_like(left), torch.full_like(left_max, LOWEST / 2)
        d_key, d_value, d_before = (functools.reduce(torch.add, groups) for groups in zip(*parts, strict=True))
        d_scale = None if log_scale is None else (key * d_key).sum(-1)
        d_decay = None if log_decay is None else decay_gradient(d_scale, d_log, factor, kv_after, d_kv)
        return None, None, None, d_query, d_key, d_value, d_scale, d_decay, d_before, None
