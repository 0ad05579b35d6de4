/* The backward pass of running softmax attention, for up to PIECE queries and PIECE keys at a time. Weights are made
 * again from queries, keys and the logs of what they add up to:
 *
 *     weight_ij = exp(scaling query_i . key_j + bias_ij - log_i)
 *     slope_ij = weight_ij (grad_i . value_j - weight_grad_i)
 *     d_query_i += slope_ij key_j,  d_key_j = sum_i slope_ij scaling query_i,  d_value_j = sum_i weight_ij grad_i
 */

#pragma once


#include "softmax.h"

/* Rows of queries and keys are padded to `keys` numbers, those of values to `values`. */
struct pairs {
    float *query, *grad, *d_query; /* [PIECE, keys or values]: the queries scaled, what their gradient adds up to */
    float *key, *turned_key, *value, *turned_value, *weights, *slopes, *d_key, *d_value;
    float log[PIECE], weight_grad[PIECE];
    int64_t key_size, value_size, keys, values;
};

static int64_t arrange_pairs(struct pairs *w, int64_t key_size, int64_t value_size, float *memory)
{
    int64_t used = 0;
    w->key_size = key_size;
    w->value_size = value_size;
    w->keys = round_up(key_size, TILE_COLUMNS);
    w->values = round_up(value_size, TILE_COLUMNS);
    float **of_keys[] = {&w->query, &w->d_query, &w->key, &w->turned_key, &w->d_key};
    float **of_values[] = {&w->grad, &w->value, &w->turned_value, &w->d_value};
    for (int part = 0; part < 5; part++)
        *of_keys[part] = take(memory, &used, PIECE * w->keys);
    for (int part = 0; part < 4; part++)
        *of_values[part] = take(memory, &used, PIECE * w->values);
    w->weights = take(memory, &used, PIECE * PIECE);
    w->slopes = take(memory, &used, PIECE * PIECE);
    return used;
}

/* out [rows, columns] += left right, left being read in steps of its own; rows and columns are whole tiles */
static void add_products(float *out, int64_t columns, const float *left, int64_t left_row, int64_t left_step,
                         const float *right, int64_t rows, int64_t steps)
{
    for (int64_t row = 0; row < rows; row += TILE_ROWS)
        for (int64_t column = 0; column < columns; column += TILE_COLUMNS)
            add_tile(out + row * columns + column, columns, left + row * left_row, left_row, left_step,
                     right + column, columns, steps);
}

/* Weights and slopes of `rows` queries from `row` on for the keys from `first` to `last`, of which `count` are there;
 * the bias is that of the first of these queries. */
static void weigh_again(struct pairs *w, int64_t row, int64_t rows, int64_t first, int64_t last, int64_t count,
                        const float *bias, int64_t bias_step, int64_t ahead)
{
    float *weights = w->weights + row * PIECE, *slopes = w->slopes + row * PIECE;
    for (int64_t column = first; column < last; column += TILE_COLUMNS) {
        add_tile(weights + column, PIECE, w->query + row * w->keys, w->keys, 1, w->turned_key + column, PIECE,
                 w->key_size);
        add_tile(slopes + column, PIECE, w->grad + row * w->values, w->values, 1, w->turned_value + column, PIECE,
                 w->value_size);
    }
    for (int64_t i = 0; i < rows; i++) {
        hide(weights + i * PIECE, bias ? bias + i * bias_step : NULL, first, last,
             bias ? count : smaller(count, ahead + i + 1));
        for (int64_t j = first; j < last; j += LANES) {
            const lanes weight = exp_of(load(weights + i * PIECE + j) - w->log[row + i]);
            store(weights + i * PIECE + j, weight);
            store(slopes + i * PIECE + j, weight * (load(slopes + i * PIECE + j) - w->weight_grad[row + i]));
        }
    }
}

/* Go through the pairs of `rows` queries with the first `count` keys, seen as in `read_piece`; returns whether there
 * are any, and if so d_key and d_value hold their gradients. */
static int read_pairs(struct pairs *w, int64_t count, int64_t rows, const float *bias, int64_t bias_step,
                      int64_t ahead)
{
    int any = 0;
    turn(w->turned_key, PIECE, w->key, w->keys, PIECE, w->keys);
    turn(w->turned_value, PIECE, w->value, w->values, PIECE, w->values);
    memset(w->weights, 0, PIECE * PIECE * sizeof(float));
    memset(w->slopes, 0, PIECE * PIECE * sizeof(float));
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        const float *shown = bias ? bias + row * bias_step : NULL;
        const int64_t tiled = smaller(rows - row, TILE_ROWS);
        int64_t first, last;
        if (!find_seen(shown, bias_step, tiled, count, ahead + row, &first, &last))
            continue;
        weigh_again(w, row, tiled, first, last, count, shown, bias_step, ahead + row);
        any = 1;
    }
    if (!any)
        return 0;
    memset(w->d_key, 0, PIECE * w->keys * sizeof(float));
    memset(w->d_value, 0, PIECE * w->values * sizeof(float));
    add_products(w->d_value, w->values, w->weights, 1, PIECE, w->grad, round_up(count, TILE_ROWS), rows);
    add_products(w->d_key, w->keys, w->slopes, 1, PIECE, w->query, round_up(count, TILE_ROWS), rows);
    add_products(w->d_query, w->keys, w->slopes, PIECE, 1, w->key, round_up(rows, TILE_ROWS), count);
    return 1;
}
