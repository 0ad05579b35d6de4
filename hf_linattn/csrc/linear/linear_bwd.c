/* Gradients of kernel attention, down to what the feature maps read.
 *
 * With g_i = factor_i d_sums_i, h_i = factor_i (d_log_i - d_sums_i . sums_i) and the weights
 * w_ij = exp(log_scale_j + c_i - c_j - top_i) of `causal_sums`, of which `factor` was kept, and checkpoints,
 *
 *     d query_i = sum_{j <= i} w_ij (g_i . value_j + h_i) key_j
 *     d key_j   = sum_{i >= j} w_ij (g_i . value_j + h_i) query_i
 *     d value_j = sum_{i >= j} w_ij (query_i . key_j) g_i
 *     d log_scale_j = key_j . d key_j
 *
 * for features query and key, which are made again. Segments are read from the last to the first: from its checkpoint
 * on, the first one from what the sequence began with, the keys of one are read from the start, and what came before
 * each of its chunks is written down; then its chunks are read from the end, with the sums over later queries, and all
 * gradients of a chunk are made at once. `bidirectional` queries see all keys: the state it left is what they read, and
 * then keys read the sums over all queries. Exponents read from the end never exceed zero either: a key's own is no
 * larger than the top of any query that sees it.
 */

#include "chunk_bwd.h"

/* g and h of the queries of one group, their features and, where a map has log scales, d_log. */
static void load_queries(struct work *w, const struct linear_bwd_args *p, int64_t batch, int64_t head, int64_t group,
                         int64_t at, int64_t count)
{
    const struct linear_args *f = &p->forward;
    struct chunk_space *s = &w->s;
    load_features(&s->query, s, f, &f->query, &f->query_map, NULL, batch, head, group, at, count);
    float *grads = matrix_write(&w->grad), *spare = matrix_write(&s->weighted);
    pack(grads, s->chunk, &p->d_sums, batch, head, group, at, count, f->value_size, s->values);
    clear(w->slope, s->chunk);
    for (int64_t i = 0; i < count; i++) {
        const float factor = *row_f32(&f->factor, batch, head, group, at + i);
        const float *sums = read_row(&f->sums, batch, head, group, at + i, f->value_size, spare);
        w->own_log[i] = p->d_log.data && factor > 0.0f ? *row_f32(&p->d_log, batch, head, group, at + i) : 0.0f;
        float *grad = grads + i * s->values;
        for (int64_t column = 0; column < s->values; column += LANES) {
            const vec scaled = factor * load(grad + column); /* rounded here: h is that of what is multiplied */
            store(grad + column, s->buffers.parts == 1 ? rounded_lanes(scaled) : scaled);
        }
        w->slope[i] = factor * w->own_log[i] - dot(grad, sums, f->value_size);
    }
}

/* Ask for the keys and values of one chunk, and for the first group of queries of another one, where there are any. */
static void look_ahead_of_chunks(struct chunk_space *s, const struct linear_bwd_args *p, int64_t batch, int64_t head,
                                 int64_t keys, int64_t queries)
{
    const struct linear_args *f = &p->forward;
    int64_t rows = keys < 0 ? 0 : min_i64(s->chunk, f->length - keys);
    s->next.count = 0;
    prefetch_push(&s->next, &f->key, batch, head, 0, keys, rows, f->input_size);
    prefetch_push(&s->next, &f->value, batch, head, 0, keys, rows, f->value_size);
    rows = queries < 0 ? 0 : min_i64(s->chunk, f->length - queries);
    prefetch_push(&s->next, &f->query, batch, head, 0, queries, rows, f->input_size);
    prefetch_push(&s->next, &f->sums, batch, head, 0, queries, rows, f->value_size);
    prefetch_push(&s->next, &p->d_sums, batch, head, 0, queries, rows, f->value_size);
}

