"""Sums over keys in Triton: a program walks through the tokens of one head and has the state beside it.

A sequence is cut into segments, so that there is work for the whole GPU. `write_states` adds up what each of them
brings; a program of `read_states` begins with the sum of those before its own, and takes `ROWS` tokens at a time: what
the state says to the queries, the pairs among these tokens, and then what the keys add to the state. What scales and
decays make of keys, queries and states is worked out before, a number per token (`triton_scales.Scales`), so that here
they are factors.

A state is [features, values + 1], its last column the sum of the features. Forward, features are the keys of these
sums and what is summed up with them are values; in two of three gradients it is the other way round, and a program
reads the state turned (not `FEATURES_FIRST`).

Features and values in half precision are multiplied as they are, and what they are multiplied with is rounded to them,
states to two numbers each, whose sums are not to lose digits; sums are float32. What float16 cannot hold is rounded in
larger units, which the sums are multiplied by. Weights are summed up as they were rounded, so that the average of
values that are all alike is one of them. A scale is multiplied into features, before these are rounded, or into two
numbers of what they are summed up with, of which much may cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.numerics import LOWEST

HIDDEN = tl.constexpr(LOWEST)
ALIKE = tl.constexpr(16)  # columns, as few as a product may have
HALF = tl.constexpr(32768.0)  # of what float16 holds


@triton.jit
def find_tile(length, TILE: tl.constexpr):
    """The sequence of a program, of all batches and heads, and the number of its tile of TILE tokens.

    One dimension of the grid has both: the others end at 65,535, which tiles of a long row are more than.
    """
    tiles = tl.cdiv(length, TILE)
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles


@triton.jit
def load_rows(rows, token_stride, place, length, columns, NUM_COLUMNS: tl.constexpr, REVERSE: tl.constexpr):
    """The columns [C] of the tokens at places [R], zero beyond either end."""
    token = (length - 1 - place if REVERSE else place).to(tl.int64)
    inside = (place < length)[:, None] & (columns < NUM_COLUMNS)[None, :]
    return tl.load(rows + token[:, None] * token_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def unit_of(most):
    """The power of two, at least 1, in whose units float16 holds numbers up to `most`."""
    return tl.exp2(tl.ceil(tl.log2(tl.minimum(tl.maximum(most / HALF, 1.0), 1e33))))


@triton.jit
def add_product(rows, factor, result, PRECISION: tl.constexpr):
    """result + rows factor, in float32; beside rows in half precision a number of a wider factor counts as two."""
    in_units: tl.constexpr = rows.dtype == tl.float16 and factor.dtype == tl.float32
    if in_units:
        unit = unit_of(tl.max(tl.max(tl.abs(factor), 1), 0))
        factor /= unit
        result /= unit
    rounded = factor.to(rows.dtype)
    result = tl.dot(rows, rounded, result, input_precision=PRECISION)
    if factor.dtype != rows.dtype:
        left = (factor - rounded.to(tl.float32)).to(rows.dtype)
        result = tl.dot(rows, left, result, input_precision=PRECISION)
    if in_units:
        result *= unit
    return result


@triton.jit
def find_state(
    number, features, keys, columns, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, FEATURES_FIRST: tl.constexpr
):  # fmt: skip
    """Where a tile [KEYS, VALUES] of state `number` lies and which of it there is, and the same of its last column.

    features: how many a state has, of which these may be a part.
    """
    inside = (keys < KEY_SIZE)[:, None] & (columns < VALUE_SIZE)[None, :]
    width: tl.constexpr = (VALUE_SIZE if FEATURES_FIRST else KEY_SIZE) + 1
    own, there = (keys, keys < KEY_SIZE) if FEATURES_FIRST else (columns, columns < VALUE_SIZE)
    if FEATURES_FIRST:
        place = keys[:, None] * width + columns[None, :]
    else:
        place = columns[None, :] * width + keys[:, None]
    base = number * features * width
    return base + place, inside, base + own * width + (width - 1), there


@triton.jit
def load_state(
    states, number, features, keys, columns, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    FEATURES_FIRST: tl.constexpr,
):  # fmt: skip
    """A tile [KEYS, VALUES] of state `number`, and of its last column, [KEYS] or [VALUES]."""
    place, inside, last, there = find_state(number, features, keys, columns, KEY_SIZE, VALUE_SIZE, FEATURES_FIRST)
    return tl.load(states + place, mask=inside, other=0.0), tl.load(states + last, mask=there, other=0.0)


@triton.jit
def store_state(
    states, number, features, keys, columns, tile, total, first, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    FEATURES_FIRST: tl.constexpr,
):  # fmt: skip
    """Write a tile of state `number`; of the programs with these features the first writes what they add up to."""
    place, inside, last, there = find_state(number, features, keys, columns, KEY_SIZE, VALUE_SIZE, FEATURES_FIRST)
    tl.store(states + place, tile, mask=inside)
    if first:
        tl.store(states + last, total, mask=there)


@triton.jit
def write_states(
    key, value, extra, weight, left, states,
    key_batch, key_head, key_group, key_token, value_batch, value_head, value_group, value_token,
    heads, groups, length, num_chunks, segment_chunks, num_segments,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SCALED: tl.constexpr, EXTRA: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [KEYS, VALUES] of what one segment adds to the state of one head.

    key: features. extra: [length], what they weigh in their own sum, where EXTRA. weight: of every key as seen from
    the end of its ROWS tokens. left: what is left of a state there. Both where SCALED.
    """
    sequence, segment = tl.program_id(0).to(tl.int64) // num_segments, tl.program_id(0) % num_segments
    batch, head, group = sequence // groups // heads, sequence // groups % heads, sequence % groups
    key += batch * key_batch + head * key_head + group * key_group
    value += batch * value_batch + head * value_head + group * value_group
    features = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    state, total = tl.zeros([KEYS, VALUES], dtype=tl.float32), tl.zeros([KEYS], dtype=tl.float32)
    for chunk in range(segment * segment_chunks, tl.minimum((segment + 1) * segment_chunks, num_chunks)):
        row = chunk * ROWS + tl.arange(0, ROWS)
        keys = load_rows(key, key_token, row, length, features, KEY_SIZE, REVERSE)
        values = load_rows(value, value_token, row, length, columns, VALUE_SIZE, REVERSE)
        if SCALED:
            factor = tl.load(left + sequence * num_chunks + chunk)
            state *= factor
            total *= factor
            keys = (keys * tl.load(weight + sequence * num_chunks * ROWS + row)[:, None]).to(values.dtype)
        state = tl.dot(tl.trans(keys), values, state, input_precision=PRECISION)
        if EXTRA:
            token = length - 1 - row if REVERSE else row
            own = tl.load(extra + sequence * length + token, mask=row < length, other=0.0)
            total += tl.sum(keys.to(tl.float32) * own[:, None], 0)
        else:
            total += tl.sum(keys.to(tl.float32), 0)
    first = tl.program_id(2) == 0
    number = tl.program_id(0).to(tl.int64)
    store_state(states, number, KEY_SIZE, features, columns, state, total, first, KEY_SIZE, VALUE_SIZE, True)


