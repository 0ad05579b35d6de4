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
    struct rounded rounded;
    struct tiles query_tiles, grad_tiles, turned_query_tiles, turned_grad_tiles; /* of these, if they are rounded */
    void *tiles[4];                                                              /* their memory */
};

/* Up to PIECE keys and values, in rows as above, and where their gradients are added up. */
struct met {
    const float *key, *value;
    float *d_key, *d_value;
    int64_t d_key_row, d_value_row;
};

static int64_t arrange_pairs(struct pairs *w, int64_t key_size, int64_t value_size, int64_t bfloat16, float *memory)
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
    const int64_t largest = PIECE * larger(PIECE, larger(w->keys, w->values));
    w->rounded = take_rounded(memory, &used, largest, largest, bfloat16);
    for (int part = 0; part < 4 && bfloat16; part++)
        w->tiles[part] = take(memory, &used, largest / 2);
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
    if (w->rounded.left) {
        w->query_tiles = put_right(w->tiles[0], w->query, w->keys, PIECE, w->keys);
        w->grad_tiles = put_right(w->tiles[1], w->grad, w->values, PIECE, w->values);
        w->turned_query_tiles = put_right(w->tiles[2], w->turned_query, PIECE, w->key_size, PIECE);
        w->turned_grad_tiles = put_right(w->tiles[3], w->turned_grad, PIECE, w->value_size, PIECE);
    }
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

/* Add what the pairs of the keys that are seen, before `end`, come to, to all gradients. */
static void add_rounded(struct pairs *w, const struct met *met, const struct seen *seen, int64_t end)
{
    const int64_t start = seen->start, first = start / BLOCK * BLOCK, keys = round_up(seen->end - first, BLOCK);
    float *pairs[] = {w->weights, w->slopes};
    for (int part = 0; part < 2; part++) { /* whole blocks of keys are added to */
        memset(pairs[part] + first * PIECE, 0, (start - first) * PIECE * sizeof(float));
        memset(pairs[part] + seen->end * PIECE, 0, (first + keys - seen->end) * PIECE * sizeof(float));
    }
    const struct tiles weights = put_left(w->rounded.left, w->weights + first * PIECE, PIECE, keys, PIECE);
    multiply(met->d_value + first * met->d_value_row, met->d_value_row, weights, w->grad_tiles, keys, w->values, PIECE,
             1);
    const struct tiles slopes = put_left(w->rounded.left, w->slopes + first * PIECE, PIECE, keys, PIECE);
    multiply(met->d_key + first * met->d_key_row, met->d_key_row, slopes, w->query_tiles, keys, w->keys, PIECE, 1);
    make_rounded(&w->rounded, w->d_query, w->keys, w->slopes + start * PIECE, 1, PIECE, met->key + start * w->keys,
                 w->keys, PIECE, w->keys, end - start, 1, 0);
}

/* Scores become weights, and what is there of their gradients becomes slopes. */
static inline __attribute__((always_inline)) void weigh_pairs(struct pairs *w, const struct seen *seen, int rounds)
{
    for (int64_t j = seen->start; j < seen->end; j++)
#pragma GCC unroll 8
        for (int64_t i = 0; i < PIECE; i += LANES) {
            const lanes score = load(w->weights + j * PIECE + i) - load(w->log + i);
            const lanes weight = rounds ? rounded_exp_of(score) : exp_of(score);
            store(w->weights + j * PIECE + i, weight);
            store(w->slopes + j * PIECE + i, weight * (load(w->slopes + j * PIECE + i) - load(w->weight_grad + i)));
        }
}

/* Go through the pairs of `rows` queries with `count` keys, with what weights begin with as scores do in `read_piece`;
 * returns whether there are any. */
static int read_pairs(struct pairs *w, const struct met *met, int64_t count, int64_t rows, enum shown shown)
{
    const struct seen seen = find_seen(w->weights, shown);
    const int adds = shown != ALL_PLAIN, some = shown == SOME;
    if (seen.start >= seen.end)
        return 0;
    if (some)
        memset(w->slopes, 0, PIECE * PIECE * sizeof(float));
    if (w->rounded.left) {
        const struct rows key = {met->key, w->keys, FLOAT32}, value = {met->value, w->values, FLOAT32};
        round_scores(&w->rounded, w->weights, &key, w->turned_query_tiles, w->key_size, adds);
        round_scores(&w->rounded, w->slopes, &value, w->turned_grad_tiles, w->value_size, 0);
    } else {
        make_scores(w->weights, &seen, met->key, w->keys, w->turned_query, w->key_size, adds);
        make_scores(w->slopes, &seen, met->value, w->values, w->turned_grad, w->value_size, some);
    }
    if (w->rounded.left)
        weigh_pairs(w, &seen, 1);
    else
        weigh_pairs(w, &seen, 0);
    if (w->rounded.left) {
        add_rounded(w, met, &seen, smaller(seen.end, count));
        return 1;
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
