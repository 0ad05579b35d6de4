/* What sums over keys work on, and the feature maps they know. */

#pragma once

#include "../common/tensor.h"

#define SEGMENT 512 /* tokens between two states that are kept for the backward pass; a whole number of chunks */

/* A feature map of x: an activation of z = x weight + bias, or of x itself where there is no weight. */
typedef struct {
    tensor_view weight; /* [input_size, columns],
        zero beyond the key_size columns that are used; its "token" is a row */
    tensor_view bias;   /* [columns]; data is NULL where there is none */
} feature_map;

enum activation {
    GIVEN,       /* query and key are features */
    ELU,         /* elu(z) + 1 */
    RELU,        /* max(z, 0) */
    EXPONENTIAL, /* e^(z - max z), and the log scale max z + quadratic |x|^2 + offset */
    SOFTMAX_PAIR /* [softmax(z), softmax(-z)] */
};

/* One of the sequences that lie one after another in a row, counted as they are read. */
struct sequence {
    int64_t row, start, length;
};

struct linear_args {
    tensor_view query, key, value, sums; /* contiguous in their last dimension, as all are; of any kind */
    tensor_view log_scale, log_decay;    /* of the keys, float32, as all others; data is NULL where there are none */
    tensor_view row_scale;               /* of the queries; the same */
    tensor_view factor, top;             /* of the queries: what their sums were multiplied by; top_i, and what a
                                        feature map takes out of the query; for one token, data may be NULL */
    const struct sequence *packed;   /* [sequences], row by row; NULL where every row is one */
    int64_t sequences;
    const float *state, *log_max;    /* [batches, heads, key_size, value_size (+ 1)], [batches, heads]: of the first
                                        sequence of each row; NULL where nothing was read before */
    float *state_after, *log_max_after; /* of the last; if bidirectional of every sequence */
    float *checkpoints; /* [.., heads, struct checkpoint]: what was before every SEGMENT tokens of each sequence; NULL
                           where nobody needs that */
    int64_t batches, heads, groups, length, key_size, value_size;
    int64_t normalise, threads;
    int64_t parts; /* of bfloat16 that numbers have in products; 0 for products of float32 */
    feature_map query_map, key_map;
    int64_t activation, input_size, bidirectional, strict;
    float quadratic, offset, least_weight;
    int64_t continues, leaves; /* of one sequence: whether it begins with the state, whether it leaves one */
};

