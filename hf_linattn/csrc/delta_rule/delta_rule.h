/* The gated delta rule in chunks: what a call is described by, and what one thread works with. */

#pragma once

#include "../common/products.h"

#define CHUNK 32    /* tokens read at a time: few pairs, all of them in the first cache */
#define SEGMENT 512 /* tokens between states that a backward pass starts from; as in ops/delta_rule/cpu_kernels.py */
#define CHUNKS (SEGMENT / CHUNK)
#define LARGEST 1e17f /* as in ops/common/numerics.py */

/* One call; `DeltaArgs` of ops/delta_rule/cpu_kernels.py. */
struct delta_args {
    tensor_view query, key, value, out; /* [B, Hkv, G, N, F], [B, Hkv, N, F], [B, Hkv, N, V], [B, Hkv, G, N, V] */
    tensor_view beta, log_gate;         /* [B, Hkv, N]; nothing is forgotten without log_gate */
    const float *state;                 /* [B, Hkv, F, V], before the first token; NULL where there is none */
    float *state_after, *kept_states;   /* the same after the last one; [segments - 1, B Hkv, F, V], or NULL */
    int64_t batches, heads, groups, length, key_size, value_size, threads;
    float least_length; /* of a key or query that is divided by its length; a shorter one is nothing */
};

struct delta_bwd_args {
    struct delta_args forward;
    tensor_view d_out, d_query, d_key, d_value, d_beta, d_log_gate;
    const float *d_state; /* of the last state, NULL for none */
    float *d_before;      /* of the first one, NULL where there is none */
};

/* All that belongs to one chunk of one head. K, Q and U are rows of the chunk, S is what was known before it. */
struct chunk {
    float *key, *turned, *query, *value, *known, *out; /* K, K^T, Q, V and U, K S, rows of output */
    float *own, *seen;                                 /* K K^T and Q K^T, [CHUNK, CHUNK] */
    float *state;                                      /* S [keys, values] */
    float beta[CHUNK], total[CHUNK], before[CHUNK], behind[CHUNK], inverse[CHUNK];
    /* total: the sum of log_gate since the chunk began; before: what is left of S at a token; behind: what is left of
     * a token at the chunk's end; inverse: 1 / |k| */
    float *decay;         /* [CHUNK, CHUNK], what is left of token j at token i, zero where j is later */
    float left;           /* what is left of S at the chunk's end */
    int64_t keys, values; /* sizes, padded */
};

static inline int64_t chunk_init(struct chunk *c, const struct delta_args *p, float *memory)
{
    int64_t used = 0;
    c->keys = round_up(p->key_size, TILE_COLUMNS);
    c->values = round_up(p->value_size, TILE_COLUMNS);
    c->key = arena_alloc(memory, &used, CHUNK * c->keys);
    c->turned = arena_alloc(memory, &used, CHUNK * c->keys);
    c->query = arena_alloc(memory, &used, CHUNK * c->keys);
    c->value = arena_alloc(memory, &used, CHUNK * c->values);
    c->known = arena_alloc(memory, &used, CHUNK * c->values);
    c->out = arena_alloc(memory, &used, CHUNK * c->values);
    c->own = arena_alloc(memory, &used, CHUNK * CHUNK);
    c->seen = arena_alloc(memory, &used, CHUNK * CHUNK);
    c->decay = arena_alloc(memory, &used, CHUNK * CHUNK);
    c->state = arena_alloc(memory, &used, c->keys * c->values);
    return used;
}

/* Rows of numbers times a factor each. */
static inline void scale_rows(float *to, const float *factor, const float *from, int64_t rows, int64_t size)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < size; column += LANES)
            store(to + row * size + column, factor[row] * load(from + row * size + column));
}

/* Divide rows by their length; what is all but nothing becomes nothing. The inverse of each length is kept. Numbers are
 * bounded before, as by `bounded` of ops/common/numerics.py: none is so large that its square is not finite. */
static inline void make_units(float *rows, float *inverse, const struct delta_args *p, int64_t count, int64_t size)
{
    for (int64_t row = 0; row < count; row++) {
        float *own = rows + row * size;
        vec squares = {0};
        for (int64_t column = 0; column < size; column += LANES) {
            const vec x = load(own + column), least = (vec){0} - LARGEST, most = (vec){0} + LARGEST;
            const vec bounded = -vmax(-vmax(x, least), -most) + 0.0f * x; /* what is not finite becomes NaN */
            squares += bounded * bounded;
            store(own + column, bounded);
        }
        const float length = __builtin_sqrtf(sum_of(squares));
        inverse[row] = length > p->least_length ? 1.0f / length : 0.0f;
        for (int64_t column = 0; column < size; column += LANES)
            store(own + column, inverse[row] * load(own + column));
    }
}