/* `to` [keys, values] and `weights` [keys] = a state of [key_size, value_size + 1] numbers, zero if there is none. */
static void read_state(const struct chunk_space *s, const struct linear_args *f, struct matrix *to, float *weights,
                       const float *given)
{
    const int64_t width = f->value_size + 1;
    float *state = matrix_write(to);
    clear(state, s->keys * s->values);
    clear(weights, s->keys);
    for (int64_t key = 0; key < f->key_size && given; key++) {
        memcpy(state + key * s->values, given + key * width, f->value_size * sizeof(float));
        weights[key] = given[key * width + f->value_size];
    }
}

/* Let the state before the next chunk be that before this one and what its keys add. */
static void add_keys(struct work *w, const struct linear_args *f, const struct recalled *own, struct recalled *next,
                     int64_t count, int scaled, float left)
{
    struct chunk_space *s = &w->s;
    float *state = matrix_write(&next->state);
    if (scaled)
        scale_rows(matrix_write(&s->value), s->weight, s->chunk, s->values);
    for (int64_t number = 0; number < s->keys * s->values; number++)
        state[number] = left * own->state.data[number];
    for (int64_t key = 0; key < s->keys; key++)
        next->weights[key] = left * own->weights[key];
    gemm_t(s, state, s->keys, &s->value, s->key, round_up(f->value_size, TILE_ROWS), s->keys, s->chunk, 1);
    add_rows(next->weights, 1.0f, scaled ? s->weight : NULL, s->key->data, count, s->keys);
}

/* Recall what was before a segment: what was kept, or what the sequence began with, by way of `turned_state`. */
static void recall_state(struct work *w, const struct linear_args *f, int64_t batch, int64_t head, int64_t from)
{
    struct chunk_space *s = &w->s;
    struct recalled *own = w->recalled;
    const int64_t sequence = batch * f->heads + head, size = f->key_size * (f->value_size + 1);
    const float *state = w->turned_state.data;
    if (from) {
        const struct checkpoint kept = checkpoint_of(f, head, from / SEGMENT - 1);
        state = kept.state;
        memcpy(own->weights, kept.weights, s->keys * sizeof(float));
        own->log_max = *kept.log_max;
    } else {
        read_state(s, f, &w->turned_state, own->weights, f->continues ? f->state + sequence * size : NULL);
        own->log_max = first_top(f, sequence);
    }
    transpose(matrix_write(&own->state), s->keys, state, s->values, s->keys, s->values);
}

/* Read the keys of a segment from its start, for all of its chunks to be recalled. */
static void read_segment(struct work *w, const struct linear_bwd_args *p, int64_t batch, int64_t head, int64_t from,
                         int64_t to)
{
    const struct linear_args *f = &p->forward;
    struct chunk_space *s = &w->s;
    const int scaled = has_scales(f);
    struct recalled *own = w->recalled;
    float left = 1.0f;
    recall_state(w, f, batch, head, from);
    for (int64_t at = from; at < to; at += s->chunk, own++) {
        const int64_t count = min_i64(s->chunk, to - at);
        s->key = &own->key;
        look_ahead_of_chunks(s, p, batch, head, at + s->chunk < to ? at + s->chunk : -1, -1);
        const float log_max = load_keys(s, f, batch, head, at, count, scaled, own->log_max, &left);
        if (scaled)
            memcpy(own->scale, s->scale, sizeof(own->scale));
        if (at + s->chunk >= to)
            break;
        own[1].log_max = log_max;
        add_keys(w, f, own, own + 1, count, scaled, left);
    }
}

/* Gradients of the queries of one group of one chunk: its `state` [values, keys] sums up value key^T of what came
 * before, and grad_pairs [chunk, chunk] has the gradients of the pairs. */
