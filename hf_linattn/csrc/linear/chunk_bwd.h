/* What one thread works with in the backward pass of sums over keys, and the way back through feature maps. */

#pragma once

#include "linear.h"

struct linear_bwd_args {
    struct linear_args forward;  /* sums, factor, log_max_after: as it left them */
    tensor_view d_sums, d_log;   /* d_log, of the log of what all weights add up to: data is NULL if there is none */
    tensor_view d_query, d_key, d_value, d_scale; /* d_scale [batches, heads, length]; data may be NULL */
    /* [batches, heads (, groups), input_size, columns] and [.., columns]; NULL where nobody needs them */
    float *d_query_weight, *d_query_bias, *d_key_weight, *d_key_bias;
    const float *d_state; /* of what it left as state; NULL where there is none */
    float *d_before;      /* of the state it began with */
};

/* One map and what its gradients need. */
struct reverse_map {
    struct matrix turned;     /* weight, [columns, inputs] */
    float *d_weight, *d_bias; /* [inputs, columns], [columns] */
};

/* What a chunk is read with from the end: its keys, their log scales, and what came before it. */
struct recalled {
    struct matrix key;   /* features [chunk, keys] */
    struct matrix state; /* state^T [values, keys] */
    float *weights;      /* [keys] */
    float log_max, scale[CHUNK];
};

struct work {
    struct chunk_space s;
    struct matrix grad, grad_pairs, d_query, d_key, turned_value, turned_state;
    float *slope, *own_log, *d_input;
    /* grad [chunk, values] is g, slope [chunk] is h; d_query, d_key [chunk, keys]: of features */
    struct recalled recalled[SEGMENT / FEW]; /* the chunks of a segment */
    struct reverse_map *maps;                  /* of the queries of each group, then of the keys */
    int64_t columns;                           /* of a weight, padded */
};

static int64_t arrange_all(struct work *w, const struct linear_bwd_args *p, float *memory)
{
    struct chunk_space *s = &w->s;
    const int64_t count = p->forward.groups + 1, parts = p->forward.parts;
    int64_t used = chunk_space_init(s, &p->forward, memory);
    s->fetched = p->forward.bidirectional ? ROWS_AHEAD : ROWS_AHEAD / 2; /* beside more products than forward */
    w->columns = p->forward.activation == SOFTMAX_PAIR ? round_up(p->forward.key_size / 2, TILE_COLUMNS) : s->keys;
    w->grad = matrix_alloc(memory, &used, s->chunk, s->values, parts, KEEP_A | KEEP_B);
    w->slope = arena_alloc(memory, &used, s->chunk);
    w->own_log = arena_alloc(memory, &used, s->chunk);
    w->grad_pairs = matrix_alloc(memory, &used, s->chunk, s->chunk, parts, KEEP_NONE);
    w->d_query = matrix_alloc(memory, &used, s->chunk, s->keys, parts, KEEP_NONE);
    w->d_key = matrix_alloc(memory, &used, s->chunk, s->keys, parts, KEEP_NONE);
    w->d_input = arena_alloc(memory, &used, s->chunk * s->inputs);
    w->turned_value = matrix_alloc(memory, &used, s->values, s->chunk, parts, KEEP_B);
    w->turned_state = matrix_alloc(memory, &used, s->values, s->keys, parts, KEEP_FINE_B);
    const int64_t all = p->forward.bidirectional ? 1 : SEGMENT / s->chunk;
    for (int64_t chunk = 0; chunk < min_i64(all, p->forward.length / s->chunk + 1); chunk++) {
        struct recalled *own = &w->recalled[chunk];
        own->key = chunk ? matrix_like(&w->recalled->key, memory, &used, s->chunk)
                         : matrix_alloc(memory, &used, s->chunk, s->keys, parts, KEEP_B);
        own->state = chunk ? matrix_like(&w->recalled->state, memory, &used, s->values)
                           : matrix_alloc(memory, &used, s->values, s->keys, parts, KEEP_FINE_B);
        own->weights = arena_alloc(memory, &used, s->keys);
    }
    s->key = &w->recalled[0].key;
    w->maps = arena_alloc(memory, &used, floats_for(count, sizeof(struct reverse_map)));
    for (int64_t map = 0; map < count; map++) {
        struct reverse_map found = {
            matrix_alloc(memory, &used, w->columns, s->inputs, parts, KEEP_B),
            arena_alloc(memory, &used, w->columns * s->inputs),
            arena_alloc(memory, &used, w->columns),
        };
        if (memory)
            w->maps[map] = found;
    }
    return used;
}

