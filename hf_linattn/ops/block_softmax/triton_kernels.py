"""Softmax attention over key blocks in Triton: what csrc/block_softmax computes, forward and back.

A program has `ROWS` queries of one block, or `COLUMNS` keys, and meets the others tile by tile. Keys that stand by
themselves come first, then those of the blocks in the table's row. Scores are in powers of two.
Heads in half precision are multiplied as they are, weights rounded to them; sums, logs and scores are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common import numerics

LOWEST, LOG2_E, LN_2 = (tl.constexpr(x) for x in (numerics.LOWEST, numerics.LOG2_E, numerics.LN_2))
ANYWHERE = tl.constexpr(0x7FFFFFFF)  # no place is behind it


@triton.jit
def load_tile(rows, token_stride, place, inside, columns, SIZE: tl.constexpr):
    """The columns [C] of the tokens at places [R], zero where none is inside."""
    shown = inside[:, None] & (columns < SIZE)[None, :]
    return tl.load(rows + place.to(tl.int64)[:, None] * token_stride + columns[None, :], mask=shown, other=0.0)


@triton.jit
def find_part(blocks, block_size, ROWS: tl.constexpr):
    """The number of batch and head of a program, its block of all `blocks`, and the places in it [ROWS].

    One dimension of the grid has all of them: the others end at 65,535, which blocks in a long row are more than.
    """
    parts = tl.cdiv(block_size, ROWS)
    part = tl.program_id(0) % (blocks * parts)
    number = (tl.program_id(0) // (blocks * parts)).to(tl.int64)
    return number, part // parts, part % parts * ROWS + tl.arange(0, ROWS)


@triton.jit
def find_rows(heads, length, first, blocks, block_size, ROWS: tl.constexpr):
    """The queries of a program: batch, head, number of both, block, places in it and in the sequence [ROWS]."""
    number, block, row = find_part(blocks, block_size, ROWS)
    at = (first + block) * block_size + row
    return number // heads, number % heads, number, block, row, at, (row < block_size) & (at < length)


@triton.jit
def score(
    query, key, row, here, place, there, bias, bias_row, column, columns, last, scaling, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [ROWS, COLUMNS] in powers of two, LOWEST for pairs that do not see each other.

    bias: of the query block, row by row, `columns` of them, which these keys have at `column` [COLUMNS], where BIASED.
    last: [ROWS], the last place that a query sees where there is none.
    """
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scaling * LOG2_E)
    seen = here[:, None] & there[None, :]
    before = place[None, :] <= last[:, None]
    if BIASED:
        given = (column < columns)[None, :]
        shown = tl.load(bias + row[:, None] * bias_row + column[None, :], mask=seen & given, other=0.0)
        return tl.where(seen & (given | before) & (shown > LOWEST / 2), scores + shown * LOG2_E, LOWEST)
    return tl.where(seen & before, scores, LOWEST)


