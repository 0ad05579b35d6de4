"""One token behind a window in Triton, as in decoding, and what is kept of a prompt."""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.triton_kernels import HIDDEN, find_tile, load_rows


@triton.jit
def load_row(row, columns, SIZE: tl.constexpr):
    """The columns of one row, in float32, zero beyond its end."""
    return tl.load(row + columns, mask=columns < SIZE, other=0.0).to(tl.float32)


@triton.jit
def see_rows(query, scaling, keys, values, seen, top, weight, total):
    """Go on with a softmax over the keys [R, D] that are `seen`, with values [R, C].

    top: the largest score. weight, total: sums of exp(score - top), and of values times these.
    """
    scores = tl.where(seen, tl.sum(query[None, :] * keys, 1) * scaling, HIDDEN)
    after = tl.maximum(top, tl.max(scores, 0))
    shares, left = tl.exp(scores - after), tl.exp(top - after)
    return after, weight * left + tl.sum(shares, 0), total * left + tl.sum(shares[:, None] * values, 0)


@triton.jit
def is_real(ends, ENDS: tl.constexpr):
    """One for a token, zero for a pad, of which only ENDS knows."""
    read = 1
    if ENDS:
        read = tl.load(ends)
    return read


@triton.jit
def find_row(starts, ends, batch, length, STARTS: tl.constexpr, ENDS: tl.constexpr):
    """Where the tokens of a row of `length` places begin, place 0 unless STARTS, and how many they are."""
    begins, count = 0, length
    if STARTS:
        begins = tl.load(starts + batch).to(tl.int64)
    if ENDS:
        count = tl.minimum(tl.load(ends + batch), length).to(tl.int32)
    return begins, count


