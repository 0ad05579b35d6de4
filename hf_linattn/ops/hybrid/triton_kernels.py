"""One more token of hybrid attention in Triton, as in decoding: window, sinks, and what has left the window.

A program reads everything once for its output; then it writes what is remembered, of which it has much at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.triton_feature_kernels import feature_numbers, features_of_row
from ..linear.triton_kernels import HIDDEN, find_tile, load_rows, load_state, store_state
from ..window.triton_decode_kernels import copy_rows, find_row, is_real, keep_rows, load_row, see_rows
from ..window.triton_kernels import opening


@triton.jit
def see_near(
    query, new_key, new_value, sink, ring_key, ring_value, sink_key, sink_value, sequence, position, scaling,
    inputs, columns, RING: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr, SINK_ROWS: tl.constexpr,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """The softmax over what of RING tokens is no sink, over SINKS and the new token, as `see_rows` returns it.

    sink: the score of one more key, of no value, is read there where BESIDE.
    """
    slot = tl.arange(0, SINK_ROWS)  # sinks, and behind them the new token
    first_keys = load_rows(sink_key + sequence * SINKS * KEY_SIZE, KEY_SIZE, slot, SINKS, inputs, KEY_SIZE, False)
    first_values = load_rows(
        sink_value + sequence * SINKS * VALUE_SIZE, VALUE_SIZE, slot, SINKS, columns, VALUE_SIZE, False
    )
    ring_key += sequence * RING * KEY_SIZE
    ring_value += sequence * RING * VALUE_SIZE
    # of no weight beside the new token, and still above what is hidden
    top = tl.maximum(tl.load(sink).to(tl.float32) if BESIDE else HIDDEN, HIDDEN / 2)
    weight, total = tl.exp(top - top), tl.zeros_like(new_value)
    for first in range(0, RING, ROWS):
        row = first + tl.arange(0, ROWS)
        keys = load_rows(ring_key, KEY_SIZE, row, RING, inputs, KEY_SIZE, False)
        values = load_rows(ring_value, VALUE_SIZE, row, RING, columns, VALUE_SIZE, False)
        seen = (position - RING + row >= SINKS) & (row < RING)
        top, weight, total = see_rows(query, scaling, keys, values, seen, top, weight, total)
    own = (slot == SINKS)[:, None]
    first_keys, first_values = tl.where(own, new_key[None], first_keys), tl.where(own, new_value[None], first_values)
    seen = (slot < tl.minimum(position, SINKS)) | (slot == SINKS)
    return see_rows(query, scaling, first_keys, first_values, seen, top, weight, total)


@triton.jit
def join(log, weight, total, far_log, far_weight, far_total, least_weight, gate, GATED: tl.constexpr):
    """The average over near keys, whose sums count exp(log) times, and far ones: see `sums.join`.

    Where GATED the share of far keys is `gate` times what it would be.
    """
    there = far_weight >= least_weight
    far_mass = tl.where(there, far_log + tl.log(tl.where(there, far_weight, 1.0)), HIDDEN)
    most = tl.maximum(log + tl.log(weight), far_mass)
    near, far = tl.exp(log - most), tl.exp(tl.where(there, far_log - most, HIDDEN))
    whole = weight * near + far_weight * far
    if GATED:
        far = far / whole * gate
        return total * ((1.0 - far_weight * far) / weight) + far_total * far
    return (total * near + far_total * far) / whole


@triton.jit
def let_in(
    query, new_key, new_value, sink, ring_key, ring_value, sink_key, sink_value, sequence, position, scaling, inputs,
    columns, asked, log, kept, total, window_log, far_gate, least_weight, RING: tl.constexpr, ROWS: tl.constexpr,
    SINKS: tl.constexpr, SINK_ROWS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BESIDE: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """What near keys, see `see_near`, and the far sums `kept` say to a query of features `asked`, see `join`.

    window_log is read where SHARED, far_gate where GATED.
    """
    top, weight, near = see_near(
        query, new_key, new_value, sink, ring_key, ring_value, sink_key, sink_value, sequence, position, scaling,
        inputs, columns, RING, ROWS, SINKS, SINK_ROWS, KEY_SIZE, VALUE_SIZE, BESIDE,
    )  # fmt: skip
    near_log = tl.load(window_log).to(tl.float32) if SHARED else top
    far_weight, far = tl.sum(asked * total, 0), tl.sum(asked[:, None] * kept, 0)
    gate = opening(tl.load(far_gate, mask=GATED, other=0.0))
    return join(near_log, weight, near, log, far_weight, far, least_weight, gate, GATED)


@triton.jit
def fold_key(
    there, key, key_log, value, before, kept, total, kv_after, log_max_after, sequence, features, columns, first,
    NUM_FEATURES: tl.constexpr, VALUE_SIZE: tl.constexpr, RESCALED: tl.constexpr,
):  # fmt: skip
    """Write the sums over far keys with one more, from those before it, `kept` and `total`; log factors if RESCALED.

    there: whether there is a key. first: whether these are the first columns.
    """
    key, key_log, after = tl.where(there, key, 0.0), tl.where(there, key_log, HIDDEN), before
    if RESCALED:
        after = tl.maximum(before, key_log)
        left = tl.exp(before - after)
        key *= tl.exp(key_log - after)
        kept *= left
        total *= left
    kept += key[:, None] * value[None, :]
    store_state(
        kv_after, sequence, NUM_FEATURES, features, columns, kept, total + key, first, NUM_FEATURES, VALUE_SIZE, True
    )
    if first:
        tl.store(log_max_after + sequence, after)


@triton.jit
def keep_near(
    ring_key, ring_value, sink_key, sink_value, length, ring_key_after, ring_value_after, sink_key_after,
    sink_value_after, length_after, batch, head, sequence, new_key, new_value, read, part, parts, inputs, columns,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
    SINK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write the near keys and values and how much was read, with the new token if there is one to be `read`."""
    position = tl.load(length + batch)
    # where a new key comes, or behind all
    last, first = tl.where(read > 0, RING - 1, RING), tl.where(read > 0, position, SINKS)
    keep_rows(ring_key, ring_key_after, sequence, new_key, last, part, parts, inputs, SIZE, RING, ROWS, 0, read)
    keep_rows(ring_value, ring_value_after, sequence, new_value, last, 0, 1, columns, VALUE_SIZE, RING, ROWS, 0, read)
    keep_rows(sink_key, sink_key_after, sequence, new_key, first, part, parts, inputs, SIZE, SINKS, SINK_ROWS)
    keep_rows(sink_value, sink_value_after, sequence, new_value, first, 0, 1, columns, VALUE_SIZE, SINKS, SINK_ROWS)
    tl.store(length_after + batch, position + read, mask=(head == 0) & (part == 0))


