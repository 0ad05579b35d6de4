/* The backward pass of running softmax attention, for up to PIECE queries and PIECE keys at a time. Weights are made
 * again from queries, keys and the logs of what they add up to:
 *
 *     weight_ij = exp(scaling query_i . key_j + bias_ij - log_i)
 *     slope_ij = weight_ij (grad_i . value_j - weight_grad_i)
 *     d_query_i += slope_ij key_j,  d_key_j = sum_i slope_ij scaling query_i,  d_value_j = sum_i weight_ij grad_i
 */

#pragma once

#include "online_softmax.h"

/* Rows of queries and keys are padded to `keys` numbers, those of values to `values`; weights and slopes are
 * [keys, queries]. */
struct pairs {
    float *query, *grad, *turned_query, *turned_grad, *d_query; /* the queries scaled; what their gradient adds up to */
    float *key, *value, *bias, *weights, *slopes, *d_key, *d_value; /* bias: of the scores, as in `workspace` */
    float log[PIECE], weight_grad[PIECE];
    float own, rest; /* of the scaling: what queries have, and their gradients get yet; what scores and slopes have */
    int64_t key_size, value_size, keys, values;
    struct pack_buffers buffers; /* left: weights or slopes; right: slopes */
    struct tiles queries, grads, turned_queries, turned_grads; /* as right factors */
    float *turned_d_query; /* [keys, PIECE]: what products of tiles add to */
    void *tiles[4];
    struct pieces pieces;
    struct prefetch_queue met, next; /* gradients of the keys that are met, which are added to; what comes next */
};

/* Up to PIECE keys and values, in rows as above, and where their gradients are added up. */
struct met {
    const float *key, *value;
    float *d_key, *d_value;
    int64_t d_key_row, d_value_row;
};

static int64_t arrange_pairs(struct pairs *w, int64_t key_size, int64_t value_size, int64_t parts, float *memory)
{
    w->key_size = key_size;
    w->value_size = value_size;
    w->met.count = w->next.count = 0;
    w->keys = round_up(key_size, TILE_COLUMNS);
    w->values = round_up(value_size, TILE_COLUMNS);
    int64_t used = arrange_pieces(&w->pieces, key_size, value_size, parts ? w->keys : 0, parts, memory);
    float **of_keys[] = {&w->query, &w->turned_query, &w->d_query, &w->key, &w->d_key};
    float **of_values[] = {&w->grad, &w->turned_grad, &w->value, &w->d_value};
    for (int part = 0; part < 5; part++)
        *of_keys[part] = arena_alloc(memory, &used, PIECE * w->keys);
    for (int part = 0; part < 4; part++)
        *of_values[part] = arena_alloc(memory, &used, PIECE * w->values);
    w->bias = arena_alloc(memory, &used, PIECE * PIECE);
    w->weights = arena_alloc(memory, &used, PIECE * PIECE);
    w->slopes = arena_alloc(memory, &used, PIECE * PIECE);
    w->buffers = take_buffers(memory, &used, 2 * PIECE * PIECE, PIECE * PIECE, parts);
    w->turned_d_query = arena_alloc(memory, &used, parts ? PIECE * w->keys : 0);
    for (int part = 0; part < 4; part++)
        w->tiles[part] = arena_alloc(memory, &used, packed_floats(PIECE * max_i64(w->keys, w->values), parts));
    return used;
}

/* Begin with the queries and gradients that have been put into `query` and `grad`. */
static void begin_pairs(struct pairs *w, float scaling)
{
    w->own = scaling_of_queries(scaling, w->buffers.parts);
    w->rest = scaling / w->own;
    for (int64_t number = 0; number < PIECE * w->keys; number++)
        w->query[number] *= w->own;
    transpose(w->turned_query, PIECE, w->query, w->keys, PIECE, w->keys);
    transpose(w->turned_grad, PIECE, w->grad, w->values, PIECE, w->values);
    memset(w->d_query, 0, PIECE * w->keys * sizeof(float));
    memset(w->log, 0, sizeof(w->log)); /* there may be fewer queries than PIECE */
    memset(w->weight_grad, 0, sizeof(w->weight_grad));
    if (!w->buffers.parts)
        return;
    const int64_t parts = w->buffers.parts;
    const struct rows query = {w->query, w->keys, FLOAT32}, turned_query = {w->turned_query, PIECE, FLOAT32};
    const struct rows grad = {w->grad, w->values, FLOAT32}, turned_grad = {w->turned_grad, PIECE, FLOAT32};
    w->queries = pack_b(w->tiles[0], query, PIECE, w->keys, parts);
    w->grads = pack_b(w->tiles[1], grad, PIECE, w->values, parts);
    w->turned_queries = pack_b(w->tiles[2], turned_query, w->key_size, PIECE, parts);
    w->turned_grads = pack_b(w->tiles[3], turned_grad, w->value_size, PIECE, parts);
    memset(w->turned_d_query, 0, PIECE * w->keys * sizeof(float));
}

