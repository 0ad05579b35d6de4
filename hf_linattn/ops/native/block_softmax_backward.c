/* The backward pass of block_softmax.c: weights are made again from the queries, the keys and `log`.
 *
 *     weight_ij = exp(scaling query_i . key_j + bias_ij - log_i)
 *     slope_ij = weight_ij (grad_i . value_j - weight_grad_i)
 *     d_query_i = scaling sum_j slope_ij key_j,  d_key_j += scaling sum_i slope_ij query_i,  d_value_j += sum_i weight_ij grad_i
 *
 * with weight_grad_i = grad_i . out_i. Each key/value head is one thread's, as its queries add to the same keys.
 */

#include "block_softmax.h"

/* A head's queries that meet keys. Rows of keys and of values are padded to `keys` and `values` numbers. */
struct work {
    const struct problem *problem;
    float *query, *grad, *d_query; /* [PIECE, keys or values], the queries already scaled */
    float *key, *turned_key, *value, *turned_value, *weights, *slopes, *d_key, *d_value;
    float log[PIECE], weight_grad[PIECE];
    int64_t keys, values, batch, head, rows;
};

static int64_t arrange_work(struct work *w, const struct problem *p, float *memory)
{
    int64_t used = 0;
    w->problem = p;
    w->keys = round_up(p->key_size, TILE_COLUMNS);
    w->values = round_up(p->value_size, TILE_COLUMNS);
    float **of_keys[] = {&w->query, &w->d_query, &w->key, &w->turned_key, &w->d_key};
    float **of_values[] = {&w->grad, &w->value, &w->turned_value, &w->d_value};
    for (int part = 0; part < 5; part++)
        *of_keys[part] = take(memory, &used, PIECE * w->keys);
    for (int part = 0; part < 4; part++)
        *of_values[part] = take(memory, &used, PIECE * w->values);
    w->weights = take(memory, &used, PIECE * PIECE);
    w->slopes = take(memory, &used, PIECE * PIECE);
    return used;
}

/* out [rows, columns] += left right, left being read in steps of its own; rows and columns are whole tiles */
static void add_products(float *out, int64_t columns, const float *left, int64_t left_row, int64_t left_step,
                         const float *right, int64_t rows, int64_t steps)
{
    for (int64_t row = 0; row < rows; row += TILE_ROWS)
        for (int64_t column = 0; column < columns; column += TILE_COLUMNS)
            add_tile(out + row * columns + column, columns, left + row * left_row, left_row, left_step,
                     right + column, columns, steps);
}

/* Weights and slopes of `rows` queries from `row` on for the keys from `first` to `last`, `count` of them there. */
static void weigh_again(struct work *w, const struct keys *met, int64_t row, int64_t rows, int64_t first, int64_t last)
{
    const struct problem *p = w->problem;
    float *weights = w->weights + row * PIECE, *slopes = w->slopes + row * PIECE;
    for (int64_t column = first; column < last; column += TILE_COLUMNS) {
        add_tile(weights + column, PIECE, w->query + row * w->keys, w->keys, 1, w->turned_key + column, PIECE,
                 p->key_size);
        add_tile(slopes + column, PIECE, w->grad + row * w->values, w->values, 1, w->turned_value + column, PIECE,
                 p->value_size);
    }
    for (int64_t i = 0; i < rows; i++) {
        hide(weights + i * PIECE, met->bias ? met->bias + (row + i) * p->bias.token : NULL, first, last,
             met->bias ? met->count : smaller(met->count, met->ahead + row + i + 1));
        for (int64_t j = first; j < last; j += LANES) {
            const lanes weight = exp_of(load(weights + i * PIECE + j) - w->log[row + i]);
            store(weights + i * PIECE + j, weight);
            store(slopes + i * PIECE + j, weight * (load(slopes + i * PIECE + j) - w->weight_grad[row + i]));
        }
    }
}

/* Add rows to those of an operand. */
static void add_rows(const operand *to, int64_t batch, int64_t head, int64_t at, const float *from, int64_t count,
                     int64_t size, int64_t padded)
{
    for (int64_t row = 0; row < count; row++) {
        float *out = place(to, batch, head, 0, at + row);
        for (int64_t column = 0; column < size; column++)
            out[column] += from[row * padded + column];
    }
}

