/* Causal sums over keys, for many sequences side by side, in tiles that stay in registers and in the first caches.
 *
 * For every query i of a sequence, with c the running sum of log_decay,
 *
 *     sums_i = sum_{j <= i} exp(log_scale_j + c_i - c_j - top_i) (query_i . key_j) value_j
 *
 * top_i being the largest exponent among them (zero without log scales), continued from and into a state
 *
 *     state = sum_j exp(log_scale_j + c_N - c_j - log_max) key_j value_j^T.
 *
 * `normalise` divides them by the same sums with a column of ones in the place of the values. That column is the last
 * one of the state then. Otherwise they are multiplied by exp(row_scale_i + top_i) where row scales are given.
 *
 * Chunks of CHUNK tokens are read in order: pairs inside a chunk are formed directly, those before it are in the
 * state. `bidirectional` queries see all keys of their sequence instead, without log decay. What is no feature yet
 * becomes one, chunk by chunk, through a `feature_map`.
 */

#include "linear.h"

/* What row i is multiplied by in the end; queries that see all keys have no pairs: all are in the state before. */
static float last_factor(const struct chunk_space *s, const struct linear_args *p, int64_t i, int scaled,
                         const float *row_scale)
{
    if (!p->normalise)
        return row_scale ? exp_of_one(*row_scale + (scaled ? s->top[i] + s->passed[i] : 0.0f)) : 1.0f;
    vec earlier = {0}, own = {0};
    for (int64_t key = 0; key < s->keys; key += LANES)
        earlier += load(s->query.data + i * s->keys + key) * load(s->weights + key);
    for (int64_t j = 0; j <= i && !p->bidirectional; j += LANES)
        own += load(s->scores.data + i * s->scores.row + j);
    const float weight = sum_of(own + (scaled ? s->kept[i] : 1.0f) * earlier);
    return weight < p->least_weight ? 0.0f : 1.0f / weight; /* NaN of NaN */
}

/* Sums and factor of the queries of one group over one chunk; `at` is its first token. */
static void read_chunk(struct chunk_space *s, const struct linear_args *p, int64_t batch, int64_t head, int64_t group,
                       int64_t at, int64_t count, int scaled)
{
    memset(s->query_scale, 0, sizeof(s->query_scale));
    load_features(&s->query, s, p, &p->query, &p->query_map, p->activation == EXPONENTIAL ? s->query_scale : NULL,
                  batch, head, group, at, count);
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->value_size);
    const int64_t others = s->next.count, last = group == p->groups - 1;
    const int64_t next = last ? at + s->chunk : at;
    prefetch_push(&s->next, &p->query, batch, head, last ? 0 : group + 1, next, min_i64(s->chunk, p->length - next),
               p->input_size);
    prefetch_push(&s->next, &p->sums, batch, head, group, at, large ? 0 : count, p->value_size);
    gemm(s, s->out, s->values, &s->query, &s->state, s->chunk, s->values, p->key_size, 0);
    for (int64_t i = 0; i < s->chunk && scaled; i++)
        for (int64_t column = 0; column < s->values; column++)
            s->out[i * s->values + column] *= s->kept[i];
    if (!p->bidirectional) {
        form_pairs(&s->scores, s, &s->query, &s->turned, p->key_size, NULL, scaled);
        gemm_tril(s, s->out, &s->scores, &s->value, s->values);
    }
    s->next.count = others;
    const float *row_scale = p->row_scale.data ? row_f32(&p->row_scale, batch, head, group, at) : NULL;
    float *factors = row_f32(&p->factor, batch, head, group, at), *tops = row_f32(&p->top, batch, head, group, at);
    for (int64_t i = 0; i < count; i++) {
        const float *own = row_scale ? row_scale + i * p->row_scale.token : NULL;
        const float factor = last_factor(s, p, i, scaled, own);
        write_row(&p->sums, batch, head, group, at + i, factor, s->out + i * s->values, p->value_size, large);
        factors[i * p->factor.token] = factor;
        tops[i * p->top.token] = (scaled ? s->top[i] + s->passed[i] : 0.0f) + s->query_scale[i];
    }
}

/* state = left state + sum_j weight_j key_j value_j^T */
static void fold_chunk(struct chunk_space *s, const struct linear_args *p, int scaled, float left)
{
    float *state = matrix_write(&s->state);
    struct matrix *value = &s->value;
    if (scaled) {
        value = &s->weighted;
        float *weighted = matrix_write(value);
        for (int64_t j = 0; j < s->chunk; j++)
            for (int64_t column = 0; column < s->values; column++)
                weighted[j * s->values + column] = s->weight[j] * s->value.data[j * s->values + column];
        for (int64_t number = 0; number < s->keys * s->values; number++)
            state[number] *= left;
    }
    const int64_t rows = round_up(p->key_size, TILE_ROWS);
    if (s->buffers.parts && !p->bidirectional) /* tiles of these rows take less time */
        gemm(s, state, s->values, &s->turned, value, rows, s->values, s->chunk, 1);
    else
        gemm_t(s, state, s->values, s->key, value, rows, s->values, s->chunk, 1);
    if (p->normalise)
        add_rows(s->weights, scaled ? left : 1.0f, scaled ? s->weight : NULL, s->key->data, s->chunk, s->keys);
}

