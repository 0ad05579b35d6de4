/* Running softmax attention of up to PIECE queries, over keys that are taken in up to PIECE at a time.
 *
 * Scores are laid out [keys, queries]: the queries are turned once, keys are read where they lie, and largest scores,
 * weights and their sums are found for LANES queries at a time.
 */

#pragma once

#include "products.h"

#include <math.h>

/* Pieces of keys and values, in tiles or in rows of float32 close together, and the memory for the last ones: blocks
 * of queries that follow each other meet nearly the same.
 */

#define PIECE 64            /* queries, and keys, that are multiplied at a time */
#define FETCHED 2           /* rows of what comes next that are asked for at a time */
#define MOST_PIECES 16      /* that are kept, */
#define KEPT_NUMBERS 200000 /* in so much memory for numbers of float32, which the second cache holds */

/* The rows of keys and of values, and in tiles what lies turned: forward the values, back the keys. */
struct piece {
    struct tiles key, value, turned;
};

struct pieces {
    int64_t *names; /* of the pieces that are there, zero for none; these two are there for all tasks of a thread */
    int64_t *next;  /* which one is given up */
    float *memory;
    int64_t count, key_size, value_size, turned_size, parts;
};

/* What PIECE rows of so many numbers take. */
static inline int64_t kept_floats(const struct pieces *p, int64_t numbers)
{
    return p->parts ? packed_floats(PIECE * numbers, p->parts) : PIECE * numbers;
}

/* Comes first in a thread's memory, of which `run_tasks` clears the beginning; a size of zero is for what none has. */
static inline int64_t arrange_pieces(struct pieces *p, int64_t key_size, int64_t value_size, int64_t turned_size,
                                     int64_t parts, float *memory)
{
    *p = (struct pieces){.key_size = round_up(key_size, BLOCK), .value_size = round_up(value_size, BLOCK),
                         .turned_size = turned_size, .parts = parts};
    const int64_t room = kept_floats(p, p->key_size + p->value_size + p->turned_size);
    int64_t used = 0;
    p->count = max_i64(1, min_i64(MOST_PIECES, KEPT_NUMBERS / room));
    p->names = arena_alloc(memory, &used, 2 * MOST_PIECES);
    p->next = arena_alloc(memory, &used, 2);
    p->memory = arena_alloc(memory, &used, p->count * room);
    return used;
}

/* Up to PIECE rows of a head, from a place on. */
struct span {
    int64_t batch, head, at, count;
};

/* Rows of a head's keys or values, zero up to `padded` numbers and PIECE rows: where they lie if tiles can be made of
 * that, or copied to `spare`. */
static inline struct rows rows_for_tiles(const struct pieces *p, const tensor_view *x, const struct span *of,
                                         int64_t size, int64_t padded, float *spare)
{
    const int readable = x->kind == FLOAT32 || (x->kind == BFLOAT16 && p->parts == 1);
    if (readable && of->count == PIECE && size == padded)
        return (struct rows){row_ptr(x, of->batch, of->head, 0, of->at), x->token, x->kind};
    pack(spare, PIECE, x, of->batch, of->head, 0, of->at, of->count, size, padded);
    return (struct rows){spare, padded, FLOAT32};
}

/* Find the piece of that name; returns whether it is there, or has yet to be put in. What has no name, but zero, is
 * never found again. */
static inline int find_piece(struct pieces *p, int64_t name, struct piece *found)
{
    const int64_t parts = p->parts, room = kept_floats(p, p->key_size + p->value_size + p->turned_size);
    int64_t place = 0;
    while (place < p->count && (!name || p->names[place] != name))
        place++;
    const int there = place < p->count;
    if (!there) {
        place = *p->next;
        *p->next = (place + 1) % p->count;
        p->names[place] = name;
    }
    float *key = p->memory + place * room;
    float *value = key + kept_floats(p, p->key_size), *turned = value + kept_floats(p, p->value_size);
    *found = (struct piece){tiles_at(key, PIECE, p->key_size, parts), tiles_at(value, PIECE, p->value_size, parts),
                            tiles_at(turned, p->turned_size, PIECE, parts)};
    return there;
}

/* Whether rows can be read where they lie, all `padded` numbers of PIECE. Rows that are far apart displace each other
 * in a cache. */