/* Leave in `d_query` what has been added up. */
static inline void end_pairs(struct pairs *w)
{
    if (w->buffers.parts)
        transpose(w->d_query, w->keys, w->turned_d_query, PIECE, w->keys, PIECE);
}

/* Note what a query's weights add up to, and its gradient; without keys all scores are LOWEST, and weights zero. */
static void note_sums(struct pairs *w, int64_t row, float log, float weight_grad)
{
    w->log[row] = log > LOWEST / 2 ? log : 0.0f;
    w->weight_grad[row] = w->rest * weight_grad;
}

/* The keys and values that have been put into `key` and `value`, and gradients of zero. */
static struct met meet_copies(struct pairs *w)
{
    memset(w->d_key, 0, PIECE * w->keys * sizeof(float));
    memset(w->d_value, 0, PIECE * w->values * sizeof(float));
    return (struct met){w->key, w->value, w->d_key, w->d_value, w->keys, w->values};
}

/* Scores, beside their bias if they are `biased`, become weights, and what is there of their gradients slopes. */
static inline __attribute__((always_inline)) void weigh_pairs(struct pairs *w, const struct seen *seen, int biased)
{
    for (int64_t j = seen->start; j < seen->end; j++)
#pragma GCC unroll 8
        for (int64_t i = 0; i < PIECE; i += LANES) {
            const vec product = load(w->weights + j * PIECE + i);
            const vec score = biased ? beside_bias(product, load(w->bias + j * PIECE + i)) : product;
            const vec weight = exp_of(score - load(w->log + i));
            store(w->weights + j * PIECE + i, weight);
            store(w->slopes + j * PIECE + i, weight * (load(w->slopes + j * PIECE + i) - load(w->weight_grad + i)));
        }
}

/* Go through the pairs of `rows` queries with keys before `end`, with a bias as in `read_piece`. */
static void read_pairs(struct pairs *w, const struct met *met, const struct seen *seen, int64_t end, int64_t rows,
                       enum shown shown)
{
    const int some = shown == SOME;
    if (some)
        memset(w->slopes, 0, PIECE * PIECE * sizeof(float));
    make_scores(w->weights, seen, met->key, w->keys, w->turned_query, w->key_size, 0);
    make_scores(w->slopes, seen, met->value, w->values, w->turned_grad, w->value_size, some);
    if (shown == ALL_PLAIN)
        weigh_pairs(w, seen, 0);
    else
        weigh_pairs(w, seen, 1);
    for (int64_t j = seen->start; j < seen->end; j += TILE_ROWS) {
        for (int64_t column = 0; column < w->values; column += TILE_COLUMNS)
            add_tile(met->d_value + j * met->d_value_row + column, met->d_value_row, w->weights + j * PIECE, PIECE, 1,
                     w->grad + column, w->values, rows);
        for (int64_t column = 0; column < w->keys; column += TILE_COLUMNS)
            add_tile(met->d_key + j * met->d_key_row + column, met->d_key_row, w->slopes + j * PIECE, PIECE, 1,
                     w->query + column, w->keys, rows);
    }
    for (int64_t i = 0; i < PIECE; i += TILE_ROWS) {
        const int64_t first = seen->first[i / LANES], last = min_i64(seen->last[i / LANES], end);
        for (int64_t column = 0; first < last && column < w->keys; column += TILE_COLUMNS)
            add_tile(w->d_query + i * w->keys + column, w->keys, w->slopes + first * PIECE + i, 1, PIECE,
                     met->key + first * w->keys + column, w->keys, last - first);
    }
}

/* Put PIECE rows of keys and of values, zero where there are none, into the tiles of a piece. */
static void put_pairs_piece(const struct pairs *w, const struct piece *piece, struct rows keys, struct rows values)
{
    pack_a((void *)piece->key.data, keys, PIECE, w->key_size, w->buffers.parts);
    pack_a((void *)piece->value.data, values, PIECE, w->value_size, w->buffers.parts);
    pack_a_transposed((void *)piece->turned.data, keys, w->keys, PIECE, w->buffers.parts);
}

