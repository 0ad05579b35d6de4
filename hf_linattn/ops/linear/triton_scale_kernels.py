"""What log scales and decays make of causal sums in Triton: factors, a number per token, see `triton_scales.Scales`.

A program has one sequence, some chunks at a time. What the state before a chunk has for its largest exponent is a scan
over chunks, m_t = max(own_t, m_{t-1} + passed_t), which chunks of one tile make together, one tile after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.numerics import LOWEST

LEAST = tl.constexpr(LOWEST)


@triton.jit
def raise_by(value, gain, later, later_gain):
    """Two steps of m_t = max(value_t, m_{t-1} + gain_t) in one."""
    return tl.maximum(later, value + later_gain), gain + later_gain


@triton.jit
def multiply(x, y):
    """x y, for a product over many."""
    return x * y


@triton.jit
def load_scales(
    log_scale, log_decay, factor, top, starts, decay_token, chunk, length, num_chunks,
    SIZE: tl.constexpr, CHUNKS: tl.constexpr, SCALED: tl.constexpr, DECAYED: tl.constexpr, SHARES: tl.constexpr,
    TOPPED: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Exponents [CHUNKS, SIZE] of the keys of some chunks, counted from where these begin, and what tokens passed.

    Then the largest exponent that each chunk adds, as seen from its end, and what a state loses in it, [CHUNKS]. Then
    `exponent` without those keys whose sequence ends before the chunk. All of no weight before the first chunk.
    """
    place = chunk[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (chunk >= 0)[:, None] & (place < length)
    token = length - 1 - place if REVERSE else place
    own = tl.zeros([CHUNKS, SIZE], dtype=tl.float32)
    if SCALED and not SHARES:
        own = tl.load(log_scale + token, mask=inside, other=0.0)
    if SHARES:  # of queries that are read as keys; one without weight has no gradient, and must not be the largest
        share = tl.load(factor + token, mask=inside, other=0.0)
        own = tl.log(tl.where(share > 0, share, 1.0))
        if TOPPED:
            own -= tl.load(top + token, mask=inside, other=0.0)
        own = tl.where(share > 0, own, LEAST)
    own = tl.where(inside, own, LEAST)
    passed = tl.zeros([CHUNKS, SIZE], dtype=tl.float32)
    through = tl.zeros([CHUNKS], dtype=tl.float32)
    if DECAYED:
        # between two tokens that are read backwards comes the decay of the later one
        of_decay = token + 1 if REVERSE else token
        lost = tl.load(log_decay + of_decay * decay_token, mask=inside & (of_decay < length), other=0.0)
        passed, through = tl.cumsum(lost, 1), tl.sum(lost, 1)
    exponent = own - passed
    at_end, going_on = exponent, through
    if PACKED:
        there = (chunk >= 0) & (chunk < num_chunks)
        last = tl.load(starts + chunk * SIZE + SIZE - 1, mask=there, other=0)
        carried = tl.load(starts + tl.maximum(chunk * SIZE - 1, 0), mask=there, other=0)  # the state's sequence
        at_end = tl.where(tl.load(starts + place, mask=there[:, None], other=0) == last[:, None], exponent, LEAST)
        going_on = tl.where(last == carried, through, LEAST)
    added = tl.maximum(tl.max(at_end, 1) + through, LEAST / 2)
    return exponent, passed, at_end, added, through, going_on


@triton.jit
def find_largest(
    own, before, starts, chunk, place, there, SIZE: tl.constexpr, CHUNKS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """The largest exponent that each query sees, and what it sees of the state before its chunk [CHUNKS, SIZE]."""
    gains = tl.zeros([CHUNKS, SIZE], dtype=tl.float32)
    seen = before[:, None] + gains
    if PACKED:
        start = tl.load(starts + place, mask=there[:, None], other=0)
        earlier = tl.load(starts + tl.maximum(place - 1, 0), mask=there[:, None], other=0)
        carried = tl.load(starts + tl.maximum(chunk * SIZE - 1, 0), mask=there, other=0)
        gains = tl.where((place > chunk[:, None] * SIZE) & (start != earlier), LEAST, 0.0)
        seen = tl.where(start == carried[:, None], seen, LEAST)
    largest, _ = tl.associative_scan((own, gains), 1, raise_by)
    return tl.maximum(tl.maximum(largest, seen), LEAST / 2), seen


@triton.jit
def write_scales(
    log_scale, log_decay, log_max, factor, seen_top, starts, exponent, top, kept, weight, left, through, after,
    row_top, row_factor, decay_batch, decay_head, decay_token, heads, repeats, groups, length, num_chunks,
    segment_chunks, num_segments, SIZE: tl.constexpr, CHUNKS: tl.constexpr, SEGMENT: tl.constexpr,
    SCALED: tl.constexpr, DECAYED: tl.constexpr, SHARES: tl.constexpr, TOPPED: tl.constexpr, PACKED: tl.constexpr,
    BEGINS: tl.constexpr, TOPS: tl.constexpr, FACTORS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The `Scales` of one of `heads`, of whose keys each is that of `repeats` heads.

    SHARES: keys are queries, of log scales log(factor) - seen_top. row_top: what sums of queries are divided by, for
    each of `groups`, where TOPS. row_factor: exp of that, times exp(log_scale) where SCALED, where FACTORS.
    """
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    log_scale += (sequence // repeats) * length
    log_decay += batch * decay_batch + (head // repeats) * decay_head
    factor, seen_top = factor + sequence * length, seen_top + sequence * length
    starts += batch * num_chunks * SIZE
    first_place, number = sequence * num_chunks * SIZE, sequence * num_chunks
    begin = tl.load(log_max + sequence) if BEGINS else LEAST / 2
    carry = LEAST / 2
    own_place, own_chunk = tl.arange(0, SIZE), tl.arange(0, CHUNKS)
    for first in range(0, num_chunks, CHUNKS):
        chunk = first + own_chunk
        _, _, _, value, _, gain = load_scales(
            log_scale, log_decay, factor, seen_top, starts, decay_token, chunk - 1, length, num_chunks, SIZE, CHUNKS,
            SCALED, DECAYED, SHARES, TOPPED, PACKED, REVERSE,
        )  # fmt: skip
        value, gain = tl.where(chunk == 0, begin, value), tl.where(chunk == 0, LEAST, gain)
        before, gain = tl.associative_scan((value, gain), 0, raise_by)
        before = tl.maximum(before, carry + gain)
        carry = tl.sum(tl.where(own_chunk == CHUNKS - 1, before, 0.0), 0)
        own, passed, at_end, added, lost, going_on = load_scales(
            log_scale, log_decay, factor, seen_top, starts, decay_token, chunk, length, num_chunks, SIZE, CHUNKS,
            SCALED, DECAYED, SHARES, TOPPED, PACKED, REVERSE,
        )  # fmt: skip
        last = tl.maximum(added, before + going_on)
        there, place = chunk < num_chunks, chunk[:, None] * SIZE + own_place[None, :]
        largest, seen = find_largest(own, before, starts, chunk, place, there, SIZE, CHUNKS, PACKED)
        tl.store(exponent + first_place + place, own, mask=there[:, None])
        tl.store(top + first_place + place, largest, mask=there[:, None])
        tl.store(kept + first_place + place, tl.exp(seen - largest), mask=there[:, None])
        tl.store(weight + first_place + place, tl.exp(at_end + (lost - last)[:, None]), mask=there[:, None])
        tl.store(left + number + chunk, tl.exp(before + going_on - last), mask=there)
        tl.store(after + sequence + chunk * 0, last, mask=chunk == num_chunks - 1)
        token, inside = length - 1 - place if REVERSE else place, place < length
        if TOPS:
            for group in range(groups):
                tl.store(row_top + (sequence * groups + group) * length + token, largest + passed, mask=inside)
        if FACTORS:
            power = largest + passed
            if SCALED:
                power += tl.load(log_scale + token, mask=inside, other=0.0)
            tl.store(row_factor + sequence * length + token, tl.exp(power), mask=inside)
    tl.debug_barrier()  # what is left of a state after a segment is made of what was just written
    part = tl.arange(0, SEGMENT)
    for segment in range(num_segments):
        chunk = segment * segment_chunks + part
        some = tl.load(left + number + chunk, mask=(part < segment_chunks) & (chunk < num_chunks), other=1.0)
        tl.store(through + sequence * num_segments + segment, tl.reduce(some, 0, multiply))
