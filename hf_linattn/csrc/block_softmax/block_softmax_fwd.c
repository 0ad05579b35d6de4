/* Softmax attention of blocks of queries over the key blocks that a table names for each, without copying any.
 *
 *     out_i = sum_j exp(scaling query_i . key_j + bias_ij - log_i) value_j,   log_i = log sum_j exp(...)
 *
 * over `shared` keys that stand by themselves and those of the blocks in the query block's row of the table; column c
 * of the bias belongs to the c-th of all these. What has no bias is seen, in a query block's own block and if `causal`
 * only those that come no later. What stands in `before` counts as one more value, read with the weight
 * exp(before_log_i); it may lie where `out` does. A query without keys gets zero, and a log of LOWEST.
 *
 * With a gate c per query head that value gets c times this share, and what is left goes to the keys; log_i is theirs.
 */

#include "block_softmax.h"

/* A head's queries that meet keys. */
struct work {
    struct workspace *scratch;
    const struct block_softmax_args *args;
    int64_t batch, head, group, rows;
};

/* The head's next queries, and the keys they begin with, are those from `next` on. */
static void look_ahead_of(struct workspace *s, const struct block_softmax_args *p, int64_t batch, int64_t head,
                          int64_t group, int64_t next)
{
    const int64_t rows = min_i64(PIECE, p->length - next);
    s->next.count = 0;
    prefetch_push(&s->next, &p->query, batch, head, group, next, rows, p->key_size);
    prefetch_push(&s->next, &p->key, batch, head, 0, next, rows, p->key_size);
    prefetch_push(&s->next, &p->value, batch, head, 0, next, rows, p->value_size);
}

/* What is there of the queries before any key: nothing, or what stands in `before`. */
static void begin(struct workspace *s, const struct block_softmax_args *p, int64_t batch, int64_t head, int64_t group,
                  int64_t at, int64_t count)
{
    pack(s->rows, PIECE, &p->query, batch, head, group, at, count, p->key_size, s->keys);
    memset(s->out, 0, PIECE * s->values * sizeof(float));
    for (int64_t i = 0; i < PIECE; i++) {
        const int begun = !p->gate.data && i < count && has_before(p, batch, head, group, at + i);
        const int64_t row = at + i - p->begun;
        s->weight[i] = begun;
        s->top[i] = begun ? *row_f32(&p->before_log, batch, head, group, row) : LOWEST / 2;
        if (begun)
            pack(s->out + i * s->values, 1, &p->before, batch, head, group, row, 1, p->value_size, s->values);
    }
    begin_queries(s, p->scaling);
}

/* Take in some keys. */
static void read_keys(void *work, const struct keys *read)
{
    struct work *w = work;
    const struct block_softmax_args *p = w->args;
    struct workspace *s = w->scratch;
    if (!p->parts)
        prefetch_some(&s->next, PIECE / 2);
    const tensor_view *key = read->shared ? &p->shared_key : &p->key,
        *value = read->shared ? &p->shared_value : &p->value;
    const struct beginning begun = begin_scores(p, s->bias, read, w->rows);
    if (begun.seen.start >= begun.seen.end)
        return;
    const struct span of = {w->batch, w->head, read->at, read->count};
    read_span(s, &begun.seen, key, value, &of, name_of(p, w->batch, w->head, read), begun.shown, begun.bias);
}

/* Let in what stands before a query, as far as the gate is open, beside the attention to its keys, which is a row of
 * `out` times `factor`; return the factor of the row then. */
static float let_in(const struct workspace *s, const struct work *w, int64_t at, float log, float factor, float *out)
{
    const struct block_softmax_args *p = w->args;
    if (!p->gate.data || !has_before(p, w->batch, w->head, w->group, at))
        return factor;
    const struct shares shares = find_shares(p, w->batch, w->head, w->group, at, log);
    const float share = shares.most * shares.joint, kept = factor * (1.0f - share);
    const float *before = read_row(&p->before, w->batch, w->head, w->group, at - p->begun, p->value_size, s->value);
    for (int64_t column = 0; column < p->value_size; column++)
        out[column] = kept * out[column] + share * before[column];
    return 1.0f;
}

/* One query block of one head. */
static void read_block(struct workspace *s, const struct block_softmax_args *p, int64_t batch, int64_t head,
                       int64_t group, int64_t block)
{
    const int64_t start = (p->first + block) * p->block_size, end = min_i64(start + p->block_size, p->length);
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->value_size);
    for (int64_t at = start; at < end; at += PIECE) {
        struct work work = {s, p, batch, head, group, min_i64(end - at, PIECE)};
        begin(s, p, batch, head, group, at, work.rows);
        look_ahead_of(s, p, batch, head, group, at + PIECE);
        for_keys(p, batch, head * p->groups + group, block, at, read_keys, &work);
        end_queries(s);
        for (int64_t i = 0; i < work.rows; i++) {
            const float weight = s->weight[i], factor = weight != 0.0f ? 1.0f / weight : 0.0f; /* of NaN, NaN */
            const float log = weight != 0.0f ? s->top[i] + logf(weight) : LOWEST;
            float *out = s->out + i * s->values;
            const float left = let_in(s, &work, at + i, log, factor, out);
            write_row(&p->out, batch, head, group, at + i, left, out, p->value_size, large);
            *row_f32(&p->log, batch, head, group, at + i) = log;
        }
    }
}

static void read_task(const void *args, float *memory, int64_t task)
{
    const struct block_softmax_args *p = args;
    const int64_t rows = task / p->blocks, sequence = rows / p->groups;
    struct workspace s;
    workspace_init(&s, p->key_size, p->value_size, p->parts, memory);
    begin_tiles(p->parts);
    read_block(&s, p, sequence / p->heads, sequence % p->heads, rows % p->groups, task % p->blocks);
    end_tiles(p->parts);
}

/* Work through all query blocks of a call; returns 0, 1 where there was no memory to work in, or BAD_NUMBERS. */
int block_softmax(const struct block_softmax_args *p)
{
    struct workspace s;
    if (!fits(p))
        return BAD_NUMBERS;
    const int64_t size = workspace_init(&s, p->key_size, p->value_size, p->parts, NULL);
    return run_tasks(read_task, p, p->batches * p->heads * p->groups * p->blocks, p->threads, size);
}

LAYOUT(block_softmax, struct block_softmax_args, 0x53f9fad4)