@triton.jit
def begin(
    state, states, through, number, segment, num_segments, features, keys, columns,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    FEATURES_FIRST: tl.constexpr, BEGINS: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A tile of the state before a segment, and of its last column."""
    tile = tl.zeros([KEYS, VALUES], dtype=tl.float32)
    total = tl.zeros([KEYS if FEATURES_FIRST else VALUES], dtype=tl.float32)
    if BEGINS:
        tile, total = load_state(state, number, features, keys, columns, KEY_SIZE, VALUE_SIZE, FEATURES_FIRST)
    for earlier in range(segment if PAIRS else 0):
        at = number * (num_segments - 1) + earlier
        added, added_total = load_state(states, at, features, keys, columns, KEY_SIZE, VALUE_SIZE, FEATURES_FIRST)
        if SCALED:
            factor = tl.load(through + number * num_segments + earlier)
            tile *= factor
            total *= factor
        tile += added
        total += added_total
    return tile, total


@triton.jit
def read_state(
    queries, tile, total, totals, own, ROWS: tl.constexpr, VALUES: tl.constexpr, NORMALISE: tl.constexpr,
    EXTRA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a state says to queries, [ROWS, VALUES], and with what weight, [ROWS]."""
    result = add_product(queries, tile, tl.zeros([ROWS, VALUES], dtype=tl.float32), PRECISION)
    if EXTRA is not None:
        result += (own[:, None] if EXTRA == "rows" else 1.0) * total[None, :]
    said = tl.zeros([ROWS], dtype=tl.float32)
    if NORMALISE:
        said = tl.max(add_product(queries, totals, tl.zeros([ROWS, ALIKE], dtype=tl.float32), PRECISION), 1)
    return result, said


@triton.jit
def add_pairs(
    queries, rows, values, row, starts, own, result, said, exponent, top, kept, EXTRA: tl.constexpr,
    SCALED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a state and the pairs of a chunk say to queries together, [ROWS, VALUES], and with what weight, [ROWS]."""
    scores = tl.dot(queries, tl.trans(rows), input_precision=PRECISION)
    visible = row[None, :] <= row[:, None]
    if PACKED:
        visible &= row[None, :] >= tl.load(starts + row)[:, None]
    if EXTRA is not None:
        scores += own[:, None] if EXTRA == "rows" else own[None, :]
    if SCALED:
        before = tl.load(kept + row)
        result *= before[:, None]
        said *= before
        power = tl.load(exponent + row)[None, :] - tl.load(top + row)[:, None]
        scores *= tl.exp(tl.where(visible, power, HIDDEN))
    scores = tl.where(visible, scores, 0.0)
    in_units: tl.constexpr = values.dtype == tl.float16
    if in_units:
        unit = unit_of(tl.max(tl.abs(scores), 1))
        scores /= unit[:, None]
        result /= unit[:, None]
        said /= unit
    scores = scores.to(values.dtype)
    result = tl.dot(scores, values, result, input_precision=PRECISION)
    said += tl.sum(scores.to(tl.float32), 1)
    if in_units:
        result *= unit[:, None]
        said *= unit
    return result, said


@triton.jit
def go_on(
    rows, values, tile, total, totals, own, weight, left, ROWS: tl.constexpr, FEATURES_FIRST: tl.constexpr,
    NORMALISE: tl.constexpr, EXTRA: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of a state after a chunk, its last column, and the same as columns that are all alike."""
    scale = tl.full([ROWS, 1], 1.0, dtype=tl.float32)
    if SCALED:
        remaining = tl.load(left)
        tile *= remaining
        if NORMALISE:
            totals *= remaining
        else:
            total *= remaining
        scale = tl.load(weight)[:, None]
        values = values.to(tl.float32) * scale
        if not FEATURES_FIRST:
            values = values.to(rows.dtype)
    tile = add_product(tl.trans(rows), values, tile, PRECISION)
    if NORMALISE:
        alike = tl.full([ROWS, ALIKE], 1.0, dtype=tl.float32 if SCALED else rows.dtype)
        totals = add_product(tl.trans(rows), alike * scale if SCALED else alike, totals, PRECISION)
    if EXTRA is not None:
        total += tl.sum(values.to(tl.float32) * (1.0 if EXTRA == "rows" else own[:, None]), 0)
    return tile, total, totals


@triton.jit
def write_rows(
    result, weight, sums, rest, partial, sums_token, factor, log, row_top, weights, weights_after, row_factor, row,
    length, columns, least_weight, VALUE_SIZE: tl.constexpr, NORMALISE: tl.constexpr, WEIGHED: tl.constexpr,
    EXACT: tl.constexpr, ADDS: tl.constexpr, GOES_ON: tl.constexpr, LOGS: tl.constexpr, TOPS: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Sums of the queries in rows, and what they are divided by; see `read_states`.

    log: that, times exp(row_top) where TOPS, is written as its log where LOGS.
    """
    token = length - 1 - row if REVERSE else row
    inside = (row < length)[:, None] & (columns < VALUE_SIZE)[None, :]
    place = token.to(tl.int64)[:, None] * sums_token + columns[None, :]
    if WEIGHED:
        result *= tl.load(row_factor + token, mask=row < length, other=0.0)[:, None]
    if ADDS:
        result += tl.load(partial + place, mask=inside, other=0.0)
        if NORMALISE:
            weight += tl.load(weights + token, mask=row < length, other=0.0)
    if GOES_ON:
        tl.store(partial + place, result, mask=inside)
        if NORMALISE:
            if tl.program_id(1) == 0:
                tl.store(weights_after + token, weight, mask=row < length)
    else:
        if NORMALISE:
            little = weight < least_weight  # which one that is no number is not: it shows
            own = tl.where(little, 0.0, 1.0 / tl.where(little, 1.0, weight))
            if tl.program_id(1) == 0:
                tl.store(factor + token, own, mask=row < length)
                if LOGS:
                    whole = tl.log(tl.where(little, 1.0, weight))
                    if TOPS:
                        whole += tl.load(row_top + token, mask=row < length, other=0.0)
                    tl.store(log + token, tl.where(little, HIDDEN, whole), mask=row < length)
            result *= own[:, None]
        rounded = result.to(sums.dtype.element_ty)
        tl.store(sums + place, rounded, mask=inside)
        if EXACT:
            tl.store(rest + place, result - rounded.to(tl.float32), mask=inside)


@triton.jit
def read_states(
    query, key, value, sums, rest, partial, factor, log, row_top, weights, weights_after, row_factor, extra, exponent,
    top, kept, weight, left, starts, state, states, through, state_after, log_max_after,
    query_batch, query_head, query_group, query_token, key_batch, key_head, key_group, key_token,
    value_batch, value_head, value_group, value_token, sums_batch, sums_head, sums_group, sums_token,
    heads, groups, shared_by, length, num_chunks, segment_chunks, num_segments, features, least_weight,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    FEATURES_FIRST: tl.constexpr, NORMALISE: tl.constexpr, WEIGHED: tl.constexpr, EXTRA: tl.constexpr,
    EXACT: tl.constexpr, ADDS: tl.constexpr, GOES_ON: tl.constexpr, BEGINS: tl.constexpr, ENDS: tl.constexpr,
    ZEROED: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, REVERSE: tl.constexpr,
    LOGS: tl.constexpr, TOPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums [segment, VALUES] of queries of one head, and the state after the last where ENDS; see above."""
    sequence, segment = tl.program_id(0).to(tl.int64) // num_segments, tl.program_id(0) % num_segments
    batch, head, group = sequence // groups // heads, sequence // groups % heads, sequence % groups
    number, numbers = sequence // shared_by, sequence // shared_by * num_chunks * ROWS
    query += batch * query_batch + head * query_head + group * query_group
    key += batch * key_batch + head * key_head + group * key_group
    value += batch * value_batch + head * value_head + group * value_group
    at, of_rows = batch * sums_batch + head * sums_head + group * sums_group, sequence * length
    keys, columns = tl.arange(0, KEYS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    tile, total = begin(
        state, states, through, number, segment, num_segments, features, keys, columns, KEY_SIZE, VALUE_SIZE, KEYS,
        VALUES, FEATURES_FIRST, BEGINS, SCALED, PAIRS,
    )  # fmt: skip
    totals, own = tl.zeros([KEYS, ALIKE], dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)
    if NORMALISE:  # sums of features by products, too, as columns that are all alike
        totals += total[:, None]
    for chunk in range(segment * segment_chunks, tl.minimum((segment + 1) * segment_chunks, num_chunks)):
        row = chunk * ROWS + tl.arange(0, ROWS)
        queries = load_rows(query, query_token, row, length, keys, KEY_SIZE, REVERSE)
        if EXTRA is not None:
            token = length - 1 - row if REVERSE else row
            own = tl.load(extra + of_rows + token, mask=row < length, other=0.0)
        result, said = read_state(queries, tile, total, totals, own, ROWS, VALUES, NORMALISE, EXTRA, PRECISION)
        if PAIRS:
            rows = load_rows(key, key_token, row, length, keys, KEY_SIZE, REVERSE)
            values = load_rows(value, value_token, row, length, columns, VALUE_SIZE, REVERSE)
            result, said = add_pairs(
                queries, rows, values, row, starts + batch * num_chunks * ROWS, own, result, said, exponent + numbers,
                top + numbers, kept + numbers, EXTRA, SCALED, PACKED, PRECISION,
            )  # fmt: skip
        write_rows(
            result, said, sums + at, rest + at, partial + at, sums_token, factor + of_rows, log + of_rows,
            row_top + of_rows, weights + of_rows, weights_after + of_rows, row_factor + of_rows, row, length, columns,
            least_weight, VALUE_SIZE, NORMALISE, WEIGHED, EXACT, ADDS, GOES_ON, LOGS, TOPS, REVERSE,
        )  # fmt: skip
        if PAIRS:
            tile, total, totals = go_on(
                rows, values, tile, total, totals, own, weight + numbers + row, left + number * num_chunks + chunk,
                ROWS, FEATURES_FIRST, NORMALISE, EXTRA, SCALED, PRECISION,
            )  # fmt: skip
    if ENDS:
        if (segment == num_segments - 1) & (sequence % shared_by == 0):
            total = tl.max(totals, 1) if NORMALISE else total
            first = tl.program_id(1) == 0 if FEATURES_FIRST else tl.program_id(1) >= 0
            store_state(state_after, number, features, keys, columns, tile, total, first, KEY_SIZE, VALUE_SIZE,
                        FEATURES_FIRST)  # fmt: skip
            if ZEROED:  # the state's largest exponent, without scales
                tl.store(log_max_after + number, 0.0)


@triton.jit
def multiply_rows(
    x, y, rest, beside, products, x_batch, x_head, x_group, x_token, y_batch, y_head, y_group, y_token, heads, groups,
    length,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
    NEGATIVE: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Products [ROWS] of the rows of x and y of one head; y has `rest` besides where EXACT.

    What is written is less than nothing by them where NEGATIVE, or than `beside` where BESIDE, too.
    """
    sequence, tile = find_tile(length, ROWS)
    batch, head, group = sequence // groups // heads, sequence // groups % heads, sequence % groups
    at = batch * y_batch + head * y_head + group * y_group
    row, columns = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    own = load_rows(x + batch * x_batch + head * x_head + group * x_group, x_token, row, length, columns, SIZE, False)
    other = load_rows(y + at, y_token, row, length, columns, SIZE, False).to(tl.float32)
    if EXACT:
        other += load_rows(rest + at, y_token, row, length, columns, SIZE, False).to(tl.float32)
    result = tl.sum(own.to(tl.float32) * other, 1)
    if NEGATIVE:
        result = -result
    if BESIDE:
        result += tl.load(beside + sequence * length + row, mask=row < length, other=0.0)
    tl.store(products + sequence * length + row, result, mask=row < length)
