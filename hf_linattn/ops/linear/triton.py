"""Kernel attention by Triton: features, sums over keys and their gradients, and one token as in decoding.

The backward pass keeps the operands, the output, what it lacks for having been rounded, and a number per query: the
gradient of a query's weight is a sum of its output and that one's gradient, of which much cancels.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST
from ..common.precision import wide
from ..runtime.cpu import empty_output, output_for
from ..runtime.triton import kinds, no_kernels
from ..runtime.triton_row_products import row_products
from .autograd import Gradients, Kernels, Operands, Sums, attend
from .features import FeatureKernels, make_keys
from .triton_decode import step_attention
from .triton_features import FeatureMaker, make_features, no_step
from .triton_launch import causal_sums_backward_triton, causal_sums_triton, cut_for, too_wide
from .types import FeatureMap, Features, LinearCall, LinearState, specs_of


def unsupported(call: LinearCall) -> str | None:
    """Return why there are no kernels for a call."""
    if reason := no_kernels(call.key):
        return reason
    if call.is_step:
        if not call.policy.inference:
            return "one token with gradients or in training"
        return no_step(call.query_map, call.key_map)
    if reason := too_wide(call.value):
        return reason
    if call.causal or call.log_decay is not None:
        return None
    if call.sequence_ids is not None:
        return "packed sequences, read both ways without decay"
    return None if call.query.shape[2] == call.key.shape[2] else "other numbers of queries and keys"


def run(call: LinearCall) -> tuple[Tensor, LinearState | None]:
    """Return the output [B, H, N, Dv], and the state after a causal call."""
    if call.is_step:
        maps = specs_of(call.query_map, call.key_map)
        how: Any = {"key_padding_mask": call.key_padding_mask, "log_decay": call.log_decay, "state": call.state}
        attended, after = step_attention(call.grouped_query, call.key, call.value, maps, **how)
        return attended.flatten(1, 2), after
    if makers := own_maps(call.query_map, call.key_map):
        call = call._replace(query_map=makers[0], key_map=makers[1])
    else:
        call = call._replace(query=wide(call.query), key=wide(call.key))
    if call.causal:
        return SUMS.causal(call, call.key.shape[2])
    if call.log_decay is not None:
        return SUMS.two_way(call), None
    query = call.query_map(call.grouped_query).values
    (features, log_scale), _ = SUMS.keys(call.key_map, call.key, call.key_padding_mask)
    query, features, value = SUMS.heads(query, features, call.value)
    output = output_for(call.query, call.value)
    attended, _, _ = _attend(None, output, query, features, value, log_scale, None, None, False, causal=False)
    return attended.flatten(1, 2), None


def own_maps(query_map: FeatureMap, key_map: FeatureMap) -> list[Any]:
    """Return what makes the features of both maps by Triton, from heads as they are; nothing for unknown ones."""
    return [FeatureMaker(x) for x in specs_of(query_map, key_map)]


def _make_keys(key_map: Any, key: Tensor, mask: Tensor | None, scaled: bool = False) -> tuple[Features, bool]:
    """`FeatureKernels.keys`: one kernel makes features and hides those of masked keys, where it knows the map."""
    if not isinstance(key_map, FeatureMaker):
        return make_keys(key_map, key, mask, scaled)
    made = make_features(key, key_map.spec, mask, scaled)
    return made, key_map.spec.activation == "exponential"


class _How(NamedTuple):
    """Where the sequence of each token starts, read forwards and backwards [B, N], and whether pairs are causal."""

    starts: Tensor | None
    starts_back: Tensor | None
    causal: bool


def _attend(
    sequence_ids: Tensor | None, output: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    log_scale: Tensor | None, log_decay: Tensor | None, state: LinearState | None, weighed: bool, causal: bool = True,
) -> tuple[Tensor, Tensor | None, LinearState]:  # fmt: skip
    """`FeatureKernels.attend`; not `causal`: every query sees all keys."""
    starts = starts_back = None
    if sequence_ids is not None:
        starts, starts_back = sequence_starts(sequence_ids), sequence_starts(sequence_ids.flip(1))
    operands = Operands(query, key, value, log_scale, log_decay, *((None, None) if state is None else state))
    return attend(KERNELS, _How(starts, starts_back, causal), operands, (), output, weighed)


def sequence_starts(sequence_ids: Tensor) -> Tensor:
    """Return where the sequence of each token starts [B, N], int32."""
    begins = F.pad(sequence_ids[:, 1:] != sequence_ids[:, :-1], (1, 0))
    steps = torch.arange(begins.shape[1], device=begins.device, dtype=torch.int32)
    return torch.where(begins, steps, 0).cummax(1).values


def _forward(
    how: _How, operands: Operands, parameters: Any, output: Tensor | None, weighed: bool, keep: bool
) -> Sums:
    """`Kernels.forward`."""
    query, key, value, log_scale, log_decay, kv, log_max = operands
    output = empty_output(query, value) if output is None else output
    rest = torch.empty_like(output) if keep and value.dtype != torch.float32 else None
    factor = query.new_empty(query.shape[:4], dtype=torch.float32)
    scaled = log_scale is not None or log_decay is not None
    top = torch.empty_like(factor) if weighed and scaled else None
    log = torch.empty_like(factor) if weighed else None
    kv = None if kv is None else kv.contiguous()
    kv_after = factor.new_empty(*key.shape[:2], key.shape[-1], value.shape[-1] + 1)
    max_after = factor.new_empty(key.shape[:2])
    states = factor.new_empty(*key.shape[:2], cut_for(query, value).num_segments - how.causal, *kv_after.shape[2:])
    causal_sums_triton(
        query, key, value, log_scale, log_decay, output, rest, factor, top, log, kv, log_max, states, kv_after,
        max_after, how.starts, how.causal,
    )  # fmt: skip
    return Sums(output, factor, top, kv_after, max_after, (rest, states), log)


def _backward(
    how: _How, operands: Operands, parameters: Any, sums: Sums, d_output: Tensor, d_log: Tensor | None,
    d_kv: Tensor | None, needed: Any,
) -> Gradients:  # fmt: skip
    """`Kernels.backward`."""
    query, key, value, log_scale, log_decay, kv, log_max = cast(Any, operands)
    kv = None if kv is None else kv.contiguous()
    (rest, states), factor = sums.kept, sums.factor
    extra = row_products(d_output, sums.output, rest, d_log, negative=True)
    (batch, heads, groups, length, key_size), value_size = query.shape, value.shape[-1]
    kind = value.dtype if groups == 1 else torch.float32  # of what is added up over groups
    d_query = torch.empty_like(query)
    d_key, d_value = (
        value.new_empty(batch, heads, groups, length, size, dtype=kind) for size in (key_size, value_size)
    )
    before, before_max = (factor.new_empty(batch, heads, groups, *shape) for shape in (sums.kv.shape[2:], ()))
    d_state = d_max = None
    if d_kv is not None:  # part of the first group's only
        d_max = torch.full_like(before_max, LOWEST / 2)
        d_state = F.pad(d_kv[:, :, None], (*(0,) * 4, 0, groups - 1)).contiguous()
        d_max[:, :, 0] = -sums.log_max
    causal_sums_backward_triton(
        query, key, value, log_scale, log_decay, d_output, extra, factor, sums.top, kv if how.causal else sums.kv,
        log_max, states, d_state, d_max, d_query, d_key, d_value, before, before_max, how.starts, how.starts_back,
        how.causal,
    )  # fmt: skip
    d_key, d_value = (x.squeeze(2) if groups == 1 else x.sum(2).to(value.dtype) for x in (d_key, d_value))
    d_before = None
    if kv is not None:
        passed = 0.0 if log_decay is None else log_decay[:, :, :1]
        d_before = (before * (before_max + passed + log_max[:, :, None]).exp()[..., None, None]).sum(2)
    d_scale = None if log_scale is None and log_decay is None else row_products(key, d_key)
    return Gradients(d_query, d_key, d_value, d_scale, d_before)


KERNELS = Kernels(_forward, _backward)
SUMS = FeatureKernels(_attend, kinds, _make_keys)