@triton.jit
def meet(
    query, row, here, key, key_token, value, value_token, place, there, bias, bias_row, column, columns, last, scaling,
    keys, values, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys and values at some places, and the `score` of queries with these keys."""
    tile = load_tile(key, key_token, place, there, keys, KEY_SIZE)
    met = load_tile(value, value_token, place, there, values, VALUE_SIZE)
    return tile, met, score(query, tile, row, here, place, there, bias, bias_row, column, columns, last, scaling,
                            BIASED, PRECISION)  # fmt: skip


@triton.jit
def take_in(scores, value, top, weight, out, PRECISION: tl.constexpr):
    """Go on with some scores and their values: the largest score, the sum of weights and of weighted values."""
    largest = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - largest[:, None])
    left = tl.exp2(top - largest)
    out = tl.dot(shares.to(value.dtype), value, out * left[:, None], input_precision=PRECISION)
    return largest, weight * left + tl.sum(shares, 1), out


@triton.jit
def begin_with(before, before_token, before_log, old, here, columns, SIZE: tl.constexpr):
    """What queries begin with, rows `old` of `before` if these are any: as `take_in` leaves it."""
    log = tl.load(before_log + old, mask=here & (old >= 0), other=LOWEST)
    some = log > LOWEST / 2
    top = tl.where(some, log * LOG2_E, LOWEST / 2)
    out = load_tile(before, before_token, old, some, columns, SIZE).to(tl.float32)
    return top, tl.where(some, 1.0, 0.0), out


@triton.jit
def attend_blocks(
    query, key, value, out, log, before, before_log, shared_key, shared_value, bias, table,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    out_batch, out_head, out_token, before_batch, before_head, before_token, other_key_batch, other_key_head,
    other_key_token, other_value_batch, other_value_head, other_value_token, bias_batch, bias_block, bias_head,
    bias_row, heads, groups, length, first, block_size, blocks, table_heads, width, shared, offset, columns, begun,
    old_rows, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, BEGINS: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention [ROWS, VALUE_SIZE] of queries of one head and block, and the logs of their weights.

    offset: of the columns that the bias has for keys of blocks; those of keys that stand by themselves are the first.
    """
    batch, own, number, block, row, at, here = find_rows(heads, length, first, blocks, block_size, ROWS)
    keys, values, anywhere = tl.arange(0, KEYS), tl.arange(0, VALUES), tl.full([ROWS], ANYWHERE, tl.int32)
    rows = load_tile(query + batch * query_batch + own * query_head, query_token, at, here, keys, KEY_SIZE)
    top = tl.full([ROWS], LOWEST / 2, tl.float32)
    weight, result = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, VALUES], tl.float32)
    if BEGINS:
        before += batch * before_batch + own * before_head
        before_log += number * old_rows
        top, weight, result = begin_with(before, before_token, before_log, at - begun, here, values, VALUE_SIZE)
    bias += batch * bias_batch + block * bias_block + own * bias_head
    shared_key += batch * other_key_batch + own // groups * other_key_head
    shared_value += batch * other_value_batch + own // groups * other_value_head
    for start in range(0, shared, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        _, met, scores = meet(
            rows, row, here, shared_key, other_key_token, shared_value, other_value_token, place, place < shared, bias,
            bias_row, place, columns, anywhere, scaling, keys, values, KEY_SIZE, VALUE_SIZE, BIASED, PRECISION,
        )  # fmt: skip
        top, weight, result = take_in(scores, met, top, weight, result, PRECISION)
    key += batch * key_batch + own // groups * key_head
    value += batch * value_batch + own // groups * value_head
    for entry in range(0, width):
        named = tl.load(table + (block * table_heads + own % table_heads) * width + entry).to(tl.int32)
        last = tl.where(CAUSAL & (named == first + block), at, anywhere)
        for start in range(0, tl.where(named < 0, 0, block_size), COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            place = named * block_size + column
            _, met, scores = meet(
                rows, row, here, key, key_token, value, value_token, place, (column < block_size) & (place < length),
                bias, bias_row, offset + entry * block_size + column, columns, last, scaling, keys, values, KEY_SIZE,
                VALUE_SIZE, BIASED, PRECISION,
            )  # fmt: skip
            top, weight, result = take_in(scores, met, top, weight, result, PRECISION)
    some, weight = weight != 0, tl.where(weight != 0, weight, 1.0)  # one that is no number is some, and shown
    out += batch * out_batch + own * out_head + at.to(tl.int64)[:, None] * out_token + values[None, :]
    result = tl.where(some[:, None], result / weight[:, None], 0.0)
    tl.store(out, result, mask=here[:, None] & (values < VALUE_SIZE)[None, :])
    tl.store(log + number * length + at, tl.where(some, (top + tl.log2(weight)) * LN_2, LOWEST), mask=here)


@triton.jit
def reverse(scores, value, grad, log, weight_grad, PRECISION: tl.constexpr):
    """Weights [ROWS, COLUMNS], made again from scores and the logs of their sums, and the scores' gradients."""
    weights = tl.exp2(scores - log[:, None])
    return weights, weights * (tl.dot(grad, tl.trans(value), input_precision=PRECISION) - weight_grad[:, None])


@triton.jit
def load_queries(
    query, query_token, grad, grad_token, log, weight_grad, number, length, at, here, keys, values,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    """Queries and the gradients of their outputs, and for each the log of its weights and a part of their gradient."""
    rows = load_tile(query, query_token, at, here, keys, KEY_SIZE)
    grads = load_tile(grad, grad_token, at, here, values, VALUE_SIZE)
    place = number * length + at
    total, of_weight = tl.load(log + place, mask=here, other=0.0), tl.load(weight_grad + place, mask=here, other=0.0)
    return rows, grads, total, of_weight


@triton.jit
def reverse_queries(
    query, key, value, grad, log, weight_grad, d_query, shared_key, shared_value, bias, table,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    grad_batch, grad_head, grad_token, d_query_batch, d_query_head, d_query_token, other_key_batch, other_key_head,
    other_key_token, other_value_batch, other_value_head, other_value_token, bias_batch, bias_block, bias_head,
    bias_row, heads, groups, length, first, block_size, blocks, table_heads, width, shared, offset, columns, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries that `attend_blocks` had in a program; log in powers of two, weight_grad: [B H, N]."""
    batch, own, number, block, row, at, here = find_rows(heads, length, first, blocks, block_size, ROWS)
    keys, values, anywhere = tl.arange(0, KEYS), tl.arange(0, VALUES), tl.full([ROWS], ANYWHERE, tl.int32)
    rows, grads, total, of_weight = load_queries(
        query + batch * query_batch + own * query_head, query_token, grad + batch * grad_batch + own * grad_head,
        grad_token, log, weight_grad, number, length, at, here, keys, values, KEY_SIZE, VALUE_SIZE,
    )  # fmt: skip
    result = tl.zeros([ROWS, KEYS], tl.float32)
    bias += batch * bias_batch + block * bias_block + own * bias_head
    shared_key += batch * other_key_batch + own // groups * other_key_head
    shared_value += batch * other_value_batch + own // groups * other_value_head
    for start in range(0, shared, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        tile, met, scores = meet(
            rows, row, here, shared_key, other_key_token, shared_value, other_value_token, place, place < shared, bias,
            bias_row, place, columns, anywhere, scaling, keys, values, KEY_SIZE, VALUE_SIZE, BIASED, PRECISION,
        )  # fmt: skip
        _, slopes = reverse(scores, met, grads, total, of_weight, PRECISION)
        result = tl.dot(slopes.to(tile.dtype), tile, result, input_precision=PRECISION)
    key += batch * key_batch + own // groups * key_head
    value += batch * value_batch + own // groups * value_head
    for entry in range(0, width):
        named = tl.load(table + (block * table_heads + own % table_heads) * width + entry).to(tl.int32)
        last = tl.where(CAUSAL & (named == first + block), at, anywhere)
        for start in range(0, tl.where(named < 0, 0, block_size), COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            place = named * block_size + column
            tile, met, scores = meet(
                rows, row, here, key, key_token, value, value_token, place, (column < block_size) & (place < length),
                bias, bias_row, offset + entry * block_size + column, columns, last, scaling, keys, values, KEY_SIZE,
                VALUE_SIZE, BIASED, PRECISION,
            )  # fmt: skip
            _, slopes = reverse(scores, met, grads, total, of_weight, PRECISION)
            result = tl.dot(slopes.to(tile.dtype), tile, result, input_precision=PRECISION)
    d_query += batch * d_query_batch + own * d_query_head + at.to(tl.int64)[:, None] * d_query_token + keys[None, :]
    tl.store(d_query, result * scaling, mask=here[:, None] & (keys < KEY_SIZE)[None, :])


@triton.jit
def add_tile(to, token_stride, place, inside, columns, tile, SIZE: tl.constexpr):
    """Add a tile to the tokens at places [R], of which nobody else has any."""
    shown = inside[:, None] & (columns < SIZE)[None, :]
    to += place.to(tl.int64)[:, None] * token_stride + columns[None, :]
    tl.store(to, tl.load(to, mask=shown, other=0.0) + tile, mask=shown)


@triton.jit
def reverse_keys(
    query, key, value, grad, log, weight_grad, d_key, d_value, bias, met_by, met_from,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    grad_batch, grad_head, grad_token, d_key_part, d_key_batch, d_key_head, d_key_token, d_value_part, d_value_batch,
    d_value_head, d_value_token, bias_batch, bias_block, bias_head, bias_row, heads, groups, length, first, block_size,
    table_heads, offset, columns, key_count, key_size, num_blocks, scaling,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of COLUMNS keys, and of their values, what all queries give that meet them.

    key_count: how many keys there are, in blocks of `key_size`. met_by [M, 2]: query blocks and the entries of the
    table by which they meet a block of keys; those of block b for a head of the table are numbers met_from[b] to
    met_from[b + 1] - 1, of which the programs of the grid's second dimension take a part each, in gradients of their
    own. offset: of the columns that the bias has for these keys.
    """
    number, named, column = find_part(num_blocks, key_size, COLUMNS)
    batch, head, part = number // (heads // groups), number % (heads // groups), tl.program_id(1).to(tl.int64)
    place = named * key_size + column
    there = (column < key_size) & (place < key_count)
    keys, values, anywhere = tl.arange(0, KEYS), tl.arange(0, VALUES), tl.full([ROWS], ANYWHERE, tl.int32)
    tile = load_tile(key + batch * key_batch + head * key_head, key_token, place, there, keys, KEY_SIZE)
    met = load_tile(value + batch * value_batch + head * value_head, value_token, place, there, values, VALUE_SIZE)
    key_grad, value_grad = tl.zeros([COLUMNS, KEYS], tl.float32), tl.zeros([COLUMNS, VALUES], tl.float32)
    for group in range(0, groups):
        own = head * groups + group
        begin = tl.load(met_from + own % table_heads * (num_blocks + 1) + named)
        end = tl.load(met_from + own % table_heads * (num_blocks + 1) + named + 1)
        step = tl.cdiv(end - begin, tl.num_programs(1))
        for meeting in range(begin + part * step, tl.minimum(begin + part * step + step, end)):
            block = tl.load(met_by + 2 * meeting)
            shown = bias + batch * bias_batch + block * bias_block + own * bias_head
            met_at = offset + tl.load(met_by + 2 * meeting + 1) * block_size
            for start in range(0, block_size, ROWS):
                row = start + tl.arange(0, ROWS)
                at = ((first + block) * block_size + row).to(tl.int32)
                here = (row < block_size) & (at < length)
                rows, grads, total, of_weight = load_queries(
                    query + batch * query_batch + own * query_head, query_token,
                    grad + batch * grad_batch + own * grad_head, grad_token, log, weight_grad, batch * heads + own,
                    length, at, here, keys, values, KEY_SIZE, VALUE_SIZE,
                )  # fmt: skip
                last = tl.where(CAUSAL & (named == first + block), at, anywhere)
                scores = score(rows, tile, row, here, place, there, shown, bias_row, met_at + column, columns, last,
                               scaling, BIASED, PRECISION)  # fmt: skip
                weights, slopes = reverse(scores, met, grads, total, of_weight, PRECISION)
                shares, slopes = tl.trans(weights).to(grads.dtype), tl.trans(slopes).to(rows.dtype)
                value_grad = tl.dot(shares, grads, value_grad, input_precision=PRECISION)
                key_grad = tl.dot(slopes, rows, key_grad, input_precision=PRECISION)
    d_key += part * d_key_part + batch * d_key_batch + head * d_key_head
    add_tile(d_key, d_key_token, place, there, keys, key_grad * scaling, KEY_SIZE)
    d_value += part * d_value_part + batch * d_value_batch + head * d_value_head
    add_tile(d_value, d_value_token, place, there, values, value_grad, VALUE_SIZE)