static void write_queries(struct work *w, const struct linear_bwd_args *p, const struct recalled *own, int64_t batch,
                          int64_t head, int64_t group, int64_t at, int64_t count)
{
    const struct linear_args *f = &p->forward;
    struct chunk_space *s = &w->s;
    float *d_query = matrix_write(&w->d_query);
    for (int64_t i = 0; i < s->chunk; i++)
        for (int64_t key = 0; key < s->keys; key++)
            d_query[i * s->keys + key] = w->slope[i] * own->weights[key];
    gemm(s, d_query, s->keys, &w->grad, &own->state, s->chunk, s->keys, f->value_size, 1);
    if (!f->bidirectional) {
        if (has_scales(f))
            scale_rows(d_query, s->kept, s->chunk, s->keys);
        gemm_tril(s, d_query, &w->grad_pairs, s->key, s->keys);
    }
    reverse_features(w, f, &w->maps[group], &w->d_query, &s->query, f->query_map.weight.data != NULL,
                     p->d_query_weight || p->d_query_bias, w->own_log, &p->d_query, batch, head, group, at, count);
}

/* The largest exponent of queries that saw anything, from the end to the start of a chunk. */
static float largest_exponent(const struct work *w, const struct linear_bwd_args *p, int64_t batch, int64_t head,
                              int64_t at, int64_t count, float later)
{
    for (int64_t group = 0; group < p->forward.groups; group++)
        for (int64_t i = 0; i < count; i++)
            if (*row_f32(&p->forward.factor, batch, head, group, at + i) > 0.0f && -w->s.top[i] > later)
                later = -w->s.top[i];
    return later;
}

/* Add the queries of one group to the state. */
static void fold_queries(struct work *w, const struct linear_args *f, int64_t count)
{
    struct chunk_space *s = &w->s;
    gemm_t(s, matrix_write(&s->state), s->values, &s->query, &w->grad, round_up(f->key_size, TILE_ROWS), s->values,
           s->chunk, 1);
    add_rows(s->weights, 1.0f, w->slope, s->query.data, count, s->keys);
}

/* Add them to the gradients of the keys and values of their chunk, too; `top` is the largest exponent. */
static void add_queries(struct work *w, const struct linear_args *f, float *d_value, int64_t batch, int64_t head,
                        int64_t group, int64_t at, int64_t count, int scaled, float top)
{
    struct chunk_space *s = &w->s;
    form_pairs(&s->scores, s, &s->query, &s->turned, f->key_size, NULL, scaled);
    gemm_tril_t(s, matrix_write(&w->d_key), &w->grad_pairs, &s->query, s->keys);
    gemm_tril_t(s, d_value, &s->scores, &w->grad, s->values);
    if (scaled) {
        float *grad = matrix_write(&w->grad);
        for (int64_t i = 0; i < count; i++) {
            const float seen = *row_f32(&f->factor, batch, head, group, at + i);
            const float weight = seen > 0.0f ? exp_of_one(-s->top[i] - top) : 0.0f;
            w->slope[i] *= weight;
            for (int64_t column = 0; column < s->values; column++)
                grad[i * s->values + column] *= weight;
        }
    }
    fold_queries(w, f, count);
}

static void turn_state(struct work *w)
{
    const struct chunk_space *s = &w->s;
    transpose(matrix_write(&w->turned_state), s->keys, s->state.data, s->values, s->keys, s->values);
}

/* Begin the gradients of the keys and values of a chunk with those of later queries, which `state` [keys, values] and
 * `weights` sum up, turned, too; `later` is their largest exponent as seen from the end of the chunk. */
static void read_later(struct work *w, const struct linear_args *f, float *d_value, int scaled, float later)
{
    struct chunk_space *s = &w->s;
    float *d_key = matrix_write(&w->d_key);
    for (int64_t j = 0; j < s->chunk; j++)
        memcpy(d_key + j * s->keys, s->weights, s->keys * sizeof(float));
    gemm(s, d_key, s->keys, &s->value, &w->turned_state, s->chunk, s->keys, f->value_size, 1);
    gemm(s, d_value, s->values, s->key, &s->state, s->chunk, s->values, f->key_size, 0);
    if (!scaled)
        return;
    for (int64_t j = 0; j < s->chunk; j++)
        s->weight[j] = exp_of_one(s->exponent[j] + later + s->passed[s->chunk - 1]);
    scale_rows(d_key, s->weight, s->chunk, s->keys);
    scale_rows(d_value, s->weight, s->chunk, s->values);
}

