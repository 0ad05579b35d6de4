/* The backward pass of block_softmax_fwd.c. Each key/value head is one thread's, as its queries add to the same
 * keys. */

#include "block_softmax.h"
#include "../common/online_softmax_bwd.h"

/* A head's queries that meet keys. */
struct work {
    const struct block_softmax_args *args;
    struct pairs pairs;
    int64_t batch, head, group, rows;
};

/* The head's next queries are those from `next` on. */
static void look_ahead_of(struct work *w, int64_t next)
{
    const struct block_softmax_args *p = w->args;
    struct prefetch_queue *u = &w->pairs.next;
    const int64_t rows = min_i64(PIECE, p->length - next);
    u->count = 0;
    prefetch_push(u, &p->query, w->batch, w->head, w->group, next, rows, p->key_size);
    prefetch_push(u, &p->grad, w->batch, w->head, w->group, next, rows, p->value_size);
    prefetch_push(u, &p->out, w->batch, w->head, w->group, next, rows, p->value_size);
}

/* Meet a piece in tiles. */
static void meet_tiles(struct work *w, const tensor_view *key, const tensor_view *value, const struct keys *met,
                       const struct met *gradients, const struct beginning *begun)
{
    struct pairs *s = &w->pairs;
    const struct block_softmax_args *p = w->args;
    const struct span of = {w->batch, w->head, met->at, met->count};
    struct piece piece;
    if (!find_piece(&s->pieces, name_of(p, w->batch, w->head, met), &piece))
        put_pairs_piece(s, &piece, rows_for_tiles(&s->pieces, key, &of, p->key_size, s->keys, s->key),
                        rows_for_tiles(&s->pieces, value, &of, p->value_size, s->values, s->value));
    read_pair_tiles(s, &piece, gradients, &begun->seen, begun->shown, begun->bias);
}

static void read_keys(void *work, const struct keys *met)
{
    struct work *w = work;
    struct pairs *s = &w->pairs;
    const struct block_softmax_args *p = w->args;
    if (!p->parts)
        prefetch_some(&s->next, PIECE / 2);
    const tensor_view *key = met->shared ? &p->shared_key : &p->key,
        *value = met->shared ? &p->shared_value : &p->value;
    const tensor_view *d_key = met->shared ? &p->d_shared_key : &p->d_key;
    const tensor_view *d_value = met->shared ? &p->d_shared_value : &p->d_value;
    const struct beginning begun = begin_scores(p, s->bias, met, w->rows);
    if (begun.seen.start >= begun.seen.end)
        return;
    float *d_keys = row_f32(d_key, w->batch, w->head, 0, met->at);
    float *d_values = row_f32(d_value, w->batch, w->head, 0, met->at);
    s->met.count = 0; /* in the end gradients are added to these */
    prefetch_push(&s->met, d_key, w->batch, w->head, 0, met->at, met->count, p->key_size);
    prefetch_push(&s->met, d_value, w->batch, w->head, 0, met->at, met->count, p->value_size);
    if (!p->parts)
        prefetch_some(&s->met, PIECE);
    /* whole tiles are added to where they lie */
    const int whole = met->count == PIECE && p->key_size == s->keys && p->value_size == s->values;
    struct met in_place = {s->key, s->value, d_keys, d_values, d_key->token, d_value->token};
    if (!whole)
        in_place = meet_copies(s);
    if (p->parts)
        meet_tiles(w, key, value, met, &in_place, &begun);
    else {
        const struct span of = {w->batch, w->head, met->at, met->count};
        find_rows(&s->pieces, key, value, &of, name_of(p, w->batch, w->head, met), p->key_size, p->value_size, s->keys,
                  s->values, &in_place.key, &in_place.value, s->key, s->value);
        read_pairs(s, &in_place, &begun.seen, met->count, w->rows, begun.shown);
    }
    for (int64_t j = 0; j < met->count && !whole; j++) {
        add_scaled(d_keys + j * d_key->token, 1.0f, s->d_key + j * s->keys, p->key_size);
        add_scaled(d_values + j * d_value->token, 1.0f, s->d_value + j * s->values, p->value_size);
    }
}

/* The gradient of what a query begins with: its share of the one of the output, as every value's; grad_out is
 * grad . out, without the gradient of the log. */
static void read_before(const struct work *w, int64_t at, const float *grad, float grad_out)
{
    const struct block_softmax_args *p = w->args;
    const int64_t row = at - p->begun;
    if (!p->before.data || row < 0)
        return;
    float *d_log = row_f32(&p->d_before_log, w->batch, w->head, w->group, row), share = 0.0f;
    *d_log = 0.0f;
    if (has_before(p, w->batch, w->head, w->group, at)) {
        const float log = *row_f32(&p->log, w->batch, w->head, w->group, at);
        share = exp_of_one(*row_f32(&p->before_log, w->batch, w->head, w->group, row) - log);
        const float *before = read_row(&p->before, w->batch, w->head, w->group, row, p->value_size, w->pairs.value);
        *d_log = share * (dot(grad, before, p->value_size) - grad_out);
    }
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->value_size);
    write_row(&p->d_before, w->batch, w->head, w->group, row, share, grad, p->value_size, large);
}

