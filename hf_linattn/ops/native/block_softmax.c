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
        fetch_row(&p->query, w->batch, w->head, w->group, w->ahead, p->key_size);
        fetch_row(&p->key, w->batch, w->head, 0, w->ahead, p->key_size);
        fetch_row(&p->value, w->batch, w->head, 0, w->ahead, p->value_size);
    }
}

/* What is there of the queries before any key: nothing, or what stands in `before`. */
static void begin(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t group, int64_t at,
                  int64_t count)
{
    pack(s->rows, PIECE, &p->query, batch, head, group, at, count, p->key_size, s->keys);
    begin_queries(s, p->scaling);
    memset(s->out, 0, PIECE * s->values * sizeof(float));
    for (int64_t i = 0; i < PIECE; i++) {
        const int begun = i < count && has_before(p, batch, head, group, at + i);
        const int64_t row = at + i - p->begun;
        s->weight[i] = begun;
        s->top[i] = begun ? *place(&p->before_log, batch, head, group, row) : LOWEST / 2;
        if (begun)
            pack(s->out + i * s->values, 1, &p->before, batch, head, group, row, 1, p->value_size, s->values);
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
    struct rows keys = {s->rows, s->keys, FLOAT32}, values = {s->value, s->values, FLOAT32};
    const int whole = p->key_size == s->keys && p->value_size == s->values, rounds = s->rounded.left != NULL;
    if (read->count == PIECE && (rounds ? whole && key->kind != FLOAT16 : key->kind == FLOAT32))
        keys = (struct rows){row_of(key, w->batch, w->head, 0, read->at), key->token, key->kind};
    else
        pack(s->rows, PIECE, key, w->batch, w->head, 0, read->at, read->count, p->key_size, s->keys);
    /* rows of float32 that are far apart displace each other */
    if (whole && (rounds ? value->kind != FLOAT16 : value->kind == FLOAT32 && value->token == s->values))
        values = (struct rows){row_of(value, w->batch, w->head, 0, read->at), value->token, value->kind};
    else
        pack(s->value, read->count, value, w->batch, w->head, 0, read->at, read->count, p->value_size, s->values);
    const enum shown shown = show(s->scores, read->bias, p->bias.token, w->rows, read->count, read->ahead);
    read_piece(s, keys, values, read->count, shown);
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
            write_row(&p->out, batch, head, group, at + i, factor, s->out + i * s->values, p->value_size, large);
            *place(&p->log, batch, head, group, at + i) = weight > 0.0f ? s->top[i] + logf(weight) : LOWEST;
        }
    }
}

static void read_task(const void *problem, float *memory, int64_t task)
{
    const struct problem *p = problem;
    const int64_t rows = task / p->blocks, sequence = rows / p->groups;
    struct scratch s;
    arrange(&s, p->key_size, p->value_size, p->bfloat16, memory);
    begin_tiles(&s.rounded);
    read_block(&s, p, sequence / p->heads, sequence % p->heads, rows % p->groups, task % p->blocks);
    end_tiles(&s.rounded);
}

/* Work through all query blocks of a problem; returns 0, or 1 where there was no memory to work in. */
int block_softmax(const struct problem *p)
{
    struct scratch s;
    const int64_t size = arrange(&s, p->key_size, p->value_size, p->bfloat16, NULL);
    return run_tasks(read_task, p, p->batches * p->heads * p->groups * p->blocks, p->threads, size);
}
