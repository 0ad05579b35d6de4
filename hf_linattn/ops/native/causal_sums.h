/* What sums over keys work on, and the feature maps they know. */

#pragma once

#include "lanes.h"

/* A feature map of x: an activation of z = x weight + bias, or of x itself where there is no weight. */
typedef struct {
    operand weight; /* [input_size, columns], zero beyond the key_size columns that are used; its "token" is a row */
    operand bias;   /* [columns]; data is NULL where there is none */
} feature_map;

enum activation {
    GIVEN,       /* query and key are features */
    ELU,         /* elu(z) + 1 */
    RELU,        /* max(z, 0) */
    EXPONENTIAL, /* e^(z - max z), and the log scale max z + quadratic |x|^2 + offset */
    SOFTMAX_PAIR /* [softmax(z), softmax(-z)] */
};

struct problem {
    operand query, key, value, sums; /* float32, contiguous in their last dimension */
    operand log_scale, log_decay;    /* of the keys; data is NULL where there are none */
    operand row_scale;               /* of the queries; the same */
    operand factor, top;             /* of the queries: what their sums were multiplied by; top_i, and what a
                                        feature map takes out of the query; for one token, data may be NULL */
    const float *state, *log_max;    /* [batches, heads, key_size, value_size (+ 1)], [batches, heads] */
    float *state_after, *log_max_after;
    int64_t batches, heads, groups, length, key_size, value_size;
    int64_t normalise, threads;
    feature_map query_map, key_map;
    int64_t activation, input_size, bidirectional, strict;
    float quadratic, offset, least_weight;
};

/* Whether keys weigh more than their features say. */
static inline int has_scales(const struct problem *p)
{
    return p->log_scale.data || p->log_decay.data || p->activation == EXPONENTIAL;
}

/* z = e^(sign z - max sign z) for the first `count` numbers; return the maximum, and in `sum` the sum of z. */
static float exponentials(float *to, const float *z, float sign, int64_t count, float *sum)
{
    const int64_t whole = count / LANES * LANES;
    const mask counts = (mask)LANE_NUMBERS < (int32_t)(count - whole);
    lanes largest = sign * z[0] + (lanes){0}, total = {0};
    for (int64_t key = 0; key < whole; key += LANES)
        largest = larger_of(sign * load(z + key), largest);
    if (whole < count)
        largest = larger_of(choose(counts, sign * load(z + whole), largest), largest);
    const float top = max_of(largest);
    for (int64_t key = 0; key < whole; key += LANES) {
        const lanes part = exp_of(sign * load(z + key) - top);
        total += part;
        store(to + key, part);
    }
    if (whole < count) {
        const lanes part = choose(counts, exp_of(sign * load(z + whole) - top), (lanes){0});
        total += part;
        store(to + whole, part);
    }
    *sum = sum_of(total);
    return top;
}

/* z = e^(z - max z) and opposite = e^(min z - z) for the first `count` numbers, side by side; return their sums. */
static void exponential_pair(float *z, float *opposite, int64_t count, float *sum, float *opposite_sum)
{
    const int64_t whole = count / LANES * LANES;
    const mask counts = (mask)LANE_NUMBERS < (int32_t)(count - whole);
    lanes largest = z[0] + (lanes){0}, least = -largest, total = {0}, opposite_total = {0};
    for (int64_t key = 0; key < count; key += LANES) {
        const lanes part = choose(key < whole ? (mask){0} - 1 : counts, load(z + key), z[0] + (lanes){0});
        largest = larger_of(part, largest);
        least = larger_of(-part, least);
    }
    const float top = max_of(largest), bottom = max_of(least);
    for (int64_t key = 0; key < whole; key += LANES) {
        const lanes part = load(z + key), one = exp_of(part - top), other = exp_of(-part - bottom);
        total += one;
        opposite_total += other;
        store(z + key, one);
        store(opposite + key, other);
    }
    if (whole < count) {
        const lanes part = load(z + whole);
        const lanes one = choose(counts, exp_of(part - top), (lanes){0});
        const lanes other = choose(counts, exp_of(-part - bottom), (lanes){0});
        total += one;
        opposite_total += other;
        store(z + whole, one);
        store(opposite + whole, other);
    }
    *sum = sum_of(total);
    *opposite_sum = sum_of(opposite_total);
}

/* Apply the activation to one row of z; return the log scale without what x adds. `spare` is memory for a row. */
static float activate(float *z, float *spare, const struct problem *p, int64_t padded)
{
    float sum, opposite, log_scale = 0.0f;
    const int64_t half = p->key_size / 2;
    switch (p->activation) {
    case ELU:
        for (int64_t key = 0; key < p->key_size; key += LANES) {
            const lanes part = load(z + key), high = larger_of((lanes){0}, part);
            store(z + key, high + exp_of(part - high));
        }
        break;
    case RELU:
        for (int64_t key = 0; key < p->key_size; key += LANES) {
            store(z + key, larger_of((lanes){0}, load(z + key)));
        }
        break;
    case EXPONENTIAL:
        log_scale = exponentials(z, z, 1.0f, p->key_size, &sum);
        break;
    case SOFTMAX_PAIR:
        exponential_pair(z, spare, half, &sum, &opposite);
        sum = 1.0f / sum;
        opposite = 1.0f / opposite;
        for (int64_t key = 0; key < half; key++)
            z[key] *= sum;
        for (int64_t key = 0; key < half; key++)
            z[half + key] = spare[key] * opposite;
    }
    memset(z + p->key_size, 0, (padded - p->key_size) * sizeof(float));
    return log_scale;
}
