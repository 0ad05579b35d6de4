"""Kernel attention by PyTorch's operations, which can compute every call.

`chunk_sums` has the causal sums of several chunks of tokens at once, with the log factor they were divided by. Inside
a chunk the pairs are formed directly; everything before it is summed up in a state of constant size, which is carried
from chunk to chunk in two products each. What is finished here into a ratio or put under one denominator with other
weights (`hybrid`) are the same sums.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LN_2, LOWEST, dense, fast_exp, running_sum
from ..common.precision import widened
from ..common.tracing import is_open
from ..runtime.cpu import output_for
from .torch_open_length import OpenChunks, Passage, cut_whole
from .types import LEAST_LENGTH, LEAST_WEIGHT, FeatureMap, Features, LinearCall, LinearState, masked

AT_ONCE = {"cpu": 32}  # chunks in one product, counted once for each query head and row: here they fit the cache
AT_ONCE_ELSEWHERE = 1024
SEGMENT_SIZE = 512  # keys or queries for which features are made at a time where no pairs are formed


def unsupported(call: LinearCall) -> str | None:
    """PyTorch's operations can compute every call."""
    return None


def run(call: LinearCall) -> tuple[Tensor, LinearState | None]:
    """Return the output [B, H, N, Dv], and the state after a causal call."""
    if call.is_step:
        return _step(call)
    query, key, value = widened(call.query, call.key, call.value)
    call = call._replace(query=query, key=key, value=value)
    if call.causal:
        return _causal_attention(call)
    if call.sequence_ids is not None or call.log_decay is not None:
        return _two_way_attention(call), None
    return read_state(query, sum_keys(key, value, call.key_map, call.key_padding_mask), call.query_map), None


def _causal_attention(call: LinearCall) -> tuple[Tensor, LinearState]:
    output = output_for(call.query, call.value)
    parts: list[Tensor] = []
    start, after = 0, cast(LinearState, call.state)  # there is at least one segment
    for sums, _, after in _segments(call):  # noqa: B007 - the last one is returned
        place = None if output is None else output.narrow(3, start, sums.shape[3])
        parts.append(torch.div(*ratio(sums), out=place))
        start += sums.shape[3]
    return joined(parts, output).flatten(1, 2), after


def _step(call: LinearCall) -> tuple[Tensor, LinearState]:
    """One token of each row."""
    query, key, value = widened(call.grouped_query, call.key, call.value)
    state, log_decay = call.state, call.log_decay
    if call.query_map is call.key_map:  # one call for the key and the queries of its group: calls cost most here
        both, log_scale = call.key_map(torch.cat([query, key.unsqueeze(2)], dim=2))
        query, features = both.split([query.shape[2], 1], 2)
        keys = Features(features.squeeze(2), None if log_scale is None else log_scale[:, :, -1])
    else:
        query, keys = call.query_map(query).values, call.key_map(key)
    features, log_scale = masked(keys, call.key_padding_mask, log_decay is not None)
    if log_decay is not None and (state is not None or log_decay.requires_grad):  # of a first token it is zero
        state = LinearState.before(features.shape[-1], value, True) if state is None else state
        state = state._replace(log_max=state.log_max + log_decay[:, :, 0])
    state = _fold(state, features, log_scale, with_ones(value))
    return torch.div(*ratio(_read(query, state.kv))).flatten(1, 2), state


def _two_way_attention(call: LinearCall) -> Tensor:
    """Bidirectional attention inside each packed sequence: keys up to i read forwards, keys after i read backwards."""
    mask, ids, log_decay = call.key_padding_mask, call.sequence_ids, call.log_decay
    forward = _collect(call, strict=False)
    backwards = call._replace(
        query=call.query.flip(2),
        key=call.key.flip(2),
        value=call.value.flip(2),
        key_padding_mask=None if mask is None else mask.flip(1),
        sequence_ids=None if ids is None else ids.flip(1),
        # read backwards, what comes between two tokens is the decay of the later one
        log_decay=None if log_decay is None else F.pad(log_decay[:, :, 1:].flip(2), (1, 0)),
    )
    later = _collect(backwards, strict=True)
    (left, left_max), (right, right_max) = forward, (x.flip(-2 if x.dim() == 5 else -1) for x in later)
    top = torch.maximum(left_max, right_max).detach()
    total = left * (left_max - top).exp()[:, :, None, :, None] + right * (right_max - top).exp()[:, :, None, :, None]
    return torch.div(*ratio(total)).flatten(1, 2)