static inline int is_dense(const tensor_view *x, int64_t count, int64_t size, int64_t padded)
{
    return count == PIECE && x->kind == FLOAT32 && size == padded && x->token == padded;
}

/* Point to the rows of a head's keys and values in float32, `keys` and `values` numbers wide: where they lie, or
 * copied, with zeros up to PIECE rows. Those of one name are copied once, those without one into `spare_key` and
 * `spare_value`. */
static inline void find_rows(struct pieces *p, const tensor_view *key, const tensor_view *value, const struct span *of,
                             int64_t name, int64_t key_size, int64_t value_size, int64_t keys, int64_t values,
                             const float **key_rows, const float **value_rows, float *spare_key, float *spare_value)
{
    const int key_lies = is_dense(key, of->count, key_size, keys);
    const int value_lies = is_dense(value, of->count, value_size, values);
    int there = 0;
    if (name && !(key_lies && value_lies)) {
        struct piece piece;
        there = find_piece(p, name, &piece);
        spare_key = (float *)piece.key.data;
        spare_value = (float *)piece.value.data;
    }
    *key_rows = key_lies ? row_f32(key, of->batch, of->head, 0, of->at) : spare_key;
    *value_rows = value_lies ? row_f32(value, of->batch, of->head, 0, of->at) : spare_value;
    if (!key_lies && !there)
        pack(spare_key, PIECE, key, of->batch, of->head, 0, of->at, of->count, key_size, keys);
    if (!value_lies && !there)
        pack(spare_value, PIECE, value, of->batch, of->head, 0, of->at, of->count, value_size, values);
}

#define GROUPS (PIECE / LANES) /* of queries */
#define ROOM 8.0f /* e^8 times the largest weight leaves float32 the precision it has: sums seldom need to be scaled */

struct workspace {
    float *query, *rows, *value, *scores, *out; /* query: scaled, [key_size,
        PIECE]; rows: where a piece is no whole one */
    float rest;                                 /* of the scaling, for scores: what queries do not have of it */
    float *bias;                                /* of the scores: what `show` made of a piece */
    float top[PIECE], weight[PIECE];            /* the weights e^(score - top) are summed up */
    int64_t key_size, value_size, keys, values; /* keys, values: padded */
    struct pack_buffers buffers;                /* left: of the queries; right: of the weights */
    struct tiles queries;
    float *turned_out; /* [values, PIECE]: what products of tiles add to */
    struct pieces pieces;
    struct prefetch_queue next; /* what is asked for beside the products, so many rows at a time */
};

static inline int64_t workspace_init(struct workspace *s, int64_t key_size, int64_t value_size, int64_t parts,
                                     float *memory)
{
    s->key_size = key_size;
    s->value_size = value_size;
    s->keys = round_up(key_size, TILE_COLUMNS);
    s->values = round_up(value_size, TILE_COLUMNS);
    s->next.count = 0;
    int64_t used = arrange_pieces(&s->pieces, key_size, parts ? 0 : value_size, parts ? s->values : 0, parts, memory);
    s->query = arena_alloc(memory, &used, PIECE * s->keys);
    s->rows = arena_alloc(memory, &used, PIECE * s->keys);
    s->value = arena_alloc(memory, &used, PIECE * s->values);
    s->scores = arena_alloc(memory, &used, PIECE * PIECE);
    s->bias = arena_alloc(memory, &used, PIECE * PIECE);
    s->out = arena_alloc(memory, &used, PIECE * s->values);
    s->buffers = take_buffers(memory, &used, PIECE * s->keys, PIECE * PIECE, parts);
    s->turned_out = parts ? arena_alloc(memory, &used, PIECE * s->values) : NULL;
    return used;
}

/* What queries get of the scaling: all, or where they are multiplied as bfloat16 a power of two, which rounds no
 * digit. */
static inline float scaling_of_queries(float scaling, int64_t parts)
{
    int exponent;
    frexpf(scaling, &exponent);
    return parts == 1 ? ldexpf(1.0f, exponent - 1) : scaling;
}

/* Scores of `keys` keys get what the queries do not have of the scaling. */
static inline void scale_scores(float *scores, int64_t keys, float rest)
{
    for (int64_t number = 0; rest != 1.0f && number < keys * PIECE; number += LANES)
        store(scores + number, load(scores + number) * rest);
}

