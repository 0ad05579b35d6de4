/* Hybrid attention whose state keeps a few keys out: what a call is described by, and what one thread works with. */

#pragma once

#include <math.h>

#include "../common/online_softmax.h"
#include "../linear/linear.h"

#define CHUNK 64 /* tokens that leave the window at a time, as in ops/linear/types.py */
_Static_assert(CHUNK == PIECE, "queries of a block are read at a time");

/* One call; `HardKeysArgs` of ops/hybrid/cpu_kernels.py. M is `most`, R is CHUNK (back + 1). */
struct hard_keys_args {
    tensor_view query, key, value, out;  /* contiguous in their last dimension, as all are; of any kind */
    tensor_view ring_key, ring_value;    /* [B, Hkv, R, D or V], the tokens before; without data, none */
    tensor_view sink_key, sink_value;    /* [B, Hkv, sinks, D or V], as far as these tokens have come */
    tensor_view hard_key, hard_value;    /* [B, Hkv, M, D or V], before the call; without data, none */
    tensor_view hard_key_after, hard_value_after;
    const int64_t *hard_position;        /* [B, Hkv, M], -1 where there is none, in front */
    int64_t *hard_position_after;
    const int64_t *start, *end;          /* [B], position of the first token of the call; how many are there */
    const float *state, *log_max;        /* [B, Hkv, F, V + 1], [B, Hkv]; NULL where nothing was read before */
    float *state_after, *log_max_after;
    const float *log_mix, *gate, *sink;  /* [Hkv, G]; no gate is one that is open */
    const float *rate;                   /* [Hkv], of decay */
    feature_map query_map, key_map;
    tensor_view query_features;          /* [B, Hkv, G, N, F], where the state is that of the delta rule */
    tensor_view key_features;            /* [B, Hkv, M + R + N, F], of hard keys, ring and call; without a ring of the
        last alone; without data, no block leaves */
    tensor_view key_beta, key_gate;      /* [B, Hkv, M + R + N]; key_gate: the log, nothing is forgotten without data */
    int64_t batches, heads, groups, length, key_size, value_size, features;
    int64_t sinks, most, back, relative, activation, threads, parts;
    float scaling, quadratic, offset, least_weight;
};

/* Keys that stay exact, and behind them those of a block that leaves the window: rows of `keys`, `values` and `mapped`
 * numbers. scale: the logs of what features were divided by, or by the delta rule of gates. The first `known` have
 * features. */
struct candidates {
    float *key, *value, *mapped, *scale, *beta, *error, *recall; /* recall: rows of values */
    int64_t *position;
    int64_t count, known;
};

/* All that belongs to one key/value head. */
struct store {
    struct workspace exact;
    struct candidates hard;
    float *state, *weights; /* S [features, values] and its last column, padded */
    float log_max;
    float *query, *far, *spare;           /* features and far output of CHUNK queries; a row of features */
    float *lost_mapped, *lost_value;      /* CHUNK rows of what enters the state */
    float *block_key, *block_value;       /* CHUNK rows that lie partly before the call */
    int64_t keys, values, mapped;         /* sizes, padded */
    int64_t serial;                       /* of the hard keys that the queries of a block meet, in pieces */
    float far_log[CHUNK], far_weight[CHUNK]; /* by the delta rule 1, and far_log the share itself */
};

static inline int64_t store_init(struct store *s, const struct hard_keys_args *p, float *memory)
{
    int64_t used = workspace_init(&s->exact, p->key_size, p->value_size, p->parts, memory); /* first: see run_tasks */
    const int64_t room = round_up(p->most + CHUNK, TILE_COLUMNS);
    s->keys = s->exact.keys;
    s->values = s->exact.values;
    s->mapped = round_up(p->features, TILE_COLUMNS);
    struct candidates *c = &s->hard;
    c->key = arena_alloc(memory, &used, room * s->keys);
    c->value = arena_alloc(memory, &used, room * s->values);
    c->mapped = arena_alloc(memory, &used, room * s->mapped);
    c->recall = arena_alloc(memory, &used, room * s->values);
    c->scale = arena_alloc(memory, &used, room);
    c->beta = arena_alloc(memory, &used, room);
    c->error = arena_alloc(memory, &used, room);
    c->position = arena_alloc(memory, &used, 2 * room);
    s->state = arena_alloc(memory, &used, s->mapped * s->values);
    s->weights = arena_alloc(memory, &used, s->mapped);
    s->query = arena_alloc(memory, &used, CHUNK * s->mapped);
    s->far = arena_alloc(memory, &used, CHUNK * s->values);
    s->spare = arena_alloc(memory, &used, s->mapped);
    s->lost_mapped = arena_alloc(memory, &used, CHUNK * s->mapped);
    s->lost_value = arena_alloc(memory, &used, CHUNK * s->values);
    s->block_key = arena_alloc(memory, &used, CHUNK * s->keys);
    s->block_value = arena_alloc(memory, &used, CHUNK * s->values);
    return used;
}

/* Whether keys weigh more than their features say. */
static inline int is_scaled(const struct hard_keys_args *p) { return p->rate || p->activation == EXPONENTIAL; }

/* Whether the state is that of the delta rule. */
static inline int by_delta_rule(const struct hard_keys_args *p) { return p->query_features.data != NULL; }

/* How many columns a state has: the last one is that of the weights, which the delta rule has not. */
static inline int64_t width_of(const struct hard_keys_args *p) { return p->value_size + (by_delta_rule(p) ? 0 : 1); }