/* Note what a query's weights add up to, and what is subtracted from grad . value in their gradients. */
static void note_query(struct work *w, int64_t at, int64_t i, float grad_out, const float *grad)
{
    const struct block_softmax_args *p = w->args;
    const float log = *row_f32(&p->log, w->batch, w->head, w->group, at);
    const float log_grad = *row_f32(&p->log_grad, w->batch, w->head, w->group, at);
    if (!p->gate.data) {
        note_sums(&w->pairs, i, log, grad_out - log_grad);
        read_before(w, at, grad, grad_out - log_grad);
        return;
    }
    float share = 0.0f, d_log = 0.0f, d_gate = 0.0f, kept = 1.0f, grad_before = 0.0f;
    if (has_before(p, w->batch, w->head, w->group, at)) {
        const struct shares shares = find_shares(p, w->batch, w->head, w->group, at, log);
        const float *before = read_row(&p->before, w->batch, w->head, w->group, at - p->begun, p->value_size,
                                       w->pairs.value);
        grad_before = dot(grad, before, p->value_size);
        share = shares.most * shares.joint;
        kept = fmaxf(1.0f - share, 1e-30f);
        /* grad . (before - attention to the keys alone) is (grad_before - grad_out) / kept */
        d_gate = shares.joint / kept * (grad_before - grad_out);
        d_log = share * (shares.rest / kept) * (grad_before - grad_out);
    }
    /* gradients of the keys' weights are `kept` of grad's, and weights are made with that factor */
    note_sums(&w->pairs, i, log > LOWEST / 2 ? log - logf(kept) : log,
              (grad_out - share * grad_before + d_log - log_grad) / kept);
    if (at < p->begun)
        return;
    *row_f32(&p->d_before_log, w->batch, w->head, w->group, at - p->begun) = d_log;
    *row_f32(&p->d_gate, w->batch, w->head, w->group, at - p->begun) = d_gate;
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->value_size);
    write_row(&p->d_before, w->batch, w->head, w->group, at - p->begun, share, grad, p->value_size, large);
}

/* One query block of one head. */
static void read_block(struct work *w, const struct block_softmax_args *p, int64_t group, int64_t block)
{
    struct pairs *s = &w->pairs;
    const int64_t start = (p->first + block) * p->block_size, end = min_i64(start + p->block_size, p->length);
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->key_size);
    for (int64_t at = start; at < end; at += PIECE) {
        w->rows = min_i64(end - at, PIECE);
        w->group = group;
        look_ahead_of(w, at + PIECE);
        pack(s->query, PIECE, &p->query, w->batch, w->head, group, at, w->rows, p->key_size, s->keys);
        pack(s->grad, PIECE, &p->grad, w->batch, w->head, group, at, w->rows, p->value_size, s->values);
        begin_pairs(s, p->scaling);
        for (int64_t i = 0; i < w->rows; i++) {
            const float *out = read_row(&p->out, w->batch, w->head, group, at + i, p->value_size, s->value);
            const float *grad = s->grad + i * s->values;
            note_query(w, at + i, i, dot(grad, out, p->value_size), grad);
        }
        for_keys(p, w->batch, w->head * p->groups + group, block, at, read_keys, w);
        end_pairs(s);
        for (int64_t i = 0; i < w->rows; i++)
            write_row(&p->d_query, w->batch, w->head, group, at + i, s->own, s->d_query + i * s->keys, p->key_size,
                      large);
    }
}

static void read_task(const void *args, float *memory, int64_t task)
{
    const struct block_softmax_args *p = args;
    struct work work = {.args = p, .batch = task / p->heads, .head = task % p->heads};
    arrange_pairs(&work.pairs, p->key_size, p->value_size, p->parts, memory);
    begin_tiles(p->parts);
    for (int64_t group = 0; group < p->groups; group++)
        for (int64_t block = 0; block < p->blocks; block++)
            read_block(&work, p, group, block);
    end_tiles(p->parts);
}

/* Work through all key/value heads of a call; returns 0, 1 where there was no memory to work in, or BAD_NUMBERS. */
int block_softmax_backward(const struct block_softmax_args *p)
{
    struct pairs pairs;
    if (!fits(p))
        return BAD_NUMBERS;
    const int64_t size = arrange_pairs(&pairs, p->key_size, p->value_size, p->parts, NULL);
    return run_tasks(read_task, p, p->batches * p->heads, p->threads, size);
}

LAYOUT(block_softmax_backward, struct block_softmax_args, 0x53f9fad4)
