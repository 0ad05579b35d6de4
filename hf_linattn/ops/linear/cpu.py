"""Kernel attention by csrc/linear, in one pass through the caches of a CPU.

Feature maps that can say what they are (`FeatureMapSpec`) are computed by the C too, chunk by chunk, from the heads to
the output and back: the backward pass keeps the heads, the output, a number per query and the state before every
`SEGMENT` tokens of a sequence but the first ones, and makes features again. Of maps it does not know the C gets the
features (`SUMS`), and what these are made of is known to autograd. One token is what decoding reads all the time: a
step of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST
from ..common.padding import Packed
from ..common.precision import widened
from ..runtime.cpu import KINDS, dense_rows, empty_like, empty_output, output_for, refusal
from .autograd import Gradients, Kernels, Operands, Sums, attend, join
from .cpu_kernels import ACTIVATIONS, COLUMNS, causal_step, causal_sums, causal_sums_backward, make_checkpoints
from .features import FeatureKernels
from .types import FeatureMapSpec, LinearCall, LinearState, for_all_heads, log_weight, specs_of

NATIVE_SIZE = 2048  # keys or queries whose features are made at a time where the C gets them


def unsupported(call: LinearCall) -> str | None:
    """Return why the C cannot compute a call."""
    if reason := refusal(call.query, kinds=KINDS):
        return reason
    if call.is_step:
        if not call.policy.inference:
            return "one token with gradients or in training"
        return None if specs_of(call.query_map, call.key_map) else "a feature map that the C does not know"
    if reason := few_sequences(call.key):
        return reason
    if call.causal:
        return None
    if call.query.shape[2] != call.key.shape[2]:
        return "other numbers of queries and keys"
    known = call.log_decay is not None or specs_of(call.query_map, call.key_map)
    return None if known else "a feature map that the C does not know, read both ways"


def few_sequences(key: Tensor) -> str | None:
    """Return why threads would be idle: each sequence is read by one, and there are none for half of them."""
    busy = 2 * key.shape[:2].numel() >= torch.get_num_threads()
    return None if busy else "fewer rows times heads than half of the threads"


def run(call: LinearCall) -> tuple[Tensor, LinearState | None]:
    """Return the output [B, H, N, Dv], and the state after a causal call."""
    maps = specs_of(call.query_map, call.key_map)
    if call.is_step:
        query, key, value = widened(call.grouped_query, call.key, call.value)
        how: Any = {"key_padding_mask": call.key_padding_mask, "log_decay": call.log_decay, "state": call.state}
        attended, after = step_attention(query, key, value, maps, **how)
        return attended.flatten(1, 2), after
    if not maps:
        query, key, value = widened(*call[:3])
        call = call._replace(query=query, key=key, value=value)
        return SUMS.causal(call, NATIVE_SIZE) if call.causal else (SUMS.two_way(call), None)
    packed = None if call.sequence_ids is None else Packed.of(call.sequence_ids, call.key.shape[0])
    heads = call.grouped_query, call.key, call.value
    if not call.causal and call.log_decay is not None:
        return two_way_attention(*heads, maps, call.key_padding_mask, call.log_decay, packed).flatten(1, 2), None
    how = {"bidirectional": not call.causal, "packed": packed, "weighed": False}
    output = output_for(call.query, call.value)
    rest: Any = call.key_padding_mask, call.log_decay, call.state, output
    attended, _, after = mapped_attention(*heads, maps, *rest, **how)
    return attended.flatten(1, 2), after if call.causal else None


def _weights_of(spec: FeatureMapSpec, heads: int, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """Weight [Hkv, G, D, columns] and bias [Hkv, G, m] of a map for all heads, in float32."""
    weight, bias = spec.scaled_weight(), spec.bias
    if weight is None:
        return None, None
    missing = -weight.shape[-1] % COLUMNS
    weight = weight.detach().float()
    weight = (F.pad(weight, (0, missing)) if missing else weight).contiguous()
    bias = None if bias is None else for_all_heads(bias.detach().float(), heads, groups, 1)
    return for_all_heads(weight, heads, groups, 2), bias


def map_operands(
    query: Tensor, key: Tensor, maps: Sequence[FeatureMapSpec], key_padding_mask: Tensor | None
) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Return the log scales of hidden keys, and what describes the maps."""
    query_map, key_map = maps
    kv_heads, groups = query.shape[1:3]
    hidden = None
    if key_padding_mask is not None:
        scales = key.new_zeros(key_padding_mask.shape, dtype=torch.float32)
        hidden = scales.masked_fill_(~key_padding_mask.bool(), LOWEST)[:, None].expand(key.shape[:3])
    of_query = _weights_of(query_map, kv_heads, groups)
    of_key = of_query if query_map is key_map else _weights_of(key_map, kv_heads, 1)
    activation = ACTIVATIONS.index(key_map.activation)
    return hidden, (*of_query, *of_key, activation, key_map.quadratic, key_map.offset)


def mapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: list[FeatureMapSpec],
    key_padding_mask: Tensor | None,
    log_decay: Tensor | None,
    state: LinearState | None,
    output: Tensor | None = None,
    bidirectional: bool = False,
    reverse: bool = False,
    packed: Packed | None = None,
    weighed: bool = True,
) -> tuple[Tensor, Any, LinearState]:
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
    hidden, described = map_operands(query, key, maps, key_padding_mask)
    places = None if packed is None else (packed.backwards() if reverse else packed).places
    before = (None, None) if state is None else state
    how = _How(maps[1].width(key.shape[-1]), described, bidirectional, places, reverse)
    operands = Operands(dense_rows(query), dense_rows(key), dense_rows(value), hidden, log_decay, *before)
    if torch.is_grad_enabled():
        weights = tuple(y for x in maps for y in (x.scaled_weight(), x.bias))
        return attend(MAPPED, how, operands, weights, weighed=weighed, reverse=reverse)
    sums = _mapped_forward(how, operands, (), output, weighed, False)
    return sums.output, log_weight(sums.factor, sums.top) if weighed else None, LinearState(sums.kv, sums.log_max)


def two_way_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: list[FeatureMapSpec],
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


class _How(NamedTuple):
    """How the C is to read heads: features of each, `map_operands`, and `bidirectional` ... `reverse` as above."""

    num_features: int
    maps: tuple[Any, ...]
    bidirectional: bool
    places: Tensor | None
    reverse: bool


def _mapped_forward(
    how: _How, operands: Operands, parameters: Any, output: Tensor | None, weighed: bool, keep: bool
) -> Sums:
    """`Kernels.forward`; queries that see all keys need the state that each of their sequences leaves."""
    query, key, value = operands[:3]
    checkpoints = None
    if keep:  # differences to the output are gradients, for which half precision has too few digits
        output = empty_output(query, value, exact=True)
        if not how.bidirectional:
            checkpoints = make_checkpoints(query, how.num_features, value.shape[-1])
    states = len(how.places) if how.bidirectional and how.places is not None else len(key)
    kv = value.new_empty(states, key.shape[1], how.num_features, value.shape[-1] + 1, dtype=torch.float32)
    rest = (*how.maps, how.bidirectional, how.places, checkpoints)
    sums = read(operands, reverse=how.reverse, sums=output, rest=rest, after=(kv, kv.new_empty(kv.shape[:2])))
    return sums._replace(kept=(checkpoints,))