/* Let the state of later queries count from another largest exponent: `left` of it is left. */
static void scale_state(struct chunk_space *s, float left)
{
    float *state = matrix_write(&s->state);
    for (int64_t number = 0; number < s->keys * s->values; number++)
        state[number] *= left;
    for (int64_t key = 0; key < s->keys; key++)
        s->weights[key] *= left;
}

/* Gradients of the keys and values of one chunk, whose keys are there. */
static void write_keys(struct work *w, const struct linear_bwd_args *p, const float *d_value, int64_t batch,
                       int64_t head, int64_t at, int64_t count)
{
    const struct linear_args *f = &p->forward;
    struct chunk_space *s = &w->s;
    const int large = is_large(f->batches * f->heads * f->length * f->value_size);
    for (int64_t j = 0; j < count; j++) {
        write_row(&p->d_value, batch, head, 0, at + j, 1.0f, d_value + j * s->values, f->value_size, large);
        w->slope[j] = dot(w->d_key.data + j * s->keys, s->key->data + j * s->keys, f->key_size);
        if (p->d_scale.data)
            *row_f32(&p->d_scale, batch, head, 0, at + j) = w->slope[j];
    }
    if (f->key_map.weight.data)
        pack(matrix_write(&s->input), s->chunk, &f->key, batch, head, 0, at, count, f->input_size, s->inputs);
    reverse_features(w, f, &w->maps[f->groups], &w->d_key, s->key, f->key_map.weight.data != NULL,
                     p->d_key_weight || p->d_key_bias, w->slope, &p->d_key, batch, head, 0, at, count);
}

/* All gradients of one chunk, which is recalled; returns the largest exponent of what comes after it as seen from its
 * start. */
static float read_chunk(struct work *w, const struct linear_bwd_args *p, struct recalled *own, int64_t batch,
                        int64_t head, int64_t at, float later)
{
    const struct linear_args *f = &p->forward;
    struct chunk_space *s = &w->s;
    const int scaled = has_scales(f);
    const int64_t count = min_i64(s->chunk, f->length - at);
    float left, *d_value = s->out;
    s->key = &own->key;
    if (scaled)
        memcpy(s->scale, own->scale, sizeof(own->scale));
    load_values(s, f, batch, head, at, count, scaled, own->log_max, &left);
    turn_keys(s);
    transpose(matrix_write(&w->turned_value), w->turned_value.row, s->value.data, s->values, s->chunk, s->values);
    turn_state(w);
    look_ahead_of_chunks(s, p, batch, head, at - SEGMENT, at - s->chunk);
    read_later(w, f, d_value, scaled, later);
    if (scaled) {
        later += s->passed[s->chunk - 1];
        const float top = largest_exponent(w, p, batch, head, at, count, later);
        scale_state(s, exp_of_one(later - top));
        later = top;
    }
    for (int64_t group = 0; group < f->groups; group++) {
        load_queries(w, p, batch, head, group, at, count);
        form_pairs(&w->grad_pairs, s, &w->grad, &w->turned_value, f->value_size, w->slope, scaled);
        write_queries(w, p, own, batch, head, group, at, count);
        add_queries(w, f, d_value, batch, head, group, at, count, scaled, later);
    }
    write_keys(w, p, d_value, batch, head, at, count);
    return later;
}

/* The same of all chunks where queries see all keys: `later` is the largest exponent of all of them. */
static void read_both_ways(struct work *w, const struct linear_bwd_args *p, int64_t batch, int64_t head, float later)
{
    const struct linear_args *f = &p->forward;
    struct chunk_space *s = &w->s;
    float left, *d_value = s->out;
    for (int64_t at = 0; at < f->length; at += s->chunk)
        for (int64_t group = 0; group < f->groups; group++) {
            const int64_t count = min_i64(s->chunk, f->length - at);
            look_ahead_of_chunks(s, p, batch, head, -1, at + s->chunk);
            load_queries(w, p, batch, head, group, at, count);
            write_queries(w, p, w->recalled, batch, head, group, at, count);
            fold_queries(w, f, count);
        }
    turn_state(w);
    for (int64_t at = 0; at < f->length; at += s->chunk) {
        const int64_t count = min_i64(s->chunk, f->length - at);
        look_ahead_of_chunks(s, p, batch, head, at + s->chunk, -1);
        load_keys(s, f, batch, head, at, count, has_scales(f), LOWEST, &left);
        read_later(w, f, d_value, has_scales(f), later);
        write_keys(w, p, d_value, batch, head, at, count);
    }
}

