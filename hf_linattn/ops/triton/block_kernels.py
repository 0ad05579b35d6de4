"""Softmax attention over key blocks in Triton: what `native/block_softmax.c` computes, forward and back.

A program has `ROWS` queries of one block, or `COLUMNS` keys, and meets the others tile by tile. Keys that stand by
themselves come first, then those of the blocks in the table's row. Scores are in powers of two, see `exponential`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # `exponential.LOWEST`
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(rows, token_stride, place, inside, columns, SIZE: tl.constexpr):
    """The columns [C] of the tokens at places [R], zero where none is inside."""
    shown = inside[:, None] & (columns < SIZE)[None, :]
    return tl.load(rows + place.to(tl.int64)[:, None] * token_stride + columns[None, :], mask=shown, other=0.0)


@triton.jit
def score(
    query, key, row, place, seen, bias, bias_row, column, last, scaling,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [ROWS, COLUMNS] in powers of two, LOWEST for pairs that are not `seen`.

    bias: of the query block, row by row, of which `column` [COLUMNS] are these, where BIASED. last: [ROWS], the last
    place that a query sees else.
    """
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scaling * LOG2_E)
    if BIASED:
        shown = tl.load(bias + row[:, None] * bias_row + column[None, :], mask=seen, other=LOWEST)
        scores += shown * LOG2_E
        seen = seen & (shown > LOWEST / 2)
    else:
        seen = seen & (place[None, :] <= last[:, None])
    return tl.where(seen, scores, LOWEST)


@triton.jit
def take_in(scores, value, top, weight, out, PRECISION: tl.constexpr):
    """Go on with some scores and their values: the largest score, the sum of weights and of weighted values."""
    largest = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - largest[:, None])
    left = tl.exp2(top - largest)
    out = tl.dot(shares, value, out * left[:, None], input_precision=PRECISION)
    return largest, weight * left + tl.sum(shares, 1), out


