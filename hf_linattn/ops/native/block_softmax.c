/* Softmax attention of blocks of queries over the key blocks that a table names for each, without copying any.
 *
 *     out_i = sum_j exp(scaling query_i . key_j + bias_ij - log_i) value_j,   log_i = log sum_j exp(...)
 *
 * over `shared` keys that stand by themselves and those of the blocks in the query block's row of the table; column c
 * of the bias belongs to the c-th of all these. What has no bias is seen, in a query block's own block and if `causal`
 * only those that come no later. `continued` rows begin with what stands in `out`, as if it had been read with the
 * weight exp(log_i). A query without keys gets zero, and a log of LOWEST.
 */

#include <math.h>

#include "block_softmax.h"

/* A head's queries that meet keys. */
struct work {
    struct scratch *scratch;
    const struct problem *problem;
    int64_t batch, head, rows;
};

/* What is there of the queries before any key: nothing, or what stands in `out`. */
static void begin(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t group, int64_t at,
                  int64_t count)
{
    pack(s->query, PIECE, place(&p->query, batch, head, group, at), p->query.token, count, p->key_size, s->keys);
    for (int64_t number = 0; number < count * s->keys; number++)
        s->query[number] *= p->scaling;
    memset(s->out, 0, PIECE * s->values * sizeof(float));
    for (int64_t i = 0; i < PIECE; i++) {
        const float log = p->continued && i < count ? *place(&p->log, batch, head, group, at + i) : LOWEST;
        const int begun = log > LOWEST / 2;
        store(s->weight + i * LANES, (lanes){begun ? 1.0f : 0.0f});
        s->top[i] = begun ? log : LOWEST / 2;
        if (begun)
            memcpy(s->out + i * s->values, place(&p->out, batch, head, group, at + i), p->value_size * sizeof(float));
    }
}

/* Take in some keys; their values are read where they lie if that will do. */
static void read_keys(void *work, const struct keys *read)
{
    const struct work *w = work;
    const struct problem *p = w->problem;
    struct scratch *s = w->scratch;
    const operand *key = read->shared ? &p->shared_key : &p->key, *value = read->shared ? &p->shared_value : &p->value;
    const float *keys = place(key, w->batch, w->head, 0, read->at);
    const float *values = place(value, w->batch, w->head, 0, read->at);
    if (read->count < PIECE || p->key_size < s->keys) {
        pack(s->key, PIECE, keys, key->token, read->count, p->key_size, s->keys);
        turn(s->turned, PIECE, s->key, s->keys, PIECE, s->keys);
    } else
        turn(s->turned, PIECE, keys, key->token, PIECE, s->keys);
    if (read->count < PIECE || p->value_size < s->values || value->token != s->values) {
        pack(s->value, PIECE, values, value->token, read->count, p->value_size, s->values);
        values = s->value;
    }
    read_piece(s, values, read->count, w->rows, read->bias, p->bias.token, read->ahead);
}

/* One query block of one head. */
static void read_block(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t group,
                       int64_t block)
{
    const int64_t start = (p->first + block) * p->block_size, end = smaller(start + p->block_size, p->length);
    for (int64_t at = start; at < end; at += PIECE) {
        struct work work = {s, p, batch, head, smaller(end - at, PIECE)};
        begin(s, p, batch, head, group, at, work.rows);
        for_keys(p, batch, head * p->groups + group, block, at, read_keys, &work);
        for (int64_t i = 0; i < work.rows; i++) {
            float *out = place(&p->out, batch, head, group, at + i);
            const float weight = sum_of(load(s->weight + i * LANES)), factor = weight > 0.0f ? 1.0f / weight : 0.0f;
            for (int64_t column = 0; column < p->value_size; column++)
                out[column] = factor * s->out[i * s->values + column];
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