/* Begin with the queries that have been put into `rows`, and with what stands in `out` for them. */
static inline void begin_queries(struct workspace *s, float scaling)
{
    const float own = scaling_of_queries(scaling, s->buffers.parts);
    s->rest = scaling / own;
    transpose(s->query, PIECE, s->rows, s->keys, PIECE, s->keys);
    for (int64_t number = 0; number < PIECE * s->keys; number++)
        s->query[number] *= own;
    if (!s->buffers.parts)
        return;
    const struct rows query = {s->query, PIECE, FLOAT32};
    s->queries = pack_b(s->buffers.left, query, s->key_size, PIECE, s->buffers.parts);
    transpose(s->turned_out, PIECE, s->out, s->values, PIECE, s->values);
}

/* Leave in `out` what has been summed up. */
static inline void end_queries(struct workspace *s)
{
    if (s->buffers.parts)
        transpose(s->out, s->values, s->turned_out, PIECE, s->values, PIECE);
}

/* The keys, from `first` to before `last` in whole tiles, that each group of queries sees, and that any of them
 * does. */
struct seen {
    int64_t first[GROUPS], last[GROUPS], start, end;
};

/* Which pairs of a piece are seen: some; all, with nothing added to their scores; all, with a bias. */
enum shown { SOME, ALL_PLAIN, ALL_BIASED };

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

/* Whether one row of bias is the same for a whole piece, so that products of tiles do without it. */
static inline int is_same(const float *bias, int64_t count)
{
    mask others = {0};
    for (int64_t j = 0; count == PIECE && j < PIECE; j += LANES)
        others |= load(bias + j) != (vec){0} + bias[0];
    return count == PIECE && bias[0] > LOWEST / 2 && !any_of(others);
}

/* Find what the scores of `count` keys get from the bias of each of `rows` queries, in rows of `bias_step` numbers, or
 * one row for all. Without a bias query i sees the first `ahead` + i + 1 of them. Where all is zero nothing is
 * written. */
static enum shown show(float *shown, const float *bias, int64_t bias_step, int64_t rows, int64_t count, int64_t ahead)
{
    if (!bias && count == PIECE && ahead >= PIECE - 1)
        return ALL_PLAIN;
    if (bias && bias_step && rows == PIECE && count == PIECE) {
        if (is_zero(bias, bias_step))
            return ALL_PLAIN;
        transpose(shown, PIECE, bias, bias_step, PIECE, PIECE);
        return SOME;
    }
    int all = bias && !bias_step;
    for (int64_t j = 0; j < PIECE; j++) {
        const float there = j >= count ? LOWEST : bias && !bias_step ? bias[j] : 0.0f;
        all = all && there > LOWEST / 2;
        for (int64_t i = 0; i < PIECE; i += LANES)
            store(shown + j * PIECE + i, (vec){0} + there);
    }
    for (int64_t j = 0; !bias && j < count; j++) /* the first that sees it is query j - ahead */
        for (int64_t i = 0; i < min_i64(j - ahead, PIECE); i++)
            shown[j * PIECE + i] = LOWEST;
    for (int64_t j = 0; bias && bias_step && j < count; j++)
        for (int64_t i = 0; i < rows; i++)
            shown[j * PIECE + i] = bias[i * bias_step + j];
    return all ? ALL_BIASED : SOME;
}

/* Find which keys are seen with that bias. */
static struct seen find_seen(const float *bias, enum shown shown)
{
    const int all = shown != SOME;
    struct seen found = {.start = all ? 0 : PIECE, .end = all ? PIECE : 0};
    for (int64_t group = 0; group < GROUPS; group++) {
        found.first[group] = found.start;
        found.last[group] = found.end;
    }
    for (int64_t group = 0; !all && group < GROUPS; group++)
        for (int64_t j = 0; j < PIECE; j += TILE_ROWS) {
            vec largest = load(bias + j * PIECE + group * LANES);
            for (int64_t row = 1; row < TILE_ROWS; row++)
                largest = vmax(largest, load(bias + (j + row) * PIECE + group * LANES));
            if (max_of(largest) <= LOWEST / 2)
                continue;
            found.first[group] = min_i64(found.first[group], j);
            found.last[group] = j + TILE_ROWS;
            found.start = min_i64(found.start, j);
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
            if (j >= min_i64(seen->first[group], seen->first[group + 1])
                && (j < seen->last[group] || j < seen->last[group + 1]))
                make_tile(out + j * PIECE + i, PIECE, key + j * key_row, key_row, 1, query + i, PIECE, size, adds);
        }
}