/* Rows of memory that are the same for all heads. */
static inline tensor_view view_of(float *data, int64_t row)
{
    return (tensor_view){.data = data, .token = row, .kind = FLOAT32};
}

/* Take what keys of a head write by the delta rule, from a place of the operands on, behind those that are known. */
static inline void take_entries(struct store *s, const struct hard_keys_args *p, int64_t batch, int64_t head,
                                int64_t place, int64_t count)
{
    struct candidates *c = &s->hard;
    pack(c->mapped + c->known * s->mapped, count, &p->key_features, batch, head, 0, place, count, p->features,
         s->mapped);
    for (int64_t j = 0; j < count; j++) {
        c->beta[c->known + j] = *row_f32(&p->key_beta, batch, head, 0, place + j);
        c->scale[c->known + j] = p->key_gate.data ? *row_f32(&p->key_gate, batch, head, 0, place + j) : 0.0f;
    }
    c->known += count;
}

/* What there is before the call. */
static inline void load_store(struct store *s, const struct hard_keys_args *p, int64_t batch, int64_t head)
{
    const int64_t task = batch * p->heads + head, width = width_of(p);
    memset(s->state, 0, s->mapped * s->values * sizeof(float));
    memset(s->weights, 0, s->mapped * sizeof(float));
    s->log_max = p->state ? p->log_max[task] : is_scaled(p) ? LOWEST / 2 : 0.0f;
    for (int64_t key = 0; p->state && key < p->features; key++) {
        const float *row = p->state + (task * p->features + key) * width;
        memcpy(s->state + key * s->values, row, p->value_size * sizeof(float));
        s->weights[key] = by_delta_rule(p) ? 0.0f : row[p->value_size];
    }
    struct candidates *c = &s->hard;
    c->count = c->known = 0;
    for (int64_t place = 0; p->hard_key.data && place < p->most; place++) {
        const int64_t position = p->hard_position[task * p->most + place];
        if (position < 0)
            continue;
        pack(c->key + c->count * s->keys, 1, &p->hard_key, batch, head, 0, place, 1, p->key_size, s->keys);
        pack(c->value + c->count * s->values, 1, &p->hard_value, batch, head, 0, place, 1, p->value_size, s->values);
        c->position[c->count++] = position;
        if (p->key_features.data)
            take_entries(s, p, batch, head, place, 1);
    }
}

/* What there is after it; places without a key come first, and are zero. */
static inline void save_store(struct store *s, const struct hard_keys_args *p, int64_t batch, int64_t head)
{
    const int64_t task = batch * p->heads + head, width = width_of(p);
    p->log_max_after[task] = s->log_max;
    for (int64_t key = 0; key < p->features; key++) {
        float *row = p->state_after + (task * p->features + key) * width;
        memcpy(row, s->state + key * s->values, p->value_size * sizeof(float));
        if (!by_delta_rule(p))
            row[p->value_size] = s->weights[key];
    }
    const struct candidates *c = &s->hard;
    memset(s->block_key, 0, s->keys * sizeof(float));
    memset(s->block_value, 0, s->values * sizeof(float));
    for (int64_t place = 0; place < p->most; place++) {
        const int64_t own = place - (p->most - c->count);
        const float *key = own < 0 ? s->block_key : c->key + own * s->keys;
        const float *value = own < 0 ? s->block_value : c->value + own * s->values;
        write_row(&p->hard_key_after, batch, head, 0, place, 1.0f, key, p->key_size, 0);
        write_row(&p->hard_value_after, batch, head, 0, place, 1.0f, value, p->value_size, 0);
        p->hard_position_after[task * p->most + place] = own < 0 ? -1 : c->position[own];
    }
}

/* Features of `count` rows of heads, whose log scales are added to `scale`. Each row is worked out by itself, in the
 * same order wherever it stands: what is chosen by them is the same in a prefill and in a step. */
static inline void map_rows(float *to, float *scale, const struct store *s, const struct hard_keys_args *p,
                            const feature_map *map, const float *from, int64_t head, int64_t group, int64_t count)
{
    const struct linear_args own = {.activation = p->activation, .key_size = p->features};
    const int64_t used = p->activation == SOFTMAX_PAIR ? p->features / 2 : p->features;
    const int64_t rows = round_up(count, TILE_ROWS), columns = round_up(used, TILE_COLUMNS);
    for (int64_t row = 0; row < rows && map->weight.data && map->bias.data; row++) {
        memcpy(to + row * s->mapped, row_f32(&map->bias, 0, head, group, 0), used * sizeof(float));
        memset(to + row * s->mapped + used, 0, (s->mapped - used) * sizeof(float));
    }
    if (map->weight.data)
        gemm_f32(to, s->mapped, from, s->keys, 1, row_f32(&map->weight, 0, head, group, 0), map->weight.token, rows,
                 columns, p->key_size, map->bias.data != NULL);
    for (int64_t row = 0; row < count; row++) {
        const float *input = from + row * s->keys;
        if (!map->weight.data)
            memcpy(to + row * s->mapped, input, p->features * sizeof(float));
        scale[row] = activate(to + row * s->mapped, s->spare, &own, s->mapped);
        if (p->activation == EXPONENTIAL)
            scale[row] += p->quadratic * dot(input, input, s->keys) + p->offset;
    }
}