@triton.jit
def attend_blocks(
    query, key, value, out, log, before, before_log, shared_key, shared_value, bias, table,
    query_batch, query_head, query_group, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, out_batch, out_head, out_group, out_token,
    log_batch, log_head, log_group, log_token, before_batch, before_head, before_group, before_token,
    start_batch, start_head, start_group, start_token,
    other_key_batch, other_key_head, other_key_token, other_value_batch, other_value_head, other_value_token,
    bias_batch, bias_block, bias_head, bias_row,
    heads, groups, length, first, block_size, table_heads, width, shared, begun, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, BEGINS: tl.constexpr, SHARED_BIAS: tl.constexpr,
    BLOCK_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention [ROWS, VALUE_SIZE] of queries of one head and block, and the logs of their weights."""
    row_head = tl.program_id(0).to(tl.int64)
    sequence, group = row_head // groups, row_head % groups
    batch, head = sequence // heads, sequence % heads
    own = head * groups + group
    parts = tl.cdiv(block_size, ROWS)
    block = tl.program_id(1) // parts
    row = tl.program_id(1) % parts * ROWS + tl.arange(0, ROWS)
    at = (first + block) * block_size + row
    here = (row < block_size) & (at < length)
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    query += batch * query_batch + head * query_head + group * query_group
    rows = load_tile(query, query_token, at, here, keys, KEY_SIZE)
    top = tl.full([ROWS], LOWEST / 2, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, VALUES], tl.float32)
    if BEGINS:
        old = here & (at >= begun)
        before_log += batch * start_batch + head * start_head + group * start_group
        begin = tl.load(before_log + (at - begun).to(tl.int64) * start_token, mask=old, other=LOWEST)
        old = old & (begin > LOWEST / 2)
        top = tl.where(old, begin * LOG2_E, top)
        weight = tl.where(old, 1.0, 0.0)
        before += batch * before_batch + head * before_head + group * before_group
        result = load_tile(before, before_token, at - begun, old, values, VALUE_SIZE)
    shown = bias + batch * bias_batch + block * bias_block + own * bias_head
    shared_key += batch * other_key_batch + head * other_key_head
    shared_value += batch * other_value_batch + head * other_value_head
    for start in range(0, shared, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        there = place < shared
        tile = load_tile(shared_key, other_key_token, place, there, keys, KEY_SIZE)
        scores = score(
            rows, tile, row, place, here[:, None] & there[None, :], shown, bias_row, place,
            tl.full([ROWS], 0x7FFFFFFF, tl.int32), scaling, SHARED_BIAS, PRECISION,
        )  # fmt: skip
        tile = load_tile(shared_value, other_value_token, place, there, values, VALUE_SIZE)
        top, weight, result = take_in(scores, tile, top, weight, result, PRECISION)
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    for entry in range(0, width):
        number = tl.load(table + (block * table_heads + own % table_heads) * width + entry).to(tl.int32)
        if number >= 0:
            last = tl.full([ROWS], 0x7FFFFFFF, tl.int32)
            if CAUSAL:
                last = tl.where(number == first + block, at, last)
            for start in range(0, block_size, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                place = number * block_size + column
                there = (column < block_size) & (place < length)
                tile = load_tile(key, key_token, place, there, keys, KEY_SIZE)
                scores = score(
                    rows, tile, row, place, here[:, None] & there[None, :], shown, bias_row,
                    shared + entry * block_size + column, last, scaling, BLOCK_BIAS, PRECISION,
                )  # fmt: skip
                tile = load_tile(value, value_token, place, there, values, VALUE_SIZE)
                top, weight, result = take_in(scores, tile, top, weight, result, PRECISION)
    some = weight > 0
    weight = tl.where(some, weight, 1.0)
    out += batch * out_batch + head * out_head + group * out_group
    result = tl.where(some[:, None], result / weight[:, None], 0.0)
    inside = here[:, None] & (values < VALUE_SIZE)[None, :]
    tl.store(out + at.to(tl.int64)[:, None] * out_token + values[None, :], result, mask=inside)
    log += batch * log_batch + head * log_head + group * log_group
    total = tl.where(some, (top + tl.log2(weight)) * LN_2, LOWEST)
    tl.store(log + at.to(tl.int64) * log_token, total, mask=here)


@triton.jit
def reverse(scores, value, grad, log, weight_grad, PRECISION: tl.constexpr):
    """Weights [ROWS, COLUMNS], made again from scores and the logs of their sums, and the scores' gradients."""
    weights = tl.exp2(scores - log[:, None])
    slopes = weights * (tl.dot(grad, tl.trans(value), input_precision=PRECISION) - weight_grad[:, None])
    return weights, slopes


@triton.jit
def reverse_queries(
    query, key, value, grad, log, weight_grad, d_query, shared_key, shared_value, bias, table,
    query_batch, query_head, query_group, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, grad_batch, grad_head, grad_group, grad_token,
    d_query_batch, d_query_head, d_query_group, d_query_token,
    other_key_batch, other_key_head, other_key_token, other_value_batch, other_value_head, other_value_token,
    bias_batch, bias_block, bias_head, bias_row,
    heads, groups, length, first, block_size, table_heads, width, shared, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, SHARED_BIAS: tl.constexpr, BLOCK_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries that `attend_blocks` had in a program; log in powers of two, weight_grad: [B H, N]."""
    row_head = tl.program_id(0).to(tl.int64)
    sequence, group = row_head // groups, row_head % groups
    batch, head = sequence // heads, sequence % heads
    own = head * groups + group
    parts = tl.cdiv(block_size, ROWS)
    block = tl.program_id(1) // parts
    row = tl.program_id(1) % parts * ROWS + tl.arange(0, ROWS)
    at = (first + block) * block_size + row
    here = (row < block_size) & (at < length)
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    query += batch * query_batch + head * query_head + group * query_group
    grad += batch * grad_batch + head * grad_head + group * grad_group
    rows = load_tile(query, query_token, at, here, keys, KEY_SIZE)
    grads = load_tile(grad, grad_token, at, here, values, VALUE_SIZE)
    total = tl.load(log + row_head * length + at, mask=here, other=0.0)
    shares = tl.load(weight_grad + row_head * length + at, mask=here, other=0.0)
    result = tl.zeros([ROWS, KEYS], tl.float32)
    shown = bias + batch * bias_batch + block * bias_block + own * bias_head
    shared_key += batch * other_key_batch + head * other_key_head
    shared_value += batch * other_value_batch + head * other_value_head
    for start in range(0, shared, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        there = place < shared
        tile = load_tile(shared_key, other_key_token, place, there, keys, KEY_SIZE)
        scores = score(
            rows, tile, row, place, here[:, None] & there[None, :], shown, bias_row, place,
            tl.full([ROWS], 0x7FFFFFFF, tl.int32), scaling, SHARED_BIAS, PRECISION,
        )  # fmt: skip
        met = load_tile(shared_value, other_value_token, place, there, values, VALUE_SIZE)
        _, slopes = reverse(scores, met, grads, total, shares, PRECISION)
        result = tl.dot(slopes, tile, result, input_precision=PRECISION)
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    for entry in range(0, width):
        number = tl.load(table + (block * table_heads + own % table_heads) * width + entry).to(tl.int32)
        if number >= 0:
            last = tl.full([ROWS], 0x7FFFFFFF, tl.int32)
            if CAUSAL:
                last = tl.where(number == first + block, at, last)
            for start in range(0, block_size, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                place = number * block_size + column
                there = (column < block_size) & (place < length)
                tile = load_tile(key, key_token, place, there, keys, KEY_SIZE)
                scores = score(
                    rows, tile, row, place, here[:, None] & there[None, :], shown, bias_row,
                    shared + entry * block_size + column, last, scaling, BLOCK_BIAS, PRECISION,
                )  # fmt: skip
                met = load_tile(value, value_token, place, there, values, VALUE_SIZE)
                _, slopes = reverse(scores, met, grads, total, shares, PRECISION)
                result = tl.dot(slopes, tile, result, input_precision=PRECISION)
    d_query += batch * d_query_batch + head * d_query_head + group * d_query_group
    inside = here[:, None] & (keys < KEY_SIZE)[None, :]
    tl.store(d_query + at.to(tl.int64)[:, None] * d_query_token + keys[None, :], result * scaling, mask=inside)


@triton.jit
def reverse_keys(
    query, key, value, grad, log, weight_grad, d_key, d_value, bias, met_by, met_from,
    query_batch, query_head, query_group, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, grad_batch, grad_head, grad_group, grad_token,
    d_key_part, d_key_batch, d_key_head, d_key_token, d_value_part, d_value_batch, d_value_head, d_value_token,
    bias_batch, bias_block, bias_head, bias_row,
    heads, groups, length, first, block_size, table_heads, shared, key_count, key_size, num_blocks, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of COLUMNS keys, and of their values, what all queries give that meet them.

    key_count: how many keys there are, in blocks of `key_size`. met_by [M, 2]: query blocks and the entries of the
    table by which they meet a block of keys; those of block b for a head of the table are numbers met_from[b] to
    met_from[b + 1] - 1, of which the programs of the grid's last dimension take a part each, in gradients of their
    own.
    shared: columns of the bias before those of blocks.
    """
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    parts = tl.cdiv(key_size, COLUMNS)
    number = tl.program_id(1) // parts
    column = tl.program_id(1) % parts * COLUMNS + tl.arange(0, COLUMNS)
    place = number * key_size + column
    there = (column < key_size) & (place < key_count)
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    tile = load_tile(key + batch * key_batch + head * key_head, key_token, place, there, keys, KEY_SIZE)
    met = load_tile(value + batch * value_batch + head * value_head, value_token, place, there, values, VALUE_SIZE)
    key_grad = tl.zeros([COLUMNS, KEYS], tl.float32)
    value_grad = tl.zeros([COLUMNS, VALUES], tl.float32)
    for group in range(0, groups):
        own = head * groups + group
        row_head = sequence * groups + group
        of_table = own % table_heads * (num_blocks + 1) + number
        query_rows = query + batch * query_batch + head * query_head + group * query_group
        grad_rows = grad + batch * grad_batch + head * grad_head + group * grad_group
        begin, end = tl.load(met_from + of_table), tl.load(met_from + of_table + 1)
        step = tl.cdiv(end - begin, tl.num_programs(2))
        begin += tl.program_id(2) * step
        for meeting in range(begin, tl.minimum(begin + step, end)):
            block = tl.load(met_by + 2 * meeting)
            offset = tl.load(met_by + 2 * meeting + 1) * block_size + shared
            shown = bias + batch * bias_batch + block * bias_block + own * bias_head
            for start in range(0, block_size, ROWS):
                row = start + tl.arange(0, ROWS)
                at = (first + block) * block_size + row
                here = (row < block_size) & (at < length)
                rows = load_tile(query_rows, query_token, at, here, keys, KEY_SIZE)
                grads = load_tile(grad_rows, grad_token, at, here, values, VALUE_SIZE)
                total = tl.load(log + row_head * length + at, mask=here, other=0.0)
                shares = tl.load(weight_grad + row_head * length + at, mask=here, other=0.0)
                last = tl.full([ROWS], 0x7FFFFFFF, tl.int32)
                if CAUSAL:
                    last = tl.where(number == first + block, at, last)
                scores = score(
                    rows, tile, row, place, here[:, None] & there[None, :], shown, bias_row, offset + column, last,
                    scaling, BIASED, PRECISION,
                )  # fmt: skip
                weights, slopes = reverse(scores, met, grads, total, shares, PRECISION)
                value_grad = tl.dot(tl.trans(weights), grads, value_grad, input_precision=PRECISION)
                key_grad = tl.dot(tl.trans(slopes), rows, key_grad, input_precision=PRECISION)
    part = tl.program_id(2).to(tl.int64)
    d_key += part * d_key_part + batch * d_key_batch + head * d_key_head
    d_value += part * d_value_part + batch * d_value_batch + head * d_value_head
    inside = there[:, None] & (keys < KEY_SIZE)[None, :]
    to = d_key + place.to(tl.int64)[:, None] * d_key_token + keys[None, :]
    tl.store(to, tl.load(to, mask=inside, other=0.0) + key_grad * scaling, mask=inside)
    inside = there[:, None] & (values < VALUE_SIZE)[None, :]
    to = d_value + place.to(tl.int64)[:, None] * d_value_token + values[None, :]
    tl.store(to, tl.load(to, mask=inside, other=0.0) + value_grad, mask=inside)