static void clear(float *numbers, int64_t count) { memset(numbers, 0, count * sizeof(float)); }

static void scale_rows(float *rows, const float *factor, int64_t count, int64_t size)
{
    for (int64_t row = 0; row < count; row++)
        for (int64_t column = 0; column < size; column++)
            rows[row * size + column] *= factor[row];
}

/* Turn the weights, and begin with gradients of zero. */
static void prepare_maps(struct work *w, const struct linear_bwd_args *p, int64_t head)
{
    const struct linear_args *f = &p->forward;
    for (int64_t group = 0; group <= f->groups; group++) {
        const tensor_view *weight = group < f->groups ? &f->query_map.weight : &f->key_map.weight;
        struct reverse_map *map = &w->maps[group];
        if (!weight->data)
            continue;
        float *padded = map->d_weight;
        clear(padded, w->s.inputs * w->columns);
        for (int64_t row = 0; row < f->input_size; row++)
            memcpy(padded + row * w->columns, row_f32(weight, 0, head, group < f->groups ? group : 0, row),
                   w->columns * sizeof(float));
        transpose(matrix_write(&map->turned), w->s.inputs, padded, w->columns, w->s.inputs, w->columns);
        clear(map->d_weight, w->s.inputs * w->columns);
        clear(map->d_bias, w->columns);
    }
}

static void write_map(const struct work *w, const struct linear_args *f, const struct reverse_map *map,
                      float *d_weight, float *d_bias, int64_t number)
{
    const int64_t columns = f->activation == SOFTMAX_PAIR ? f->key_size / 2 : f->key_size;
    for (int64_t row = 0; row < f->input_size && d_weight; row++)
        memcpy(d_weight + (number * f->input_size + row) * columns, map->d_weight + row * w->columns,
               columns * sizeof(float));
    if (d_bias)
        memcpy(d_bias + number * columns, map->d_bias, columns * sizeof(float));
}

/* d z from d phi(z), in place, for one row of features. */
static void reverse_activation(float *d, const float *features, const struct linear_args *p)
{
    const int64_t half = p->key_size / 2;
    switch (p->activation) {
    case ELU:
        for (int64_t key = 0; key < p->key_size; key++)
            d[key] *= features[key] < 1.0f ? features[key] : 1.0f;
        break;
    case RELU:
        for (int64_t key = 0; key < p->key_size; key++)
            d[key] = features[key] > 0.0f ? d[key] : 0.0f;
        break;
    case EXPONENTIAL:
        for (int64_t key = 0; key < p->key_size; key++)
            d[key] *= features[key];
        break;
    case SOFTMAX_PAIR: {
        const float mean = dot(d, features, half), opposite = dot(d + half, features + half, half);
        for (int64_t key = 0; key < half; key++)
            d[key] = features[key] * (d[key] - mean) - features[half + key] * (d[half + key] - opposite);
        clear(d + half, half);
    }
    }
}

/* From the gradient of features and these to that of what lies in `input`; `d_scale` is that of the log scales. */
static void reverse_features(struct work *w, const struct linear_args *p, struct reverse_map *map,
                             struct matrix *d_features, const struct matrix *features, int has_weight, int learned,
                             const float *d_scale, const tensor_view *to, int64_t batch, int64_t head, int64_t group,
                             int64_t at, int64_t count)
{
    struct chunk_space *s = &w->s;
    float *from = matrix_write(d_features);
    for (int64_t row = 0; row < count; row++)
        reverse_activation(from + row * s->keys, features->data + row * s->keys, p);
    int64_t size = s->keys;
    if (has_weight) {
        clear(from + count * s->keys, (s->chunk - count) * s->keys);
        gemm(s, w->d_input, s->inputs, d_features, &map->turned, s->chunk, s->inputs,
             p->activation == SOFTMAX_PAIR ? p->key_size / 2 : p->key_size, 0);
        if (learned) {
            gemm_t(s, map->d_weight, w->columns, &s->input, d_features, round_up(p->input_size, TILE_ROWS), w->columns,
                   s->chunk, 1);
            for (int64_t row = 0; row < count; row++)
                add_scaled(map->d_bias, 1.0f, from + row * s->keys, w->columns);
        }
        from = w->d_input;
        size = s->inputs;
    }
    const int changes = p->quadratic && d_scale;
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->input_size);
    for (int64_t row = 0; row < count; row++) {
        if (changes)
            add_scaled(from + row * size, 2 * p->quadratic * d_scale[row], s->input.data + row * s->inputs,
                       p->input_size);
        write_row(to, batch, head, group, at + row, 1.0f, from + row * size, p->input_size, large);
    }
}
