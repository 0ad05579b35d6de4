/* What one thread works with where sums are made chunk by chunk. */

#pragma once

#include "linear.h"
#include "../common/pack_cache.h"

#define CHUNK 64   /* tokens read at a time, at most */
#define FEW 32     /* the same where products are of float32: the fewer, the fewer pairs,
    and all is in the first cache */
#define FETCHED 4  /* rows of each at a time */
#define SLAB 16    /* rows of a product at a time */

/* All that belongs to one chunk of one head. */
struct workspace {
    float *input, *query, *key, *turned, *value, *weighted, *scores, *out, *state, *weights, *spare;
    /* weights: the last column of a normalised state; spare: a row of features */
    float *turned_state, *earlier; /* in the backward pass: the state turned; that of what came before, turned */
    float scale[CHUNK], query_scale[CHUNK], exponent[CHUNK], passed[CHUNK], top[CHUNK], kept[CHUNK], weight[CHUNK];
    int64_t chunk;                /* tokens read at a time: fewer where there are no more */
    int64_t inputs, keys, values; /* sizes, padded */
    int64_t fetched;              /* rows of what comes next that are asked for at a time */
    struct pack_cache factors;
    struct prefetch_queue next;
};

/* How many tokens are read at a time. */
static inline int64_t chunk_of(const struct linear_args *p)
{
    return min_i64(p->parts ? CHUNK : FEW, round_up(p->length ? p->length : 1, TILE_COLUMNS));
}

static inline int64_t workspace_init(struct workspace *s, const struct linear_args *p, float *memory)
{
    s->next.count = 0;
    s->fetched = FETCHED;
    s->turned_state = s->earlier = NULL;
    s->chunk = chunk_of(p);
    s->inputs = round_up(p->input_size, TILE_COLUMNS);
    s->keys = round_up(p->key_size, TILE_COLUMNS);
    s->values = round_up(p->value_size, TILE_COLUMNS);
    int64_t used = 0;
    s->input = arena_alloc(memory, &used, s->chunk * s->inputs);
    s->query = arena_alloc(memory, &used, s->chunk * s->keys);
    s->key = arena_alloc(memory, &used, s->chunk * s->keys);
    s->turned = arena_alloc(memory, &used, s->chunk * s->keys);
    s->value = arena_alloc(memory, &used, s->chunk * s->values);
    s->weighted = arena_alloc(memory, &used, s->chunk * s->values);
    s->scores = arena_alloc(memory, &used, s->chunk * s->chunk);
    s->out = arena_alloc(memory, &used, s->chunk * s->values);
    s->state = arena_alloc(memory, &used, s->keys * s->values);
    s->weights = arena_alloc(memory, &used, s->keys);
    s->spare = arena_alloc(memory, &used, s->keys);
    const int64_t widest = max_i64(max_i64(s->inputs, s->keys), max_i64(s->values, s->chunk));
    const int64_t largest = max_i64(widest * s->chunk, s->keys * max_i64(s->values, s->inputs));
    s->factors = take_factors(memory, &used, widest * s->chunk, largest, p->parts);
    hold(&s->factors, memory, &used, s->query, s->chunk * s->keys, LEFT);
    hold(&s->factors, memory, &used, s->turned, s->chunk * s->keys, RIGHT);
    hold(&s->factors, memory, &used, s->value, s->chunk * s->values, RIGHT);
    hold(&s->factors, memory, &used, s->state, s->keys * s->values, RIGHT);
    for (int64_t map = 0; map <= p->groups && p->key_map.weight.data; map++)
        hold(&s->factors, memory, &used, NULL, s->inputs * s->keys, RIGHT);
    return used;
}

/* out [rows, columns] = left right, more what is there if `adds`, rows and columns being whole numbers of tiles; a
 * function of its own, as its tiles need all registers */
