/* The backward pass of running softmax attention, for up to PIECE queries and PIECE keys at a time. Weights are made
 * again from queries, keys and the logs of what they add up to:
 *
 *     weight_ij = exp(scaling query_i . key_j + bias_ij - log_i)
 *     slope_ij = weight_ij (grad_i . value_j - weight_grad_i)
 *     d_query_i += slope_ij key_j,  d_key_j = sum_i slope_ij scaling query_i,  d_value_j = sum_i weight_ij grad_i
 */

#pragma once


#include "softmax.h"

/* Rows of queries and keys are padded to `keys` numbers, those of values to `values`; weights and slopes are
 * [keys, queries]. */
struct pairs {
    float *query, *grad, *turned_query, *turned_grad, *d_query; /* the queries scaled; what their gradient adds up to */
    float *key, *value, *weights, *slopes, *d_key, *d_value;
    float log[PIECE], weight_grad[PIECE];
    int64_t key_size, value_size, keys, values;
};

/* Up to PIECE keys and values, in rows as above, and where their gradients are added up. */
struct met {
    const float *key, *value;
    float *d_key, *d_value;
    int64_t d_key_row, d_value_row;
};

static int64_t arrange_pairs(struct pairs *w, int64_t key_size, int64_t value_size, float *memory)
{
    int64_t used = 0;
    w->key_size = key_size;
    w->value_size = value_size;
    w->keys = round_up(key_size, TILE_COLUMNS);
    w->values = round_up(value_size, TILE_COLUMNS);
    float **of_keys[] = {&w->query, &w->turned_query, &w->d_query, &w->key, &w->d_key};
    float **of_values[] = {&w->grad, &w->turned_grad, &w->value, &w->d_value};
    for (int part = 0; part < 5; part++)
        *of_keys[part] = take(memory, &used, PIECE * w->keys);
    for (int part = 0; part < 4; part++)
        *of_values[part] = take(memory, &used, PIECE * w->values);
    w->weights = take(memory, &used, PIECE * PIECE);
    w->slopes = take(memory, &used, PIECE * PIECE);
    return used;
}

/* Begin with the queries and gradients that have been put into `query` and `grad`. */
static void begin_pairs(struct pairs *w, float scaling)
{
    for (int64_t number = 0; number < PIECE * w->keys; number++)
        w->query[number] *= scaling;
    turn(w->turned_query, PIECE, w->query, w->keys, PIECE, w->keys);
    turn(w->turned_grad, PIECE, w->grad, w->values, PIECE, w->values);
    memset(w->d_query, 0, PIECE * w->keys * sizeof(float));
}

/* Note what a query's weights add up to, and its gradient; without keys all scores are LOWEST, and weights zero. */
static void note_sums(struct pairs *w, int64_t row, float log, float weight_grad)
{
    w->log[row] = log > LOWEST / 2 ? log : 0.0f;
    w->weight_grad[row] = weight_grad;
}

/* The keys and values that have been put into `key` and `value`, and gradients of zero. */
static struct met meet_copies(struct pairs *w)
{
    memset(w->d_key, 0, PIECE * w->keys * sizeof(float));
    memset(w->d_value, 0, PIECE * w->values * sizeof(float));
    return (struct met){w->key, w->value, w->d_key, w->d_value, w->keys, w->values};
}

/* Go through the pairs of `rows` queries with `count` keys, with what weights begin with as scores do in `read_piece`;
 * returns whether there are any. */
static int read_pairs(struct pairs *w, const struct met *met, int64_t count, int64_t rows, int all)
{
    const struct seen seen = find_seen(w->weights, all);
    if (seen.start >= seen.end)
        return 0;
    memset(w->slopes, 0, PIECE * PIECE * sizeof(float));
    add_scores(w->weights, &seen, met->key, w->keys, w->turned_query, w->key_size);
    add_scores(w->slopes, &seen, met->value, w->values, w->turned_grad, w->value_size);
    for (int64_t j = seen.start; j < seen.end; j++)
#pragma GCC unroll 8
        for (int64_t i = 0; i < PIECE; i += LANES) {
            const lanes weight = exp_of(load(w->weights + j * PIECE + i) - load(w->log + i));
            store(w->weights + j * PIECE + i, weight);
            store(w->slopes + j * PIECE + i, weight * (load(w->slopes + j * PIECE + i) - load(w->weight_grad + i)));
        }
    for (int64_t j = seen.start; j < seen.end; j += TILE_ROWS) {
        for (int64_t column = 0; column < w->values; column += TILE_COLUMNS)
            add_tile(met->d_value + j * met->d_value_row + column, met->d_value_row, w->weights + j * PIECE, PIECE, 1,
                     w->grad + column, w->values, rows);
        for (int64_t column = 0; column < w->keys; column += TILE_COLUMNS)
            add_tile(met->d_key + j * met->d_key_row + column, met->d_key_row, w->slopes + j * PIECE, PIECE, 1,
                     w->query + column, w->keys, rows);
    }
    for (int64_t i = 0; i < PIECE; i += TILE_ROWS) {
        const int64_t first = seen.first[i / LANES], last = smaller(seen.last[i / LANES], count);
        for (int64_t column = 0; first < last && column < w->keys; column += TILE_COLUMNS)
            add_tile(w->d_query + i * w->keys + column, w->keys, w->slopes + first * PIECE + i, 1, PIECE,
                     met->key + first * w->keys + column, w->keys, last - first);
    }
    return 1;
}
