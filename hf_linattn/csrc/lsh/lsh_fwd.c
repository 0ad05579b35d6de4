/* Softmax attention of each query to the keys that share a bucket with it in at least one of several rounds.
 *
 *     out_i = sum_j exp(scaling query_i . key_j) value_j / sum_j exp(scaling query_i . key_j),   j in S_i
 *
 * S_i has, of every round, the keys of the query's bucket: of those not after i the last `behind`, of those after it
 * the first `ahead`; each counts once. Unless they are `shared`, a query whose own key is in its bucket in no round
 * sees
 * that one, too. If they are, it sees its own key only where it sees no other.
 *
 * Keys are listed by bucket, and by place inside one. So those of a query are a run in the list of each round, and
 * queries of one bucket that follow each other have nearly the same run: they are taken together.
 */

#include <math.h>

#include "lsh.h"

/* What one key/value head is worked through with. */
struct work {
    const struct lsh_args *args;
    struct workspace scratch;
    struct lists lists;
    int64_t sequence, batch, head, group;
};

/* What is there of each query before any key: nothing, or its own key. */
static void begin(struct work *w)
{
    const struct lsh_args *p = w->args;
    for (int64_t i = 0; i < p->length; i++) {
        const int alone = is_alone(p, w->sequence, w->group, i);
        float *out = row_f32(&p->out, w->batch, w->head, w->group, i);
        w->lists.top[i] = LOWEST / 2;
        w->lists.weight[i] = alone;
        if (alone) {
            w->lists.top[i] = p->scaling * dot(row_f32(&p->query, w->batch, w->head, w->group, i),
                                               row_f32(&p->key, w->batch, w->head, 0, i), p->key_size);
            memcpy(out, row_f32(&p->value, w->batch, w->head, 0, i), p->value_size * sizeof(float));
        } else
            memset(out, 0, p->value_size * sizeof(float));
    }
}

/* Take in the keys and values that have been copied together. */
static void read_rows(struct workspace *s, int64_t count)
{
    const struct seen seen = find_seen(s->bias, SOME);
    if (seen.start >= seen.end)
        return;
    if (!s->buffers.parts) {
        read_piece(s, &seen, s->rows, s->value, count, SOME);
        return;
    }
    const struct rows keys = {s->rows, s->keys, FLOAT32}, values = {s->value, s->values, FLOAT32};
    struct piece piece;
    find_piece(&s->pieces, 0, &piece);
    put_piece(s, &piece, keys, values);
    read_tiles(s, &seen, &piece, SOME, 0.0f);
}

static void read_runs(void *work, int64_t round, const int32_t *member, const int32_t *queries, int64_t rows)
{
    struct work *w = work;
    struct workspace *s = &w->scratch;
    struct lists *l = &w->lists;
    const struct lsh_args *p = w->args;
    const int32_t *start = l->start + round * p->length, *stop = l->stop + round * p->length;
    const int64_t first = start[queries[0]], end = stop[queries[rows - 1]];
    for (int64_t i = 0; i < rows; i++) {
        pack(s->rows + i * s->keys, 1, &p->query, w->batch, w->head, w->group, queries[i], 1, p->key_size, s->keys);
        pack(s->out + i * s->values, 1, &p->out, w->batch, w->head, w->group, queries[i], 1, p->value_size, s->values);
        s->top[i] = l->top[queries[i]];
        s->weight[i] = l->weight[queries[i]];
    }
    begin_queries(s, p->scaling);
    note_runs(l, p, round, queries, rows);
    for (int64_t at = first; at < end; at += PIECE) {
        const int64_t count = min_i64(end - at, PIECE);
        for (int64_t j = 0; j < count; j++) {
            pack(s->rows + j * s->keys, 1, &p->key, w->batch, w->head, 0, member[at + j], 1, p->key_size, s->keys);
            pack(s->value + j * s->values, 1, &p->value, w->batch, w->head, 0, member[at + j], 1, p->value_size,
                 s->values);
        }
        memset(s->rows + count * s->keys, 0, (PIECE - count) * s->keys * sizeof(float)); /* whole tiles are read */
        memset(s->value + count * s->values, 0, (PIECE - count) * s->values * sizeof(float));
        hide_keys(s->bias, l, p, round, member, at, count);
        read_rows(s, count);
    }
    end_queries(s);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(row_f32(&p->out, w->batch, w->head, w->group, queries[i]), s->out + i * s->values,
               p->value_size * sizeof(float));
        l->top[queries[i]] = s->top[i];
        l->weight[queries[i]] = s->weight[i];
    }
}

/* One query head. */
static void read_head(struct work *w, const struct lsh_args *p)
{
    begin(w);
    for_runs(&w->lists, p, w->sequence, w->group, read_runs, w);
    for (int64_t i = 0; i < p->length; i++) {
        float *out = row_f32(&p->out, w->batch, w->head, w->group, i);
        const float weight = w->lists.weight[i], factor = weight != 0.0f ? 1.0f / weight : 0.0f; /* of NaN, NaN */
        for (int64_t column = 0; column < p->value_size; column++)
            out[column] *= factor;
        if (!factor)
            memcpy(out, row_f32(&p->value, w->batch, w->head, 0, i), p->value_size * sizeof(float));
        *row_f32(&p->log, w->batch, w->head, w->group, i) = factor ? w->lists.top[i] + logf(weight) : LOWEST;
    }
}

static void read_task(const void *args, float *memory, int64_t task)
{
    const struct lsh_args *p = args;
    struct work work = {.args = p, .sequence = task, .batch = task / p->heads, .head = task % p->heads};
    arrange_lists(&work.lists, p, memory + workspace_init(&work.scratch, p->key_size, p->value_size, p->parts, memory));
    list_keys(&work.lists, p, task);
    begin_tiles(p->parts);
    for (work.group = 0; work.group < p->groups; work.group++)
        read_head(&work, p);
    end_tiles(p->parts);
}

/* Work through all key/value heads of a call; returns 0, 1 where there was no memory to work in, or BAD_NUMBERS. */
int bucket_softmax(const struct lsh_args *p)
{
    struct workspace s;
    struct lists l;
    if (!fits(p))
        return BAD_NUMBERS;
    const int64_t size = workspace_init(&s, p->key_size, p->value_size, p->parts, NULL) + arrange_lists(&l, p, NULL);
    return run_tasks(read_task, p, p->batches * p->heads, p->threads, size);
}

LAYOUT(bucket_softmax, struct lsh_args, 0x67a7d141)
