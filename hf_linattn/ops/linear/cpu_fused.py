"""Kernel attention in C from the heads to the output, feature maps included, and back.

The backward pass keeps the heads, the output, a number per query and the state before every `SEGMENT` tokens: features
are made again, chunk by chunk. With `causal_sums` what they are made of is known to autograd instead.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ...errors import OperandError
from ..common.derivatives import first_order
from ..common.padding import Packed
from ..runtime.cpu import Operand, call, dense_rows, operation
from ..runtime.output_pool import empty_like, empty_output
from .autograd import decay_gradient, log_weight, read
from .cpu import (
    OPERANDS,
    SEGMENT,
    LinearArgs,
    NativeMap,
    all_operands,
    causal_sums,
    chunk_size,
    describe,
    make_checkpoints,
    map_operands,
    sizes_of,
)
from .torch import LinearState

GRADIENTS = ("d_sums", "d_log", "d_query", "d_key", "d_value", "d_scale")
GROUPED_GRADIENTS = {"d_sums", "d_log", "d_query"}
PLACES = ("d_query_weight", "d_query_bias", "d_key_weight", "d_key_bias", "d_state", "d_before")


class LinearBackwardArgs(ctypes.Structure):
    """`struct linear_bwd_args` of linear_bwd.c."""

    _fields_ = (
        ("forward", LinearArgs),
        *((name, Operand) for name in GRADIENTS),
        *((name, ctypes.c_void_p) for name in PLACES),
    )


@operation(*GRADIENTS[2:], *PLACES[:4], "d_before")
def causal_sums_backward(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None, sums: Tensor,
    factor: Tensor, state: Tensor | None, log_max: Tensor | None, state_after: Tensor, log_max_after: Tensor,
    query_weight: Tensor | None, query_bias: Tensor | None, key_weight: Tensor | None, key_bias: Tensor | None,
    activation: int, quadratic: float, offset: float, bidirectional: bool, packed: Tensor | None,
    checkpoints: Tensor | None, d_sums: Tensor, d_log: Tensor | None, d_query: Tensor, d_key: Tensor,
    d_value: Tensor, d_scale: Tensor, d_query_weight: Tensor | None, d_query_bias: Tensor | None,
    d_key_weight: Tensor | None, d_key_bias: Tensor | None, d_state: Tensor | None, d_before: Tensor | None,
    reverse: bool,
) -> None:  # fmt: skip
    """Write the gradients of a call of `causal_sums`, each shaped as what it belongs to.

    Args:
        checkpoints: as it left them; None where every query sees all keys.
        d_sums, d_log, d_state: gradients of the output, of the log of its weights and of the last state.
        d_scale: [B, Hkv, N], of the log scales of the keys. d_before: of the first state.
        reverse: whether tokens were read from the last to the first.
        d_query_weight: [B, Hkv, G, D, m]. d_query_bias: [B, Hkv, G, m]. d_key_weight, d_key_bias: without G.
    """
    forward = dict.fromkeys(OPERANDS)
    forward |= {"query": query, "key": key, "value": value, "sums": sums, "factor": factor}
    forward |= {"log_scale": log_scale, "log_decay": log_decay}
    states, maps = (state, log_max, state_after, log_max_after), (query_weight, query_bias, key_weight, key_bias)
    gradients = dict(zip(GRADIENTS, (d_sums, d_log, d_query, d_key, d_value, d_scale), strict=True))
    learned = (d_query_weight, d_query_bias, d_key_weight, d_key_bias, d_state, d_before)
    places = dict(zip(PLACES, learned, strict=True))
    settings: dict[str, Any] = {"reverse": reverse, "bidirectional": bidirectional, "packed": packed}
    settings |= {"checkpoints": checkpoints}
    operands = all_operands(forward, states, maps, packed, checkpoints)
    if checkpoints is None and not bidirectional:
        raise OperandError("causal_sums_backward: there are no 'checkpoints'; hand over those of causal_sums")

    def describe_both() -> LinearBackwardArgs:
        return LinearBackwardArgs(
            forward=describe(forward, states, maps, activation, quadratic, offset, **settings),
            **{name: Operand.of(x, name in GROUPED_GRADIENTS, reverse) for name, x in gradients.items()},
            **{name: None if x is None else x.data_ptr() for name, x in places.items()},
        )

    sizes = sizes_of(operands, activation, bidirectional=bidirectional)
    call("causal_sums_backward", operands | gradients | places, sizes, describe_both)


@register_flop_formula(torch.ops.hf_linattn.causal_sums_backward, get_raw=True)
def _flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **__: Any) -> int:
    """Pairs inside a chunk five times; a state read once, another folded and read twice; if causal the first is folded
    too, for all chunks of a segment but the last; the maps."""
    (batch, heads, groups, length, input_size), value_size, key_size = query.shape, value.shape[-1], rest[6].shape[2]
    bidirectional, chunk = rest[15], chunk_size(query, key_size)
    learned = 2 if rest[24] is None else 3  # features, what they are made of, the weight itself
    weights = [(x, number) for x, number in zip((rest[8], rest[10]), (groups, 1), strict=True) if x is not None]
    maps = [2 * learned * input_size * weight.shape[-1] * number for weight, number in weights]
    pairs = 0 if bidirectional else groups * chunk * (3 * key_size + 2 * value_size)
    state = 2 * key_size * value_size
    folded = 0 if bidirectional else state * (SEGMENT - chunk) // SEGMENT
    return batch * heads * length * (pairs + (2 * groups + 2) * state + folded + sum(maps))


def mapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: list[NativeMap],
    key_padding_mask: Tensor | None,
    log_decay: Tensor | None,
    state: LinearState | None,
    output: Tensor | None = None,
    bidirectional: bool = False,
    reverse: bool = False,
    packed: Packed | None = None,
    weighed: bool = True,
) -> tuple[Tensor, Tensor, LinearState]:
    """Return the attention output [B, Hkv, G, N, Dv], the log of its weights, and the state after the last key.

    Args:
        query: [B, Hkv, G, N, D], before the feature maps. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]. Half precision
            is read as it is, and the output in it, too; state, log and sums are float32.
        key_padding_mask: [B, N]. log_decay: [B, Hkv, N]. state: what was read before.
        output: where to write it, if no gradients are needed.
        bidirectional: every query sees all keys; without decay and log.
        reverse: read from the last token to the first.
        packed: the sequences of the rows, if these hold several; the state before belongs to the first of a row, the
            state after to the last (if bidirectional, there is one after each).
        weighed: whether the log is wanted; None else.

    The log of what the weights of a query add up to is [B, Hkv, G, N], `LOWEST` where that is nothing.
    """
    hidden, rest = map_operands(query, key, maps, key_padding_mask)
    heads: Any = dense_rows(query), dense_rows(key), dense_rows(value)
    places = None if packed is None else (packed.backwards() if reverse else packed).places
    before, rest = (None, None) if state is None else state, (*rest, bidirectional, places)
    num_features = maps[1].width(key.shape[-1])
    if torch.is_grad_enabled():
        weights = (x for native in maps for x in (native.scaled_weight(), native.bias))
        how = num_features, rest, reverse, weighed
        attended, log, *after = _MappedAttention.apply(*heads, log_decay, *before, *weights, hidden, how)
    else:
        heads = (*heads, hidden, log_decay, *before)
        attended, *after, factor, top = _read(heads, num_features, rest, reverse, output)
        log = log_weight(factor, top) if weighed else None
    return attended, log, LinearState(*after)


def _read(
    heads: Any, num_features: int, rest: Any, reverse: bool, output: Tensor | None = None,
    checkpoints: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`read` by the C; queries that see all keys need the state that each of their sequences leaves."""
    _, key, value, *_ = heads
    *_, bidirectional, places = rest
    states = len(places) if bidirectional and places is not None else len(key)
    kv = value.new_empty(states, key.shape[1], num_features, value.shape[-1] + 1, dtype=torch.float32)
    after = kv, kv.new_empty(kv.shape[:2])
    return read(causal_sums, heads, reverse=reverse, sums=output, rest=(*rest, checkpoints), after=after)