static __attribute__((noinline)) void
gemm_f32(float *out, int64_t out_row, const float *left, int64_t left_row, int64_t left_step, const float *right,
           int64_t right_step, int64_t rows, int64_t columns, int64_t steps, int adds)
{
    for (int64_t column = 0; column < columns; column += TILE_COLUMNS)
        for (int64_t row = 0; row < rows; row += TILE_ROWS)
            make_tile(out + row * out_row + column, out_row, left + row * left_row, left_row, left_step,
                      right + column, right_step, steps, adds);
}

/* Rows of what comes next that are asked for beside the products of a block of tiles: those of parts take longer. */
static inline int64_t fetched_of(const struct workspace *s) { return s->factors.parts == 3 ? 1 : FETCHED / 2; }

static inline struct tiles right_of(struct workspace *s, const float *right, int64_t right_step, int64_t steps,
                                    int64_t columns)
{
    const int fine = right == s->state || right == s->turned_state || right == s->earlier;
    return right_tiles(&s->factors, right, right_step, steps, columns, fine);
}

/* The same while memory is asked for what comes next, if anything does. Factors in parts have whole blocks of rows;
 * sums
 * over all tokens so far, which are `right` then, are not to lose digits that cancel. */
static inline void gemm(struct workspace *s, float *out, int64_t out_row, const float *left, int64_t left_row,
                                int64_t left_step, const float *right, int64_t right_step, int64_t rows,
                                int64_t columns, int64_t steps, int adds)
{
    if (s->factors.parts) {
        rows = round_up(rows, BLOCK);
        multiply(out, out_row, left_tiles(&s->factors, left, left_row, left_step, rows, steps),
                 right_of(s, right, right_step, steps, columns), rows, columns, steps, adds, &s->next, fetched_of(s));
        return;
    }
    for (int64_t column = 0; column < columns; column += TILE_COLUMNS) /* as many of `right` as the first cache holds */
        for (int64_t row = 0; row < rows; row += SLAB) {
            prefetch_some(&s->next, s->fetched);
            gemm_f32(out + row * out_row + column, out_row, left + row * left_row, left_row, left_step,
                       right + column, right_step, min_i64(SLAB, rows - row), TILE_COLUMNS, steps, adds);
        }
}

/* out [chunk, columns] += scores right, of pairs [chunk, chunk] whose column is no later than their row */
static inline void gemm_tril(struct workspace *s, float *out, const float *scores, const float *right, int64_t columns)
{
    const int64_t chunk = s->chunk;
    if (s->factors.parts) {
        const struct tiles left = left_tiles(&s->factors, scores, chunk, 1, chunk, chunk);
        const struct tiles tiles = right_of(s, right, columns, chunk, columns);
        for (int64_t row = 0; row < chunk; row += BLOCK)
            multiply(out + row * columns, columns, tiles_from(left, row, 0), tiles, BLOCK, columns, row + BLOCK, 1,
                     &s->next, fetched_of(s));
        return;
    }
    for (int64_t row = 0; row < chunk; row += TILE_ROWS) {
        prefetch_some(&s->next, s->fetched / 2);
        gemm_f32(out + row * columns, columns, scores + row * chunk, chunk, 1, right, columns, TILE_ROWS, columns,
                   row + TILE_ROWS, 1);
    }
}

/* out [chunk, columns] += scores^T right, of the same */
static inline void gemm_tril_t(struct workspace *s, float *out, const float *scores, const float *right,
                               int64_t columns)
{
    const int64_t chunk = s->chunk;
    if (s->factors.parts) {
        const struct tiles left = left_tiles(&s->factors, scores, 1, chunk, chunk, chunk);
        const struct tiles tiles = right_of(s, right, columns, chunk, columns);
        for (int64_t row = 0; row < chunk; row += BLOCK)
            multiply(out + row * columns, columns, tiles_from(left, row, row), tiles_from(tiles, 0, row), BLOCK,
                     columns, chunk - row, 1, &s->next, fetched_of(s));
        return;
    }
    for (int64_t row = 0; row < chunk; row += TILE_ROWS)
        gemm_f32(out + row * columns, columns, scores + row * chunk + row, 1, chunk, right + row * columns, columns,
                   TILE_ROWS, columns, chunk - row, 1);
}

