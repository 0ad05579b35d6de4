/* Running softmax attention of up to PIECE queries, over keys that are taken in up to PIECE at a time. */

#pragma once


#include "lanes.h"

#define PIECE 64   /* queries, and keys, that are multiplied at a time */
#define ROOM 8.0f /* e^8 times the largest weight leaves float32 the precision it has: sums seldom need to be scaled */

struct scratch {
    float *query, *key, *turned, *value, *scores, *out; /* turned: the keys that `read_piece` takes, [keys, PIECE] */
    float top[PIECE], weight[PIECE * LANES]; /* weight: to be added up over the lanes */
    int64_t key_size, keys, values; /* keys, values: sizes, padded */
};

static inline int64_t arrange(struct scratch *s, int64_t key_size, int64_t value_size, float *memory)
{
    s->key_size = key_size;
    s->keys = round_up(key_size, LANES);
    s->values = round_up(value_size, TILE_COLUMNS);
    int64_t used = 0;
    s->query = take(memory, &used, PIECE * s->keys);
    s->key = take(memory, &used, PIECE * s->keys);
    s->turned = take(memory, &used, PIECE * s->keys);
    s->value = take(memory, &used, PIECE * s->values);
    s->scores = take(memory, &used, PIECE * PIECE);
    s->out = take(memory, &used, PIECE * s->values);
    return used;
}

/* Whether any of TILE_COLUMNS keys, `count` of them there, is seen by any of `rows` queries. */
static int is_seen(const float *bias, int64_t bias_step, int64_t rows, int64_t count)
{
    lanes largest = (lanes){0} + LOWEST;
    for (int64_t i = 0; i < (bias_step ? rows : 1); i++)
        for (int64_t j = 0; j < TILE_COLUMNS; j += LANES)
            if (j + LANES <= count)
                largest = larger_of(largest, load(bias + i * bias_step + j));
            else if (j < count)
                return 1;
    return max_of(largest) > LOWEST / 2;
}

/* Add the bias of one query to the scores of the first `count` keys; the others are not there. */
static void hide(float *scores, const float *bias, int64_t first, int64_t last, int64_t count)
{
    int64_t j = first;
    for (; bias && j + LANES <= smaller(last, count); j += LANES)
        store(scores + j, load(scores + j) + load(bias + j));
    for (; bias && j < smaller(last, count); j++)
        scores[j] += bias[j];
    for (j = count > first ? count : first; j < last; j++)
        scores[j] = LOWEST;
}

/* Scores of `rows` queries become weights under their `top`, which is at most ROOM below the largest score: where it
 * was less, what was summed up before is brought down to the new one. Each step is taken for all queries before the
 * next one: a row by itself would wait for its maximum. */
static void weigh(struct scratch *s, float *scores, int64_t row, int64_t rows, int64_t first, int64_t last)
{
    float tops[TILE_ROWS];
    for (int64_t i = 0; i < rows; i++) {
        lanes largest = load(scores + i * PIECE + first);
        for (int64_t j = first + LANES; j < last; j += LANES)
            largest = larger_of(largest, load(scores + i * PIECE + j));
        tops[i] = max_of(largest);
    }
    for (int64_t i = 0; i < rows; i++) {
        float *top = s->top + row + i, *out = s->out + (row + i) * s->values, *weight = s->weight + (row + i) * LANES;
        if (tops[i] > *top + ROOM) {
            const float left = exp_of_one(*top - tops[i]);
            for (int64_t column = 0; column < s->values; column += LANES)
                store(out + column, load(out + column) * left);
            store(weight, load(weight) * left);
            *top = tops[i];
        } else
            tops[i] = *top;
    }
    for (int64_t i = 0; i < rows; i++) {
        lanes sum = load(s->weight + (row + i) * LANES);
        for (int64_t j = first; j < last; j += LANES) {
            const lanes part = exp_of(load(scores + i * PIECE + j) - tops[i]);
            store(scores + i * PIECE + j, part);
            sum += part;
        }
        store(s->weight + (row + i) * LANES, sum);
    }
}

/* Between which whole tiles lie the keys that any of `rows` queries sees, of `count`; returns whether there are any.
 * Without a bias query i sees the first `ahead` + i + 1 of them. */
static int find_seen(const float *bias, int64_t bias_step, int64_t rows, int64_t count, int64_t ahead, int64_t *first,
                     int64_t *last)
{
    const int64_t reached = smaller(count, ahead + rows);
    *first = bias ? PIECE : 0;
    *last = bias || reached < 1 ? 0 : round_up(reached, TILE_COLUMNS);
    for (int64_t column = 0; bias && column < count; column += TILE_COLUMNS)
        if (is_seen(bias + column, bias_step, rows, count - column)) {
            *first = smaller(*first, column);
            *last = column + TILE_COLUMNS;
        }
    return *first < *last;
}

/* Take in the first `count` of the turned keys and of the values, with the bias of each query in rows of `bias_step`
 * numbers, or as in `find_seen`. */
static inline void read_piece(struct scratch *s, const float *value, int64_t count, int64_t rows, const float *bias,
                       int64_t bias_step, int64_t ahead)
{
    memset(s->scores, 0, PIECE * PIECE * sizeof(float));
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        const float *shown = bias ? bias + row * bias_step : NULL;
        const int64_t tiled = smaller(rows - row, TILE_ROWS);
        int64_t first, last;
        if (!find_seen(shown, bias_step, tiled, count, ahead + row, &first, &last))
            continue;
        float *scores = s->scores + row * PIECE;
        for (int64_t column = first; column < last; column += TILE_COLUMNS)
            add_tile(scores + column, PIECE, s->query + row * s->keys, s->keys, 1, s->turned + column, PIECE,
                     s->key_size);
        for (int64_t i = 0; i < tiled; i++)
            hide(scores + i * PIECE, bias ? shown + i * bias_step : NULL, first, last,
                 bias ? count : smaller(count, ahead + row + i + 1));
        weigh(s, scores, row, tiled, first, last);
        for (int64_t column = 0; column < s->values; column += TILE_COLUMNS)
            add_tile(s->out + row * s->values + column, s->values, scores + first, PIECE, 1,
                     value + first * s->values + column, s->values, smaller(last, count) - first);
    }
}
