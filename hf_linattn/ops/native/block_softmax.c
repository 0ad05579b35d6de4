/* Softmax attention of blocks of queries over the key blocks that a table names for each, without copying any.
 *
 *     out_i = sum_j exp(scaling query_i . key_j + bias_ij - log_i) value_j,   log_i = log sum_j exp(...)
 *
 * over `shared` keys that stand by themselves and those of the blocks in the query block's row of the table; column c
 * of the bias belongs to the c-th of all these. What has no bias is seen, in a query block's own block and if `causal`
 * only those that come no later. What stands in `before` counts as one more value, read with the weight
 * exp(before_log_i); it may lie where `out` does. A query without keys gets zero, and a log of LOWEST.
 */

#include <math.h>

#include "block_softmax.h"

/* A head's queries that meet keys. */
struct work {
    struct scratch *scratch;
    const struct problem *problem;
    int64_t batch, head, group, rows;
    int64_t ahead, end; /* the next token that memory is asked for, and behind the last one */
};

/* Ask for some of the tokens that this head's next queries begin with, so that memory answers meanwhile. */
static inline void fetch_ahead(struct work *w)
{
    const struct problem *p = w->problem;
    for (int64_t row = 0; row < PIECE / 2 && w->ahead < w->end; row++, w->ahead++) {
        fetch_row(place(&p->query, w->batch, w->head, w->group, w->ahead), p->key_size);
        fetch_row(place(&p->key, w->batch, w->head, 0, w->ahead), p->key_size);
        fetch_row(place(&p->value, w->batch, w->head, 0, w->ahead), p->value_size);
    }
}

/* What is there of the queries before any key: nothing, or what stands in `before`. */
static void begin(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t group, int64_t at,
                  int64_t count)
{
    pack(s->rows, PIECE, place(&p->query, batch, head, group, at), p->query.token, count, p->key_size, s->keys);
    turn(s->query, PIECE, s->rows, s->keys, PIECE, s->keys);
    for (int64_t number = 0; number < PIECE * s->keys; number++)
        s->query[number] *= p->scaling;
    memset(s->out, 0, PIECE * s->values * sizeof(float));
    for (int64_t i = 0; i < PIECE; i++) {
        const int begun = i < count && has_before(p, batch, head, group, at + i);
        const int64_t row = at + i - p->begun;
        s->weight[i] = begun;
        s->top[i] = begun ? *place(&p->before_log, batch, head, group, row) : LOWEST / 2;
        if (begun)
            memcpy(s->out + i * s->values, place(&p->before, batch, head, group, row), p->value_size * sizeof(float));
    }
}

/* Take in some keys; they and their values are read where they lie if that will do. */
static void read_keys(void *work, const struct keys *read)
{
    struct work *w = work;
    const struct problem *p = w->problem;
    struct scratch *s = w->scratch;
    fetch_ahead(w);
    const operand *key = read->shared ? &p->shared_key : &p->key, *value = read->shared ? &p->shared_value : &p->value;
    const float *keys = place(key, w->batch, w->head, 0, read->at);
    const float *values = place(value, w->batch, w->head, 0, read->at);
    int64_t key_row = key->token, value_row = value->token;
    if (read->count < PIECE) {
        pack(s->rows, PIECE, keys, key_row, read->count, p->key_size, s->keys);
        keys = s->rows, key_row = s->keys;
    }
    if (p->value_size < s->values || value_row != s->values) { /* rows that are far apart displace each other */
        pack(s->value, read->count, values, value_row, read->count, p->value_size, s->values);
        values = s->value, value_row = s->values;
    }
    const int all = show(s->scores, read->bias, p->bias.token, w->rows, read->count, read->ahead);
    read_piece(s, keys, key_row, values, value_row, read->count, all);
}

/* One query block of one head. */
static void read_block(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t group,
                       int64_t block)
{
    const int64_t start = (p->first + block) * p->block_size, end = smaller(start + p->block_size, p->length);
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->value_size);
    for (int64_t at = start; at < end; at += PIECE) {
        struct work work = {s, p, batch, head, group, smaller(end - at, PIECE), at + PIECE,
                            smaller(at + 2 * PIECE, p->length)};
        begin(s, p, batch, head, group, at, work.rows);
        for_keys(p, batch, head * p->groups + group, block, at, read_keys, &work);
        for (int64_t i = 0; i < work.rows; i++) {
            const float weight = s->weight[i], factor = weight > 0.0f ? 1.0f / weight : 0.0f;
            write_row(place(&p->out, batch, head, group, at + i), factor, s->out + i * s->values, p->value_size,
                      large);
            *place(&p->log, batch, head, group, at + i) = weight > 0.0f ? s->top[i] + logf(weight) : LOWEST;
        }
    }
}

static void read_task(const void *problem, float *memory, int64_t task)
{
    const struct problem *p = problem;
    const int64_t rows = task / p->blocks, sequence = rows / p->groups;
    struct scratch s;
    arrange(&s, p->key_size, p->value_size, memory);
    read_block(&s, p, sequence / p->heads, sequence % p->heads, rows % p->groups, task % p->blocks);
}

/* Work through all query blocks of a problem; returns 0, or 1 where there was no memory to work in. */
int block_softmax(const struct problem *p)
{
    struct scratch s;
    const int64_t size = arrange(&s, p->key_size, p->value_size, NULL);
    return run_tasks(read_task, p, p->batches * p->heads * p->groups * p->blocks, p->threads, size);
}
