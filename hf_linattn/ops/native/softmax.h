/* Running softmax attention of up to PIECE queries, over keys that are taken in up to PIECE at a time.
 *
 * Scores are laid out [keys, queries]: the queries are turned once, keys are read where they lie, and largest scores,
 * weights and their sums are found for LANES queries at a time.
 */

#pragma once

#include "bfloat16.h"
#include "operands.h"

#define PIECE 64                /* queries, and keys, that are multiplied at a time */
#define GROUPS (PIECE / LANES) /* of queries */
#define ROOM 8.0f /* e^8 times the largest weight leaves float32 the precision it has: sums seldom need to be scaled */

struct scratch {
    float *query, *rows, *value, *scores, *out; /* query: scaled, [key_size, PIECE]; rows: where a piece is no whole one */
    float top[PIECE], weight[PIECE];            /* the weights e^(score - top) are summed up */
    struct rounded rounded;
    struct tiles turned; /* the same queries, if they are rounded */
    void *tiles;         /* their memory */
    int64_t key_size, keys, values;             /* keys, values: sizes, padded */
};

static inline int64_t arrange(struct scratch *s, int64_t key_size, int64_t value_size, int64_t bfloat16, float *memory)
{
    s->key_size = key_size;
    s->keys = round_up(key_size, TILE_COLUMNS);
    s->values = round_up(value_size, TILE_COLUMNS);
    int64_t used = 0;
    s->query = take(memory, &used, PIECE * s->keys);
    s->rows = take(memory, &used, PIECE * s->keys);
    s->value = take(memory, &used, PIECE * s->values);
    s->scores = take(memory, &used, PIECE * PIECE);
    s->out = take(memory, &used, PIECE * s->values);
    const int64_t largest = PIECE * larger(PIECE, larger(s->keys, s->values));
    s->rounded = take_rounded(memory, &used, largest, largest, bfloat16);
    s->tiles = bfloat16 ? take(memory, &used, PIECE * s->keys / 2) : NULL;
    return used;
}

/* Begin with the queries that have been put into `rows`. */
static inline void begin_queries(struct scratch *s, float scaling)
{
    turn(s->query, PIECE, s->rows, s->keys, PIECE, s->keys);
    for (int64_t number = 0; number < PIECE * s->keys; number++)
        s->query[number] *= scaling;
    if (s->rounded.left)
        s->turned = put_right(s->tiles, s->query, PIECE, s->key_size, PIECE);
}

/* The keys, from `first` to before `last` in whole tiles, that each group of queries sees, and that any of them does. */
struct seen {
    int64_t first[GROUPS], last[GROUPS], start, end;
};

/* Which pairs of a piece are seen: some; all, with nothing added to their scores; all, with what these begin with. */
enum shown { SOME, ALL_PLAIN, ALL_BEGUN };

/* Whether nothing is added to any score of PIECE queries and as many keys, as in the middle of a window. */
static int is_zero(const float *bias, int64_t bias_step)
{
    for (int64_t i = 0; i < PIECE; i++) {
        mask bits = {0};
        for (int64_t j = 0; j < PIECE; j += LANES)
            bits |= (mask)load(bias + i * bias_step + j);
        if (any_of(bits))
            return 0;
    }
    return 1;
}

/* Begin the scores of `count` keys with the bias of each of `rows` queries, in rows of `bias_step` numbers, or one row
 * for all. Without a bias query i sees the first `ahead` + i + 1 of them. Where nothing is added it begins nothing. */
static enum shown show(float *scores, const float *bias, int64_t bias_step, int64_t rows, int64_t count, int64_t ahead)
{
    if (!bias && count == PIECE && ahead >= PIECE - 1)
        return ALL_PLAIN;
    if (bias && bias_step && rows == PIECE && count == PIECE) {
        if (is_zero(bias, bias_step))
            return ALL_PLAIN;
        turn(scores, PIECE, bias, bias_step, PIECE, PIECE);
        return SOME;
    }
    int all = bias && !bias_step;
    for (int64_t j = 0; j < PIECE; j++) {
        const float there = j >= count ? LOWEST : bias && !bias_step ? bias[j] : 0.0f;
        all = all && there > LOWEST / 2;
        for (int64_t i = 0; i < PIECE; i += LANES)
            store(scores + j * PIECE + i, (lanes){0} + there);
    }
    for (int64_t j = 0; !bias && j < count; j++) /* the first that sees it is query j - ahead */
        for (int64_t i = 0; i < smaller(j - ahead, PIECE); i++)
            scores[j * PIECE + i] = LOWEST;
    for (int64_t j = 0; bias && bias_step && j < count; j++)
        for (int64_t i = 0; i < rows; i++)
            scores[j * PIECE + i] = bias[i * bias_step + j];
    return all ? ALL_BEGUN : SOME;
}