/* Bring what has been summed up for a group of queries down to a higher top. */
static inline void scale_sums(struct workspace *s, int64_t group, vec left, mask higher)
{
    for (int64_t row = 0; s->buffers.parts && row < s->values; row++) {
        float *out = s->turned_out + row * PIECE + group * LANES;
        store(out, load(out) * left);
    }
    for (int64_t lane = 0; !s->buffers.parts && lane < LANES; lane++)
        for (int64_t column = 0; higher[lane] && column < s->values; column += LANES) {
            float *out = s->out + (group * LANES + lane) * s->values + column;
            store(out, load(out) * left[lane]);
        }
}

/* Scores beside their bias; a hidden pair has LOWEST, whatever its product came to. */
static inline __attribute__((always_inline)) vec beside_bias(vec scores, vec bias)
{
    return blend(bias > LOWEST / 2, scores + bias, (vec){0} + LOWEST);
}

/* Find the largest scores of the keys from `start` to `end`, which get their bias first if they are `biased`. */
static inline __attribute__((always_inline)) void
find_tops(vec *top, const struct workspace *s, int64_t start, int64_t end, int biased)
{
    for (int64_t j = start; j < end; j++)
#pragma GCC unroll 8
        for (int group = 0; group < GROUPS; group++) {
            float *at = s->scores + j * PIECE + group * LANES;
            vec score = load(at);
            if (biased) {
                score = beside_bias(score, load(s->bias + j * PIECE + group * LANES));
                store(at, score);
            }
            top[group] = vmax(top[group], score);
        }
}

/* See to it that the `top` of a query is at most ROOM below its largest score, of the keys from `start` to `end` that
 * all have a bias beside their own ones: where it was less, what was summed up before is brought down to the new
 * one. */
static inline void raise_tops(struct workspace *s, int64_t start, int64_t end, enum shown shown, float bias)
{
    vec top[GROUPS];
#pragma GCC unroll 8
    for (int group = 0; group < GROUPS; group++)
        top[group] = (vec){0} + LOWEST;
    if (shown == ALL_PLAIN)
        find_tops(top, s, start, end, 0);
    else
        find_tops(top, s, start, end, 1);
    for (int64_t group = 0; group < GROUPS; group++) {
        const vec before = load(s->top + group * LANES);
        top[group] += bias;
        const mask higher = top[group] > before + ROOM;
        if (!any_of(higher))
            continue;
        top[group] = blend(higher, top[group], before);
        const vec left = exp_of(before - top[group]);
        store(s->weight + group * LANES, load(s->weight + group * LANES) * left);
        store(s->top + group * LANES, top[group]);
        scale_sums(s, group, left, higher);
    }
}

/* Scores become weights under the `top` of their query. */
static inline void weigh(struct workspace *s, int64_t start, int64_t end, enum shown shown)
{
    raise_tops(s, start, end, shown, 0.0f);
    vec top[GROUPS], sum[GROUPS];
#pragma GCC unroll 8
    for (int group = 0; group < GROUPS; group++) {
        top[group] = load(s->top + group * LANES);
        sum[group] = load(s->weight + group * LANES);
    }
    for (int64_t j = start; j < end; j++)
#pragma GCC unroll 8
        for (int group = 0; group < GROUPS; group++) {
            const vec weight = exp_of(load(s->scores + j * PIECE + group * LANES) - top[group]);
            store(s->scores + j * PIECE + group * LANES, weight);
            sum[group] += weight;
        }
#pragma GCC unroll 8
    for (int group = 0; group < GROUPS; group++)
        store(s->weight + group * LANES, sum[group]);
}