static void read_sequence(struct work *w, const struct linear_bwd_args *p, int64_t batch, int64_t head)
{
    const struct linear_args *f = &p->forward;
    struct chunk_space *s = &w->s;
    const int64_t sequence = batch * f->heads + head, width = f->value_size + 1, size = f->key_size * width;
    const int left_one = f->leaves && p->d_state;
    float later = left_one || f->bidirectional ? -f->log_max_after[sequence] : LOWEST;
    if (f->bidirectional) {
        read_state(s, f, &s->state, w->recalled->weights, f->state_after + sequence * size);
        transpose(matrix_write(&w->recalled->state), s->keys, s->state.data, s->values, s->keys, s->values);
    }
    read_state(s, f, &s->state, s->weights, left_one ? p->d_state + sequence * size : NULL);
    if (f->bidirectional)
        read_both_ways(w, p, batch, head, later);
    for (int64_t from = (segments_of(f->length) - 1) * SEGMENT; from >= 0 && !f->bidirectional; from -= SEGMENT) {
        const int64_t tokens = min_i64(SEGMENT, f->length - from);
        read_segment(w, p, batch, head, from, from + tokens);
        for (int64_t number = (tokens - 1) / s->chunk; number >= 0; number--)
            later = read_chunk(w, p, &w->recalled[number], batch, head, from + number * s->chunk, later);
    }
    const float left = has_scales(f) && f->continues ? exp_of_one(later + f->log_max[sequence]) : 1.0f;
    for (int64_t key = 0; key < f->key_size && f->continues && p->d_before; key++) {
        float *row = p->d_before + sequence * size + key * width;
        for (int64_t column = 0; column < f->value_size; column++)
            row[column] = left * s->state.data[key * s->values + column];
        row[f->value_size] = left * s->weights[key];
    }
}

static void read_task(const void *args, float *memory, int64_t task)
{
    const struct linear_bwd_args *p = args;
    const struct linear_args *f = &p->forward;
    const int64_t row = task / f->heads, head = task % f->heads;
    struct work w;
    arrange_all(&w, p, memory);
    prepare_maps(&w, p, head);
    for (int64_t number = first_of(f, row); number < first_of(f, row + 1); number++) {
        struct linear_bwd_args own = *p;
        own.forward = problem_of(f, row, number);
        tensor_view *gradients[] = {&own.d_sums, &own.d_log, &own.d_query, &own.d_key, &own.d_value, &own.d_scale};
        for (size_t i = 0; f->packed && i < sizeof(gradients) / sizeof(*gradients); i++)
            begin_at(gradients[i], f->packed[number].start);
        w.s.chunk = chunk_of(&own.forward); /* no more than there is memory for */
        begin_tiles(f->parts);
        read_sequence(&w, &own, row, head);
        end_tiles(f->parts);
    }
    for (int64_t group = 0; group < f->groups; group++)
        write_map(&w, f, &w.maps[group], p->d_query_weight, p->d_query_bias, task * f->groups + group);
    write_map(&w, f, &w.maps[f->groups], p->d_key_weight, p->d_key_bias, task);
}

/* Work through all rows; returns 0, 1 where there was no memory to work in, or BAD_NUMBERS. */
int causal_sums_backward(const struct linear_bwd_args *p)
{
    struct work w;
    if (!fits(&p->forward))
        return BAD_NUMBERS;
    return run_tasks(read_task, p, p->forward.batches * p->forward.heads, p->forward.threads,
                     arrange_all(&w, p, NULL));
}

LAYOUT(causal_sums_backward, struct linear_bwd_args, 0x9ffbf5d0)
