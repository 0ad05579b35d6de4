"""One token of kernel attention by `causal_step.c`, from the heads to the output: what decoding does all the time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..runtime.cpu import call, dense_rows, operation
from ..runtime.output_pool import empty_output
from .autograd import log_weight
from .cpu import OPERANDS, NativeMap, all_operands, describe, map_operands, sizes_of
from .torch import LinearState


@operation("sums", "factor", "top", "state_after", "log_max_after")
def causal_step(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None, sums: Tensor,
    factor: Tensor | None, top: Tensor | None, state: Tensor, log_max: Tensor, state_after: Tensor,
    log_max_after: Tensor, query_weight: Tensor | None, query_bias: Tensor | None, key_weight: Tensor | None,
    key_bias: Tensor | None, activation: int, quadratic: float, offset: float, strict: bool,
) -> None:  # fmt: skip
    """`causal_sums` of one token, normalised; arguments as there. A query sees its own key unless `strict`."""
    operands = (query, key, value, sums, log_scale, log_decay, None, factor, top)
    states, maps = (state, log_max, state_after, log_max_after), (query_weight, query_bias, key_weight, key_bias)
    named = dict(zip(OPERANDS, operands, strict=True))
    everything = all_operands(named, states, maps)
    sizes, how = [*sizes_of(everything, activation), ("N", 1)], (activation, quadratic, offset)
    call("causal_step", everything, sizes, lambda: describe(named, states, maps, *how, strict=strict))


@register_flop_formula(torch.ops.hf_linattn.causal_step)
def _flops(query: Any, key: Any, value: Any, *rest: Any, **__: Any) -> int:
    """Adding the key to the state, reading it for every query, the maps."""
    (batch, heads, groups, _, input_size), size = query, rest[5][2] * rest[5][3]
    weights = zip(rest[9:13:2], (groups, 1), strict=True)
    maps = [2 * input_size * weight[-1] * number for weight, number in weights if weight]
    return batch * heads * (2 * (groups + 1) * size + sum(maps))


def step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: list[NativeMap],
    key_padding_mask: Tensor | None,
    log_decay: Tensor | None,
    state: LinearState | None,
) -> tuple[Tensor, LinearState]:
    """Return the output [B, Hkv, G, 1, Dv] and the next state; `state` stays as it is. Without gradients.

    Args:
        query: [B, Hkv, G, 1, D], before the feature maps. key: [B, Hkv, 1, D]. value: [B, Hkv, 1, Dv].
        key_padding_mask: [B, 1]. log_decay: [B, Hkv, 1].
    """
    return _step(query, key, value, maps, key_padding_mask, log_decay, state)


def strict_step(
    query: Tensor, key: Tensor, value: Tensor, maps: list[NativeMap], log_decay: Tensor | None, state: LinearState
) -> tuple[Tensor, Tensor, LinearState]:
    """`step_attention` to what was there before the key; with the log of the weights of each query [B, Hkv, G, 1]."""
    factor, top = query.new_empty(2, *query.shape[:4]).unbind()
    output, after = _step(query, key, value, maps, None, log_decay, state, factor, top)
    return output, log_weight(factor, top), after


def _step(query, key, value, maps, mask, log_decay, state, factor=None, top=None):
    hidden, rest = map_operands(query, key, maps, mask)
    if state is None:
        scaled = maps[1].activation == "exponential" or log_decay is not None
        state = LinearState.before(maps[1].width(key.shape[-1]), value, scaled)
    output = empty_output(query, value)
    before = state.kv.contiguous(), state.log_max.contiguous()
    after = LinearState(*(torch.empty_like(x) for x in before))
    heads = dense_rows(query), dense_rows(key), dense_rows(value)
    causal_step(*heads, hidden, log_decay, output, factor, top, *before, *after, *rest, factor is not None)
    return output, after