/* Find which keys are seen with the bias that scores begin with. */
static struct seen find_seen(const float *scores, enum shown shown)
{
    const int all = shown != SOME;
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

/* out [keys, queries] = rows of keys, `key_row` numbers apart, times turned queries, where a tile has seen pairs, more
 * what is there if it `adds`. */
static inline __attribute__((always_inline)) void
make_scores(float *out, const struct seen *seen, const float *key, int64_t key_row, const float *query, int64_t size,
            int adds)
{
    for (int64_t j = seen->start; j < seen->end; j += TILE_ROWS)
        for (int64_t i = 0; i < PIECE; i += TILE_COLUMNS) {
            const int64_t group = i / LANES;
            if (j >= smaller(seen->first[group], seen->first[group + 1])
                && (j < seen->last[group] || j < seen->last[group + 1]))
                make_tile(out + j * PIECE + i, PIECE, key + j * key_row, key_row, 1, query + i, PIECE, size, adds);
        }
}

/* Scores become weights under the `top` of their query, which is at most ROOM below its largest score: where it was
 * less, what was summed up before is brought down to the new one. */
static inline __attribute__((always_inline)) void weigh(struct scratch *s, const struct seen *seen, int rounds)
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
            const lanes score = load(s->scores + j * PIECE + group * LANES) - top[group];
            const lanes weight = rounds ? rounded_exp_of(score) : exp_of(score);
            store(s->scores + j * PIECE + group * LANES, weight);
            sum[group] += weight;
        }
#pragma GCC unroll 8
    for (int group = 0; group < GROUPS; group++)
        store(s->weight + group * LANES, sum[group]);
}

/* The scores of PIECE keys, some of whose rows may mean nothing, from rounded factors. */
static inline void round_scores(const struct rounded *rounded, float *out, const struct rows *key, struct tiles turned,
                                int64_t size, int adds)
{
    const struct tiles keys =
        key->kind ? tiles_of_rows(key) : put_left(rounded->left, key->data, key->row, PIECE, size);
    multiply(out, PIECE, keys, turned, PIECE, PIECE, size, adds);
}

/* Add values to the output with the weights that their scores have become, up to before `end`. */
static void add_rounded_values(struct scratch *s, const struct seen *seen, const struct rows *value, int64_t end)
{
    const int64_t start = seen->start, first = start * value->row, keys = end - start;
    const struct tiles weights = put_turned_left(s->rounded.left, s->scores + start * PIECE, PIECE, PIECE, keys);
    const struct tiles values =
        value->kind
            ? put_right_halves(s->rounded.right, (const uint16_t *)value->data + first, value->row, keys, s->values)
            : put_right(s->rounded.right, (const float *)value->data + first, value->row, keys, s->values);
    multiply(s->out, s->values, weights, values, PIECE, s->values, keys, 1);
}

/* Take in `count` keys, whose rows are there in whole tiles, and their values, with scores that begin as `show` left
 * them. What is not float32 has whole blocks of numbers, and is for rounded products. */
static void read_piece(struct scratch *s, struct rows keys, struct rows values, int64_t count, enum shown shown)
{
    const struct seen seen = find_seen(s->scores, shown);
    const int adds = shown != ALL_PLAIN;
    if (seen.start >= seen.end)
        return;
    if (s->rounded.left) {
        round_scores(&s->rounded, s->scores, &keys, s->turned, s->key_size, adds);
        weigh(s, &seen, 1);
        add_rounded_values(s, &seen, &values, smaller(seen.end, count));
        return;
    }
    const float *value = values.data;
    make_scores(s->scores, &seen, keys.data, keys.row, s->query, s->key_size, adds);
    weigh(s, &seen, 0);
    for (int64_t i = 0; i < PIECE; i += TILE_ROWS) {
        const int64_t first = seen.first[i / LANES], last = smaller(seen.last[i / LANES], count);
        for (int64_t column = 0; first < last && column < s->values; column += TILE_COLUMNS)
            add_tile(s->out + i * s->values + column, s->values, s->scores + first * PIECE + i, 1, PIECE,
                     value + first * values.row + column, values.row, last - first);
    }
}
