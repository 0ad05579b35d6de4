"""Kernel attention in linear time: o_i = sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j).

The keys are read a few chunks at a time. Inside a chunk the pairs are formed directly; everything before it is summed
up in a state of constant size (`chunk_sums`). Features may carry a log scale, phi = values * exp(log_scale):
exponential feature maps then neither overflow nor need an epsilon. The state keeps the running maximum of the scales
and is rescaled when it grows; each query's own factor depends only on the keys it may see and cancels in the ratio, so
the future cannot leak.

Weights may decay with the distance, w_ij = phi(q_i) . phi(k_j) exp(-|c_i - c_j|) with c the running sum of a decay per
token. That is one more log scale of the keys, counted from the start of each chunk so that it never grows with N. The
normaliser is one more column of the values (of ones), so that numerator and denominator see the same masks and decays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numerics import LOWEST, dense, fast_exp
from ..common.padding import Packed
from ..common.precision import wide, wide_dtype, widened
from ..common.tracing import is_open, is_watched
from ..runtime.cpu import suits
from ..runtime.output_pool import empty_output
from .autograd import CausalSums, causal_attention, full_attention, weighed_attention
from .cpu import NATIVE_SUMS, can_read, native_maps
from .cpu_decode import step_attention
from .cpu_fused import join, mapped_attention, two_way_attention
from .torch import CHUNK_SIZE, Chunks, LinearState, chunk_sums, part_sizes, ratio, with_ones
from .torch_open_length import OpenChunks, cut_whole

SEGMENT_SIZE = 512  # keys or queries for which features are made at a time where no pairs are formed
NATIVE_SIZE = 2048  # the same where the C forms them


class Features(NamedTuple):
    """phi(x) = values * exp(log_scale): values [..., N, F], log_scale [..., N] or None where it is zero."""

    values: Tensor
    log_scale: Tensor | None = None


FeatureMap = Callable[[Tensor], Features]


def causal_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_map: FeatureMap,
    key_map: FeatureMap,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    state: LinearState | None = None,
    log_decay: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    use_native: bool = False,
    training: bool = False,
    causal_sums: CausalSums | None = None,
) -> tuple[Tensor, LinearState]:
    """Return the causal attention output and the state after the last key.

    Args:
        query: [B, H, N, D]. key: [B, Hkv, N, D]. value: [B, Hkv, N, Dv]; H is a multiple of Hkv. All of one dtype, in
            which the output is, unless that is widened.
        query_map, key_map: feature maps; the query's log scale cancels and is ignored.
        key_padding_mask: [B, N], true for real keys. sequence_ids: [B, N], equal inside a packed sequence.
        state: what was read before; it belongs to the first packed sequence.
        log_decay: [B, Hkv, N], at most 0: log of what all earlier keys lose when this token comes; 0 where masked.
        use_native: whether the C may do it where it can, in chunks of its own size.
        training: whether a call without gradients must give the same bits as one with them, which may recompute it.
        causal_sums: forms the sums instead, of all tokens at once: Triton's.

    Returns:
        output [B, H, N, Dv]; the state, which belongs to the last packed sequence. Time O(N (F + chunk_size) Dv).
    """
    if key.shape[2] == 1:
        inference = use_native and not training and not torch.is_grad_enabled()
        given = (query, key, value, query_map, key_map, key_padding_mask, state, log_decay)
        return _single_token(*given, inference, causal_sums)
    maps = native_maps(query_map, key_map) if use_native and causal_sums is None and can_read(query, key) else []
    if own := own_maps(causal_sums, query_map, key_map, key):
        query_map, key_map = own
    elif not maps:
        query, key = widened(query, key)
        value = value if _works(causal_sums, key) else wide(value)
    heads = (query, key, value, query_map, key_map, key_padding_mask, sequence_ids, state, log_decay)
    if maps:
        return _mapped(maps, *heads)
    if _works(causal_sums, key):
        return _by_operation(causal_sums, key.shape[2], *heads)
    if use_native and can_read(query, key):
        return _by_operation(NATIVE_SUMS, NATIVE_SIZE, *heads)
    output = _output_for(query, value)
    parts: list[Tensor] = []
    start, after = 0, cast(LinearState, state)  # there is at least one segment
    for sums, _, after in _segments(  # noqa: B007 - the last one is returned
        query, key, value, query_map, key_map, key_padding_mask, sequence_ids, state, log_decay, chunk_size
    ):
        place = None if output is None else output.narrow(3, start, sums.shape[3])
        parts.append(torch.div(*ratio(sums), out=place))
        start += sums.shape[3]
    return _joined(parts, output).flatten(1, 2), after


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_map: FeatureMap,
    key_map: FeatureMap,
    key_padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    log_decay: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    use_native: bool = False,
    causal_sums: CausalSums | None = None,
) -> Tensor:
    """Return the bidirectional attention output [B, H, Nq, Dv]; arguments as in `causal_linear_attention`."""
    reads = use_native and query.shape[2] == key.shape[2] and can_read(query, key)
    maps = native_maps(query_map, key_map) if reads and causal_sums is None else []
    at_once = _takes_all(causal_sums, query, key) and log_decay is None and sequence_ids is None
    if own := own_maps(causal_sums, query_map, key_map, key) if at_once or log_decay is not None else []:
        query_map, key_map = own
    elif not maps:
        query, key, value = widened(query, key, value)
    heads = query.unflatten(1, (key.shape[1], -1)), key, value, maps, key_padding_mask
    if maps:
        packed = None if sequence_ids is None else Packed.of(sequence_ids, key.shape[0])
        if log_decay is not None:
            return two_way_attention(*heads, log_decay, packed).flatten(1, 2)
        output = _output_for(query, value)
        how: Any = {"bidirectional": True, "packed": packed, "weighed": False}
        return mapped_attention(*heads, None, None, output, **how)[0].flatten(1, 2)
    causal_sums = NATIVE_SUMS if causal_sums is None and reads else causal_sums
    if log_decay is not None and _works(causal_sums, key):
        return _two_way_by_operation(
            causal_sums, query, key, value, query_map, key_map, key_padding_mask, sequence_ids, log_decay
        )
    if sequence_ids is not None or log_decay is not None:
        return _two_way_linear_attention(
            query, key, value, query_map, key_map, key_padding_mask, sequence_ids, log_decay, chunk_size
        )
    if at_once:
        output, query = _output_for(query, value), query_map(query.unflatten(1, (key.shape[1], -1))).values
        keys = masked(key_map(key), key_padding_mask)
        return full_attention(cast(CausalSums, causal_sums), query, *keys, value, output).flatten(1, 2)
    return read_state(query, sum_keys(key, value, key_map, key_padding_mask), query_map)


def sum_keys(key: Tensor, value: Tensor, key_map: FeatureMap, key_padding_mask: Tensor | None) -> LinearState:
    """Return sum_j phi(k_j) [v_j, 1]^T over the real keys [B, Hkv, N, D]."""
    state: Any = None
    for key_part, value_part, mask in _split(SEGMENT_SIZE, (key, 2), (value, 2), (key_padding_mask, 1)):
        features, log_scale = masked(key_map(dense(key_part)), mask)
        state = _fold(state, features, log_scale, with_ones(value_part))
    return state


def read_state(query: Tensor, state: LinearState, query_map: FeatureMap) -> Tensor:
    """Return phi(q_i) S / phi(q_i) . z [B, H, Nq, Dv] for all queries [B, H, Nq, D] alike."""
    output = _output_for(query, state.kv[..., :-1])
    query = query.unflatten(1, (state.kv.shape[1], -1))
    parts = [
        torch.div(*ratio(_read(query_map(part).values, state.kv)), out=place)
        for part, place in _split(SEGMENT_SIZE, (query, 3), (output, 3))
    ]
    return _joined(parts, output).flatten(1, 2)


def _two_way_linear_attention(
    query, key, value, query_map, key_map, key_padding_mask, sequence_ids, log_decay, chunk_size
):
    """Bidirectional attention inside each packed sequence: keys up to i read forwards, keys after i read backwards."""
    operands, mask, ids = (query, key, value), key_padding_mask, sequence_ids
    forward = _collect(operands, query_map, key_map, mask, ids, log_decay, chunk_size, strict=False)
    backward = _collect(
        tuple(x.flip(2) for x in operands),
        query_map,
        key_map,
        None if mask is None else mask.flip(1),
        None if ids is None else ids.flip(1),
        # read backwards, what comes between two tokens is the decay of the later one
        None if log_decay is None else F.pad(log_decay[:, :, 1:].flip(2), (1, 0)),
        chunk_size,
        strict=True,
    )
    (left, left_max), (right, right_max) = forward, (x.flip(-2 if x.dim() == 5 else -1) for x in backward)
    top = torch.maximum(left_max, right_max).detach()
    total = left * (left_max - top).exp()[:, :, None, :, None] + right * (right_max - top).exp()[:, :, None, :, None]
    return torch.div(*ratio(total)).flatten(1, 2)


def _collect(operands, query_map, key_map, mask, sequence_ids, log_decay, chunk_size, strict):
    """Return the sums of all segments [B, Hkv, G, N, Dv + 1] with their log factors [B, Hkv, N]."""
    segments = list(
        _segments(*operands, query_map, key_map, mask, sequence_ids, None, log_decay, chunk_size, strict=strict)
    )
    sums = torch.cat([part for part, _, _ in segments], dim=3)
    if segments[0][1] is None:
        return sums, sums.new_zeros(*sums.shape[:2], sums.shape[3])
    return sums, torch.cat([top for _, top, _ in segments], dim=2)


def _segments(
    query, key, value, query_map, key_map, key_padding_mask, sequence_ids, state, log_decay, chunk_size, strict=False
) -> Iterator[tuple[Tensor, Tensor | None, LinearState]]:
    """Yield for a few chunks at a time: sums over visible keys [B, Hkv, G, M, Dv + 1], log factors, the next state."""
    query = query.unflatten(1, (key.shape[1], -1))
    opened = OpenChunks(key.shape[2], chunk_size, key.device) if is_open(key) else None
    sizes = [] if opened else part_sizes(query, chunk_size)
    operands = ((query, 3), (key, 2), (value, 2), (key_padding_mask, 1), (sequence_ids, 1), (log_decay, 2))
    carried_id = None if sequence_ids is None else sequence_ids[:, 0]
    for query, key, value, mask, ids, decay in _split(sizes, *operands):
        features, log_scale = masked(key_map(dense(key)), mask, log_decay is not None)
        cut = opened.cut if opened else functools.partial(cut_whole, chunk_size)
        chunks = Chunks(
            cut(query_map(dense(query)).values, 3).transpose(2, 3),
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


def _split(sizes: int | list[int], *operands: tuple[Tensor | None, int]) -> Iterator[tuple[Any, ...]]:
    """Yield the parts of tensors, each along its dimension, side by side; None has parts that are None.

    Split and not sliced: the gradients of all parts are then put together once; not even that where there is one.
    """
    if any(x is not None and is_open(x) for x, _ in operands):  # a loop would be one over the parts of an example
        return iter([tuple(x for x, _ in operands)])
    largest = sizes if isinstance(sizes, int) else sizes[0]
    cut = [None if x is None else x.split(sizes, dim) if x.shape[dim] > largest else [x] for x, dim in operands]
    return zip(*(itertools.repeat(None) if parts is None else parts for parts in cut), strict=False)


def _joined(parts: list[Tensor], output: Tensor | None) -> Tensor:
    """Return `output`, into which parts were written, or parts [B, Hkv, G, N, Dv] one after another."""
    if output is None:
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
    return output


def _works(causal_sums: CausalSums | None, key: Tensor) -> bool:
    """Whether there is an operation for such keys, which what watches operations cannot see into."""
    return causal_sums is not None and key.dtype in causal_sums.kinds() and not is_watched()


def _takes_all(causal_sums: CausalSums | None, query: Tensor, key: Tensor) -> bool:
    """Whether there is an operation by which as many queries as keys see all of them."""
    works = query.shape[2] == key.shape[2] and _works(causal_sums, key)
    return works and cast(CausalSums, causal_sums).attend_all is not None


def own_maps(causal_sums: CausalSums | None, query_map: FeatureMap, key_map: FeatureMap, key: Tensor) -> list[Any]:
    """Return both maps as the operation makes their features, from heads as they are; nothing where it does not."""
    if causal_sums is None or causal_sums.make_features is None or not _works(causal_sums, key):
        return []
    return [functools.partial(causal_sums.make_features, native=x) for x in native_maps(query_map, key_map)]


def _mapped(maps, query, key, value, query_map, key_map, key_padding_mask, sequence_ids, state, log_decay):
    """`causal_linear_attention` by the C, which makes the features itself."""
    output, query = _output_for(query, value), query.unflatten(1, (key.shape[1], -1))
    packed = None if sequence_ids is None else Packed.of(sequence_ids, key.shape[0])
    attended, _, state = mapped_attention(
        query, key, value, maps, key_padding_mask, log_decay, state, output, packed=packed, weighed=False
    )
    return attended.flatten(1, 2), state


def _by_operation(
    causal_sums, size, query, key, value, query_map, key_map, key_padding_mask, sequence_ids, state, log_decay
):
    """`causal_linear_attention` by an operation that gets the features of `size` tokens at a time."""
    output, parts, last = _output_for(query, value), [], None
    ids = None if sequence_ids is None else sequence_ids.expand(query.shape[0], -1)
    query = query.unflatten(1, (key.shape[1], -1))
    operands = ((query, 3), (key, 2), (value, 2), (key_padding_mask, 1), (ids, 1), (log_decay, 2), (output, 3))
    for query, key, value, mask, own, decay, place in _split(size, *operands):
        if last is not None and own is not None:  # a sequence may end where a part does
            state = _kept(state, last == own[:, 0])
        features = key_map(key)
        keys = masked(features, mask, decay is not None or own is not None)
        part, state = causal_attention(causal_sums, query_map(query).values, *keys, value, decay, state, place, own)
        if features.log_scale is None and decay is None:  # which no scale is, even where a row has no keys
            state = state._replace(log_max=torch.zeros_like(state.log_max))
        last = None if own is None else own[:, -1]
        parts.append(part)
    return _joined(parts, output).flatten(1, 2), state


def _kept(state: LinearState, kept: Tensor) -> LinearState:
    """The state of the rows [B] that keep theirs, an empty one in the others."""
    kept = kept[:, None]
    return LinearState(state.kv * kept[..., None, None], state.log_max.masked_fill(~kept, LOWEST / 2))


def _two_way_by_operation(
    causal_sums, query, key, value, query_map, key_map, key_padding_mask, sequence_ids, log_decay
):
    """Bidirectional attention of weights that decay, by an operation that gets features: see `two_way_attention`."""
    ids = None if sequence_ids is None else sequence_ids.expand(key.shape[0], -1)
    query = query_map(query.unflatten(1, (key.shape[1], -1))).values
    key, log_scale = masked(key_map(key), key_padding_mask, True)
    output, log, _ = weighed_attention(causal_sums, query, key, log_scale, value, log_decay, ids)
    if key.shape[2] > 1:
        scale = log_scale[:, :, 1:]
        if ids is not None:  # beside the last query of a sequence lies the first key of the next one
            scale = scale.masked_fill((ids[:, 1:] != ids[:, :-1])[:, None], LOWEST)
            ids = ids[:, :-1].flip(1)
        later = query[..., :-1, :], key[:, :, 1:], scale[..., None], value[:, :, 1:]
        query, key, scale, value = (x.flip(-2) for x in later)
        decay = F.pad(log_decay[:, :, 2:].flip(2), (1, 0))
        after, after_log, _ = weighed_attention(causal_sums, query, key, scale.squeeze(-1), value, decay, ids)
        output, _ = join(output, log, after.flip(3), after_log.flip(3) + log_decay[:, :, None, 1:])
    return output.flatten(1, 2)


def _single_token(query, key, value, query_map, key_map, key_padding_mask, state, log_decay, inference, causal_sums):
    """One token of each row, as in decoding: it is taken into the state, and the state is read."""
    if inference and (own := own_maps(causal_sums, query_map, key_map, key)):
        features = own[0](query.unflatten(1, (key.shape[1], -1))).values
        attended, after = causal_sums.step(features, *own[1](key), value, log_decay, key_padding_mask, state)
        return attended.flatten(1, 2), after
    query, key, value = widened(query, key, value)
    if inference and suits(query, key) and (maps := native_maps(query_map, key_map)):
        query = query.unflatten(1, (key.shape[1], -1))
        attended, after = step_attention(query, key, value, maps, key_padding_mask, log_decay, state)
        return attended.flatten(1, 2), after
    query = query.unflatten(1, (key.shape[1], -1))
    if query_map is key_map:  # one call for the key and the queries of its group: here calls cost more than numbers
        both, log_scale = key_map(torch.cat([query, key.unsqueeze(2)], dim=2))
        query, features = both.split([query.shape[2], 1], 2)
        features = Features(features.squeeze(2), None if log_scale is None else log_scale[:, :, -1])
    else:
        query, features = query_map(query).values, key_map(key)
    features, log_scale = masked(features, key_padding_mask, log_decay is not None)
    if log_decay is not None and (state is not None or log_decay.requires_grad):  # of a first token it is zero
        state = LinearState.before(features.shape[-1], value, True) if state is None else state
        state = state._replace(log_max=state.log_max + log_decay[:, :, 0])
    state = _fold(state, features, log_scale, with_ones(value))
    return torch.div(*ratio(_read(query, state.kv))).flatten(1, 2), state


def masked(keys: Features, key_padding_mask: Tensor | None, scaled: bool = False) -> Features:
    """Features of a part of the keys, `scaled` for sure; a masked key has no weight and no say in the maximum."""
    values, log_scale = keys
    if scaled and log_scale is None:
        log_scale = values.new_zeros(values.shape[:-1], dtype=wide_dtype(values))
    if key_padding_mask is not None:
        hidden = ~key_padding_mask[:, None].bool()
        values = values.masked_fill(hidden[..., None], 0.0)
        log_scale = None if log_scale is None else log_scale.masked_fill(hidden, LOWEST)
    return Features(values, log_scale)


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


def _output_for(query: Tensor, value: Tensor) -> Tensor | None:
    """Return memory [B, Hkv, G, N, Dv] into which the output is written part by part, so that it is fetched once.

    None where gradients or a graph need parts.
    """
    if torch.is_grad_enabled() or is_watched():
        return None
    return empty_output(query.unflatten(1, (value.shape[1], -1)), value)