@triton.jit
def step_hybrid(
    query, key, value, query_weight, query_bias, key_weight, key_bias, ring_key, ring_value, sink_key, sink_value, kv,
    log_max, length, log_mix, decay_rate, window_log, sink, far_gate, ends, sums, ring_key_after, ring_value_after,
    sink_key_after, sink_value_after, kv_after, log_max_after, length_after, query_batch, query_head, key_batch,
    key_head, value_batch, value_head, query_weight_head, query_weight_group, query_weight_row, query_weight_column,
    query_bias_head, query_bias_group, query_bias_column, key_weight_head, key_weight_row, key_weight_column,
    key_bias_head, key_bias_column, heads, groups, scaling, scale, quadratic, offset, least_weight,
    INPUT_SIZE: tl.constexpr, SIZE: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr, WEIGHED: tl.constexpr, BIASED: tl.constexpr, NUM_FEATURES: tl.constexpr,
    KEYS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUES: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr,
    SINKS: tl.constexpr, SINK_ROWS: tl.constexpr, DECAYED: tl.constexpr, SHARED: tl.constexpr, BESIDE: tl.constexpr,
    GATED: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """One more token of a sequence, and all queries of its groups, in VALUES columns of its values.

    The oldest of RING keys enters the sums, the new one if there are none. What makes features: see `features_of_row`.
    A pad, whose `ends` is zero, leaves all as it is.
    """
    sequence, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, head, inputs = sequence // heads, sequence % heads, tl.arange(0, KEYS)
    features = feature_numbers(SIZE, COLUMNS, ACTIVATION == "softmax_pair")
    columns = part * VALUES + tl.arange(0, VALUES)
    key += batch * key_batch + head * key_head
    leaving_key, leaving_log = features_of_row(
        ring_key + sequence * RING * INPUT_SIZE if RING > 0 else key, key_weight + head * key_weight_head,
        key_bias + head * key_bias_head, key_weight_row, key_weight_column, key_bias_column, scale, quadratic, offset,
        INPUT_SIZE, SIZE, INPUTS, COLUMNS, ACTIVATION, WEIGHED, BIASED,
    )  # fmt: skip
    new_key = load_row(key, inputs, INPUT_SIZE)
    new_value = load_row(value + batch * value_batch + head * value_head, columns, VALUE_SIZE)
    kept, total = load_state(kv, sequence, NUM_FEATURES, features, columns, NUM_FEATURES, VALUE_SIZE, True)
    position, rate = tl.load(length + batch), tl.load(decay_rate + head, mask=DECAYED, other=0.0).to(tl.float32)
    read = is_real(ends + batch, ENDS)
    before = tl.load(log_max + sequence) - rate * read
    leaving = load_row(ring_value + sequence * RING * VALUE_SIZE, columns, VALUE_SIZE) if RING > 0 else new_value
    for group in range(groups):
        own, row = head * groups + group, sequence * groups + group
        here = query + batch * query_batch + own * query_head
        asked, query_log = features_of_row(
            here, query_weight + head * query_weight_head + group * query_weight_group,
            query_bias + head * query_bias_head + group * query_bias_group, query_weight_row, query_weight_column,
            query_bias_column, scale, quadratic, offset, INPUT_SIZE, SIZE, INPUTS, COLUMNS, ACTIVATION, WEIGHED, BIASED
        )  # fmt: skip
        log = before - rate * RING + tl.load(log_mix + own).to(tl.float32) + query_log
        result = let_in(
            load_row(here, inputs, INPUT_SIZE), new_key, new_value, sink + own, ring_key, ring_value, sink_key,
            sink_value, sequence, position, scaling, inputs, columns, asked, log, kept, total, window_log + own,
            far_gate + own, least_weight, RING, ROWS, SINKS, SINK_ROWS, INPUT_SIZE, VALUE_SIZE, BESIDE, SHARED, GATED,
        )  # fmt: skip
        tl.store(sums + row * VALUE_SIZE + columns, result, mask=columns < VALUE_SIZE)
    fold_key(  # unless the oldest key is a sink, or there is none
        (position >= SINKS + RING) & (read > 0), leaving_key, leaving_log, leaving, before, kept, total, kv_after,
        log_max_after, sequence, features, columns, part == 0, NUM_FEATURES, VALUE_SIZE,
        ACTIVATION == "exponential" or DECAYED,
    )  # fmt: skip
    keep_near(
        ring_key, ring_value, sink_key, sink_value, length, ring_key_after, ring_value_after, sink_key_after,
        sink_value_after, length_after, batch, head, sequence, new_key, new_value, read, part, parts, inputs, columns,
        INPUT_SIZE, VALUE_SIZE, RING, ROWS, SINKS, SINK_ROWS,
    )  # fmt: skip


@triton.jit
def keep_prompt(
    key, value, starts, ends, ring_key, ring_value, sink_key, sink_value, length_after, key_batch, key_head, key_token,
    value_batch, value_head, value_token, heads, length,
    KEY_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUES: tl.constexpr, RING: tl.constexpr,
    SINKS: tl.constexpr, ROWS: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Copy the last RING keys and values of a sequence, and the first SINKS, ROWS of each at a time."""
    most: tl.constexpr = RING if RING > SINKS else SINKS
    sequence, tile = find_tile(most if most > 0 else 1, ROWS)
    row, batch, head = tile * ROWS + tl.arange(0, ROWS), sequence // heads, sequence % heads
    begins, read = find_row(starts, ends, batch, length, STARTS, ENDS)
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    inputs, columns, last = tl.arange(0, KEYS), tl.arange(0, VALUES), read - RING + row
    inside, place = row < RING, sequence * RING + row
    there = inside & (last >= 0)
    copy_rows(key, key_token, begins + last, there, ring_key, place, inside, inputs, KEY_SIZE)
    copy_rows(value, value_token, begins + last, there, ring_value, place, inside, columns, VALUE_SIZE)
    inside, place = row < SINKS, sequence * SINKS + row
    there = inside & (row < read)
    copy_rows(key, key_token, begins + row, there, sink_key, place, inside, inputs, KEY_SIZE)
    copy_rows(value, value_token, begins + row, there, sink_value, place, inside, columns, VALUE_SIZE)
    if (head == 0) & (tile == 0):
        tl.store(length_after + batch, tl.cast(read, tl.int64))