def _mapped_backward(
    how: _How, operands: Operands, parameters: Any, sums: Sums, d_output: Tensor, d_log: Tensor | None,
    d_kv: Tensor | None, needed: Any,
) -> Gradients:  # fmt: skip
    query, key, value, hidden, log_decay, kv, log_max = operands
    d_query, d_key, d_value = (empty_like(x) for x in (query, key, value))
    d_scale = sums.factor.new_empty(key.shape[:3])
    before: tuple[Tensor | None, ...] = (None, None)
    d_before = None
    if kv is not None and log_max is not None:
        before, d_before = (kv.contiguous(), log_max.contiguous()), kv.new_empty(kv.shape)
    rows = (query.shape[:3],) * 2 + (key.shape[:2],) * 2
    made = [_room(x, heads) if wanted else None for x, heads, wanted in zip(parameters, rows, needed, strict=True)]
    causal_sums_backward(
        query, key, value, hidden, log_decay, sums.output, sums.factor, *before, sums.kv, sums.log_max,
        *how.maps, how.bidirectional, how.places, *sums.kept, d_output, d_log, d_query, d_key, d_value, d_scale,
        *made, d_kv, d_before, how.reverse,
    )  # fmt: skip
    of_parameters = tuple(
        None if d is None else d.sum_to_size(x.shape).to(x.dtype) for d, x in zip(made, parameters, strict=True)
    )
    return Gradients(d_query, d_key, d_value, d_scale, d_before, of_parameters)


def _room(parameter: Tensor, heads: torch.Size) -> Tensor:
    """Memory for the gradient of a map's weight [*heads, D, m] or bias [*heads, m] in every row."""
    return parameter.new_empty(*heads, *parameter.shape[len(heads) - 1 :], dtype=torch.float32)


MAPPED = Kernels(_mapped_forward, _mapped_backward)


def read(
    operands: Operands, normalise: bool = True, reverse: bool = False, row_scale: Tensor | None = None,
    sums: Tensor | None = None, rest: tuple[Any, ...] = (), after: Any = None,
) -> Sums:  # fmt: skip
    """Call `causal_sums`, which leaves the operands as they are.

    sums: where to write them; None: in new memory. after: where to write the state and log_max; None: in memory as
    there is before, for which kv and log_max must be there. rest: its last arguments.
    """
    query, key, value, log_scale, log_decay, kv, log_max = operands
    sums = empty_output(query, value) if sums is None else sums
    factor, top = query.new_empty(2, *query.shape[:4], dtype=torch.float32).unbind()
    before: list[Any] = [x if x is None else x.contiguous() for x in (kv, log_max)]
    after = tuple(x.new_empty(x.shape) for x in before) if after is None else after
    written = (row_scale, sums, factor, top, *before, *after)
    causal_sums(query, key, value, log_scale, log_decay, *written, normalise, reverse, *rest)
    return Sums(sums, factor, top, *after)


class _Packing(NamedTuple):
    """What `causal_sums` of features gets of packed rows, read forwards and backwards; nothing for others."""

    forwards: tuple[Any, ...] = ()
    backwards: tuple[Any, ...] = ()

    @classmethod
    def of(cls, sequence_ids: Tensor) -> _Packing:
        """Describe ids [B, N]."""
        ways = (Packed.of(ids, len(ids)).places for ids in (sequence_ids, sequence_ids.flip(1)))
        return cls(*((*(None,) * 4, ACTIVATIONS.index("given"), 0.0, 0.0, False, places) for places in ways))


def _sums_forward(
    how: _Packing, operands: Operands, parameters: Any, output: Tensor | None, weighed: bool, keep: bool
) -> Sums:
    return read(operands, sums=output, rest=how.forwards)


