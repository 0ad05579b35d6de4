"""One more token of kernel attention in Triton, as in decoding."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_feature_kernels import feature_numbers, features_of_row
from .triton_kernels import HIDDEN, load_state, store_state


@triton.jit
def add_key(key, log_scale, values, kept, total, before, RESCALED: tl.constexpr):
    """Sums over keys with one more, their last column, and their largest exponent; log factors where RESCALED."""
    after = before
    if RESCALED:
        after = tl.maximum(before, log_scale)
        left = tl.exp(before - after)
        key *= tl.exp(log_scale - after)
        kept *= left
        total *= left
    return kept + key[:, None] * values[None, :], total + key, after


@triton.jit
def step_token(
    query, key, value, query_weight, query_bias, key_weight, key_bias, log_decay, mask, sums, state, log_max,
    state_after, log_max_after, query_batch, query_head, query_group, key_batch, key_head, value_batch, value_head,
    query_weight_head, query_weight_group, query_weight_row, query_weight_column,
    query_bias_head, query_bias_group, query_bias_column,
    key_weight_head, key_weight_row, key_weight_column, key_bias_head, key_bias_column,
    decay_batch, decay_head, mask_batch, heads, groups, scale, quadratic, offset, least_weight,
    INPUT_SIZE: tl.constexpr, SIZE: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr, WEIGHED: tl.constexpr, BIASED: tl.constexpr, NUM_FEATURES: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUES: tl.constexpr, DECAYED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One more key of a sequence, and all queries of its groups, in VALUES columns of its state.

    log_decay: of the state where DECAYED. mask: if there is a key, where MASKED. The others as in `features_of_row`.
    """
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    features = feature_numbers(SIZE, COLUMNS, ACTIVATION == "softmax_pair")
    columns = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    scaled: tl.constexpr = ACTIVATION == "exponential"
    own, log_scale = features_of_row(
        key + batch * key_batch + head * key_head, key_weight + head * key_weight_head,
        key_bias + head * key_bias_head, key_weight_row, key_weight_column, key_bias_column, scale, quadratic, offset,
        INPUT_SIZE, SIZE, INPUTS, COLUMNS, ACTIVATION, WEIGHED, BIASED,
    )  # fmt: skip
    if MASKED:
        real = tl.load(mask + batch * mask_batch)
        own = tl.where(real, own, 0.0)
        if scaled or DECAYED:
            log_scale = tl.where(real, log_scale, HIDDEN)
    value += batch * value_batch + head * value_head
    values = tl.load(value + columns, mask=columns < VALUE_SIZE, other=0.0).to(tl.float32)
    kept, total = load_state(state, sequence, NUM_FEATURES, features, columns, NUM_FEATURES, VALUE_SIZE, True)
    before = tl.load(log_max + sequence)
    if DECAYED:
        before += tl.load(log_decay + batch * decay_batch + head * decay_head)
    kept, total, after = add_key(own, log_scale, values, kept, total, before, scaled or DECAYED)
    first = tl.program_id(1) == 0
    store_state(
        state_after, sequence, NUM_FEATURES, features, columns, kept, total, first, NUM_FEATURES, VALUE_SIZE, True
    )
    if first:
        tl.store(log_max_after + sequence, after)
    query += batch * query_batch + head * query_head
    query_weight += head * query_weight_head
    query_bias += head * query_bias_head
    for group in range(groups):
        asked, _ = features_of_row(
            query + group * query_group, query_weight + group * query_weight_group,
            query_bias + group * query_bias_group, query_weight_row, query_weight_column, query_bias_column, scale,
            quadratic, offset, INPUT_SIZE, SIZE, INPUTS, COLUMNS, ACTIVATION, WEIGHED, BIASED,
        )  # fmt: skip
        weight = tl.sum(asked * total, 0)
        result = tl.sum(asked[:, None] * kept, 0) / tl.where(weight >= least_weight, weight, float("inf"))
        row = sequence * groups + group
        tl.store(sums + row * VALUE_SIZE + columns, result, mask=columns < VALUE_SIZE)
