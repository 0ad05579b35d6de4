/* The backward pass of block_softmax.c. Each key/value head is one thread's, as its queries add to the same keys. */

#include "block_softmax.h"
#include "softmax_backward.h"

/* A head's queries that meet keys. */
struct work {
    const struct problem *problem;
    struct pairs pairs;
    int64_t batch, head, group, rows;
    int64_t ahead, end; /* the next query that memory is asked for, and behind the last one */
};

/* Ask for some of the queries that come next, so that memory answers meanwhile. */
static inline void fetch_ahead(struct work *w)
{
    const struct problem *p = w->problem;
    for (int64_t row = 0; row < PIECE / 2 && w->ahead < w->end; row++, w->ahead++) {
        fetch_row(&p->query, w->batch, w->head, w->group, w->ahead, p->key_size);
        fetch_row(&p->grad, w->batch, w->head, w->group, w->ahead, p->value_size);
        fetch_row(&p->out, w->batch, w->head, w->group, w->ahead, p->value_size);
    }
}

static void read_keys(void *work, const struct keys *met)
{
    struct work *w = work;
    struct pairs *s = &w->pairs;
    const struct problem *p = w->problem;
    fetch_ahead(w);
    const operand *key = met->shared ? &p->shared_key : &p->key, *value = met->shared ? &p->shared_value : &p->value;
    const operand *d_key = met->shared ? &p->d_shared_key : &p->d_key;
    const operand *d_value = met->shared ? &p->d_shared_value : &p->d_value;
    const float *keys = s->key, *values = s->value;
    float *d_keys = place(d_key, w->batch, w->head, 0, met->at);
    float *d_values = place(d_value, w->batch, w->head, 0, met->at);
    for (int64_t j = 0; j < met->count; j++) { /* in the end gradients are added to these */
        fetch_row(d_key, w->batch, w->head, 0, met->at + j, p->key_size);
        fetch_row(d_value, w->batch, w->head, 0, met->at + j, p->value_size);
    }
    const enum shown shown = show(s->weights, met->bias, p->bias.token, w->rows, met->count, met->ahead);
    /* whole tiles are read and added to where they lie; rows that are far apart displace each other */
    const int whole = met->count == PIECE && p->key_size == s->keys && p->value_size == s->values;
    if (!whole || key->kind || key->token != s->keys)
        pack(s->key, PIECE, key, w->batch, w->head, 0, met->at, met->count, p->key_size, s->keys);
    else
        keys = place(key, w->batch, w->head, 0, met->at);
    if (!whole || value->kind || value->token != s->values)
        pack(s->value, PIECE, value, w->batch, w->head, 0, met->at, met->count, p->value_size, s->values);
    else
        values = place(value, w->batch, w->head, 0, met->at);
    if (whole) {
        const struct met in_place = {keys, values, d_keys, d_values, d_key->token, d_value->token};
        read_pairs(s, &in_place, PIECE, w->rows, shown);
        return;
    }
    const struct met copies = meet_copies(s);
    if (!read_pairs(s, &copies, met->count, w->rows, shown))
        return;
    for (int64_t j = 0; j < met->count; j++) {
        add_scaled(d_keys + j * d_key->token, 1.0f, s->d_key + j * s->keys, p->key_size);
        add_scaled(d_values + j * d_value->token, 1.0f, s->d_value + j * s->values, p->value_size);
    }
}

/* The gradient of what a query begins with: its share of the one of the output, as every value's; grad_out is
 * grad . out, without the gradient of the log. */
static void read_before(const struct work *w, int64_t group, int64_t at, const float *grad, float grad_out)
{
    const struct problem *p = w->problem;
    const int64_t row = at - p->begun;
    if (!p->before.data || row < 0)
        return;
    float *d_log = place(&p->d_before_log, w->batch, w->head, group, row), share = 0.0f;
    *d_log = 0.0f;
    if (has_before(p, w->batch, w->head, group, at)) {
        const float log = *place(&p->log, w->batch, w->head, group, at);
        share = exp_of_one(*place(&p->before_log, w->batch, w->head, group, row) - log);
        const float *before = read_row(&p->before, w->batch, w->head, group, row, p->value_size, w->pairs.value);
        *d_log = share * (dot(grad, before, p->value_size) - grad_out);
    }
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->value_size);
    write_row(&p->d_before, w->batch, w->head, group, row, share, grad, p->value_size, large);
}

/* One query block of one head. */
static void read_block(struct work *w, const struct problem *p, int64_t group, int64_t block)
{
    struct pairs *s = &w->pairs;
    const int64_t start = (p->first + block) * p->block_size, end = smaller(start + p->block_size, p->length);
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->key_size);
    for (int64_t at = start; at < end; at += PIECE) {
        w->rows = smaller(end - at, PIECE);
        w->group = group;
        w->ahead = at + PIECE;
        w->end = smaller(at + 2 * PIECE, p->length);
        pack(s->query, PIECE, &p->query, w->batch, w->head, group, at, w->rows, p->key_size, s->keys);
        pack(s->grad, PIECE, &p->grad, w->batch, w->head, group, at, w->rows, p->value_size, s->values);
        begin_pairs(s, p->scaling);
        for (int64_t i = 0; i < w->rows; i++) {
            const float *out = read_row(&p->out, w->batch, w->head, group, at + i, p->value_size, s->value);
            const float *grad = s->grad + i * s->values;
            const float log_grad = *place(&p->log_grad, w->batch, w->head, group, at + i);
            const float grad_out = dot(grad, out, p->value_size) - log_grad;
            note_sums(s, i, *place(&p->log, w->batch, w->head, group, at + i), grad_out);
            read_before(w, group, at + i, grad, grad_out);
        }
        for_keys(p, w->batch, w->head * p->groups + group, block, at, read_keys, w);
        for (int64_t i = 0; i < w->rows; i++)
            write_row(&p->d_query, w->batch, w->head, group, at + i, p->scaling, s->d_query + i * s->keys, p->key_size,
                      large);
    }
}

static void read_task(const void *problem, float *memory, int64_t task)
{
    const struct problem *p = problem;
    struct work work = {.problem = p, .batch = task / p->heads, .head = task % p->heads};
    arrange_pairs(&work.pairs, p->key_size, p->value_size, p->bfloat16, memory);
    begin_tiles(&work.pairs.rounded);
    for (int64_t group = 0; group < p->groups; group++)
        for (int64_t block = 0; block < p->blocks; block++)
            read_block(&work, p, group, block);
    end_tiles(&work.pairs.rounded);
}

/* Work through all key/value heads of a problem; returns 0, or 1 where there was no memory to work in. */
int block_softmax_backward(const struct problem *p)
{
    struct pairs pairs;
    const int64_t size = arrange_pairs(&pairs, p->key_size, p->value_size, p->bfloat16, NULL);
    return run_tasks(read_task, p, p->batches * p->heads, p->threads, size);
}
