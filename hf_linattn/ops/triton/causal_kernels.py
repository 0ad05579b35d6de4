"""Causal sums over keys in Triton: one kernel adds up the states of a sequence, another reads them.

A sequence is cut into segments of `SEGMENT` tokens. `write_states` walks through them and leaves the state before
each; `read_states` takes all of them at once, `ROWS` queries in a program: what the state says of the segments before,
and the pairs inside the own one. What scales and decays make of keys, queries and states is worked out before, a
number per token (`causal_sums.Scales`), so that here they are factors.

Features and values in half precision are multiplied as they are, and what they are multiplied with is rounded to them,
states to two numbers each, whose sums are not to lose digits; sums are float32. Weights are summed up as they were
rounded, so that the average of values that are all alike is one of them. A scale is multiplied into features, before
these are rounded, and not into what they are summed up with, whose columns cancel: values and, as keys of gradients,
values and ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)  # `exponential.LOWEST`


@triton.jit
def load_rows(rows, token_stride, place, length, columns, NUM_COLUMNS: tl.constexpr, REVERSE: tl.constexpr):
    """The columns [C] of the tokens at places [R], zero beyond either end."""
    token = (length - 1 - place if REVERSE else place).to(tl.int64)
    inside = (place < length)[:, None] & (columns < NUM_COLUMNS)[None, :]
    return tl.load(rows + token[:, None] * token_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def add_product(rows, factor, result, PRECISION: tl.constexpr):
    """result + rows factor, in float32; beside rows in half precision a number of the factor counts as two."""
    rounded = factor.to(rows.dtype)
    result = tl.dot(rows, rounded, result, input_precision=PRECISION)
    if rows.dtype != tl.float32:
        left = (factor - rounded.to(tl.float32)).to(rows.dtype)
        result = tl.dot(rows, left, result, input_precision=PRECISION)
    return result


@triton.jit
def write_states(
    key, value, weight, left, state, state_after, states, totals,
    key_batch, key_head, key_token, value_batch, value_head, value_token, heads, length, num_segments,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, SCALED: tl.constexpr, NORMALISE: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [KEYS, VALUES] of the states of one sequence: `states` before every segment, `state_after` the last.

    state, state_after: [KEY_SIZE, VALUE_SIZE], with one more column where NORMALISE, which `totals` has of the others.
    weight: of every key as seen from the end of its segment. left: what is left of a state there. Both where SCALED.
    """
    sequence = tl.program_id(0).to(tl.int64)
    key += sequence // heads * key_batch + sequence % heads * key_head
    value += sequence // heads * value_batch + sequence % heads * value_head
    features = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    inside = (features < KEY_SIZE)[:, None] & (columns < VALUE_SIZE)[None, :]
    width: tl.constexpr = VALUE_SIZE + 1 if NORMALISE else VALUE_SIZE
    given = (sequence * KEY_SIZE + features) * width
    kept = tl.load(state + given[:, None] + columns[None, :], mask=inside, other=0.0)
    total = tl.zeros([KEYS], dtype=tl.float32)
    if NORMALISE:
        total = tl.load(state + given + VALUE_SIZE, mask=features < KEY_SIZE, other=0.0)
    for segment in range(num_segments):
        place = (sequence * num_segments + segment) * KEY_SIZE + features
        tl.store(states + place[:, None] * VALUE_SIZE + columns[None, :], kept, mask=inside)
        if NORMALISE and tl.program_id(2) == 0:  # of the programs with these features one is enough
            tl.store(totals + place, total, mask=features < KEY_SIZE)
        if SCALED:
            factor = tl.load(left + sequence * num_segments + segment)
            kept *= factor
            total *= factor
        for start in range(0, SEGMENT, ROWS):
            token = segment * SEGMENT + start + tl.arange(0, ROWS)
            keys = load_rows(key, key_token, token, length, features, KEY_SIZE, REVERSE)
            values = load_rows(value, value_token, token, length, columns, VALUE_SIZE, REVERSE)
            if SCALED:
                scale = tl.load(weight + sequence * num_segments * SEGMENT + token)[:, None]
                if NORMALISE:
                    keys = (keys * scale).to(values.dtype)
                else:
                    values = (values * scale).to(keys.dtype)
            kept = tl.dot(tl.trans(keys), values, kept, input_precision=PRECISION)
            total += tl.sum(keys.to(tl.float32), 0)
    tl.store(state_after + given[:, None] + columns[None, :], kept, mask=inside)
    if NORMALISE and tl.program_id(2) == 0:
        tl.store(state_after + given + VALUE_SIZE, total, mask=features < KEY_SIZE)


