/* Gradients of the gated delta rule, segment by segment from the last: of each the states before its chunks are made
 * again from the one that was kept, or given. With the names of delta_rule_fwd.c, g_i = dL/dout_i and D the gradient of the state
 * after a chunk,
 *
 *     dU_j = sum_{i >= j} exp(c_i - c_j) (q_i . k_j) g_i + exp(c - c_j) D^T k_j
 *     W    = dU solved back through the chunk's triangle,   W_j = dU_j - sum_{i > j} exp(c_i - c_j) (k_i . k_j) beta_i W_i
 *
 * dv = beta W and dbeta = W . E. A key is read by what corrects it, which passes -beta W on to the state and to the keys
 * before, and written with U. What log_gate does to a chunk is to multiply its readers by exp(c_i), its writers by
 * exp(-c_j) and what is left at its end by exp(c), so that
 *
 *     dc_i = q_i . dq_i + k_i . (dk_i as read) - k_i . (dk_i as written),   and D . (the state after it) for the last.
 */

#include "delta_rule.h"

/* What else the backward pass works with. */
struct back {
    struct chunk c;
    float *states, *errors;                            /* of every chunk of a segment: S before it, E */
    float *grad, *turned_state, *turned_grad;          /* D [keys, values], S^T and D^T [values, keys] */
    float *d_out, *d_update, *turned_update, *pairs;   /* rows of g; dU and W; U^T [values, CHUNK]; [CHUNK, CHUNK] */
    float *d_query, *read, *written, *update, *scaled; /* rows of gradients of Q, of K in its two parts; U; anything */
    float d_total[CHUNK];                              /* dc */
};

static int64_t back_init(struct back *b, const struct delta_args *p, float *memory)
{
    int64_t used = chunk_init(&b->c, p, memory);
    const int64_t keys = b->c.keys, values = b->c.values;
    b->states = arena_alloc(memory, &used, CHUNKS * keys * values);
    b->errors = arena_alloc(memory, &used, CHUNKS * CHUNK * values);
    b->grad = arena_alloc(memory, &used, keys * values);
    b->turned_state = arena_alloc(memory, &used, keys * values);
    b->turned_grad = arena_alloc(memory, &used, keys * values);
    b->d_out = arena_alloc(memory, &used, CHUNK * values);
    b->d_update = arena_alloc(memory, &used, CHUNK * values);
    b->turned_update = arena_alloc(memory, &used, CHUNK * values);
    b->update = arena_alloc(memory, &used, CHUNK * values);
    b->pairs = arena_alloc(memory, &used, CHUNK * CHUNK);
    b->d_query = arena_alloc(memory, &used, CHUNK * keys);
    b->read = arena_alloc(memory, &used, CHUNK * keys);
    b->written = arena_alloc(memory, &used, CHUNK * keys);
    b->scaled = arena_alloc(memory, &used, CHUNK * (keys > values ? keys : values));
    return used;
}

/* pairs = decay (left right^T), right^T being [values, CHUNK] */
static void d_pairs(struct back *b, const float *left)
{
    const struct chunk *c = &b->c;
    gemm_f32(b->pairs, CHUNK, left, c->values, 1, b->turned_update, CHUNK, CHUNK, CHUNK, c->values, 0);
    for (int64_t pair = 0; pair < CHUNK * CHUNK; pair += LANES)
        store(b->pairs + pair, load(b->pairs + pair) * load(c->decay + pair));
}

/* to [CHUNK, size] = pairs right, more what is there if `adds`, or the same of their transpose */
static void add_pairs(const struct back *b, float *to, const float *right, int64_t size, int transposed, int adds)
{
    const int64_t row = transposed ? 1 : CHUNK, step = transposed ? CHUNK : 1;
    gemm_f32(to, size, b->pairs, row, step, right, size, CHUNK, size, CHUNK, adds);
}

/* to += sign (one row . other row), for all rows of keys */
static void add_dots(float *to, float sign, const float *one, const float *other, int64_t size)
{
    for (int64_t i = 0; i < CHUNK; i++)
        to[i] += sign * dot(one + i * size, other + i * size, size);
}

/* Gradients of units into those of what was divided by its length: (d - u (u . d)) / length. */
static void write_units(const tensor_view *x, int64_t batch, int64_t head, int64_t group, int64_t at, int64_t count,
                        float *d, const float *units, const float *inverse, int64_t size, int64_t padded)
{
    for (int64_t i = 0; i < count; i++) {
        float *own = d + i * padded;
        add_scaled(own, -dot(own, units + i * padded, padded), units + i * padded, padded);
        write_row(x, batch, head, group, at + i, inverse[i], own, size, 0);
    }
}

