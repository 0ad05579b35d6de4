/* The backward pass of lsh_fwd.c. Each key/value head is one thread's, as its queries add to the same keys. */

#include "lsh.h"
#include "../common/online_softmax_bwd.h"

/* What one key/value head is worked through with. */
struct work {
    const struct lsh_args *args;
    struct pairs pairs;
    struct lists lists;
    int64_t sequence, batch, head, group;
};

/* What a query and its own key give each other outside of all rounds; without any weight its output was its value. */
static void begin(struct work *w)
{
    const struct lsh_args *p = w->args;
    for (int64_t i = 0; i < p->length; i++) {
        const float *query = row_f32(&p->query, w->batch, w->head, w->group, i);
        const float *grad = row_f32(&p->grad, w->batch, w->head, w->group, i);
        const float *key = row_f32(&p->key, w->batch, w->head, 0, i), *value = row_f32(&p->value, w->batch, w->head,
                                                                                       0, i);
        const float log = *row_f32(&p->log, w->batch, w->head, w->group, i);
        const int empty = log <= LOWEST / 2;
        if (!empty && !is_alone(p, w->sequence, w->group, i))
            continue;
        const float weight = empty ? 1.0f : exp_of_one(p->scaling * dot(query, key, p->key_size) - log);
        const float slope = empty ? 0.0f : weight * (dot(grad, value, p->value_size)
                                                     - *row_f32(&p->weight_grad, w->batch, w->head, w->group, i));
        add_scaled(row_f32(&p->d_value, w->batch, w->head, 0, i), weight, grad, p->value_size);
        add_scaled(row_f32(&p->d_key, w->batch, w->head, 0, i), p->scaling * slope, query, p->key_size);
        add_scaled(row_f32(&p->d_query, w->batch, w->head, w->group, i), p->scaling * slope, key, p->key_size);
    }
}

/* Meet the keys and values that have been copied together, as tiles. */
static void read_rows(struct pairs *s, const struct met *met, const struct seen *seen)
{
    struct piece piece;
    find_piece(&s->pieces, 0, &piece);
    put_pairs_piece(s, &piece, (struct rows){s->key, s->keys, FLOAT32}, (struct rows){s->value, s->values, FLOAT32});
    read_pair_tiles(s, &piece, met, seen, SOME, 0.0f);
}

static void read_runs(void *work, int64_t round, const int32_t *member, const int32_t *queries, int64_t rows)
{
    struct work *w = work;
    struct pairs *s = &w->pairs;
    struct lists *l = &w->lists;
    const struct lsh_args *p = w->args;
    const int32_t *start = l->start + round * p->length, *stop = l->stop + round * p->length;
    const int64_t first = start[queries[0]], end = stop[queries[rows - 1]];
    for (int64_t i = 0; i < rows; i++) {
        pack(s->query + i * s->keys, 1, &p->query, w->batch, w->head, w->group, queries[i], 1, p->key_size, s->keys);
        pack(s->grad + i * s->values, 1, &p->grad, w->batch, w->head, w->group, queries[i], 1, p->value_size,
             s->values);
    }
    memset(s->query + rows * s->keys, 0, (PIECE - rows) * s->keys * sizeof(float)); /* whole tiles are read */
    memset(s->grad + rows * s->values, 0, (PIECE - rows) * s->values * sizeof(float));
    begin_pairs(s, p->scaling);
    for (int64_t i = 0; i < rows; i++)
        note_sums(s, i, *row_f32(&p->log, w->batch, w->head, w->group, queries[i]),
                  *row_f32(&p->weight_grad, w->batch, w->head, w->group, queries[i]));
    note_runs(l, p, round, queries, rows);
    for (int64_t at = first; at < end; at += PIECE) {
        const int64_t count = min_i64(end - at, PIECE);
        for (int64_t j = 0; j < count; j++) {
            pack(s->key + j * s->keys, 1, &p->key, w->batch, w->head, 0, member[at + j], 1, p->key_size, s->keys);
            pack(s->value + j * s->values, 1, &p->value, w->batch, w->head, 0, member[at + j], 1, p->value_size,
                 s->values);
        }
        memset(s->key + count * s->keys, 0, (PIECE - count) * s->keys * sizeof(float)); /* whole tiles are read */
        memset(s->value + count * s->values, 0, (PIECE - count) * s->values * sizeof(float));
        hide_keys(s->bias, l, p, round, member, at, count);
        const struct seen seen = find_seen(s->bias, SOME);
        if (seen.start >= seen.end)
            continue;
        const struct met met = meet_copies(s);
        if (s->buffers.parts)
            read_rows(s, &met, &seen);
        else
            read_pairs(s, &met, &seen, count, rows, SOME);
        for (int64_t j = 0; j < count; j++) {
            add_scaled(row_f32(&p->d_key, w->batch, w->head, 0, member[at + j]), 1.0f, s->d_key + j * s->keys,
                       p->key_size);
            add_scaled(row_f32(&p->d_value, w->batch, w->head, 0, member[at + j]), 1.0f, s->d_value + j * s->values,
                       p->value_size);
        }
    }
    end_pairs(s);
    for (int64_t i = 0; i < rows; i++)
        add_scaled(row_f32(&p->d_query, w->batch, w->head, w->group, queries[i]), s->own, s->d_query + i * s->keys,
                   p->key_size);
}

static void read_task(const void *args, float *memory, int64_t task)
{
    const struct lsh_args *p = args;
    struct work work = {.args = p, .sequence = task, .batch = task / p->heads, .head = task % p->heads};
    arrange_lists(&work.lists, p, memory + arrange_pairs(&work.pairs, p->key_size, p->value_size, p->parts, memory));
    list_keys(&work.lists, p, task);
    begin_tiles(p->parts);
    for (work.group = 0; work.group < p->groups; work.group++) {
        begin(&work);
        for_runs(&work.lists, p, task, work.group, read_runs, &work);
    }
    end_tiles(p->parts);
}

/* Work through all key/value heads of a call; returns 0, 1 where there was no memory to work in, or BAD_NUMBERS. */
int bucket_softmax_backward(const struct lsh_args *p)
{
    struct pairs pairs;
    struct lists l;
    if (!fits(p))
        return BAD_NUMBERS;
    const int64_t size = arrange_pairs(&pairs, p->key_size, p->value_size, p->parts, NULL);
    return run_tasks(read_task, p, p->batches * p->heads, p->threads, size + arrange_lists(&l, p, NULL));
}

LAYOUT(bucket_softmax_backward, struct lsh_args, 0x67a7d141)
