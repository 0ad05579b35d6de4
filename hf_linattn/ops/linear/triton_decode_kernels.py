"""One more token of kernel attention in Triton, as in decoding."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import HIDDEN


@triton.jit
def step_token(
    query, key, value, log_scale, log_decay, mask, sums, state, log_max, state_after, log_max_after,
    value_batch, value_head, decay_batch, decay_head, mask_batch, heads, groups, least_weight,
    KEY_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUES: tl.constexpr,
    SCALED: tl.constexpr, DECAYED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One more key of a sequence, and all queries of its groups, in VALUES columns of its state; of KEYS >= KEY_SIZE.

    log_scale: of the key where SCALED. log_decay: of the state where DECAYED. mask: if there is a key, where MASKED.
    """
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    features = tl.arange(0, KEYS)
    columns = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    of_keys, of_values = features < KEY_SIZE, columns < VALUE_SIZE
    inside = of_keys[:, None] & of_values[None, :]
    keys = tl.load(key + sequence * KEY_SIZE + features, mask=of_keys, other=0.0).to(tl.float32)
    if MASKED:
        real = tl.load(mask + batch * mask_batch)
        keys = tl.where(real, keys, 0.0)
    value += batch * value_batch + head * value_head
    values = tl.load(value + columns, mask=of_values, other=0.0).to(tl.float32)
    place = (sequence * KEY_SIZE + features) * (VALUE_SIZE + 1)
    kept = tl.load(state + place[:, None] + columns[None, :], mask=inside, other=0.0)
    total = tl.load(state + place + VALUE_SIZE, mask=of_keys, other=0.0)
    before = tl.load(log_max + sequence)
    after = before
    if SCALED or DECAYED:
        if DECAYED:
            before += tl.load(log_decay + batch * decay_batch + head * decay_head)
        scale = tl.load(log_scale + sequence) if SCALED else 0.0
        if MASKED:
            scale = tl.where(real, scale, HIDDEN)
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