static void read_sequence(struct chunk_space *s, const struct linear_args *p, int64_t batch, int64_t head)
{
    const int scaled = has_scales(p);
    const int64_t sequence = batch * p->heads + head, width = p->value_size + (p->normalise ? 1 : 0);
    const float *given = p->state + sequence * p->key_size * width;
    float *after = p->state_after + sequence * p->key_size * width, before = first_top(p, sequence), left = 1.0f;
    float *state = matrix_write(&s->state);
    memset(state, 0, s->keys * s->values * sizeof(float));
    memset(s->weights, 0, s->keys * sizeof(float));
    for (int64_t key = 0; key < p->key_size && p->continues; key++) {
        memcpy(state + key * s->values, given + key * width, p->value_size * sizeof(float));
        s->weights[key] = p->normalise ? given[key * width + p->value_size] : 0.0f;
    }
    for (int64_t at = 0; at < p->length; at += s->chunk) {
        const int64_t count = min_i64(s->chunk, p->length - at);
        if (p->kept_states && at && at % SEGMENT == 0) {
            const struct checkpoint kept = checkpoint_of(p, head, at / SEGMENT - 1);
            memcpy(kept.state, s->state.data, s->keys * s->values * sizeof(float));
            memcpy(kept.weights, s->weights, s->keys * sizeof(float));
            *kept.log_max = before;
        }
        s->next.count = 0;
        const int64_t next = at + s->chunk, rows = min_i64(s->chunk, p->length - next);
        prefetch_push(&s->next, &p->key, batch, head, 0, next, rows, p->input_size);
        prefetch_push(&s->next, &p->value, batch, head, 0, next, rows, p->value_size);
        before = load_keys(s, p, batch, head, at, count, scaled, before, &left);
        if (!p->bidirectional)
            turn_keys(s);
        for (int64_t group = 0; group < p->groups && !p->bidirectional; group++)
            read_chunk(s, p, batch, head, group, at, count, scaled);
        fold_chunk(s, p, scaled, left);
    }
    s->next.count = 0;
    for (int64_t at = 0; at < p->length && p->bidirectional; at += s->chunk)
        for (int64_t group = 0; group < p->groups; group++)
            read_chunk(s, p, batch, head, group, at, min_i64(s->chunk, p->length - at), 0);
    if (!p->leaves)
        return;
    for (int64_t key = 0; key < p->key_size; key++) {
        memcpy(after + key * width, s->state.data + key * s->values, p->value_size * sizeof(float));
        if (p->normalise)
            after[key * width + p->value_size] = s->weights[key];
    }
    p->log_max_after[sequence] = before;
}

static int64_t forward_init(struct chunk_space *s, struct matrix *key, const struct linear_args *p, float *memory)
{
    int64_t used = chunk_space_init(s, p, memory);
    if (p->bidirectional) /* one product for each chunk: all of the next one is asked for beside it */
        s->fetched = max_i64(ROWS_AHEAD, SLAB * TILE_COLUMNS / s->values);
    *key = matrix_alloc(memory, &used, s->chunk, s->keys, p->parts, KEEP_NONE);
    s->key = key;
    return used;
}

static void read_task(const void *args, float *memory, int64_t task)
{
    const struct linear_args *p = args;
    const int64_t row = task / p->heads, head = task % p->heads;
    struct chunk_space s;
    struct matrix key;
    for (int64_t number = first_of(p, row); number < first_of(p, row + 1); number++) {
        const struct linear_args own = problem_of(p, row, number);
        forward_init(&s, &key, &own, memory);
        begin_tiles(p->parts);
        read_sequence(&s, &own, row, head);
        end_tiles(p->parts);
    }
}

/* Work through all rows of a call; returns 0, 1 where there was no memory to work in, or BAD_NUMBERS. */
int causal_sums(const struct linear_args *p)
{
    struct chunk_space s;
    struct matrix key;
    if (!fits(p))
        return BAD_NUMBERS;
    return run_tasks(read_task, p, p->batches * p->heads, p->threads, forward_init(&s, &key, p, NULL));
}

LAYOUT(causal_sums, struct linear_args, 0x85260022)
