"""Softmax attention inside a sliding window and to sinks in Triton, forward and back.

    o_i = sum_j exp(s q_i . k_j) v_j / sum_j exp(s q_i . k_j)      j < sinks, or |i - j| < window

What is seen follows from places, so no mask and no table of blocks is read. A program has `ROWS` queries, or `COLUMNS`
keys, and meets the others tile by tile; sinks come in tiles of `SINKS`. Each query may begin with one more value, and
each gradient is written by one program. Scores are in powers of two, as in the `triton_kernels` of blocks.

A prompt without gradients (`attend_window` alone): each row may begin further on, a score without value stands beside
all keys, and what lies beyond the window has an average of its own (`Far`), of which a gate says how much counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..block_softmax.triton_kernels import LN_2, LOG2_E, LOWEST, load_tile, take_in
from ..hybrid.types import GATE_GAIN, GATE_RANGE
from .triton_decode_kernels import find_row

GAIN, SHUT, OPEN = (tl.constexpr(x) for x in (GATE_GAIN, *GATE_RANGE))


@triton.jit
def find_tile(length, TILE: tl.constexpr):
    """The tokens of a program: the number of batch and head, of the tile, the first place, and all [TILE]."""
    tiles = tl.cdiv(length, TILE)
    tile = tl.program_id(0) % tiles
    return (tl.program_id(0) // tiles).to(tl.int64), tile, tile * TILE, tile * TILE + tl.arange(0, TILE)


@triton.jit
def in_window(at, place, window, sinks, end, CAUSAL: tl.constexpr):
    """Whether queries at some places see keys that are no sinks; both broadcast."""
    seen = (place >= sinks) & (place < end) & (at - place < window)
    return seen & (place <= at) if CAUSAL else seen & (place - at < window)


@triton.jit
def is_sink(at, place, sinks, end, CAUSAL: tl.constexpr):
    """Whether they see a sink."""
    seen = (place < sinks) & (place < end)
    return seen & (place <= at) if CAUSAL else seen


@triton.jit
def first_key(first, window, sinks, COLUMNS: tl.constexpr):
    """Where the tiles of keys begin that queries from `first` on see, but for sinks."""
    return tl.maximum(tl.maximum(first - window + 1, 0), sinks) // COLUMNS * COLUMNS


@triton.jit
def behind_keys(first, window, end, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """Behind the last key that ROWS queries from `first` on see."""
    return tl.minimum(first + ROWS if CAUSAL else first + ROWS + window - 1, end)


@triton.jit
def score_seen(left, right, seen, scaling, PRECISION: tl.constexpr):
    """Products of two tiles as scores in powers of two, LOWEST for pairs that do not see each other."""
    return tl.where(seen, tl.dot(left, tl.trans(right), input_precision=PRECISION) * (scaling * LOG2_E), LOWEST)


@triton.jit
def powers(log):
    """A log in powers of two, and zero for none: without keys all scores are LOWEST, and weights zero."""
    return tl.where(log > LOWEST / 2, log * LOG2_E, 0.0)


@triton.jit
def see_keys(
    rows, at, first, key, key_token, value, value_token, end, window, sinks, scaling, keys, values, top, weight,
    result, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SINKS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go on with sinks and the window of queries at some places, from `first` on, as `take_in` does."""
    if SINKS > 0:
        for start in tl.range(0, sinks, SINKS, num_stages=1):
            place = start + tl.arange(0, SINKS)
            there = (place < sinks) & (place < end)
            tile = load_tile(key, key_token, place, there, keys, KEY_SIZE)
            met = load_tile(value, value_token, place, there, values, VALUE_SIZE)
            seen = is_sink(at[:, None], place[None, :], sinks, end, CAUSAL)
            scores = score_seen(rows, tile, seen, scaling, PRECISION)
            top, weight, result = take_in(scores, met, top, weight, result, PRECISION)
    low, high = first_key(first, window, sinks, COLUMNS), behind_keys(first, window, end, ROWS, CAUSAL)
    for start in range(low, high, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        tile = load_tile(key, key_token, place, place < end, keys, KEY_SIZE)
        met = load_tile(value, value_token, place, place < end, values, VALUE_SIZE)
        seen = in_window(at[:, None], place[None, :], window, sinks, end, CAUSAL)
        scores = score_seen(rows, tile, seen, scaling, PRECISION)
        top, weight, result = take_in(scores, met, top, weight, result, PRECISION)
    return top, weight, result


@triton.jit
def opening(far_gate):
    """How far a gate is open, from its number as it is stored: `ops.hybrid.types.gate_logit`."""
    return tl.sigmoid(tl.minimum(tl.maximum(far_gate.to(tl.float32), SHUT), OPEN) * GAIN)


@triton.jit
def add_far(
    result, top, weight, given, begin, some, mix, rate, far_gate, window, DECAYED: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """The averages [R, C] of near keys, whose weights come to weight 2^top, with those of a `Far` where it has some.

    given: its averages. begin: its logs. mix, rate, far_gate: where those of the head are.
    """
    gate = opening(tl.load(far_gate)) if GATED else 1.0
    begin += tl.load(mix).to(tl.float32)
    if DECAYED:
        begin -= tl.load(rate).to(tl.float32) * window
    begin = tl.where(some, begin * LOG2_E, LOWEST)
    near = tl.where(weight > 0, top + tl.log2(tl.where(weight > 0, weight, 1.0)), LOWEST)
    share = gate / (1.0 + tl.exp2(tl.minimum(near - begin, 126.0)))
    return result * (1.0 - share)[:, None] + given.to(tl.float32) * share[:, None]


@triton.jit
def attend_window(
    query, key, value, out, rest, log, before, before_log, starts, ends, sink, mix, rate, far_gate,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    out_batch, out_head, out_token, before_batch, before_head, before_token,
    heads, groups, length, begun, old_rows, window, sinks, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SINKS: tl.constexpr, CAUSAL: tl.constexpr, BEGINS: tl.constexpr, ENDS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, STARTS: tl.constexpr = False, BESIDE: tl.constexpr = False,
    FAR: tl.constexpr = False, DECAYED: tl.constexpr = False, GATED: tl.constexpr = False,
):  # fmt: skip
    """Attention [ROWS, VALUE_SIZE] of queries of one head, and the logs of their weights.

    SPLIT: whether `rest` gets what is left of the output when it is rounded; it lies in memory as `out` does.
    STARTS: whether places count from `starts` on; pads then stand behind the last token, those in front of the row
    last, and get zero. BESIDE: whether there is a sink. FAR: whether queries begin with far keys, without logs after.
    """
    number, _, first, at = find_tile(length, ROWS)
    batch, own, here = number // heads, number % heads, at < length
    begins, end = find_row(starts, ends, batch, length, STARTS, ENDS)
    token, shown_at = at, here
    key += batch * key_batch + own // groups * key_head
    value += batch * value_batch + own // groups * value_head
    if STARTS:
        token, shown_at = (begins + at) % length, at < end
        key += begins * key_token
        value += begins * value_token
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    rows = load_tile(query + batch * query_batch + own * query_head, query_token, token, here, keys, KEY_SIZE)
    old = token - begun
    top, weight = tl.full([ROWS], LOWEST / 2, tl.float32), tl.zeros([ROWS], tl.float32)
    if BEGINS:  # read now, for the time until it comes, and added last
        begin = tl.load(before_log + number * old_rows + old, mask=shown_at & (old >= 0), other=LOWEST)
        some = (begin > LOWEST / 2) | (begin != begin)  # one that is no number shows
        given = load_tile(before + batch * before_batch + own * before_head, before_token, old, some, values,
                          VALUE_SIZE)  # fmt: skip
        if not FAR:
            top, weight = tl.where(some, begin * LOG2_E, LOWEST / 2), tl.where(some, 1.0, 0.0)
    begin_top = top
    if BESIDE:
        top, weight = tl.maximum(top, tl.load(sink + own).to(tl.float32) * LOG2_E), weight + 1.0
    top, weight, result = see_keys(
        rows, at, first, key, key_token, value, value_token, end, window, sinks, scaling, keys, values, top, weight,
        tl.zeros([ROWS, VALUES], tl.float32), KEY_SIZE, VALUE_SIZE, ROWS, COLUMNS, SINKS, CAUSAL, PRECISION,
    )  # fmt: skip
    if BEGINS and not FAR:
        result += tl.where(some, tl.exp2(begin_top - top), 0.0)[:, None] * given.to(tl.float32)
    found = shown_at & (weight != 0)  # one that is no number is found, and shown
    result = tl.where(found[:, None], result / tl.where(found, weight, 1.0)[:, None], 0.0)
    if FAR:
        result = add_far(result, top, weight, given, begin, some, mix + own, rate + own // groups, far_gate + own,
                         window, DECAYED, GATED)  # fmt: skip
    offset = batch * out_batch + own * out_head + token.to(tl.int64)[:, None] * out_token + values[None, :]
    shown = here[:, None] & (values < VALUE_SIZE)[None, :]
    rounded = result.to(out.dtype.element_ty)
    tl.store(out + offset, rounded, mask=shown)
    if SPLIT:
        tl.store(rest + offset, result - rounded.to(tl.float32), mask=shown)
    if not FAR:
        weight = tl.where(found, weight, 1.0)
        tl.store(log + number * length + token, tl.where(found, (top + tl.log2(weight)) * LN_2, LOWEST), mask=here)


@triton.jit
def reverse(left, left_value, right, right_value, seen, log, weight_grad, scaling, PRECISION: tl.constexpr):
    """Weights, made again from scores and the logs of their sums, and the scores' gradients; logs broadcast.

    Of keys one side has the values, of queries the other the gradients of the outputs. In the dtype of all four.
    """
    weights = tl.exp2(score_seen(left, right, seen, scaling, PRECISION) - log)
    products = tl.dot(left_value, tl.trans(right_value), input_precision=PRECISION)
    return weights.to(left.dtype), (weights * (products - weight_grad)).to(left.dtype)


@triton.jit
def lost(
    grad, grad_token, out, rest, out_token, log_grad, at, here, columns, SIZE: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Gradients g of outputs o, and what each query's weights lose together: g . o less the gradient of its log."""
    grads = load_tile(grad, grad_token, at, here, columns, SIZE)
    made = load_tile(out, out_token, at, here, columns, SIZE).to(tl.float32)
    if SPLIT:
        made += load_tile(rest, out_token, at, here, columns, SIZE).to(tl.float32)
    return grads, tl.sum(grads.to(tl.float32) * made, 1) - tl.load(log_grad + at, mask=here, other=0.0)


@triton.jit
def reverse_beginning(
    grads, of_weight, total, before, before_token, d_before, d_before_token, log, d_log, old, here, columns,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of what queries begin with, rows `old`: its share of the output's, as every value's."""
    there, grads = here & (old >= 0), grads.to(tl.float32)
    begin = tl.load(log + old, mask=there, other=LOWEST)
    some = begin > LOWEST / 2
    given = load_tile(before, before_token, old, some, columns, SIZE).to(tl.float32)
    share = tl.where(some, tl.exp2(begin * LOG2_E - total), 0.0)
    place = old.to(tl.int64)[:, None] * d_before_token + columns[None, :]
    tl.store(d_before + place, share[:, None] * grads, mask=there[:, None] & (columns < SIZE)[None, :])
    tl.store(d_log + old, share * (tl.sum(grads * given, 1) - of_weight), mask=there)


@triton.jit
def store_share(to, weights, rows, factor, number, there, columns, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Write what a tile of queries adds to the gradients of sinks: weights [ROWS, SINKS] times rows [ROWS, ...]."""
    share = tl.dot(tl.trans(weights), rows, input_precision=PRECISION) * factor
    shown = there[:, None] & (columns < SIZE)[None, :]
    tl.store(to + number[:, None] * SIZE + columns[None, :], share, mask=shown)


@triton.jit
def reverse_window_queries(
    query, key, value, grad, out, rest, log, log_grad, before, before_log, ends, d_query, d_before, d_before_log,
    weight_grad, d_sink_key, d_sink_value,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    grad_batch, grad_head, grad_token, out_batch, out_head, out_token, before_batch, before_head, before_token,
    d_query_batch, d_query_head, d_query_token, d_before_batch, d_before_head, d_before_token,
    heads, groups, length, begun, old_rows, window, sinks, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SINKS: tl.constexpr, CAUSAL: tl.constexpr, BEGINS: tl.constexpr, ENDS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of a program, of what they begin with, and their share of the sinks' gradients.

    weight_grad: [B H, N], written: what each query's weights lose together, g_i . o_i less the gradient of its log.
    d_sink_key, d_sink_value: [B H, tiles, sinks, D or Dv], written.
    """
    number, tile_number, first, at = find_tile(length, ROWS)
    batch, own, here = number // heads, number % heads, at < length
    _begins, end = find_row(ends, ends, batch, length, False, ENDS)
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    rows = load_tile(query + batch * query_batch + own * query_head, query_token, at, here, keys, KEY_SIZE)
    offset, row = batch * out_batch + own * out_head, number * length + at
    grads, of_weight = lost(
        grad + batch * grad_batch + own * grad_head, grad_token, out + offset, rest + offset, out_token,
        log_grad + number * length, at, here, values, VALUE_SIZE, SPLIT,
    )  # fmt: skip
    tl.store(weight_grad + row, of_weight, mask=here)
    total = powers(tl.load(log + row, mask=here, other=0.0))
    if BEGINS:
        reverse_beginning(
            grads, of_weight, total, before + batch * before_batch + own * before_head, before_token,
            d_before + batch * d_before_batch + own * d_before_head, d_before_token, before_log + number * old_rows,
            d_before_log + number * old_rows, at - begun, here, values, VALUE_SIZE,
        )  # fmt: skip
    result = tl.zeros([ROWS, KEYS], tl.float32)
    key += batch * key_batch + own // groups * key_head
    value += batch * value_batch + own // groups * value_head
    if SINKS > 0:
        part = (number * tl.cdiv(length, ROWS) + tile_number) * sinks
        for start in tl.range(0, sinks, SINKS, num_stages=1):
            place = start + tl.arange(0, SINKS)
            there = place < sinks
            tile = load_tile(key, key_token, place, there, keys, KEY_SIZE)
            met = load_tile(value, value_token, place, there, values, VALUE_SIZE)
            seen = is_sink(at[:, None], place[None, :], sinks, end, CAUSAL)
            weights, slopes = reverse(rows, grads, tile, met, seen, total[:, None], of_weight[:, None], scaling,
                                      PRECISION)  # fmt: skip
            result = tl.dot(slopes, tile, result, input_precision=PRECISION)
            store_share(d_sink_key, slopes, rows, scaling, part + place, there, keys, KEY_SIZE, PRECISION)
            store_share(d_sink_value, weights, grads, 1.0, part + place, there, values, VALUE_SIZE, PRECISION)
    low, high = first_key(first, window, sinks, COLUMNS), behind_keys(first, window, end, ROWS, CAUSAL)
    for start in range(low, high, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        tile = load_tile(key, key_token, place, place < length, keys, KEY_SIZE)
        met = load_tile(value, value_token, place, place < length, values, VALUE_SIZE)
        seen = in_window(at[:, None], place[None, :], window, sinks, end, CAUSAL)
        _, slopes = reverse(rows, grads, tile, met, seen, total[:, None], of_weight[:, None], scaling, PRECISION)
        result = tl.dot(slopes, tile, result, input_precision=PRECISION)
    d_query += batch * d_query_batch + own * d_query_head + at.to(tl.int64)[:, None] * d_query_token + keys[None, :]
    tl.store(d_query, result * scaling, mask=here[:, None] & (keys < KEY_SIZE)[None, :])


@triton.jit
def reverse_window_keys(
    query, key, value, grad, log, weight_grad, ends, d_key, d_value,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    grad_batch, grad_head, grad_token, d_key_batch, d_key_head, d_key_token, d_value_batch, d_value_head,
    d_value_token, heads, groups, length, window, sinks, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of COLUMNS keys and their values, of all but sinks; weights and slopes are [COLUMNS, ROWS]."""
    number, _, first, place = find_tile(length, COLUMNS)
    kv_heads = heads // groups
    batch, head, there = number // kv_heads, number % kv_heads, place < length
    _begins, end = find_row(ends, ends, batch, length, False, ENDS)
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    tile = load_tile(key + batch * key_batch + head * key_head, key_token, place, there, keys, KEY_SIZE)
    met = load_tile(value + batch * value_batch + head * value_head, value_token, place, there, values, VALUE_SIZE)
    key_grad, value_grad = tl.zeros([COLUMNS, KEYS], tl.float32), tl.zeros([COLUMNS, VALUES], tl.float32)
    low = first if CAUSAL else tl.maximum(first - window + 1, 0)
    tiles = tl.cdiv(tl.minimum(first + COLUMNS + window - 1, length) - low, ROWS)
    query += batch * query_batch + head * groups * query_head
    grad += batch * grad_batch + head * groups * grad_head
    for step in range(0, groups * tiles):
        group, at = (step // tiles).to(tl.int64), low + step % tiles * ROWS + tl.arange(0, ROWS)
        here = at < length
        rows = load_tile(query + group * query_head, query_token, at, here, keys, KEY_SIZE)
        grads = load_tile(grad + group * grad_head, grad_token, at, here, values, VALUE_SIZE)
        row = (batch * heads + head * groups + group) * length + at
        total = powers(tl.load(log + row, mask=here, other=0.0))
        of_weight = tl.load(weight_grad + row, mask=here, other=0.0)
        seen = in_window(at[None, :], place[:, None], window, sinks, end, CAUSAL)
        weights, slopes = reverse(tile, met, rows, grads, seen, total[None, :], of_weight[None, :], scaling, PRECISION)
        value_grad = tl.dot(weights, grads, value_grad, input_precision=PRECISION)
        key_grad = tl.dot(slopes, rows, key_grad, input_precision=PRECISION)
    shown, place = there & (place >= sinks), place.to(tl.int64)[:, None]
    d_key += batch * d_key_batch + head * d_key_head + place * d_key_token + keys[None, :]
    tl.store(d_key, key_grad * scaling, mask=shown[:, None] & (keys < KEY_SIZE)[None, :])
    d_value += batch * d_value_batch + head * d_value_head + place * d_value_token + values[None, :]
    tl.store(d_value, value_grad, mask=shown[:, None] & (values < VALUE_SIZE)[None, :])
