/* The gated delta rule, for many sequences side by side: what a key is wrong about is what it writes.
 *
 *     S_i = g_i (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T,   out_i = S_i^T q_i,   g_i = exp(log_gate_i)
 *
 * keys and queries being divided by their length. After the state S, in a chunk of CHUNK tokens and with c_i the sum of
 * log_gate since the chunk began, U = beta E is one triangular system,
 *
 *     E_i = v_i - exp(c_i) S^T k_i - sum_{j < i} exp(c_i - c_j) (k_i . k_j) U_j,
 *
 * which is solved from row to row; the rest are products (Yang et al. 2024, arXiv 2406.06484 and 2412.06464):
 *
 *     out_i = exp(c_i) S^T q_i + sum_{j <= i} exp(c_i - c_j) (q_i . k_j) U_j,   S = exp(c) S + sum_j exp(c - c_j) k_j U_j^T
 */

#include "delta_rule.h"

/* Rows of output of the queries of one group over one chunk. */
static void read_chunk(struct chunk *c, const struct delta_args *p, int64_t batch, int64_t head, int64_t group,
                       int64_t at, int64_t count, const float *update)
{
    float inverse[CHUNK];
    pack(c->query, CHUNK, &p->query, batch, head, group, at, count, p->key_size, c->keys);
    make_units(c->query, inverse, p, CHUNK, c->keys);
    gemm_f32(c->out, c->values, c->query, c->keys, 1, c->state, c->values, CHUNK, c->values, c->keys, 0);
    scale_rows(c->out, c->before, c->out, CHUNK, c->values);
    form_pairs(c->seen, c, c->query);
    for (int64_t row = 0; row < CHUNK; row += TILE_ROWS)
        gemm_f32(c->out + row * c->values, c->values, c->seen + row * CHUNK, CHUNK, 1, update, c->values,
                     TILE_ROWS, c->values, row + TILE_ROWS, 1);
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->value_size);
    for (int64_t i = 0; i < count; i++)
        write_row(&p->out, batch, head, group, at + i, 1.0f, c->out + i * c->values, p->value_size, large);
}

static void read_sequence(const void *args, float *memory, int64_t task)
{
    const struct delta_args *p = args;
    const int64_t batch = task / p->heads, head = task % p->heads, size = p->key_size * p->value_size;
    struct chunk c;
    chunk_init(&c, p, memory);
    load_state(c.state, state_of(p->state, p, task), p, &c);
    for (int64_t at = 0; at < p->length; at += CHUNK) {
        const int64_t count = min_i64(CHUNK, p->length - at);
        if (p->kept_states && at && at % SEGMENT == 0)
            save_state(checkpoint_of(p, task, at / SEGMENT), c.state, p, &c);
        load_chunk(&c, p, batch, head, at, count);
        solve_chunk(&c);
        scale_rows(c.value, c.beta, c.value, CHUNK, c.values);
        for (int64_t group = 0; group < p->groups; group++)
            read_chunk(&c, p, batch, head, group, at, count, c.value);
        fold_chunk(&c, c.value, c.known);
    }
    save_state(p->state_after + task * size, c.state, p, &c);
}

/* Work through all sequences of a call; returns 0, or 1 where there was no memory to work in. */
int delta_rule(const struct delta_args *p)
{
    struct chunk c;
    return run_tasks(read_sequence, p, p->batches * p->heads, p->threads, chunk_init(&c, p, NULL));
}

/* One more token of a sequence, as in decoding: what it changes in the state, which is then read. */
static void read_token(const void *args, float *memory, int64_t task)
{
    const struct delta_args *p = args;
    const int64_t batch = task / p->heads, head = task % p->heads;
    struct chunk c;
    chunk_init(&c, p, memory);
    const float *before = p->state + task * p->key_size * p->value_size;
    float *after = p->state_after + task * p->key_size * p->value_size, inverse;
    const float beta = *row_f32(&p->beta, batch, head, 0, 0);
    const float left = p->log_gate.data ? exp_of_one(*row_f32(&p->log_gate, batch, head, 0, 0)) : 1.0f;
    pack(c.key, 1, &p->key, batch, head, 0, 0, 1, p->key_size, c.keys);
    pack(c.value, 1, &p->value, batch, head, 0, 0, 1, p->value_size, c.values);
    make_units(c.key, &inverse, p, 1, c.keys);
    memset(c.known, 0, p->value_size * sizeof(float));
    for (int64_t key = 0; key < p->key_size; key++)
        add_scaled(c.known, left * c.key[key], before + key * p->value_size, p->value_size);
    for (int64_t column = 0; column < p->value_size; column++)
        c.value[column] = beta * (c.value[column] - c.known[column]);
    for (int64_t key = 0; key < p->key_size; key++)
        for (int64_t column = 0; column < p->value_size; column++) {
            const int64_t place = key * p->value_size + column;
            after[place] = left * before[place] + c.key[key] * c.value[column];
        }
    for (int64_t group = 0; group < p->groups; group++) {
        pack(c.query, 1, &p->query, batch, head, group, 0, 1, p->key_size, c.keys);
        make_units(c.query, &inverse, p, 1, c.keys);
        memset(c.out, 0, p->value_size * sizeof(float));
        for (int64_t key = 0; key < p->key_size; key++)
            add_scaled(c.out, c.query[key], after + key * p->value_size, p->value_size);
        write_row(&p->out, batch, head, group, 0, 1.0f, c.out, p->value_size, 0);
    }
}

/* Read one token of every sequence; returns 0, or 1 where there was no memory to work in. */
int delta_rule_step(const struct delta_args *p)
{
    struct chunk c;
    return run_tasks(read_token, p, p->batches * p->heads, p->threads, chunk_init(&c, p, NULL));
}

LAYOUT(delta_rule, struct delta_args, 0xaea54dad)
LAYOUT(delta_rule_step, struct delta_args, 0xaea54dad)