/* The part of one group of queries: adds to dU, to the written part of dK, to D, to dc; writes dq. */
static void back_group(struct back *b, const struct delta_bwd_args *a, int64_t batch, int64_t head, int64_t group,
                       int64_t at, int64_t count)
{
    const struct delta_args *p = &a->forward;
    struct chunk *c = &b->c;
    float inverse[CHUNK];
    pack(c->query, CHUNK, &p->query, batch, head, group, at, count, p->key_size, c->keys);
    make_units(c->query, inverse, p, CHUNK, c->keys);
    pack(b->d_out, CHUNK, &a->d_out, batch, head, group, at, count, p->value_size, c->values);
    form_pairs(c->seen, c, c->query);
    gemm_f32(b->d_update, c->values, c->seen, 1, CHUNK, b->d_out, c->values, CHUNK, c->values, CHUNK, 1);
    gemm_f32(b->d_query, c->keys, b->d_out, c->values, 1, b->turned_state, c->keys, CHUNK, c->keys, c->values, 0);
    scale_rows(b->d_query, c->before, b->d_query, CHUNK, c->keys);
    d_pairs(b, b->d_out);
    add_pairs(b, b->d_query, c->key, c->keys, 0, 1);
    add_pairs(b, b->written, c->query, c->keys, 1, 1);
    scale_rows(b->scaled, c->before, b->d_out, CHUNK, c->values);
    gemm_f32(b->grad, c->values, c->query, 1, c->keys, b->scaled, c->values, c->keys, c->values, CHUNK, 1);
    add_dots(b->d_total, 1.0f, c->query, b->d_query, c->keys);
    write_units(&a->d_query, batch, head, group, at, count, b->d_query, c->query, inverse, p->key_size, c->keys);
}

/* W in the place of dU. */
static void solve_back(struct back *b)
{
    const struct chunk *c = &b->c;
    for (int64_t j = CHUNK - 1; j >= 0; j--) {
        float *row = b->d_update + j * c->values;
        for (int64_t column = 0; column < c->values; column += 2 * LANES) {
            vec first = load(row + column), second = load(row + column + LANES);
            for (int64_t i = j + 1; i < CHUNK; i++) {
                const float factor = c->own[i * CHUNK + j] * c->beta[i];
                first -= factor * load(b->d_update + i * c->values + column);
                second -= factor * load(b->d_update + i * c->values + column + LANES);
            }
            store(row + column, first);
            store(row + column + LANES, second);
        }
    }
}

/* What the state after a chunk gives its keys as written, dU, and dc of the last token; then D is that of before. */
static void back_state(struct back *b)
{
    struct chunk *c = &b->c;
    const int64_t size = c->keys * c->values;
    transpose(b->turned_grad, c->keys, b->grad, c->values, c->keys, c->values);
    transpose(b->turned_state, c->keys, c->state, c->values, c->keys, c->values);
    transpose(b->turned_update, CHUNK, b->update, c->values, CHUNK, c->values);
    gemm_f32(b->d_update, c->values, c->key, c->keys, 1, b->grad, c->values, CHUNK, c->values, c->keys, 0);
    scale_rows(b->d_update, c->behind, b->d_update, CHUNK, c->values);
    gemm_f32(b->written, c->keys, b->update, c->values, 1, b->turned_grad, c->keys, CHUNK, c->keys, c->values, 0);
    scale_rows(b->written, c->behind, b->written, CHUNK, c->keys);
    memset(b->d_total, 0, sizeof(b->d_total));
    float *last = b->d_total + CHUNK - 1;
    *last = c->left * dot(c->state, b->grad, size);
    for (int64_t j = 0; j < CHUNK; j++)
        *last += dot(c->key + j * c->keys, b->written + j * c->keys, c->keys);
    for (int64_t number = 0; number < size; number += LANES)
        store(b->grad + number, c->left * load(b->grad + number));
}