/* Weights and slopes of whole blocks of keys, as left factors and, the slopes, as a right one. */
struct pair_tiles {
    struct tiles weights, slopes, right_slopes;
};

/* The same numbers of two rows, PAIRS apart, of `number` and the row behind it, in left tiles and a right one. */
static inline WITH_TILES __attribute__((always_inline)) void
put_weights_and_slopes(const struct pairs *w, const struct pair_tiles *made, const float *weights, const float *slopes,
                       const float *own, float bias, int64_t at, int64_t number, int64_t i, int parts)
{
    vec weight[2][2], slope[2][2]; /* of two rows, and of two groups of queries */
#pragma GCC unroll 2
    for (int64_t row = 0; row < 2; row++)
#pragma GCC unroll 2
        for (int64_t group = 0; group < 2; group++) {
            const int64_t place = (at + number + row * PAIRS) * PIECE + i + group * LANES, query = i + group * LANES;
            const vec product = load(weights + place), here = own ? beside_bias(product, load(own + place)) : product;
            const vec score = here - (load(w->log + query) - bias);
            weight[row][group] = parts == 3 ? exp_of(score) : rounded_exp_of(score);
            slope[row][group] = weight[row][group] * (load(slopes + place) - load(w->weight_grad + query));
        }
    const int64_t line = number * sizeof(vec), place = i / BLOCK * TILE + line;
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; half++) {
        const int64_t row = (at / LANES + half) * made->weights.beside + place;
        put_pairs((char *)made->weights.data + row, made->weights.part, weight[half][0], weight[half][1], parts);
        put_pairs((char *)made->slopes.data + row, made->slopes.part, slope[half][0], slope[half][1], parts);
        put_pairs((char *)made->right_slopes.data + (i / LANES + half) * made->right_slopes.beside + at / BLOCK * TILE
                      + line,
                  made->right_slopes.part, slope[0][half], slope[1][half], parts);
    }
}

/* own: the bias of each pair; NULL where there is none. */
static WITH_TILES struct pair_tiles put_pair_tiles(const struct pairs *w, const float *weights, const float *slopes,
                                                   const float *own, float bias, int64_t keys)
{
    const int64_t parts = w->buffers.parts;
    const struct pair_tiles made = {
        tiles_at(w->buffers.left, keys, PIECE, parts),
        tiles_at((float *)w->buffers.left + packed_floats(PIECE * PIECE, parts), keys, PIECE, parts),
        tiles_at(w->buffers.right, PIECE, keys, parts),
    };
    for (int64_t at = 0; at < keys; at += BLOCK)
        for (int64_t number = 0; number < PAIRS; number++)
#pragma GCC unroll 2
            for (int64_t i = 0; i < PIECE; i += BLOCK)
                if (parts == 3)
                    put_weights_and_slopes(w, &made, weights, slopes, own, bias, at, number, i, 3);
                else
                    put_weights_and_slopes(w, &made, weights, slopes, own, bias, at, number, i, 1);
    return made;
}

/* `read_pairs` for a piece in tiles, all of whose pairs have the same bias beside. */
static void read_pair_tiles(struct pairs *w, const struct piece *piece, const struct met *met, const struct seen *seen,
                            enum shown shown, float bias)
{
    const int64_t first = seen->start / BLOCK * BLOCK, keys = round_up(seen->end - first, BLOCK);
    float *weights = w->weights + first * PIECE, *slopes = w->slopes + first * PIECE;
    const float *own = shown == ALL_PLAIN ? NULL : w->bias + first * PIECE;
    multiply(weights, PIECE, tiles_from(piece->key, first, 0), w->turned_queries, keys, PIECE, w->key_size, 0, &w->met,
             2 * FETCHED);
    multiply(slopes, PIECE, tiles_from(piece->value, first, 0), w->turned_grads, keys, PIECE, w->value_size, 0, &w->met,
             2 * FETCHED);
    scale_scores(weights, keys, w->rest);
    scale_scores(slopes, keys, w->rest);
    const struct pair_tiles made = put_pair_tiles(w, weights, slopes, own, bias, keys);
    multiply(met->d_value + first * met->d_value_row, met->d_value_row, made.weights, w->grads, keys, w->values, PIECE,
             1, &w->next, FETCHED);
    multiply(met->d_key + first * met->d_key_row, met->d_key_row, made.slopes, w->queries, keys, w->keys, PIECE, 1,
             &w->next, FETCHED);
    multiply(w->turned_d_query, PIECE, tiles_from(piece->turned, 0, first), made.right_slopes, w->keys, PIECE, keys, 1,
             &w->next, FETCHED);
}
