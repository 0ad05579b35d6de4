"""Causal kernel attention by `causal_sums.c`: what `chunk_sums` computes, in one pass through the caches of a CPU.

The backward pass keeps nothing of the size of the pairs and no state but the last: with the normalised gradients
g_i = [dL/do_i, -dL/do_i . o_i] / weight_i and the values v_j = [v_j, 1],

    dL/dphi(q_i) = sum_{j <= i} (g_i . v_j) phi(k_j)     dL/dphi(k_j) = sum_{i >= j} (v_j . g_i) phi(q_i)
    dL/dv_j      = sum_{i >= j} (phi(k_j) . phi(q_i)) g_i

are causal sums again, the last two read from the end, with the log scales of the forward pass.

Feature maps that can say what they are (`NativeMap`) are computed by the C too, chunk by chunk: see
`mapped_attention`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ...errors import UnsupportedModelError
from ..chunk_sums import CHUNK_SIZE, LEAST_WEIGHT, LinearState
from ..exponential import LOWEST
from .library import Operand, call, dense_rows, empty_output, operation, suits

ACTIVATIONS = ("given", "elu", "relu", "exponential", "softmax_pair")  # `enum activation` of causal_sums.h
COLUMNS = 32  # a multiple of the width of a tile


class NativeMap(NamedTuple):
    """A feature map as causal_sums.c knows it: an activation of z = x weight + bias, of z = x without weight.

    activation: `elu` (elu(z) + 1), `relu`, `exponential` (e^z, its log scale more by quadratic |x|^2 + offset) or
    `softmax_pair` ([softmax(z), softmax(-z)]). weight: [*heads, D, m]. bias: [*heads, m].
    """

    activation: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    quadratic: float = 0.0
    offset: float = 0.0

    def operands(self, heads: int, groups: int) -> tuple[Tensor | None, Tensor | None]:
        """Weight [Hkv, G, D, columns] and bias [Hkv, G, m] for all heads."""
        if self.weight is None:
            return None, None
        weight, bias = self.weight.detach().float(), None if self.bias is None else self.bias.detach().float()
        if weight.dim() == 3:
            weight, bias = weight.unsqueeze(1), None if bias is None else bias.unsqueeze(1)
        missing = -weight.shape[-1] % COLUMNS
        weight = (F.pad(weight, (0, missing)) if missing else weight).contiguous()
        weight = weight.expand(heads, groups, *weight.shape[-2:])
        return weight, None if bias is None else bias.expand(heads, groups, -1)


class MapOperands(ctypes.Structure):
    """`feature_map` of causal_sums.h."""

    _fields_ = (("weight", Operand), ("bias", Operand))

    @classmethod
    def of(cls, weight: Tensor | None, bias: Tensor | None) -> MapOperands:
        """Describe weight [Hkv, G, D, columns] and bias [Hkv, G, m]."""
        places = (
            Operand() if x is None else Operand(x.data_ptr(), 0, *x.stride()[:2], x.stride(2)) for x in (weight, bias)
        )
        return cls(*places)


OPERANDS = ("query", "key", "value", "sums", "log_scale", "log_decay", "row_scale", "factor", "top")
STATES = ("state", "log_max", "state_after", "log_max_after")
GROUPED = {"query", "sums", "row_scale", "factor", "top"}
SIZES = ("batches", "heads", "groups", "length", "key_size", "value_size", "normalise", "threads")


class Problem(ctypes.Structure):
    """`struct problem` of causal_sums.h."""

    _fields_ = (
        *((name, Operand) for name in OPERANDS),
        *((name, ctypes.c_void_p) for name in STATES),
        *((name, ctypes.c_int64) for name in SIZES),
        ("query_map", MapOperands),
        ("key_map", MapOperands),
        *((name, ctypes.c_int64) for name in ("activation", "input_size", "bidirectional", "strict")),
        *((name, ctypes.c_float) for name in ("quadratic", "offset", "least_weight")),
    )


def can_read(query: Tensor, key: Tensor, sequence_ids: Tensor | None) -> bool:
    """Whether nothing is packed, and there are sequences for half of the threads: each is read by one."""
    return suits(query) and sequence_ids is None and 2 * key.shape[:2].numel() >= torch.get_num_threads()


def native_maps(query_map: Any, key_map: Any) -> list[NativeMap]:
    """Return the two maps as the C knows them, nothing where it does not know them.

    Raises:
        UnsupportedModelError: they have no weights, which an operation would not notice.
    """
    both = (query_map,) if query_map is key_map else (query_map, key_map)
    maps: list[Any] = [getattr(x, "native", lambda: None)() for x in both]
    if not all(maps):
        return []
    if any(x.is_meta for own in maps for x in (own.weight, own.bias) if x is not None):
        raise UnsupportedModelError(
            "a feature map has its weights on the device 'meta', where they have no values, and its inputs on 'cpu';"
            " load them with from_pretrained, or move the model with to_empty and load_state_dict"
        )
    return [maps[0], maps[-1]]


def describe(
    operands: dict[str, Any], states: tuple[Tensor, ...], maps: tuple[Tensor | None, ...], activation: int,
    quadratic: float, offset: float, normalise: bool = True, reverse: bool = False, bidirectional: bool = False,
    strict: bool = False,
) -> Problem:  # fmt: skip
    """Describe a problem by the tensors named in `OPERANDS` and `STATES` and the operands of its maps."""
    query, value = operands["query"], operands["value"]
    state, query_weight, query_bias, key_weight, key_bias = states[0], *maps
    sizes = (*query.shape[:4], state.shape[2], value.shape[-1], normalise, torch.get_num_threads())
    return Problem(
        **{name: Operand.of(operand, name in GROUPED, reverse) for name, operand in operands.items()},
        **{name: x.data_ptr() for name, x in zip(STATES, states, strict=True)},
        **dict(zip(SIZES, sizes, strict=True)),
        query_map=MapOperands.of(query_weight, query_bias),
        key_map=MapOperands.of(key_weight, key_bias),
        activation=activation,
        input_size=query.shape[-1],
        bidirectional=bidirectional,
        strict=strict,
        quadratic=quadratic,
        offset=offset,
        least_weight=LEAST_WEIGHT[torch.float32],
    )


@operation("sums", "factor", "top", "state_after", "log_max_after")
def causal_sums(
    query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None, log_decay: Tensor | None,
    row_scale: Tensor | None, sums: Tensor, factor: Tensor, top: Tensor, state: Tensor, log_max: Tensor,
    state_after: Tensor, log_max_after: Tensor, normalise: bool, reverse: bool, query_weight: Tensor | None = None,
    query_bias: Tensor | None = None, key_weight: Tensor | None = None, key_bias: Tensor | None = None,
    activation: int = 0, quadratic: float = 0.0, offset: float = 0.0, bidirectional: bool = False,
) -> None:
    """Work through one problem of causal_sums.c.

    Args:
        query: [B, Hkv, G, N, K]. key: [B, Hkv, N, K]. value: [B, Hkv, N, Dv]. log_scale, log_decay: [B, Hkv, N].
            With an activation that is not `given` query and key are [..., D], and K is the number of features.
        row_scale: [B, Hkv, G, N]; where not None, `sums` are multiplied by exp(row_scale + top).
        sums: [B, Hkv, G, N, Dv]. factor: [B, Hkv, G, N], what they were multiplied by. top: [B, Hkv, G, N].
        state: [B, Hkv, K, Dv], with one more column where `normalise`. log_max: [B, Hkv]. Both contiguous, as is what
            they become.
        reverse: whether to read the tokens from the last to the first.
        query_weight ... offset: `NativeMap.operands` of the two maps, and what else is in a `NativeMap`.
        bidirectional: whether every query sees all keys of its sequence.
    """
    operands = (query, key, value, sums, log_scale, log_decay, row_scale, factor, top)
    states, maps = (state, log_max, state_after, log_max_after), (query_weight, query_bias, key_weight, key_bias)
    named = dict(zip(OPERANDS, operands, strict=True))
    problem = describe(named, states, maps, activation, quadratic, offset, normalise, reverse, bidirectional)
    call("causal_sums", problem)


@register_flop_formula(torch.ops.hf_linattn.causal_sums)
def _flops(query: Any, key: Any, value: Any, *rest: Any, **__: Any) -> int:
    """Half of the pairs inside a chunk, twice; reading the state for every query, adding every key to it; the maps."""
    (batch, heads, groups, length, input_size), value_size, key_size = query, value[-1], rest[6][2]
    weights = zip(rest[12:16:2], (groups, 1), strict=False)
    maps = [2 * input_size * weight[-1] * number for weight, number in weights if weight]
    pairs = groups * CHUNK_SIZE * (key_size + value_size)
    return batch * heads * length * (pairs + 2 * (groups + 1) * key_size * value_size + sum(maps))


def causal_attention(
    query: Tensor,
    key: Tensor,
    log_scale: Tensor | None,
    value: Tensor,
    log_decay: Tensor | None,
    state: LinearState | None,
    output: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """Return the causal attention output [B, Hkv, G, N, Dv], and the state after the last key.

    Args:
        query: [B, Hkv, G, N, F], after the feature map. key: [B, Hkv, N, F], also masked. log_scale: [B, Hkv, N].
        value: [B, Hkv, N, Dv]. log_decay: [B, Hkv, N]; with it there is a scale. state: what was read before.
        output: where to write it, if no gradients are needed.
    """
    if state is None:
        state = LinearState.empty(key, F.pad(value[:, :, :1], (0, 1)), log_scale is not None)
    heads: Any = (dense_rows(query), dense_rows(key), dense_rows(value), log_scale, log_decay, *state)
    if output is not None:
        _, *after, _, _ = read(heads, sums=output)
        return output, LinearState(*after)
    attended, _, *after = _CausalAttention.apply(*heads)
    return attended, LinearState(*after)


def weighed_attention(
    query: Tensor, key: Tensor, log_scale: Tensor | None, value: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, LinearState]:
    """`causal_attention` from the start, with the log of what the weights of each query add up to [B, Hkv, G, N]."""
    state = LinearState.empty(key, F.pad(value[:, :, :1], (0, 1)), log_scale is not None)
    heads = (dense_rows(query), dense_rows(key), dense_rows(value), log_scale, log_decay, *state)
    attended, log, *after = _CausalAttention.apply(*heads)
    return attended, log, LinearState(*after)


def map_operands(
    query: Tensor, key: Tensor, value: Tensor, maps: list[NativeMap], key_padding_mask: Tensor | None,
    log_decay: Tensor | None, state: LinearState | None,
) -> tuple[LinearState, Tensor | None, tuple[Any, ...]]:  # fmt: skip
    """Return the state, an empty one if None, the log scales of hidden keys, and what describes the maps."""
    query_map, key_map = maps
    kv_heads, groups = query.shape[1:3]
    if state is None:
        num_features = key.shape[-1] if key_map.weight is None else key_map.weight.shape[-1]
        num_features *= 2 if key_map.activation == "softmax_pair" else 1
        scaled = key_map.activation == "exponential" or log_decay is not None
        state = LinearState.empty(key.new_empty(num_features), F.pad(value[:, :, :1], (0, 1)), scaled)
    hidden = None
    if key_padding_mask is not None:
        hidden = torch.where(key_padding_mask.bool(), 0.0, LOWEST)[:, None].expand(key.shape[:3])
    of_query = query_map.operands(kv_heads, groups)
    of_key = of_query if query_map is key_map else key_map.operands(kv_heads, 1)
    activation = ACTIVATIONS.index(key_map.activation)
    return state, hidden, (*of_query, *of_key, activation, key_map.quadratic, key_map.offset)


def log_weight(factor: Tensor, top: Tensor) -> Tensor:
    """Return the log of what the weights of each query add up to, `LOWEST` where that is nothing."""
    return torch.where(factor > 0, top - factor.log(), LOWEST)


def read(heads: Any, normalise=True, reverse=False, row_scale=None, sums=None, rest=()) -> tuple[Tensor, ...]:
    """Return sums, state, log_max, factor and top of `causal_sums` for (query, ..., kv, log_max), which stay."""
    query, key, value, log_scale, log_decay, kv, log_max = heads
    sums = empty_output(query, value) if sums is None else sums
    factor, top = query.new_empty(2, *query.shape[:4]).unbind()
    before = kv.contiguous(), log_max.contiguous()
    after = tuple(torch.empty_like(x) for x in before)
    operands = (query, key, value, log_scale, log_decay, row_scale, sums, factor, top, *before, *after)
    causal_sums(*operands, normalise, reverse, *rest)
    return sums, *after, factor, top


def decay_gradient(
    d_scale: Tensor, d_log: Tensor | None, factor: Tensor, kv_after: Tensor, d_kv: Tensor | None, reverse: bool = False
) -> Tensor:
    """Return the gradient of log_decay [B, Hkv, N] from those of the keys' log scales, of the log and of the state.

    A decay multiplies all weights of earlier keys in later queries, whose gradients add up to that of the query's log,
    and in the last state; without those of the keys that come no earlier.
    """
    gradient = d_scale.double()
    if d_log is not None:
        gradient = gradient - torch.where(factor > 0, d_log, 0.0).double().sum(2)
    later = -gradient.cumsum(-1) if reverse else -gradient.flip(-1).cumsum(-1).flip(-1)
    of_state = 0.0 if d_kv is None else (kv_after * d_kv).double().sum((-1, -2))[..., None]
    return (later + of_state).to(d_scale.dtype)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, log_scale, log_decay, kv, log_max):
        output, *after, factor, top = read((query, key, value, log_scale, log_decay, kv, log_max))
        ctx.save_for_backward(query, key, value, log_scale, log_decay, kv, log_max, output, *after, factor, top)
        ctx.mark_non_differentiable(after[1])
        return output, log_weight(factor, top), *after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_log, d_kv, _):
        query, key, value, log_scale, log_decay, kv, log_max, output, kv_after, max_after, factor, top = (
            ctx.saved_tensors
        )
        weight_grad = d_log[..., None] - (d_output * output).sum(-1, keepdim=True)
        grad = torch.cat([d_output, weight_grad], dim=-1).mul_(factor[..., None])
        value = F.pad(value, (0, 1), value=1.0)
        d_query = read((grad, value, key, log_scale, log_decay, kv.mT, log_max), normalise=False)[0]
        scale, from_end = [None] * query.shape[2], {"normalise": False, "reverse": True}
        if log_scale is not None:
            # a query without weight has no gradient; as a key that is read from the end it must not be the largest
            scale = torch.where(factor > 0, -top, LOWEST).unbind(2)
            from_end["row_scale"] = log_scale[:, :, None]
        # between two tokens that are read backwards comes the decay of the later one
        decay = None if log_decay is None else F.pad(log_decay[:, :, 1:], (0, 1))
        parts = []
        left = d_kv  # gradient of the last state, part of the first group's only
        for query_part, grad_part, scale_part in zip(query.unbind(2), grad.unbind(2), scale, strict=True):
            values = (key[:, :, None], query_part, grad_part[..., :-1], scale_part, decay, left[..., :-1], -max_after)
            keys = (value[:, :, None], grad_part, query_part, scale_part, decay, left.mT, -max_after)
            d_value, *_ = read(values, **from_end)
            d_key, before, before_max, *_ = read(keys, **from_end)
            if log_scale is not None:
                passed = 0 if log_decay is None else log_decay[:, :, 0]
                before = before * (before_max + passed + log_max).exp()[..., None, None]
            parts.append((d_key.squeeze(2), d_value.squeeze(2), before.mT))
            left = torch.zeros_like(d_kv)
        d_key, d_value, d_before = (functools.reduce(torch.add, groups) for groups in zip(*parts, strict=True))
        d_scale = None if log_scale is None else (key * d_key).sum(-1)
        d_decay = None if log_decay is None else decay_gradient(d_scale, d_log, factor, kv_after, d_kv)
        return d_query, d_key, d_value, d_scale, d_decay, d_before, None