/* out [chunk, chunk] = rows columns, of pairs whose column is no later than their row, more what is there if `adds` */
static inline void gemm_out_tril(struct workspace *s, float *out, const float *rows, int64_t row_size,
                                const float *columns, int64_t steps, int adds)
{
    const int64_t chunk = s->chunk;
    if (s->factors.parts) {
        const struct tiles left = left_tiles(&s->factors, rows, row_size, 1, chunk, steps);
        const struct tiles right = right_of(s, columns, chunk, steps, chunk);
        for (int64_t column = 0; column < chunk; column += BLOCK)
            multiply(out + column * chunk + column, chunk, tiles_from(left, column, 0), tiles_from(right, column, 0),
                     chunk - column, BLOCK, steps, adds, &s->next, fetched_of(s));
        return;
    }
    for (int64_t column = 0; column < chunk; column += TILE_COLUMNS)
        gemm(s, out + column * chunk + column, chunk, rows + column * row_size, row_size, 1, columns + column,
                     chunk, chunk - column, TILE_COLUMNS, steps, adds);
}

/* sum [size] = left sum + factor^T rows, of `count` rows, in whole lanes; every factor is one for NULL */
static inline void add_rows(float *sum, float left, const float *factor, const float *rows, int64_t count, int64_t size)
{
    for (int64_t column = 0; column < size; column += LANES) {
        vec total = left * load(sum + column);
        for (int64_t row = 0; row < count; row++)
            total += (factor ? factor[row] : 1.0f) * load(rows + row * size + column);
        store(sum + column, total);
    }
}

/* Round what will be a factor of rounded products already where it is added up, too: the sums cancel in gradients. */
static inline void round_factor(const struct workspace *s, float *numbers, int64_t count)
{
    for (int64_t number = 0; s->factors.parts == 1 && number < count; number += LANES)
        store(numbers + number, rounded_lanes(load(numbers + number)));
}

/* Features [chunk, keys] of `count` tokens from `x`; log scales, where wanted, are added to `scale`. */
static void load_features(float *to, struct workspace *s, const struct linear_args *p, const tensor_view *x,
                          const feature_map *map, float *scale, int64_t batch, int64_t head, int64_t group, int64_t at,
                          int64_t count)
{
    if (p->activation == GIVEN) {
        pack(to, s->chunk, x, batch, head, group, at, count, p->key_size, s->keys);
        round_factor(s, to, count * s->keys);
        changed(&s->factors, to);
        return;
    }
    if (map->weight.data) {
        const int64_t used = p->activation == SOFTMAX_PAIR ? p->key_size / 2 : p->key_size;
        pack(s->input, s->chunk, x, batch, head, group, at, count, p->input_size, s->inputs);
        for (int64_t row = 0; row < s->chunk && map->bias.data; row++) {
            memcpy(to + row * s->keys, row_f32(&map->bias, 0, head, group, 0), used * sizeof(float));
            memset(to + row * s->keys + used, 0, (s->keys - used) * sizeof(float));
        }
        const int64_t columns = p->activation == SOFTMAX_PAIR ? round_up(p->key_size / 2, TILE_COLUMNS) : s->keys;
        const float *weight = row_f32(&map->weight, 0, head, group, 0);
        hold_right(&s->factors, weight);
        gemm(s, to, s->keys, s->input, s->inputs, 1, weight, map->weight.token, s->chunk, columns,
                     p->input_size, map->bias.data != NULL);
    } else
        pack(to, s->chunk, x, batch, head, group, at, count, p->key_size, s->keys);
    for (int64_t row = 0; row < count; row++) {
        const float top = activate(to + row * s->keys, s->spare, p, s->keys);
        if (scale) {
            vec squares = {0};
            for (int64_t column = 0; column < s->inputs; column += LANES)
                squares += load(s->input + row * s->inputs + column) * load(s->input + row * s->inputs + column);
            scale[row] += top + p->quadratic * sum_of(squares) + p->offset;
        }
    }
    round_factor(s, to, count * s->keys);
    memset(to + count * s->keys, 0, (s->chunk - count) * s->keys * sizeof(float));
    changed(&s->factors, to);
}

