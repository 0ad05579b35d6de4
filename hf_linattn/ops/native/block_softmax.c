/* Softmax attention of blocks of queries over the key blocks that a table names for each, without copying any.
 *
 *     out_i = sum_j exp(scaling query_i . key_j + bias_ij - log_i) value_j,   log_i = log sum_j exp(...)
 *
 * over `shared` keys that stand by themselves and those of the blocks in the query block's row of the table; column c
 * of the bias belongs to the c-th of all these. What has no bias is seen, in a query block's own block and if `causal`
 * only those that come no later. `continued` rows begin with what stands in `out`, as if it had been read with the
 * weight exp(log_i). A query without keys gets zero.
 */

#include "softmax.h"

struct problem {
    operand query, key, value, out; /* float32, contiguous in their last dimension */
    operand log;                    /* of the queries */
    operand shared_key, shared_value;
    operand bias;                   /* "head": of query heads, "group": of query blocks, "token": of queries */
    const int64_t *table;           /* [blocks, table_heads, width], -1 for none; table_heads is 1 or heads * groups */
    int64_t batches, heads, groups, length, key_size, value_size;
    int64_t first, blocks; /* of the query blocks */
    int64_t block_size, table_heads, width, shared, columns, continued, causal, threads; /* columns: of the bias */
    float scaling;
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

/* Have `count` keys from place `at` ready for `read_piece`; returns their values, where they lie if that will do. */
static const float *bring_keys(struct scratch *s, const struct problem *p, const operand *key, const operand *value,
                               int64_t batch, int64_t head, int64_t at, int64_t count)
{
    const float *keys = place(key, batch, head, 0, at), *values = place(value, batch, head, 0, at);
    if (count < PIECE || p->key_size < s->keys) {
        pack(s->key, PIECE, keys, key->token, count, p->key_size, s->keys);
        turn(s->turned, PIECE, s->key, s->keys, PIECE, s->keys);
    } else
        turn(s->turned, PIECE, keys, key->token, PIECE, s->keys);
    if (count == PIECE && p->value_size == s->values && value->token == s->values)
        return values;
    pack(s->value, PIECE, values, value->token, count, p->value_size, s->values);
    return s->value;
}

/* One query block of one head. */
static void read_block(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t group,
                       int64_t block)
{
    const int64_t query_head = head * p->groups + group, start = (p->first + block) * p->block_size;
    const int64_t *row = p->table + (block * p->table_heads + (p->table_heads > 1 ? query_head : 0)) * p->width;
    const int64_t end = smaller(start + p->block_size, p->length);
    for (int64_t at = start; at < end; at += PIECE) {
        const int64_t rows = smaller(end - at, PIECE);
        const float *bias = p->bias.data ? place(&p->bias, batch, query_head, block, at - start) : NULL;
        begin(s, p, batch, head, group, at, rows);
        for (int64_t place = 0; place < p->shared; place += PIECE) {
            const int64_t count = smaller(p->shared - place, PIECE);
            const float *shown = bias ? bias + place : NULL;
            read_piece(s, bring_keys(s, p, &p->shared_key, &p->shared_value, batch, head, place, count), count, rows,
                       shown, p->bias.token, p->length);
        }
        for (int64_t column = 0; column < p->width; column++) {
            if (row[column] < 0)
                continue;
            const int64_t first = row[column] * p->block_size, last = smaller(first + p->block_size, p->length);
            const float *shown = p->columns > p->shared ? bias + p->shared + column * p->block_size : NULL;
            for (int64_t place = first; place < last; place += PIECE) {
                const int64_t count = smaller(last - place, PIECE);
                read_piece(s, bring_keys(s, p, &p->key, &p->value, batch, head, place, count), count, rows,
                           shown ? shown + (place - first) : NULL, p->bias.token,
                           p->causal && first == start ? at - place : p->length);
            }
        }
        for (int64_t i = 0; i < rows; i++) {
            float *out = place(&p->out, batch, head, group, at + i);
            const float weight = sum_of(load(s->weight + i * LANES)), factor = weight > 0.0f ? 1.0f / weight : 0.0f;
            for (int64_t column = 0; column < p->value_size; column++)
                out[column] = factor * s->out[i * s->values + column];
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
