/* Running softmax attention of up to PIECE queries, over keys that are taken in up to PIECE at a time.
 *
 * Scores are laid out [keys, queries]: the queries are turned once, keys are read where they lie, and largest scores,
 * weights and their sums are found for LANES queries at a time.
 */

#pragma once


#include "lanes.h"

#define PIECE 64                /* queries, and keys, that are multiplied at a time */
#define GROUPS (PIECE / LANES) /* of queries */
#define ROOM 8.0f /* e^8 times the largest weight leaves float32 the precision it has: sums seldom need to be scaled */

struct scratch {
    float *query, *rows, *value, *scores, *out; /* query: scaled, [key_size, PIECE]; rows: where a piece is no whole one */
    float top[PIECE], weight[PIECE];            /* the weights e^(score - top) are summed up */
    int64_t key_size, keys, values;             /* keys, values: sizes, padded */
};

static inline int64_t arrange(struct scratch *s, int64_t key_size, int64_t value_size, float *memory)
{
    s->key_size = key_size;
    s->keys = round_up(key_size, LANES);
    s->values = round_up(value_size, TILE_COLUMNS);
    int64_t used = 0;
    s->query = take(memory, &used, PIECE * s->keys);
    s->rows = take(memory, &used, PIECE * s->keys);
    s->value = take(memory, &used, PIECE * s->values);
    s->scores = take(memory, &used, PIECE * PIECE);
    s->out = take(memory, &used, PIECE * s->values);
    return used;
}

/* The keys, from `first` to before `last` in whole tiles, that each group of queries sees, and that any of them does. */
struct seen {
    int64_t first[GROUPS], last[GROUPS], start, end;
};

/* Begin the scores of `count` keys with the bias of each of `rows` queries, in rows of `bias_step` numbers, or one row
 * for all. Without a bias query i sees the first `ahead` + i + 1 of them. Returns whether all see all. */
static int show(float *scores, const float *bias, int64_t bias_step, int64_t rows, int64_t count, int64_t ahead)
{
    if (!bias && count == PIECE && ahead >= PIECE - 1) {
        memset(scores, 0, PIECE * PIECE * sizeof(float));
        return 1;
    }
    if (bias && bias_step && rows == PIECE && count == PIECE) {
        turn(scores, PIECE, bias, bias_step, PIECE, PIECE);
        return 0;
    }
    for (int64_t j = 0; j < PIECE; j++) {
        const float there = j >= count ? LOWEST : bias && !bias_step ? bias[j] : 0.0f;
        for (int64_t i = 0; i < PIECE; i += LANES)
            store(scores + j * PIECE + i, (lanes){0} + there);
    }
    for (int64_t j = 0; !bias && j < count; j++) /* the first that sees it is query j - ahead */
        for (int64_t i = 0; i < smaller(j - ahead, PIECE); i++)
            scores[j * PIECE + i] = LOWEST;
    for (int64_t j = 0; bias && bias_step && j < count; j++)
        for (int64_t i = 0; i < rows; i++)
            scores[j * PIECE + i] = bias[i * bias_step + j];
    return 0;
}

/* Find which keys are seen with the bias that scores begin with; `all` of them, or find out. */
static struct seen find_seen(const float *scores, int all)
{
    struct seen found = {.start = all ? 0 : PIECE, .end = all ? PIECE : 0};
    for (int64_t group = 0; group < GROUPS; group++) {
        found.first[group] = found.start;
        found.last[group] = found.end;
    }
    for (int64_t group = 0; !all && group < GROUPS; group++)
        for (int64_t j = 0; j < PIECE; j += TILE_ROWS) {
            lanes largest = load(scores + j * PIECE + group * LANES);
            for (int64_t row = 1; row < TILE_ROWS; row++)
                largest = larger_of(largest, load(scores + (j + row) * PIECE + group * LANES));
            if (max_of(largest) <= LOWEST / 2)
                continue;
            found.first[group] = smaller(found.first[group], j);
            found.last[group] = j + TILE_ROWS;
            found.start = smaller(found.start, j);
            found.end = found.end > j + TILE_ROWS ? found.end : j + TILE_ROWS;
        }
    return found;
}

/* out [keys, queries] += rows of keys, `key_row` numbers apart, times turned queries, where a tile has seen pairs. */
static inline __attribute__((always_inline)) void
add_scores(float *out, const struct seen *seen, const float *key, int64_t key_row, const float *query, int64_t size)
{
    for (int64_t j = seen->start; j < seen->end; j += TILE_ROWS)
        for (int64_t i = 0; i < PIECE; i += TILE_COLUMNS) {
            const int64_t group = i / LANES;
            if (j >= smaller(seen->first[group], seen->first[group + 1])
                && (j < seen->last[group] || j < seen->last[group + 1]))
                add_tile(out + j * PIECE + i, PIECE, key + j * key_row, key_row, 1, query + i, PIECE, size);
        }
}

/* Scores become weights under the `top` of their query, which is at most ROOM below its largest score: where it was
 * less, what was summed up before is brought down to the new one. */
static void weigh(struct scratch *s, const struct seen *seen)
{
    lanes top[GROUPS], sum[GROUPS];
#pragma GCC unroll 8
    for (int group = 0; group < GROUPS; group++)
        top[group] = (lanes){0} + LOWEST;
    for (int64_t j = seen->start; j < seen->end; j++)
#pragma GCC unroll 8
        for (int group = 0; group < GROUPS; group++)
            top[group] = larger_of(top[group], load(s->scores + j * PIECE + group * LANES));
    for (int group = 0; group < GROUPS; group++) {
        const lanes before = load(s->top + group * LANES);
        const mask higher = top[group] > before + ROOM;
        top[group] = choose(higher, top[group], before);
        sum[group] = load(s->weight + group * LANES);
        if (!any_of(higher))
            continue;
        const lanes left = exp_of(before - top[group]);
        sum[group] *= left;
        store(s->top + group * LANES, top[group]);
        for (int64_t lane = 0; lane < LANES; lane++)
            for (int64_t column = 0; higher[lane] && column < s->values; column += LANES) {
                float *out = s->out + (group * LANES + lane) * s->values + column;
                store(out, load(out) * left[lane]);
            }
    }
    for (int64_t j = seen->start; j < seen->end; j++)
#pragma GCC unroll 8
        for (int group = 0; group < GROUPS; group++) {
            const lanes weight = exp_of(load(s->scores + j * PIECE + group * LANES) - top[group]);
            store(s->scores + j * PIECE + group * LANES, weight);
            sum[group] += weight;
        }
#pragma GCC unroll 8
    for (int group = 0; group < GROUPS; group++)
        store(s->weight + group * LANES, sum[group]);
}

/* Take in `count` keys, whose rows are there in whole tiles, and their values, with what scores begin with: `all` of
 * them seen, or as `show` left it. Values are `value_row` numbers apart. */
static void read_piece(struct scratch *s, const float *key, int64_t key_row, const float *value, int64_t value_row,
                       int64_t count, int all)
{
    const struct seen seen = find_seen(s->scores, all);
    if (seen.start >= seen.end)
        return;
    add_scores(s->scores, &seen, key, key_row, s->query, s->key_size);
    weigh(s, &seen);
    for (int64_t i = 0; i < PIECE; i += TILE_ROWS) {
        const int64_t first = seen.first[i / LANES], last = smaller(seen.last[i / LANES], count);
        for (int64_t column = 0; first < last && column < s->values; column += TILE_COLUMNS)
            add_tile(s->out + i * s->values + column, s->values, s->scores + first * PIECE + i, 1, PIECE,
                     value + first * value_row + column, value_row, last - first);
    }
}