static void read_keys(void *work, const struct keys *met)
{
    struct work *w = work;
    const struct problem *p = w->problem;
    const operand *key = met->shared ? &p->shared_key : &p->key, *value = met->shared ? &p->shared_value : &p->value;
    pack(w->key, PIECE, place(key, w->batch, w->head, 0, met->at), key->token, met->count, p->key_size, w->keys);
    pack(w->value, PIECE, place(value, w->batch, w->head, 0, met->at), value->token, met->count, p->value_size,
         w->values);
    turn(w->turned_key, PIECE, w->key, w->keys, PIECE, w->keys);
    turn(w->turned_value, PIECE, w->value, w->values, PIECE, w->values);
    memset(w->weights, 0, PIECE * PIECE * sizeof(float));
    memset(w->slopes, 0, PIECE * PIECE * sizeof(float));
    int any = 0;
    for (int64_t row = 0; row < w->rows; row += TILE_ROWS) {
        int64_t first, last;
        const int64_t rows = smaller(w->rows - row, TILE_ROWS);
        if (!find_seen(met->bias ? met->bias + row * p->bias.token : NULL, p->bias.token, rows, met->count,
                       met->ahead + row, &first, &last))
            continue;
        weigh_again(w, met, row, rows, first, last);
        any = 1;
    }
    if (!any)
        return;
    const int64_t rows = round_up(w->rows, TILE_ROWS), count = round_up(met->count, TILE_ROWS);
    memset(w->d_key, 0, PIECE * w->keys * sizeof(float));
    memset(w->d_value, 0, PIECE * w->values * sizeof(float));
    add_products(w->d_value, w->values, w->weights, 1, PIECE, w->grad, count, w->rows);
    add_products(w->d_key, w->keys, w->slopes, 1, PIECE, w->query, count, w->rows);
    add_products(w->d_query, w->keys, w->slopes, PIECE, 1, w->key, rows, met->count);
    add_rows(met->shared ? &p->d_shared_key : &p->d_key, w->batch, w->head, met->at, w->d_key, met->count, p->key_size,
             w->keys);
    add_rows(met->shared ? &p->d_shared_value : &p->d_value, w->batch, w->head, met->at, w->d_value, met->count,
             p->value_size, w->values);
}

/* One query block of one head. */
static void read_block(struct work *w, const struct problem *p, int64_t group, int64_t block)
{
    const int64_t start = (p->first + block) * p->block_size, end = smaller(start + p->block_size, p->length);
    for (int64_t at = start; at < end; at += PIECE) {
        w->rows = smaller(end - at, PIECE);
        pack(w->query, PIECE, place(&p->query, w->batch, w->head, group, at), p->query.token, w->rows, p->key_size,
             w->keys);
        pack(w->grad, PIECE, place(&p->grad, w->batch, w->head, group, at), p->grad.token, w->rows, p->value_size,
             w->values);
        for (int64_t number = 0; number < w->rows * w->keys; number++)
            w->query[number] *= p->scaling;
        for (int64_t i = 0; i < w->rows; i++) {
            const float log = *place(&p->log, w->batch, w->head, group, at + i);
            w->log[i] = log > LOWEST / 2 ? log : 0.0f; /* without keys all scores are LOWEST, and weights zero */
            w->weight_grad[i] = *place(&p->weight_grad, w->batch, w->head, group, at + i);
        }
        memset(w->d_query, 0, PIECE * w->keys * sizeof(float));
        for_keys(p, w->batch, w->head * p->groups + group, block, at, read_keys, w);
        for (int64_t i = 0; i < w->rows; i++) {
            float *out = place(&p->d_query, w->batch, w->head, group, at + i);
            for (int64_t column = 0; column < p->key_size; column++)
                out[column] = p->scaling * w->d_query[i * w->keys + column];
        }
    }
}

static void read_task(const void *problem, float *memory, int64_t task)
{
    const struct problem *p = problem;
    struct work work;
    arrange_work(&work, p, memory);
    work.batch = task / p->heads;
    work.head = task % p->heads;
    for (int64_t group = 0; group < p->groups; group++)
        for (int64_t block = 0; block < p->blocks; block++)
            read_block(&work, p, group, block);
}

/* Work through all key/value heads of a problem; returns 0, or 1 where there was no memory to work in. */
int block_softmax_backward(const struct problem *p)
{
    struct work work;
    return run_tasks(read_task, p, p->batches * p->heads, p->threads, arrange_work(&work, p, NULL));
}
