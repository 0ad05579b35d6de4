/* The arguments of one call of block-sparse softmax attention, and which keys each of its queries meets. */

#pragma once

#include <math.h>

#include "../common/online_softmax.h"


struct block_softmax_args {
    tensor_view query, key, value, out; /* contiguous in their last dimension, as all are; of any kind */
    tensor_view log;                    /* of the queries: what all their weights come to */
    tensor_view before, before_log;     /* what queries from `begun` on begin with; without data, nothing */
    tensor_view gate;                   /* of query heads ("head" and "group"): the most share of that; without data,
        all */
    tensor_view shared_key, shared_value;
    tensor_view grad, log_grad;         /* what the backward pass begins with: of out, and of log */
    tensor_view d_query, d_key, d_value, d_shared_key, d_shared_value, d_before, d_before_log, d_gate;
    tensor_view bias;                   /* "head": of query heads, "group": of query blocks, "token": of queries */
    const int64_t *table;           /* [blocks, table_heads, width], -1 for none; table_heads is 1 or heads * groups */
    int64_t batches, heads, groups, length, key_size, value_size;
    int64_t first, blocks; /* of the query blocks */
    int64_t block_size, table_heads, width, shared, columns, begun, causal, threads; /* columns: of the bias */
    int64_t parts; /* of bfloat16 that numbers have in products; 0 for products of float32 */
    float scaling;
};

/* Whether places in the blocks of the table can be counted; those of no block, or behind the last one, are no keys. */
static inline int fits(const struct block_softmax_args *p)
{
    int bad = 0;
    for (int64_t i = 0; i < p->blocks * p->table_heads * p->width; i++)
        bad |= p->table[i] < INT32_MIN || p->table[i] > INT32_MAX;
    return !bad;
}

/* Whether a query begins with something of any weight, or of NaN. */
static inline int has_before(const struct block_softmax_args *p, int64_t batch, int64_t head, int64_t group, int64_t at)
{
    return p->before.data && at >= p->begun
           && !(*row_f32(&p->before_log, batch, head, group, at - p->begun) <= LOWEST / 2);
}

/* Of the attention of a query that has something before: the share e^before_log / (e^before_log + e^log) of that, and
 * the one left to its keys, whose log it is; `most` is what its head lets through. */
struct shares {
    float joint, rest, most;
};

static inline struct shares find_shares(const struct block_softmax_args *p, int64_t batch, int64_t head, int64_t group,
                                        int64_t at, float log)
{
    const float ahead = *row_f32(&p->before_log, batch, head, group, at - p->begun) - log;
    const float less = expf(-fabsf(ahead)), most = *row_f32(&p->gate, 0, head, group, 0);
    const float major = 1.0f / (1.0f + less), minor = less * major; /* of NaN, NaN */
    return ahead > 0.0f ? (struct shares){major, minor, most} : (struct shares){minor, major, most};
}

/* Up to PIECE keys that some queries meet: `count` shared ones or of the sequence, from place `at`, with the bias of
 * the queries, or the first query seeing `ahead` + 1 of them, the next one another one, and so on. */
struct keys {
    int shared;
    int64_t at, count, ahead;
    const float *bias;
};

/* Call `meet` for all keys that a head's queries from place `at` on, which are of query block `block`, meet. */
static inline __attribute__((always_inline)) void
for_keys(const struct block_softmax_args *p, int64_t batch, int64_t query_head, int64_t block, int64_t at,
         void (*meet)(void *work, const struct keys *keys), void *work)
{
    const int64_t *row = p->table + (block * p->table_heads + (p->table_heads > 1 ? query_head : 0)) * p->width;
    const int64_t start = (p->first + block) * p->block_size;
    const float *bias = p->bias.data ? row_f32(&p->bias, batch, query_head, block, at - start) : NULL;
    for (int64_t place = 0; place < p->shared; place += PIECE)
        meet(work, &(struct keys){1, place, min_i64(p->shared - place, PIECE), p->length, bias ? bias + place : NULL});
    for (int64_t column = 0; column < p->width; column++) {
        const int64_t first = row[column] * p->block_size, last = min_i64(first + p->block_size, p->length);
        const float *shown = p->columns > p->shared ? bias + p->shared + column * p->block_size : NULL;
        for (int64_t place = first; row[column] >= 0 && place < last; place += PIECE)
            meet(work, &(struct keys){0, place, min_i64(last - place, PIECE),
                                      p->causal && first == start ? at - place : p->length,
                                      shown ? shown + (place - first) : NULL});
    }
}

/* Which pairs of a piece are seen, whether their scores have a bias, and the one that all of them have beside. */
struct beginning {
    struct seen seen;
    enum shown shown;
    float bias;
};

static inline struct beginning begin_scores(const struct block_softmax_args *p, float *bias, const struct keys *keys,
                                            int64_t rows)
{
    const int same = p->parts && keys->bias && !p->bias.token && is_same(keys->bias, keys->count);
    struct beginning found = {.shown = ALL_PLAIN, .bias = same ? *keys->bias : 0.0f};
    if (!same)
        found.shown = show(bias, keys->bias, p->bias.token, rows, keys->count, keys->ahead);
    found.seen = find_seen(bias, found.shown);
    return found;
}

/* What a piece is known by: the number of its first token, or of its first shared key, among those of all heads. Heads
 * with the same keys may have other values. */
static inline int64_t name_of(const struct block_softmax_args *p, int64_t batch, int64_t head, const struct keys *keys)
{
    const int64_t most = max_i64(p->length, p->shared);
    return 2 * ((batch * p->heads + head) * most + keys->at + 1) + keys->shared;
}