/* The number of the first sequence of a row; of the row behind the last one, how many there are. */
static inline int64_t first_of(const struct linear_args *p, int64_t row)
{
    int64_t low = 0, high = p->sequences;
    if (!p->packed)
        return row;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (p->packed[middle].row < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether all sequences lie in rows that there are, row by row. */
static inline int fits(const struct linear_args *p)
{
    for (int64_t number = 0; number < p->sequences && p->packed; number++) {
        const struct sequence one = p->packed[number];
        const int64_t before = number ? p->packed[number - 1].row : 0;
        if (one.row < before || one.row >= p->batches || one.start < 0 || one.length < 0 || one.start > p->length
            || one.length > p->length - one.start)
            return 0;
    }
    return 1;
}

/* Let an operand begin at a token. */
static inline void begin_at(tensor_view *x, int64_t start)
{
    if (x->data)
        x->data = offset_ptr(x, x->data, start * x->token);
}

/* How many segments so many tokens have. */
static inline int64_t segments_of(int64_t length) { return (length + SEGMENT - 1) / SEGMENT; }

/* What is kept before a segment: the state [keys, values] and its last column [keys], padded, and log_max. */
struct checkpoint {
    float *state, *weights, *log_max;
};

static inline struct checkpoint checkpoint_of(const struct linear_args *p, int64_t head, int64_t segment)
{
    const int64_t keys = round_up(p->key_size, TILE_COLUMNS), values = round_up(p->value_size, TILE_COLUMNS);
    const int64_t size = keys * (values + 1) + 1;
    float *state = p->checkpoints + (segment * p->heads + head) * size;
    return (struct checkpoint){state, state + keys * values, state + keys * (values + 1)};
}

/* The problem of one sequence of a row. */
static inline struct linear_args problem_of(const struct linear_args *p, int64_t row, int64_t number)
{
    struct linear_args own = *p;
    own.continues = p->state != NULL;
    own.leaves = 1;
    const int64_t start = p->packed ? p->packed[number].start : 0;
    if (p->checkpoints) /* each sequence has places of its own, wherever it starts */
        own.checkpoints = checkpoint_of(p, 0, row * segments_of(p->length) + number + start / SEGMENT).state;
    if (!p->packed)
        return own;
    tensor_view *operands[] = {&own.query,     &own.key,       &own.value,  &own.sums, &own.log_scale,
                           &own.log_decay, &own.row_scale, &own.factor, &own.top};
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++)
        begin_at(operands[i], start);
    own.length = p->packed[number].length;
    own.continues = own.continues && start == 0;
    own.leaves = p->bidirectional || start + own.length == p->length;
    if (p->bidirectional) {
        const int64_t ahead = (number - row) * p->heads;
        own.state_after += ahead * p->key_size * (p->value_size + (p->normalise ? 1 : 0));
        own.log_max_after += ahead;
    }
    return own;
}

/* Whether keys weigh more than their features say. */
static inline int has_scales(const struct linear_args *p)
{
    return p->log_scale.data || p->log_decay.data || p->activation == EXPONENTIAL;
}

/* The largest exponent before the first key of a sequence; where a map has no log scales, they do nothing but hide. */
static inline float first_top(const struct linear_args *p, int64_t task)
{
    const int given = p->log_scale.data && p->activation == GIVEN;
    return p->continues ? p->log_max[task] : given || p->log_decay.data || p->activation == EXPONENTIAL ? LOWEST / 2 : 0;
}

/* The first `count` lanes. */
static inline mask first_lanes(int64_t count) { return (mask)LANE_NUMBERS < (int32_t)count; }

/* z = e^(z - max z) for the first `count` numbers; return the maximum. */
static float exponentials(float *z, int64_t count)
{
    vec largest = z[0] + (vec){0};
    for (int64_t key = 0; key < count; key += LANES)
        largest = vmax(blend(first_lanes(count - key), load(z + key), largest), largest);
    const float top = max_of(largest);
    for (int64_t key = 0; key < count; key += LANES)
        store(z + key, blend(first_lanes(count - key), exp_of(load(z + key) - top), (vec){0}));
    return top;
}

/* z = e^(z - max z) and opposite = e^-z times whatever, for the first `count` numbers, side by side; return their
 * sums. */
static void exponential_pair(float *z, float *opposite, int64_t count, float *sum, float *opposite_sum)
{
    const vec zero = {0}, first = z[0] + zero;
    vec largest = first, least = -first, total = zero, opposite_total = zero;
    for (int64_t key = 0; key < count; key += LANES) {
        const vec part = blend(first_lanes(count - key), load(z + key), first);
        largest = vmax(part, largest);
        least = vmax(-part, least);
    }
    const float top = max_of(largest), bottom = max_of(least);
    const int close = top + bottom < 60.0f; /* then e^-x is the inverse of e^x, in a fourth of the time */
    for (int64_t key = 0; key < count; key += LANES) {
        const mask there = first_lanes(count - key);
        const vec part = load(z + key), power = exp_of(part - top);
        const vec one = blend(there, power, zero);
        const vec other = blend(there, close ? inverse_of(power) : exp_of(-part - bottom), zero);
        total += one;
        opposite_total += other;
        store(z + key, one);
        store(opposite + key, other);
    }
    *sum = sum_of(total);
    *opposite_sum = sum_of(opposite_total);
}

/* Apply the activation to one row of z; return the log scale without what x adds. `spare` is memory for a row. */
static float activate(float *z, float *spare, const struct linear_args *p, int64_t padded)
{
    float sum, opposite, log_scale = 0.0f;
    const int64_t half = p->key_size / 2;
    switch (p->activation) {
    case ELU:
        for (int64_t key = 0; key < p->key_size; key += LANES) {
            const vec part = load(z + key), high = vmax((vec){0}, part);
            store(z + key, high + exp_of(part - high));
        }
        break;
    case RELU:
        for (int64_t key = 0; key < p->key_size; key += LANES) {
            store(z + key, vmax((vec){0}, load(z + key)));
        }
        break;
    case EXPONENTIAL:
        log_scale = exponentials(z, p->key_size);
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