def _collect(call: LinearCall, strict: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of all segments [B, Hkv, G, N, Dv + 1] with their log factors [B, Hkv, N]."""
    segments = list(_segments(call, strict=strict))
    sums = torch.cat([part for part, _, _ in segments], dim=3)
    if segments[0][1] is None:
        return sums, sums.new_zeros(*sums.shape[:2], sums.shape[3])
    return sums, torch.cat([cast(Tensor, top) for _, top, _ in segments], dim=2)


def _segments(call: LinearCall, strict: bool = False) -> Iterator[tuple[Tensor, Tensor | None, LinearState]]:
    """Yield for a few chunks at a time: sums over visible keys [B, Hkv, G, M, Dv + 1], log factors, the next state."""
    query, key, value = call.grouped_query, call.key, call.value
    sequence_ids, log_decay, chunk_size, state = call.sequence_ids, call.log_decay, call.chunk_size, call.state
    opened = OpenChunks(key.shape[2], chunk_size, key.device) if is_open(key) else None
    sizes = [] if opened else part_sizes(query, chunk_size)
    operands = ((query, 3), (key, 2), (value, 2), (call.key_padding_mask, 1), (sequence_ids, 1), (log_decay, 2))
    carried_id = None if sequence_ids is None else sequence_ids[:, 0]
    for query, key, value, mask, ids, decay in split(sizes, *operands):
        features, log_scale = masked(call.key_map(dense(key)), mask, log_decay is not None)
        cut = opened.cut if opened else functools.partial(cut_whole, chunk_size)
        chunks = Chunks(
            cut(call.query_map(dense(query)).values, 3).transpose(2, 3),
            cut(features, 2),
            cut(with_ones(value), 2),
            None if log_scale is None else cut(log_scale, 2),
            None if decay is None else cut(decay, 2),
            None if ids is None else cut(ids, 1),
        )
        chunks = opened.without_filling(chunks) if opened else chunks
        state = LinearState.empty(chunks.key, chunks.value, log_scale is not None) if state is None else state
        sums, top, state = chunk_sums(chunks, state, carried_id, strict=strict)
        carried_id = None if ids is None else ids[:, -1]
        sums, top = sums.transpose(2, 3).flatten(3, 4), None if top is None else top.flatten(2)
        if opened:
            sums, top = opened.joined(sums, 3), None if top is None else opened.joined(top, 2)
        yield sums, top, state


def split(sizes: int | list[int], *operands: tuple[Tensor | None, int]) -> Iterator[tuple[Any, ...]]:
    """Yield the parts of tensors, each along its dimension, side by side; None has parts that are None.

    Split and not sliced: the gradients of all parts are then put together once; not even that where there is one.
    """
    if any(x is not None and is_open(x) for x, _ in operands):  # a loop would be one over the parts of an example
        return iter([tuple(x for x, _ in operands)])
    largest = sizes if isinstance(sizes, int) else sizes[0]
    cut = [None if x is None else x.split(sizes, dim) if x.shape[dim] > largest else [x] for x, dim in operands]
    return zip(*(itertools.repeat(None) if parts is None else parts for parts in cut), strict=False)


def joined(parts: list[Tensor], output: Tensor | None) -> Tensor:
    """Return `output`, into which parts were written, or parts [B, Hkv, G, N, Dv] one after another."""
    if output is None:
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
    return output


def _fold(state: LinearState | None, key: Tensor, log_scale: Tensor | None, value: Tensor) -> LinearState:
    """Return state + sum_j phi(k_j) [v_j, 1]^T, rescaled to the new maximum."""
    state = LinearState.empty(key, value, log_scale is not None) if state is None else state
    keys, kv = key.mT.flatten(0, 1), state.kv.flatten(0, 1)
    if log_scale is None:
        return LinearState(torch.baddbmm(kv, keys, value.flatten(0, 1)).view_as(state.kv), state.log_max)
    log_max = torch.maximum(log_scale.detach().amax(-1), state.log_max.detach())
    value = value * fast_exp(log_scale - log_max[..., None])[..., None]
    kv = kv * fast_exp(state.log_max - log_max).view(-1, 1, 1)
    return LinearState(kv.baddbmm_(keys, value.flatten(0, 1)).view_as(state.kv), log_max)


def _read(query: Tensor, kv: Tensor) -> Tensor:
    """[B, Hkv, G, N, F] @ [B, Hkv, F, Dv + 1] without repeating the right side for each query head of the group."""
    return (query.flatten(2, 3) @ kv).unflatten(2, query.shape[2:4])


def sum_keys(key: Tensor, value: Tensor, key_map: FeatureMap, key_padding_mask: Tensor | None) -> LinearState:
    """Return sum_j phi(k_j) [v_j, 1]^T over the real keys [B, Hkv, N, D]."""
    state: Any = None
    for key_part, value_part, mask in split(SEGMENT_SIZE, (key, 2), (value, 2), (key_padding_mask, 1)):
        features, log_scale = masked(key_map(dense(key_part)), mask)
        state = _fold(state, features, log_scale, with_ones(value_part))
    return state


def read_state(query: Tensor, state: LinearState, query_map: FeatureMap) -> Tensor:
    """Return phi(q_i) S / phi(q_i) . z [B, H, Nq, Dv] for all queries [B, H, Nq, D] alike."""
    output = output_for(query, state.kv[..., :-1])
    query = query.unflatten(1, (state.kv.shape[1], -1))
    parts = [
        torch.div(*ratio(_read(query_map(part).values, state.kv)), out=place)
        for part, place in split(SEGMENT_SIZE, (query, 3), (output, 3))
    ]
    return joined(parts, output).flatten(1, 2)


class Chunks(NamedTuple):
    """T chunks of C tokens after the feature maps.

    query [B, Hkv, T, G, C, F]; key [B, Hkv, T, C, F], zero where masked; value [B, Hkv, T, C, Dv + 1], its last column
    ones; log_scale [B, Hkv, T, C] of the keys, LOWEST where masked, None if keys have none and nothing decays;
    log_decay [B, Hkv, T, C], log of what earlier keys lose when a token comes, None if nothing decays; sequence_ids
    [B, T, C], equal inside a packed sequence, None if nothing is packed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_scale: Tensor | None = None
    log_decay: Tensor | None = None
    sequence_ids: Tensor | None = None


class _Packing(NamedTuple):
    """Which pairs packed sequences leave: continues, kept [B, 1, T, C], other [B, 1, T, C, C], goes_on [B, 1, T].

    continues: queries that belong to the sequence of the state before their chunk. kept: keys of the chunk's last
    sequence. other: pairs of two sequences. goes_on: chunks whose last sequence is the one of the state before.
    """

    continues: Tensor
    kept: Tensor
    other: Tensor
    goes_on: Tensor

    @classmethod
    def of(cls, ids: Tensor, carried: Tensor) -> _Packing:
        """Compare the ids [B, T, C] and the id [B] of the state's sequence."""
        last = ids[..., -1]
        previous = torch.cat([carried[:, None], last[:, :-1]], dim=1)
        other = ids[..., :, None] != ids[..., None, :]
        found = (ids == previous[..., None], ids == last[..., None], other, last == previous)
        return cls(*(x[:, None] for x in found))


def chunks_at_once(rows: int, device: torch.device) -> int:
    """Return how many chunks to take together when each holds `rows` rows, one per query head and sequence."""
    return max(1, AT_ONCE.get(device.type, AT_ONCE_ELSEWHERE) // rows)


def part_sizes(query: Tensor, chunk_size: int) -> list[int]:
    """Cut the places of query [B, Hkv, G, N, D] into parts of several chunks; the last may be one short chunk."""
    several = chunks_at_once(query.shape[:3].numel(), query.device) * chunk_size
    whole, rest = divmod(query.shape[3], chunk_size)
    parts, left = divmod(whole * chunk_size, several)
    return [size for size in (*[several] * parts, left, rest) if size]


def chunk_sums(
    chunks: Chunks, state: LinearState, carried_id: Tensor | None = None, *, strict: bool = False
) -> tuple[Tensor, Tensor | None, LinearState]:
    """Return for every query sum_j w_ij [v_j, 1], divided by exp(log factor), the log factor, and the next state.

    Args:
        state: what was read before. carried_id: [B], the id of its sequence, if any are packed.
        strict: whether a query does not see its own key.

    Returns:
        sums [B, Hkv, T, G, C, Dv + 1]; log factor [B, Hkv, T, C], None if all are zero; the state, of the last
        sequence.
    """
    query, key, value, log_scale, log_decay, ids = chunks
    shape, size = query.shape[:5], query.shape[4]
    packing = None if ids is None or carried_id is None else _Packing.of(ids, carried_id)
    query = query.flatten(3, 4)
    # by index: whatever stands in the future, it cannot come through
    scores = _products(query, key.mT).view(*shape, size).tril_(-1 if strict else 0)
    if log_scale is None:
        return _plain_sums(query, key, value, scores, state, packing)
    decay = None if log_decay is None else running_sum(log_decay)  # since the chunk began
    log_scale = log_scale if decay is None else log_scale - decay
    after_scale = log_scale if decay is None else log_scale + decay[..., -1:]  # as seen from the end of the chunk
    passed = None if decay is None else decay[..., -1]
    if packing is not None:
        after_scale = after_scale.masked_fill(~packing.kept, LOWEST)
    before, after, fold = _passage(after_scale.detach().amax(-1), passed, state, packing, is_open(query))
    weighted = value * fast_exp(after_scale - after[..., None])[..., None]
    earlier, kv = fold(query, key, weighted, state.kv)

    hidden = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(0 if strict else 1)
    visible = before[..., None]
    if packing is not None:
        hidden, visible = hidden | packing.other, visible.masked_fill(~packing.continues, LOWEST)
    # in powers of two, see `fast_exp`: every pass over the pairs counts
    visible = visible / LN_2
    powers = (log_scale / LN_2)[..., None, :].masked_fill(hidden, LOWEST)
    # half of LOWEST, so that a row without any key gets weights exp(LOWEST / 2) = 0 and not exp(0)
    top = torch.maximum(powers.detach().amax(-1), visible).clamp(min=LOWEST / 2)
    scores = scores * powers.sub_(top[..., None]).exp2_()[:, :, :, None]
    factor = torch.exp2(visible - top)[:, :, :, None, :, None]
    top = top * LN_2
    within = _products(scores.flatten(3, 4), value).view(*shape, value.shape[-1])
    total = torch.addcmul(within, earlier.view(*shape, value.shape[-1]), factor)
    # a copy: a view would keep all of `after`, and is another kind of input to a compiled slab
    return total, top if decay is None else top + decay, LinearState(kv, after[:, :, -1].clone())


def _plain_sums(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, state: LinearState, packing: _Packing | None
) -> tuple[Tensor, None, LinearState]:
    """`chunk_sums` of keys without log scales, given the scores of the pairs [B, Hkv, T, G, C, C]."""
    left, shape = None, scores.shape[:5]
    if packing is not None:
        scores = scores.masked_fill(packing.other[:, :, :, None], 0.0)
        key = key.masked_fill(~packing.kept[..., None], 0.0)
        left = packing.goes_on.to(key.dtype).expand(key.shape[:3])
    if is_open(query):
        goes_on = None if packing is None else packing.goes_on
        earlier, kv = Passage(key, None, None, state.log_max, goes_on).read_and_fold(query, key, value, state.kv)
    else:
        earlier, kv = _read_and_fold(query, key, value, state.kv, left)
    if packing is not None:
        earlier = earlier * packing.continues[..., None].repeat(1, 1, 1, shape[3], 1)
    sums = torch.baddbmm(earlier.flatten(0, 2), scores.view(-1, *query.shape[3:4], shape[4]), value.flatten(0, 2))
    return sums.view(*shape, value.shape[-1]), None, LinearState(kv, state.log_max)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """[B, Hkv, T, M, K] @ [B, Hkv, T, K, N] as one batch [B Hkv T, M, N]."""
    return torch.bmm(left.flatten(0, 2), right.flatten(0, 2))


def _passage(
    largest: Tensor, passed: Tensor | None, state: LinearState, packing: _Packing | None, is_open: bool
) -> tuple[Tensor, Tensor, Callable[..., tuple[Tensor, Tensor]]]:
    """Return the largest log scales before each chunk and after it, and what reads and folds the state."""
    log_max = state.log_max.detach()
    if is_open:
        passage = Passage(largest, largest, passed, log_max, None if packing is None else packing.goes_on)
        return cast(Tensor, passage.before), cast(Tensor, passage.after), passage.read_and_fold
    before, after = _running_max(largest, passed, log_max, packing)
    log_left = (before if passed is None else before + passed) - after
    left = fast_exp(log_left if packing is None else log_left.masked_fill(~packing.goes_on, LOWEST))
    return before, after, functools.partial(_read_and_fold, left=left)


def _running_max(
    largest: Tensor, passed: Tensor | None, log_max: Tensor, packing: _Packing | None
) -> tuple[Tensor, Tensor]:
    """Return the largest log scales [B, Hkv, T] before each chunk and after it, given those of its own keys."""
    maxima = [log_max]
    for chunk, own in enumerate(largest.clamp(min=LOWEST / 2).unbind(2)):
        earlier = maxima[-1] if passed is None else maxima[-1] + passed[:, :, chunk].detach()
        earlier = earlier if packing is None else earlier.masked_fill(~packing.goes_on[:, :, chunk], LOWEST)
        maxima.append(torch.maximum(own, earlier))
    return torch.stack(maxima[:-1], dim=2), torch.stack(maxima[1:], dim=2)


def _read_and_fold(
    query: Tensor, key: Tensor, value: Tensor, kv: Tensor, left: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the products with what stood in the state before each chunk [B, Hkv, T, G C, Dv + 1], and the new state.

    `left` [B, Hkv, T]: what is left of the state after each chunk; None if all.
    """
    shape, flat = kv.shape, kv.flatten(0, 1)
    parts = [x.flatten(0, 1).unbind(1) for x in (query, key.mT, value)]
    factors = [None] * len(parts[0]) if left is None else left.flatten(0, 1)[..., None, None].unbind(1)
    read = []
    for query_part, key_part, value_part, factor in zip(*parts, factors, strict=True):
        read.append(torch.bmm(query_part, flat))
        flat = torch.baddbmm(flat if factor is None else flat * factor, key_part, value_part)
    return torch.stack(read, dim=1).view(*shape[:2], len(read), *read[0].shape[1:]), flat.view(shape)


def with_ones(value: Tensor) -> Tensor:
    """Return the values with the column that sums up the weights: masked, scaled and decayed as they are."""
    return torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)


def ratio(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed values and what to divide them by, inf for a query that saw no weight: it gets zero.

    So does one whose weights all but vanished, far below what its own largest feature times a key's can be, or whose
    sum of features with signs came out negative by rounding: the quotient would be noise, its gradient would overflow.
    """
    summed, weight = sums.split([sums.shape[-1] - 1, 1], -1)
    return summed, torch.threshold(weight, LEAST_WEIGHT[weight.dtype], math.inf)


def inverse_length(features: Tensor) -> Tensor:
    """Return 1 / |features| [..., 1] of features [..., F], zero where all but nothing is there."""
    square = features.square().sum(-1, keepdim=True)  # a norm's second derivative is NaN where nothing is there
    return torch.threshold(square, LEAST_LENGTH[square.dtype] ** 2, math.inf).sqrt().reciprocal()


def unit_length(features: Tensor) -> Tensor:
    """Divide features [..., F] by their length; all but vanishing ones are zero."""
    return features * inverse_length(features)