/* One chunk, whose state before it and errors were made again. */
static void back_chunk(struct back *b, const struct delta_bwd_args *a, int64_t batch, int64_t head, int64_t at,
                       int64_t count, const float *errors)
{
    const struct delta_args *p = &a->forward;
    struct chunk *c = &b->c;
    load_chunk(c, p, batch, head, at, count);
    form_pairs(c->own, c, c->key);
    scale_rows(b->update, c->beta, errors, CHUNK, c->values);
    back_state(b);
    for (int64_t group = 0; group < p->groups; group++)
        back_group(b, a, batch, head, group, at, count);
    solve_back(b);
    float *passed = c->known; /* beta W */
    scale_rows(passed, c->beta, b->d_update, CHUNK, c->values);
    d_pairs(b, passed);
    for (int64_t i = 0; i < CHUNK; i++) /* a key does not correct itself; what is passed on has a minus */
        for (int64_t j = 0; j < CHUNK; j++)
            b->pairs[i * CHUNK + j] = j < i ? -b->pairs[i * CHUNK + j] : 0.0f;
    gemm_f32(b->read, c->keys, passed, c->values, 1, b->turned_state, c->keys, CHUNK, c->keys, c->values, 0);
    for (int64_t i = 0; i < CHUNK; i++)
        for (int64_t column = 0; column < c->keys; column++)
            b->read[i * c->keys + column] *= -c->before[i];
    add_pairs(b, b->read, c->key, c->keys, 0, 1);
    add_pairs(b, b->written, c->key, c->keys, 1, 1);
    for (int64_t i = 0; i < CHUNK; i++)
        for (int64_t column = 0; column < c->values; column++)
            b->scaled[i * c->values + column] = -c->before[i] * passed[i * c->values + column];
    gemm_f32(b->grad, c->values, c->key, 1, c->keys, b->scaled, c->values, c->keys, c->values, CHUNK, 1);
    add_dots(b->d_total, 1.0f, c->key, b->read, c->keys);
    add_dots(b->d_total, -1.0f, c->key, b->written, c->keys);
    float later = 0.0f;
    for (int64_t i = CHUNK - 1; i >= 0; i--) {
        later += b->d_total[i];
        if (i >= count)
            continue;
        *row_f32(&a->d_beta, batch, head, 0, at + i) = dot(b->d_update + i * c->values, errors + i * c->values,
                                                           c->values);
        if (a->d_log_gate.data)
            *row_f32(&a->d_log_gate, batch, head, 0, at + i) = later;
        write_row(&a->d_value, batch, head, 0, at + i, 1.0f, passed + i * c->values, p->value_size, 0);
    }
    for (int64_t number = 0; number < CHUNK * c->keys; number += LANES)
        store(b->read + number, load(b->read + number) + load(b->written + number));
    write_units(&a->d_key, batch, head, 0, at, count, b->read, c->key, c->inverse, p->key_size, c->keys);
}

static void back_sequence(const void *args, float *memory, int64_t task)
{
    const struct delta_bwd_args *a = args;
    const struct delta_args *p = &a->forward;
    const int64_t batch = task / p->heads, head = task % p->heads, size = p->key_size * p->value_size;
    struct back b;
    back_init(&b, p, memory);
    struct chunk *c = &b.c;
    float *state = c->state;
    const int64_t padded = c->keys * c->values;
    load_state(b.grad, state_of(a->d_state, p, task), p, c);
    for (int64_t segment = (p->length + SEGMENT - 1) / SEGMENT - 1; segment >= 0; segment--) {
        const int64_t first = segment * SEGMENT, count = min_i64(SEGMENT, p->length - first);
        load_state(state, segment ? checkpoint_of(p, task, segment) : state_of(p->state, p, task), p, c);
        for (int64_t at = 0; at < count; at += CHUNK) {
            float *errors = b.errors + at * c->values;
            memcpy(b.states + at / CHUNK * padded, state, padded * sizeof(float));
            load_chunk(c, p, batch, head, first + at, min_i64(CHUNK, count - at));
            solve_chunk(c);
            memcpy(errors, c->value, CHUNK * c->values * sizeof(float));
            scale_rows(c->value, c->beta, c->value, CHUNK, c->values);
            fold_chunk(c, c->value, c->known);
        }
        for (int64_t at = (count - 1) / CHUNK * CHUNK; at >= 0; at -= CHUNK) {
            c->state = b.states + at / CHUNK * padded;
            back_chunk(&b, a, batch, head, first + at, min_i64(CHUNK, count - at), b.errors + at * c->values);
        }
        c->state = state;
    }
    if (a->d_before)
        save_state(a->d_before + task * size, b.grad, p, c);
}

/* Gradients of all sequences of a call; returns 0, or 1 where there was no memory to work in. */
int delta_rule_backward(const struct delta_bwd_args *a)
{
    struct back b;
    const struct delta_args *p = &a->forward;
    return run_tasks(back_sequence, a, p->batches * p->heads, p->threads, back_init(&b, p, NULL));
}

LAYOUT(delta_rule_backward, struct delta_bwd_args, 0xa82bcd7a)