def _sums_backward(
    how: _Packing, operands: Operands, parameters: Any, sums: Sums, d_output: Tensor, d_log: Tensor | None,
    d_kv: Tensor | None, needed: Any,
) -> Gradients:  # fmt: skip
    """Causal sums again, those for keys and values read from the end.

    1 / w_i is a scale of the row, and of what is read as a key, beside those of the forward pass.
    """
    query, key, value, log_scale, log_decay, kv, log_max = cast(Any, operands)
    size = value.shape[-1]
    of_weight = -(d_output * sums.output).sum(-1, keepdim=True)
    grad = torch.cat([d_output, of_weight if d_log is None else of_weight + d_log[..., None]], dim=-1)
    value = F.pad(value, (0, 1), value=1.0)
    # a query without weight has no gradient; as a key that is read from the end it must not be the largest
    share = torch.where(sums.factor > 0, sums.factor.log() - cast(Tensor, sums.top), LOWEST)
    heads = Operands(grad, value, key, log_scale, log_decay, kv.mT, log_max)
    d_query = read(heads, normalise=False, row_scale=share, rest=how.forwards).output
    # between two tokens that are read backwards comes the decay of the later one
    decay = None if log_decay is None else F.pad(log_decay[:, :, 1:], (0, 1))
    own = torch.zeros_like(share[:, :, 0]) if log_scale is None else log_scale
    from_end: Any = {"normalise": False, "reverse": True, "row_scale": own[:, :, None], "rest": how.backwards}
    parts = []
    # the gradient of the last state is part of the first group's only; the largest exponent there is none without
    left = torch.zeros_like(kv) if d_kv is None else d_kv
    left_max = torch.full_like(log_max, LOWEST / 2) if d_kv is None else -sums.log_max
    for query_part, grad_part, scale in zip(query.unbind(2), grad.unbind(2), share.unbind(2), strict=True):
        values = (key[:, :, None], query_part, grad_part[..., :size], scale, decay, left[..., :size], left_max)
        keys = (value[:, :, None], grad_part, query_part, scale, decay, left.mT, left_max)
        d_value = read(Operands(*values), **from_end).output
        of_keys = read(Operands(*keys), **from_end)
        passed = 0 if log_decay is None else log_decay[:, :, 0]
        d_before = of_keys.kv.mT * (of_keys.log_max + passed + log_max).exp()[..., None, None]
        parts.append((of_keys.output.squeeze(2), d_value.squeeze(2), d_before))
        left, left_max = torch.zeros_like(left), torch.full_like(left_max, LOWEST / 2)
    d_key, d_value, d_before = (functools.reduce(torch.add, groups) for groups in zip(*parts, strict=True))
    d_scale = None if log_scale is None else (key * d_key).sum(-1)
    return Gradients(d_query, d_key, d_value, d_scale, d_before)


GIVEN = Kernels(_sums_forward, _sums_backward)


def _attend_features(
    sequence_ids: Tensor | None, output: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    log_scale: Tensor | None, log_decay: Tensor | None, state: LinearState | None, weighed: bool,
) -> tuple[Tensor, Tensor | None, LinearState]:  # fmt: skip
    """`FeatureKernels.attend`."""
    if state is None:
        state = LinearState.before(key.shape[-1], value, log_scale is not None)
    packing = _Packing() if sequence_ids is None else _Packing.of(sequence_ids)
    return attend(GIVEN, packing, Operands(query, key, value, log_scale, log_decay, *state), (), output, weighed)


SUMS = FeatureKernels(_attend_features, lambda: (torch.float32,))


def step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: Sequence[FeatureMapSpec],
    *,
    key_padding_mask: Tensor | None,
    log_decay: Tensor | None,
    state: LinearState | None,
    written: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, LinearState]:
    """Return the output [B, Hkv, G, 1, Dv] and the next state; `state` stays as it is. Without gradients.

    Args:
        query: [B, Hkv, G, 1, D], before the feature maps. key: [B, Hkv, 1, D]. value: [B, Hkv, 1, Dv].
        key_padding_mask: [B, 1]. log_decay: [B, Hkv, 1].
        written: where to write `Sums.factor` and `Sums.top` of a step that does not see its own key.
    """
    hidden, rest = map_operands(query, key, maps, key_padding_mask)
    state = LinearState.before_map(maps[1], key, value, log_decay) if state is None else state
    output = empty_output(query, value)
    before = state.kv.contiguous(), state.log_max.contiguous()
    after = LinearState(*(torch.empty_like(x) for x in before))
    heads = dense_rows(query), dense_rows(key), dense_rows(value)
    strict = written is not None
    causal_step(*heads, hidden, log_decay, output, *(written or (None, None)), *before, *after, *rest, strict)
    return output, after