/* Read `count` keys and values from token `at` on, with their gates and the pairs that these make. */
static inline void load_chunk(struct chunk *c, const struct delta_args *p, int64_t batch, int64_t head, int64_t at,
                              int64_t count)
{
    pack(c->key, CHUNK, &p->key, batch, head, 0, at, count, p->key_size, c->keys);
    pack(c->value, CHUNK, &p->value, batch, head, 0, at, count, p->value_size, c->values);
    make_units(c->key, c->inverse, p, CHUNK, c->keys);
    transpose(c->turned, CHUNK, c->key, c->keys, CHUNK, c->keys);
    float total = 0.0f;
    for (int64_t i = 0; i < CHUNK; i++) {
        const int there = i < count;
        c->beta[i] = there ? *row_f32(&p->beta, batch, head, 0, at + i) : 0.0f;
        total += there && p->log_gate.data ? *row_f32(&p->log_gate, batch, head, 0, at + i) : 0.0f;
        c->total[i] = total;
    }
    for (int64_t j = 0; j < CHUNK; j += LANES) {
        store(c->before + j, exp_of(load(c->total + j)));
        store(c->behind + j, exp_of(total - load(c->total + j)));
    }
    c->left = exp_of_one(total);
    const mask numbers = LANE_NUMBERS;
    for (int64_t i = 0; i < CHUNK; i++)
        for (int64_t j = 0; j < CHUNK; j += LANES) {
            const mask earlier = numbers + (int32_t)j <= (int32_t)i;
            const vec passed = blend(earlier, c->total[i] - load(c->total + j), (vec){0});
            store(c->decay + i * CHUNK + j, blend(earlier, exp_of(passed), (vec){0}));
        }
}

/* pairs [CHUNK, CHUNK] = decay (rows K^T) */
static inline void form_pairs(float *pairs, const struct chunk *c, const float *rows)
{
    gemm_f32(pairs, CHUNK, rows, c->keys, 1, c->turned, CHUNK, CHUNK, CHUNK, c->keys, 0);
    for (int64_t pair = 0; pair < CHUNK * CHUNK; pair += LANES)
        store(pairs + pair, load(pairs + pair) * load(c->decay + pair));
}

/* What every key is wrong about, E, in the place of the values: V - K S - (pairs of earlier keys) beta E. */
static inline void solve_chunk(struct chunk *c)
{
    form_pairs(c->own, c, c->key);
    gemm_f32(c->known, c->values, c->key, c->keys, 1, c->state, c->values, CHUNK, c->values, c->keys, 0);
    for (int64_t i = 0; i < CHUNK; i++) {
        float factor[CHUNK], *row = c->value + i * c->values;
        for (int64_t j = 0; j < i; j++)
            factor[j] = c->own[i * CHUNK + j] * c->beta[j];
        for (int64_t column = 0; column < c->values; column += 2 * LANES) {
            vec first = load(row + column) - c->before[i] * load(c->known + i * c->values + column);
            vec second = load(row + column + LANES) - c->before[i] * load(c->known + i * c->values + column + LANES);
            for (int64_t j = 0; j < i; j++) {
                first -= factor[j] * load(c->value + j * c->values + column);
                second -= factor[j] * load(c->value + j * c->values + column + LANES);
            }
            store(row + column, first);
            store(row + column + LANES, second);
        }
    }
}

/* S = left S + (what is left of every key)^T U; `written` [CHUNK, values] is memory to work in */
static inline void fold_chunk(struct chunk *c, const float *update, float *written)
{
    if (c->left != 1.0f)
        for (int64_t number = 0; number < c->keys * c->values; number += LANES)
            store(c->state + number, c->left * load(c->state + number));
    scale_rows(written, c->behind, update, CHUNK, c->values);
    gemm_f32(c->state, c->values, c->key, 1, c->keys, written, c->values, c->keys, c->values, CHUNK, 1);
}

/* The state [F, V] of one sequence among those of all, or nothing where there are none. */
static inline const float *state_of(const float *states, const struct delta_args *p, int64_t sequence)
{
    return states ? states + sequence * p->key_size * p->value_size : NULL;
}

/* A state [F, V] in memory as a padded one, nothing where there is none. */
static inline void load_state(float *to, const float *from, const struct delta_args *p, const struct chunk *c)
{
    memset(to, 0, c->keys * c->values * sizeof(float));
    for (int64_t key = 0; from && key < p->key_size; key++)
        memcpy(to + key * c->values, from + key * p->value_size, p->value_size * sizeof(float));
}

static inline void save_state(float *to, const float *from, const struct delta_args *p, const struct chunk *c)
{
    for (int64_t key = 0; key < p->key_size; key++)
        memcpy(to + key * p->value_size, from + key * c->values, p->value_size * sizeof(float));
}

/* Where the state before a segment of one sequence is kept; before the first one it is given. */
static inline float *checkpoint_of(const struct delta_args *p, int64_t sequence, int64_t segment)
{
    return p->kept_states + ((segment - 1) * p->batches * p->heads + sequence) * p->key_size * p->value_size;
}