/* Take in keys, in whole tiles, and their values before `end`, with the bias that `show` left. */
static void read_piece(struct workspace *s, const struct seen *seen, const float *key, const float *value, int64_t end,
                       enum shown shown)
{
    make_scores(s->scores, seen, key, s->keys, s->query, s->key_size, 0);
    weigh(s, seen->start, seen->end, shown);
    for (int64_t i = 0; i < PIECE; i += TILE_ROWS) {
        const int64_t first = seen->first[i / LANES], last = min_i64(seen->last[i / LANES], end);
        for (int64_t column = 0; first < last && column < s->values; column += TILE_COLUMNS)
            add_tile(s->out + i * s->values + column, s->values, s->scores + first * PIECE + i, 1, PIECE,
                     value + first * s->values + column, s->values, last - first);
    }
}

/* The weights of whole blocks of keys as a right factor, beside their sums. */
static inline WITH_TILES __attribute__((always_inline)) struct tiles
put_weights_parts(struct workspace *s, const float *scores, int64_t keys, float bias, int parts)
{
    const struct tiles made = tiles_at(s->buffers.right, PIECE, keys, parts);
    for (int64_t group = 0; group < PIECE; group += LANES) {
        const vec top = load(s->top + group) - bias;
        vec sum = load(s->weight + group);
        char *to = (char *)made.data + group / LANES * made.beside;
        for (int64_t at = 0; at < keys; at += BLOCK, to += TILE)
#pragma GCC unroll 4
            for (int64_t number = 0; number < PAIRS; number++) {
                const float *score = scores + (at + number) * PIECE + group;
                const vec one = load(score) - top, other = load(score + PAIRS * PIECE) - top;
                const vec first = parts == 3 ? exp_of(one) : rounded_exp_of(one);
                const vec second = parts == 3 ? exp_of(other) : rounded_exp_of(other);
                sum += first + second;
                put_pairs(to + number * sizeof(vec), made.part, first, second, parts);
            }
        store(s->weight + group, sum);
    }
    return made;
}

static WITH_TILES struct tiles put_weights(struct workspace *s, const float *scores, int64_t keys, float bias)
{
    return s->buffers.parts == 3 ? put_weights_parts(s, scores, keys, bias, 3)
                                 : put_weights_parts(s, scores, keys, bias, 1);
}

/* Put PIECE rows of keys and of values, zero where there are none, into the tiles of a piece. */
static void put_piece(const struct workspace *s, const struct piece *piece, struct rows keys, struct rows values)
{
    pack_a((void *)piece->key.data, keys, PIECE, s->key_size, s->buffers.parts);
    pack_a_transposed((void *)piece->turned.data, values, s->values, PIECE, s->buffers.parts);
}

/* Take in a piece that is there in tiles, with the bias that `show` left, all with the same one beside. */
static void read_tiles(struct workspace *s, const struct seen *seen, const struct piece *piece, enum shown shown,
                       float bias)
{
    const int64_t first = seen->start / BLOCK * BLOCK, keys = round_up(seen->end - first, BLOCK);
    float *scores = s->scores + first * PIECE;
    multiply(scores, PIECE, tiles_from(piece->key, first, 0), s->queries, keys, PIECE, s->key_size, 0,
             &s->next, FETCHED);
    scale_scores(scores, keys, s->rest);
    raise_tops(s, first, first + keys, shown, bias);
    const struct tiles weights = put_weights(s, scores, keys, bias);
    multiply(s->turned_out, PIECE, tiles_from(piece->turned, 0, first), weights, s->values, PIECE, keys, 1,
             &s->next, FETCHED);
}

/* Take in keys of a head and their values, of which `seen` ones are met with the bias that `show` left, all with the
 * same one beside; they are read where they lie if that will do. Those of one name, unless it is zero, are the same. */
static inline void read_span(struct workspace *s, const struct seen *seen, const tensor_view *key,
                             const tensor_view *value, const struct span *of, int64_t name, enum shown shown,
                             float bias)
{
    if (s->buffers.parts) {
        struct piece piece;
        if (!find_piece(&s->pieces, name, &piece))
            put_piece(s, &piece, rows_for_tiles(&s->pieces, key, of, s->key_size, s->keys, s->rows),
                      rows_for_tiles(&s->pieces, value, of, s->value_size, s->values, s->value));
        read_tiles(s, seen, &piece, shown, bias);
        return;
    }
    const float *keys, *values;
    find_rows(&s->pieces, key, value, of, name, s->key_size, s->value_size, s->keys, s->values, &keys, &values, s->rows,
              s->value);
    read_piece(s, seen, keys, values, of->count, shown);
}