@triton.jit
def read_state(
    query, query_token, states, totals, row, length, columns, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALISE: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a state says to queries, [ROWS, VALUES], and with what weight, [ROWS]."""
    result = tl.zeros([ROWS, VALUES], dtype=tl.float32)
    weight = tl.zeros([ROWS], dtype=tl.float32)
    for part in range(0, KEY_SIZE, KEYS):
        features = part + tl.arange(0, KEYS)
        queries = load_rows(query, query_token, row, length, features, KEY_SIZE, REVERSE)
        state = load_rows(states, VALUE_SIZE, features, KEY_SIZE, columns, VALUE_SIZE, False)
        result = add_product(queries, state, result, PRECISION)
        if NORMALISE:
            total = tl.load(totals + features, mask=features < KEY_SIZE, other=0.0)
            weight += tl.sum(queries.to(tl.float32) * total[None, :], 1)
    return result, weight


@triton.jit
def form_scores(
    query, query_token, key, key_token, row, token, length, KEY_SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of queries and keys, [ROWS, ROWS]."""
    scores = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    for part in range(0, KEY_SIZE, KEYS):
        features = part + tl.arange(0, KEYS)
        queries = load_rows(query, query_token, row, length, features, KEY_SIZE, REVERSE)
        keys = load_rows(key, key_token, token, length, features, KEY_SIZE, REVERSE)
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
    return scores


@triton.jit
def write_rows(
    result, weight, sums, sums_token, factor, row_factor, row, length, columns, least_weight,
    VALUE_SIZE: tl.constexpr, NORMALISE: tl.constexpr, WEIGHED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Sums of the queries in rows, and what they are divided by; see `read_states`."""
    token = length - 1 - row if REVERSE else row
    if NORMALISE:
        enough = weight >= least_weight
        own = tl.where(enough, 1.0 / tl.where(enough, weight, 1.0), 0.0)
        if tl.program_id(2) == 0:
            tl.store(factor + token, own, mask=row < length)
        result *= own[:, None]
    if WEIGHED:
        result *= tl.load(row_factor + token, mask=row < length, other=0.0)[:, None]
    inside = (row < length)[:, None] & (columns < VALUE_SIZE)[None, :]
    tl.store(sums + token.to(tl.int64)[:, None] * sums_token + columns[None, :], result, mask=inside)


@triton.jit
def read_states(
    query, key, value, states, totals, exponent, top, kept, starts, row_factor, sums, factor,
    query_batch, query_head, query_group, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, sums_batch, sums_head, sums_group, sums_token,
    heads, groups, length, num_segments, least_weight,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, SCALED: tl.constexpr, NORMALISE: tl.constexpr, WEIGHED: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums [ROWS, VALUES] of queries of one head; the program of the first columns writes what they are divided by.

    exponent, top, kept: where SCALED a pair weighs exp(exponent_j - top_i), the state before the segment kept_i.
    starts: where a query's sequence starts, where PACKED.
    factor: 1 / weight, written where NORMALISE. row_factor: what sums are multiplied by instead, where WEIGHED.
    """
    query_head_index = tl.program_id(0).to(tl.int64)
    sequence, group = query_head_index // groups, query_head_index % groups
    batch, head = sequence // heads, sequence % heads
    query += batch * query_batch + head * query_head + group * query_group
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    first = tl.program_id(1) * ROWS
    segment = first // SEGMENT
    row = first + tl.arange(0, ROWS)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    before = (sequence * num_segments + segment) * KEY_SIZE
    result, weight = read_state(
        query, query_token, states + before * VALUE_SIZE, totals + before, row, length, columns, KEY_SIZE, VALUE_SIZE,
        ROWS, KEYS, VALUES, NORMALISE, REVERSE, PRECISION,
    )  # fmt: skip
    numbers = sequence * num_segments * SEGMENT
    if SCALED:
        row_top = tl.load(top + numbers + row)
        row_kept = tl.load(kept + numbers + row)
        result *= row_kept[:, None]
        weight *= row_kept
    for start in range(segment * SEGMENT, first + ROWS, ROWS):
        token = start + tl.arange(0, ROWS)
        scores = form_scores(
            query, query_token, key, key_token, row, token, length, KEY_SIZE, ROWS, KEYS, REVERSE, PRECISION
        )
        visible = token[None, :] <= row[:, None]
        if PACKED:
            visible &= token[None, :] >= tl.load(starts + batch * num_segments * SEGMENT + row)[:, None]
        if SCALED:
            power = tl.load(exponent + numbers + token)[None, :] - row_top[:, None]
            scores *= tl.exp(tl.where(visible, power, HIDDEN))
        scores = tl.where(visible, scores, 0.0)
        values = load_rows(value, value_token, token, length, columns, VALUE_SIZE, REVERSE)
        scores = scores.to(values.dtype)
        result = tl.dot(scores, values, result, input_precision=PRECISION)
        weight += tl.sum(scores.to(tl.float32), 1)
    sums += batch * sums_batch + head * sums_head + group * sums_group
    numbers = query_head_index * length
    write_rows(
        result, weight, sums, sums_token, factor + numbers, row_factor + numbers, row, length, columns, least_weight,
        VALUE_SIZE, NORMALISE, WEIGHED, REVERSE,
    )  # fmt: skip


@triton.jit
def step_token(
    query, key, value, log_scale, log_decay, sums, state, log_max, state_after, log_max_after, groups, least_weight,
    KEY_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUES: tl.constexpr,
    SCALED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """One more key of a sequence, and all queries of its groups, in VALUES columns of its state; of KEYS >= KEY_SIZE.

    log_scale: of the key where SCALED. log_decay: of the state where DECAYED.
    """
    sequence = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, KEYS)
    columns = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    of_keys, of_values = features < KEY_SIZE, columns < VALUE_SIZE
    inside = of_keys[:, None] & of_values[None, :]
    keys = tl.load(key + sequence * KEY_SIZE + features, mask=of_keys, other=0.0).to(tl.float32)
    values = tl.load(value + sequence * VALUE_SIZE + columns, mask=of_values, other=0.0).to(tl.float32)
    place = (sequence * KEY_SIZE + features) * (VALUE_SIZE + 1)
    kept = tl.load(state + place[:, None] + columns[None, :], mask=inside, other=0.0)
    total = tl.load(state + place + VALUE_SIZE, mask=of_keys, other=0.0)
    before = tl.load(log_max + sequence)
    after = before
    if SCALED or DECAYED:
        if DECAYED:
            before += tl.load(log_decay + sequence)
        scale = tl.load(log_scale + sequence) if SCALED else 0.0
        after = tl.maximum(before, scale)
        left = tl.exp(before - after)
        keys *= tl.exp(scale - after)
        kept *= left
        total *= left
    kept += keys[:, None] * values[None, :]
    total += keys
    tl.store(state_after + place[:, None] + columns[None, :], kept, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(state_after + place + VALUE_SIZE, total, mask=of_keys)
        tl.store(log_max_after + sequence, after)
    for group in range(groups):
        row = sequence * groups + group
        queries = tl.load(query + row * KEY_SIZE + features, mask=of_keys, other=0.0).to(tl.float32)
        weight = tl.sum(queries * total, 0)
        result = tl.sum(queries[:, None] * kept, 0) / tl.where(weight >= least_weight, weight, float("inf"))
        tl.store(sums + row * VALUE_SIZE + columns, result, mask=of_values)