/* The exponents of a chunk's keys as seen from its start, their running maximum, and what follows from them. */
static float weigh(struct workspace *s, const float *decay, int64_t decay_step, int64_t count, float before,
                   float *left)
{
    float passed = 0.0f, top = before < LOWEST / 2 ? LOWEST / 2 : before;
    for (int64_t j = 0; j < s->chunk; j++) {
        passed += decay && j < count ? decay[j * decay_step] : 0.0f;
        s->passed[j] = passed;
        s->exponent[j] = j >= count ? LOWEST : s->scale[j] - passed;
        top = s->exponent[j] > top ? s->exponent[j] : top;
        s->top[j] = top;
    }
    for (int64_t j = 0; j < s->chunk; j += LANES) {
        store(s->kept + j, exp_of(before - load(s->top + j)));
        store(s->weight + j, exp_of(load(s->exponent + j) - top));
    }
    *left = exp_of_one(before - top);
    return top + passed;
}

/* The values of a chunk, and what its keys weigh, whose log scales are there; returns the largest exponent after
 * it, and
 * what is `left` of what was before. */
static float load_values(struct workspace *s, const struct linear_args *p, int64_t batch, int64_t head, int64_t at,
                         int64_t count, int scaled, float before, float *left)
{
    pack(s->value, s->chunk, &p->value, batch, head, 0, at, count, p->value_size, s->values);
    changed(&s->factors, s->value);
    if (!scaled)
        return before;
    const float *decay = p->log_decay.data ? row_f32(&p->log_decay, batch, head, 0, at) : NULL;
    return weigh(s, decay, p->log_decay.token, count, before, left);
}

/* The same with its keys. */
static float load_keys(struct workspace *s, const struct linear_args *p, int64_t batch, int64_t head, int64_t at,
                       int64_t count, int scaled, float before, float *left)
{
    const float *given = p->log_scale.data ? row_f32(&p->log_scale, batch, head, 0, at) : NULL;
    for (int64_t j = 0; j < count && scaled; j++)
        s->scale[j] = given ? given[j * p->log_scale.token] : 0.0f;
    load_features(s->key, s, p, &p->key, &p->key_map, p->activation == EXPONENTIAL ? s->scale : NULL, batch, head, 0,
                  at, count);
    for (int64_t j = 0; j < count && scaled && given; j++)
        if (given[j * p->log_scale.token] <= LOWEST / 2) { /* a hidden key, whose features may be of any size */
            memset(s->key + j * s->keys, 0, s->keys * sizeof(float));
            s->scale[j] = LOWEST;
        }
    return load_values(s, p, batch, head, at, count, scaled, before, left);
}

static inline void turn_keys(struct workspace *s)
{
    transpose(s->turned, s->chunk, s->key, s->keys, s->chunk, s->keys);
    changed(&s->factors, s->turned);
}

/* scores [chunk, chunk]: start_i + row_i . column_j for pairs of a chunk, weighted, those of the future zero */
static void form_pairs(float *scores, struct workspace *s, const float *rows, int64_t row_size, const float *columns,
                       int64_t steps, const float *start, int scaled)
{
    for (int64_t i = 0; i < s->chunk && start; i++)
        for (int64_t j = 0; j < s->chunk; j += LANES)
            store(scores + i * s->chunk + j, (vec){0} + start[i]);
    gemm_out_tril(s, scores, rows, row_size, columns, steps, start != NULL);
    for (int64_t i = 0; i < s->chunk; i++) {
        float *own = scores + i * s->chunk;
        if (scaled)
            for (int64_t j = 0; j <= i; j += LANES)
                store(own + j, load(own + j) * exp_of(load(s->exponent + j) - s->top[i]));
        memset(own + i + 1, 0, (s->chunk - 1 - i) * sizeof(float));
        round_factor(s, own, s->chunk);
    }
}