def two_way_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: list[NativeMap],
    key_padding_mask: Tensor | None,
    log_decay: Tensor,
    packed: Packed | None = None,
) -> Tensor:
    """Return the bidirectional output [B, Hkv, G, N, Dv] of weights that decay; arguments as in `mapped_attention`.

    Keys up to a query are read forwards; those after it backwards, each beside the query before it, so that no query
    meets its own key twice. The decay between these two multiplies all that the query reads there.
    """
    output, log, _ = mapped_attention(query, key, value, maps, key_padding_mask, log_decay, None, packed=packed)
    if key.shape[2] == 1:
        return output
    mask = None if key_padding_mask is None else key_padding_mask[:, 1:].bool()
    if packed is not None:  # beside the last query of a sequence lies the first key of the next one
        own = ~packed.begins[:, 1:]
        mask, packed = own if mask is None else own & mask, packed.shortened()
    # read backwards, what comes between two tokens is the decay of the later one
    later = query[..., :-1, :], key[:, :, 1:], value[:, :, 1:], maps, mask, F.pad(log_decay[:, :, 2:], (0, 1)), None
    after, after_log, _ = mapped_attention(*later, reverse=True, packed=packed)
    return join(output, log, after, after_log + log_decay[:, :, None, 1:])[0]


def join(output: Tensor, log: Tensor, other: Tensor, other_log: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention to both sets of keys and its log, from that to each; the last queries may lack the other."""
    last = other.shape[3]
    own = log[..., :last]
    share = torch.sigmoid(other_log - own)[..., None].to(output.dtype)
    joint = torch.lerp(output[:, :, :, :last], other.to(output.dtype), share)
    logs = torch.cat([torch.logaddexp(own, other_log), log[..., last:]], dim=3)
    return torch.cat([joint, output[:, :, :, last:]], dim=3), logs


class _MappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, log_decay, kv, log_max, *rest):
        *parameters, hidden, (num_features, operands, reverse, weighed) = rest
        heads = query, key, value, hidden, log_decay, kv, log_max
        *_, bidirectional, places = operands
        checkpoints = None if bidirectional else make_checkpoints(query, num_features, value.shape[-1], places)
        # differences to it are gradients, for which half precision has too few digits
        output = empty_output(query, value, exact=True)
        _, *after, factor, top = _read(heads, num_features, operands, reverse, output, checkpoints)
        kept = query, key, value, hidden, log_decay, kv, log_max, output, *after, factor, checkpoints
        ctx.save_for_backward(*kept, *parameters)
        ctx.operands, ctx.reverse = operands, reverse
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(after[1])
        return output.to(value.dtype), log_weight(factor, top) if weighed else None, *after

    @staticmethod
    @first_order()
    def backward(ctx, d_output, d_log, d_kv, _):
        query, key, value, hidden, log_decay, kv, log_max, output, kv_after, max_after, factor, *rest = (
            ctx.saved_tensors
        )
        checkpoints, *parameters = rest
        d_output = torch.zeros_like(output, dtype=value.dtype) if d_output is None else dense_rows(d_output)
        d_kv = None if d_kv is None else d_kv.contiguous()
        d_query, d_key, d_value = (empty_like(x) for x in (query, key, value))
        d_scale = factor.new_empty(key.shape[:3])
        before, d_before = (None, None), None
        if kv is not None:
            before, d_before = (kv.contiguous(), log_max.contiguous()), kv.new_empty(kv.shape)
        d_parameters = [
            _room(parameter, heads) if needed else None
            for parameter, heads, needed in zip(
                parameters, (query.shape[:3],) * 2 + (key.shape[:2],) * 2, ctx.needs_input_grad[6:10], strict=True
            )
        ]
        causal_sums_backward(
            query, key, value, hidden, log_decay, output, factor, *before, kv_after, max_after,
            *ctx.operands, checkpoints, d_output, d_log, d_query, d_key, d_value, d_scale,
            *d_parameters, d_kv, d_before, ctx.reverse,
        )  # fmt: skip
        d_parameters = [
            None if d is None else d.sum_to_size(parameter.shape).to(parameter.dtype)
            for d, parameter in zip(d_parameters, parameters, strict=True)
        ]
        d_decay = None
        if ctx.needs_input_grad[3]:
            d_decay = decay_gradient(d_scale, d_log, factor, kv_after, d_kv, ctx.reverse)
        return d_query, d_key, d_value, d_decay, d_before, None, *d_parameters, None, None


def _room(parameter: Tensor, heads: torch.Size) -> Tensor:
    """Memory for the gradient of a map's weight [*heads, D, m] or bias [*heads, m] in every row."""
    return parameter.new_empty(*heads, *parameter.shape[len(heads) - 1 :], dtype=torch.float32)