@triton.jit
def copy_rows(
    rows, token_stride, source, there, kept, place, inside, columns, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the rows at `source` [R] to dense ones at `place` [R] as far as these are inside, zero for none there."""
    shown = (columns < SIZE)[None, :]
    read = tl.load(
        rows + source.to(tl.int64)[:, None] * token_stride + columns[None, :], mask=there[:, None] & shown, other=0.0
    )
    tl.store(kept + place[:, None] * SIZE + columns[None, :], read, mask=inside[:, None] & shown)


@triton.jit
def keep_rows(
    rows, rows_after, sequence, new, place, part, parts, columns,
    SIZE: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr = 0, moved=0,
):  # fmt: skip
    """Write a sequence's COUNT rows, each from FIRST on what the one `moved` behind it was, the new one in its place.

    Each of `parts` programs writes one row in `parts`.
    """
    rows += sequence * COUNT * SIZE
    rows_after += sequence * COUNT * SIZE
    for first in range(0, COUNT, ROWS):
        row = first + tl.arange(0, ROWS)
        source = row + tl.where(row >= FIRST, moved, 0)
        inside = ((row < COUNT) & (row % parts == part))[:, None] & (columns < SIZE)[None, :]
        there = inside & (source < COUNT)[:, None]
        kept = tl.load(rows + source[:, None] * SIZE + columns[None, :], mask=there, other=0.0)
        kept = tl.where((row == place)[:, None], new[None, :], kept)
        tl.store(rows_after + row[:, None] * SIZE + columns[None, :], kept, mask=inside)


@triton.jit
def step_window(
    query, key, value, kept_key, kept_value, kept_position, length, sink, ends, out, key_after, value_after,
    position_after, length_after, query_batch, query_head, key_batch, key_head, value_batch, value_head, heads, groups,
    scaling,
    KEY_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUES: tl.constexpr, ROOM: tl.constexpr,
    ROWS: tl.constexpr, SINKS: tl.constexpr, BESIDE: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """One more token of a sequence, and all queries of its groups, in VALUES columns of its values.

    It sees itself and all of the first min(length, ROOM) rows that are kept; then the new key stands behind them, for
    which the oldest that is none of the first SINKS gives way once ROOM is full. A pad, whose `ends` is zero, leaves
    all as it is.
    """
    sequence, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, head, inputs = sequence // heads, sequence % heads, tl.arange(0, KEYS)
    columns = part * VALUES + tl.arange(0, VALUES)
    new_key = load_row(key + batch * key_batch + head * key_head, inputs, KEY_SIZE)
    new_value = load_row(value + batch * value_batch + head * value_head, columns, VALUE_SIZE)
    position = tl.load(length + batch)
    for group in range(groups):
        own = head * groups + group
        asked = load_row(query + batch * query_batch + own * query_head, inputs, KEY_SIZE)
        score = tl.sum(asked * new_key, 0) * scaling
        beside = tl.load(sink + own).to(tl.float32) if BESIDE else HIDDEN
        top = tl.maximum(score, beside)
        share = tl.exp(score - top)
        weight, total = share + tl.exp(beside - top), share * new_value
        for first in range(0, ROOM, ROWS):
            row = first + tl.arange(0, ROWS)
            keys = load_rows(
                kept_key + sequence * ROOM * KEY_SIZE, KEY_SIZE, row, ROOM, inputs, KEY_SIZE, False
            ).to(tl.float32)  # fmt: skip
            values = load_rows(
                kept_value + sequence * ROOM * VALUE_SIZE, VALUE_SIZE, row, ROOM, columns, VALUE_SIZE, False
            ).to(tl.float32)  # fmt: skip
            seen = row < tl.minimum(position, ROOM)
            top, weight, total = see_rows(asked, scaling, keys, values, seen, top, weight, total)
        place = (sequence * groups + group) * VALUE_SIZE + columns
        tl.store(out + place, total / weight, mask=columns < VALUE_SIZE)
    read, full = is_real(ends + batch, ENDS), position >= ROOM
    moved = tl.where(full, read, 0)
    place = tl.where(full, ROOM - 1 if ROOM > SINKS else ROOM, position)  # without a window it is not kept
    place = tl.where(read > 0, place, ROOM)
    keep_rows(
        kept_key, key_after, sequence, new_key, place, part, parts, inputs, KEY_SIZE, ROOM, ROWS, SINKS, moved
    )  # fmt: skip
    keep_rows(
        kept_value, value_after, sequence, new_value, place, 0, 1, columns, VALUE_SIZE, ROOM, ROWS, SINKS, moved
    )  # fmt: skip
    if (head == 0) & (part == 0):
        for first in range(0, ROOM, ROWS):
            row = first + tl.arange(0, ROWS)
            source = row + tl.where(row >= SINKS, moved, 0)
            known = tl.load(kept_position + batch * ROOM + source, mask=source < ROOM, other=0)
            known = tl.where(row == place, position + 1, known)
            tl.store(position_after + batch * ROOM + row, known, mask=row < ROOM)
        tl.store(length_after + batch, position + read)


@triton.jit
def keep_window(
    key, value, starts, ends, kept_key, kept_value, kept_position, length_after, key_batch, key_head, key_token,
    value_batch, value_head, value_token, heads, length,
    KEY_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUES: tl.constexpr, ROOM: tl.constexpr,
    ROWS: tl.constexpr, SINKS: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Copy the first SINKS keys and values of a sequence and the last of the others, ROOM in all, ROWS at a time."""
    sequence, tile = find_tile(ROOM if ROOM > 0 else 1, ROWS)
    row, batch, head = tile * ROWS + tl.arange(0, ROWS), sequence // heads, sequence % heads
    begins, read = find_row(starts, ends, batch, length, STARTS, ENDS)
    # the first, then those that come right before the end
    source = row + tl.where(row >= SINKS, tl.maximum(read - ROOM, 0), 0)
    inside = row < ROOM
    there, token, place = inside & (source < read), begins + source, sequence * ROOM + row
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    copy_rows(key, key_token, token, there, kept_key, place, inside, tl.arange(0, KEYS), KEY_SIZE)
    copy_rows(value, value_token, token, there, kept_value, place, inside, tl.arange(0, VALUES), VALUE_SIZE)
    if head == 0:
        known = tl.where(there, source + 1, 0).to(tl.int64)
        tl.store(kept_position + batch * ROOM + row, known, mask=row < ROOM)
        if tile == 0:
            tl.store(length_after + batch, tl.cast(read, tl.int64))
