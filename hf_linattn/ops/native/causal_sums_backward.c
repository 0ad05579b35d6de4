/* Gradients of kernel attention, down to what the feature maps read.
 *
 * With g_i = factor_i d_sums_i, h_i = factor_i (d_log_i - d_sums_i . sums_i) and the weights
 * w_ij = exp(log_scale_j + c_i - c_j - top_i) of `causal_sums`, of which nothing but `factor` was kept,
 *
 *     d query_i = sum_{j <= i} w_ij (g_i . value_j + h_i) key_j       read from the start
 *     d key_j   = sum_{i >= j} w_ij (g_i . value_j + h_i) query_i     read from the end
 *     d value_j = sum_{i >= j} w_ij (query_i . key_j) g_i             the same
 *     d log_scale_j = key_j . d key_j
 *
 * for features query and key, which are made again. `bidirectional` queries see all keys, so that the state it left is
 * all that is read from the start, and the sums over all queries all that is read from the end. Exponents read from the
 * end never exceed zero either: a key's own is no larger than the top of any query that sees it.
 */

#include "causal_chunks_backward.h"

/* g and h of the queries of one group, their features and, where a map has log scales, d_log. */
static void load_queries(struct work *w, const struct backward *p, int64_t batch, int64_t head, int64_t group,
                         int64_t at, int64_t count)
{
    const struct problem *f = &p->forward;
    struct scratch *s = &w->s;
    load_features(s->query, s, f, &f->query, &f->query_map, NULL, batch, head, group, at, count);
    pack(w->grad, s->chunk, &p->d_sums, batch, head, group, at, count, f->value_size, s->values);
    changed(&s->factors, w->grad);
    clear(w->slope, s->chunk);
    for (int64_t i = 0; i < count; i++) {
        const float factor = *place(&f->factor, batch, head, group, at + i);
        const float *sums = read_row(&f->sums, batch, head, group, at + i, f->value_size, s->weighted);
        w->own_log[i] = p->d_log.data && factor > 0.0f ? *place(&p->d_log, batch, head, group, at + i) : 0.0f;
        float *grad = w->grad + i * s->values;
        for (int64_t column = 0; column < s->values; column += LANES) {
            const lanes scaled = factor * load(grad + column); /* rounded here: h is that of what is multiplied */
            store(grad + column, s->factors.parts == 1 ? rounded_lanes(scaled) : scaled);
        }
        w->slope[i] = factor * w->own_log[i] - dot(grad, sums, f->value_size);
    }
}

/* The next chunk begins at `next`: its keys are needed, or its first group of queries, or both. */
static void look_ahead_of_chunk(struct scratch *s, const struct backward *p, int64_t batch, int64_t head, int64_t next,
                                int of_keys, int of_queries)
{
    const struct problem *f = &p->forward;
    const int64_t rows = next < 0 ? 0 : smaller(s->chunk, f->length - next);
    s->next.count = 0;
    if (of_keys) {
        look_ahead(&s->next, &f->key, batch, head, 0, next, rows, f->input_size);
        look_ahead(&s->next, &f->value, batch, head, 0, next, rows, f->value_size);
    }
    if (of_queries) {
        look_ahead(&s->next, &f->query, batch, head, 0, next, rows, f->input_size);
        look_ahead(&s->next, &f->sums, batch, head, 0, next, rows, f->value_size);
        look_ahead(&s->next, &p->d_sums, batch, head, 0, next, rows, f->value_size);
    }
}

/* Gradients of the queries of all chunks, from the start; `state` [values, keys] sums up value key^T. */
static void read_forwards(struct work *w, const struct backward *p, int64_t batch, int64_t head)
{
    const struct problem *f = &p->forward;
    struct scratch *s = &w->s;
    const int scaled = has_scales(f), pairs = !f->bidirectional;
    const int64_t sequence = batch * f->heads + head, width = f->value_size + 1;
    const float *given = (f->bidirectional ? f->state_after : f->state) + sequence * f->key_size * width;
    float top = first_top(f, sequence), left = 1.0f;
    clear(s->state, s->keys * s->values);
    changed(&s->factors, s->state);
    clear(s->weights, s->keys);
    for (int64_t key = 0; key < f->key_size && (f->continues || f->bidirectional); key++) {
        for (int64_t column = 0; column < f->value_size; column++)
            s->state[column * s->keys + key] = given[key * width + column];
        s->weights[key] = given[key * width + f->value_size];
    }
    for (int64_t at = 0; at < f->length; at += s->chunk) {
        const int64_t count = smaller(s->chunk, f->length - at);
        look_ahead_of_chunk(s, p, batch, head, at + s->chunk, pairs, 1);
        if (pairs) {
            w->before[at / s->chunk] = top;
            top = load_keys(s, f, batch, head, at, count, scaled, top, &left);
            turn(w->turned_value, s->chunk, s->value, s->values, s->chunk, s->values);
            changed(&s->factors, w->turned_value);
        }
        for (int64_t group = 0; group < f->groups; group++) {
            load_queries(w, p, batch, head, group, at, count);
            for (int64_t i = 0; i < s->chunk; i++)
                for (int64_t key = 0; key < s->keys; key++)
                    w->d_features[i * s->keys + key] = w->slope[i] * s->weights[key];
            make_product(s, w->d_features, s->keys, w->grad, s->values, 1, s->state, s->keys, s->chunk, s->keys,
                         f->value_size, 1);
            if (pairs && scaled)
                scale_rows(w->d_features, s->kept, s->chunk, s->keys);
            if (pairs)
                form_pairs(w->grad_pairs, s, w->grad, s->values, w->turned_value, f->value_size, w->slope, scaled);
            if (pairs)
                add_earlier(s, w->d_features, w->grad_pairs, s->key, s->keys);
            reverse_features(w, f, &w->maps[group], s->query, f->query_map.weight.data != NULL,
                             p->d_query_weight != NULL, w->own_log, &p->d_query, batch, head, group, at, count);
        }
        if (!pairs)
            continue;
        if (scaled) {
            scale_rows(s->value, s->weight, s->chunk, s->values);
            changed(&s->factors, s->value);
            for (int64_t number = 0; number < s->keys * s->values; number++)
                s->state[number] *= left;
            for (int64_t key = 0; key < s->keys; key++)
                s->weights[key] *= left;
        }
        make_product(s, s->state, s->keys, s->value, 1, s->values, s->key, s->keys,
                     round_up(f->value_size, TILE_ROWS), s->keys, s->chunk, 1);
        changed(&s->factors, s->state);
        for (int64_t j = 0; j < count; j++)
            add_scaled(s->weights, scaled ? s->weight[j] : 1.0f, s->key + j * s->keys, s->keys);
    }
}

/* The largest exponent of queries that saw anything, from the end to the start of a chunk. */
static float largest_exponent(const struct work *w, const struct backward *p, int64_t batch, int64_t head, int64_t at,
                              int64_t count, float later)
{
    for (int64_t group = 0; group < p->forward.groups; group++)
        for (int64_t i = 0; i < count; i++)
            if (*place(&p->forward.factor, batch, head, group, at + i) > 0.0f && -w->s.top[i] > later)
                later = -w->s.top[i];
    return later;
}

/* Add the queries of one group to the state. */
static void fold_queries(struct work *w, const struct problem *f, int64_t count)
{
    struct scratch *s = &w->s;
    make_product(s, s->state, s->values, s->query, 1, s->keys, w->grad, s->values, round_up(f->key_size, TILE_ROWS),
                 s->values, s->chunk, 1);
    changed(&s->factors, s->state);
    for (int64_t i = 0; i < count; i++)
        add_scaled(s->weights, w->slope[i], s->query + i * s->keys, s->keys);
}

/* Add them to the gradients of the keys and values of their chunk, too; `top` is the largest exponent. */
static void add_queries(struct work *w, const struct problem *f, float *d_value, int64_t batch, int64_t head,
                        int64_t group, int64_t at, int64_t count, int scaled, float top)
{
    struct scratch *s = &w->s;
    form_pairs(w->grad_pairs, s, w->grad, s->values, w->turned_value, f->value_size, w->slope, scaled);
    form_pairs(s->scores, s, s->query, s->keys, s->turned, f->key_size, NULL, scaled);
    add_later(s, w->d_features, w->grad_pairs, s->query, s->keys);
    add_later(s, d_value, s->scores, w->grad, s->values);
    if (scaled)
        for (int64_t i = 0; i < count; i++) {
            const float seen = *place(&f->factor, batch, head, group, at + i);
            const float weight = seen > 0.0f ? exp_of_one(-s->top[i] - top) : 0.0f;
            w->slope[i] *= weight;
            for (int64_t column = 0; column < s->values; column++)
                w->grad[i * s->values + column] *= weight;
        }
    if (scaled)
        changed(&s->factors, w->grad);
    fold_queries(w, f, count);
}

/* Gradients of keys and values of one chunk; `state` [keys, values] and `weights` sum up query [g, h]^T of later ones,
 * their largest exponent `later` as seen from the end of the chunk. Returns it as seen from the start. */
static float read_chunk(struct work *w, const struct backward *p, int64_t batch, int64_t head, int64_t at, float later)
{
    const struct problem *f = &p->forward;
    struct scratch *s = &w->s;
    const int scaled = has_scales(f), pairs = !f->bidirectional;
    const int large = is_large(f->batches * f->heads * f->length * f->value_size);
    const int64_t count = smaller(s->chunk, f->length - at);
    float left, *d_value = s->out;
    load_keys(s, f, batch, head, at, count, scaled, pairs ? w->before[at / s->chunk] : LOWEST, &left);
    if (pairs)
        turn_keys(s);
    turn(w->turned_value, s->chunk, s->value, s->values, s->chunk, s->values);
    changed(&s->factors, w->turned_value);
    turn(s->turned_state, s->keys, s->state, s->values, s->keys, s->values);
    for (int64_t j = 0; j < s->chunk; j++)
        memcpy(w->d_features + j * s->keys, s->weights, s->keys * sizeof(float));
    look_ahead_of_chunk(s, p, batch, head, at - s->chunk, 1, pairs);
    make_product(s, w->d_features, s->keys, s->value, s->values, 1, s->turned_state, s->keys, s->chunk, s->keys,
                 f->value_size, 1);
    make_product(s, d_value, s->values, s->key, s->keys, 1, s->state, s->values, s->chunk, s->values, f->key_size, 0);
    if (scaled) {
        later += s->passed[s->chunk - 1];
        for (int64_t j = 0; j < s->chunk; j++)
            s->weight[j] = exp_of_one(s->exponent[j] + later);
        scale_rows(w->d_features, s->weight, s->chunk, s->keys);
        scale_rows(d_value, s->weight, s->chunk, s->values);
    }
    if (scaled && pairs) {
        const float top = largest_exponent(w, p, batch, head, at, count, later);
        left = exp_of_one(later - top);
        for (int64_t number = 0; number < s->keys * s->values; number++)
            s->state[number] *= left;
        for (int64_t key = 0; key < s->keys; key++)
            s->weights[key] *= left;
        changed(&s->factors, s->state);
        later = top;
    }
    for (int64_t group = 0; pairs && group < f->groups; group++) {
        load_queries(w, p, batch, head, group, at, count);
        add_queries(w, f, d_value, batch, head, group, at, count, scaled, later);
    }
    for (int64_t j = 0; j < count; j++) {
        write_row(&p->d_value, batch, head, 0, at + j, 1.0f, d_value + j * s->values, f->value_size, large);
        w->slope[j] = dot(w->d_features + j * s->keys, s->key + j * s->keys, f->key_size);
        if (p->d_scale.data)
            *place(&p->d_scale, batch, head, 0, at + j) = w->slope[j];
    }
    pack(s->input, s->chunk, &f->key, batch, head, 0, at, count, f->input_size, s->inputs);
    reverse_features(w, f, &w->maps[f->groups], s->key, f->key_map.weight.data != NULL, p->d_key_weight != NULL,
                     w->slope, &p->d_key, batch, head, 0, at, count);
    return later;
}

static void read_backwards(struct work *w, const struct backward *p, int64_t batch, int64_t head)
{
    const struct problem *f = &p->forward;
    struct scratch *s = &w->s;
    const int64_t sequence = batch * f->heads + head, width = f->value_size + 1, size = f->key_size * width;
    const int left_one = f->leaves && p->d_state;
    float later = left_one || f->bidirectional ? -f->log_max_after[sequence] : LOWEST;
    clear(s->state, s->keys * s->values);
    changed(&s->factors, s->state);
    clear(s->weights, s->keys);
    for (int64_t key = 0; key < f->key_size && left_one; key++) {
        const float *row = p->d_state + sequence * size + key * width;
        memcpy(s->state + key * s->values, row, f->value_size * sizeof(float));
        s->weights[key] = row[f->value_size];
    }
    for (int64_t at = 0; at < f->length && f->bidirectional; at += s->chunk)
        for (int64_t group = 0; group < f->groups; group++) {
            const int64_t count = smaller(s->chunk, f->length - at);
            load_queries(w, p, batch, head, group, at, count);
            fold_queries(w, f, count);
        }
    for (int64_t at = round_up(f->length, s->chunk) - s->chunk; at >= 0; at -= s->chunk)
        later = read_chunk(w, p, batch, head, at, later);
    const float left = has_scales(f) ? exp_of_one(later + f->log_max[sequence]) : 1.0f;
    for (int64_t key = 0; key < f->key_size && f->continues && p->d_before; key++) {
        float *row = p->d_before + sequence * size + key * width;
        for (int64_t column = 0; column < f->value_size; column++)
            row[column] = left * s->state[key * s->values + column];
        row[f->value_size] = left * s->weights[key];
    }
}

static void read_task(const void *problem, float *memory, int64_t task)
{
    const struct backward *p = problem;
    const struct problem *f = &p->forward;
    const int64_t row = task / f->heads, head = task % f->heads;
    struct work w;
    arrange_all(&w, p, memory);
    prepare_maps(&w, p, head);
    for (int64_t number = first_of(f, row); number < first_of(f, row + 1); number++) {
        struct backward own = *p;
        own.forward = problem_of(f, row, number);
        operand *gradients[] = {&own.d_sums, &own.d_log, &own.d_query, &own.d_key, &own.d_value, &own.d_scale};
        for (size_t i = 0; f->packed && i < sizeof(gradients) / sizeof(*gradients); i++)
            begin_at(gradients[i], f->packed[number].start);
        w.s.chunk = chunk_of(&own.forward); /* no more than there is memory for */
        begin_tiles(f->parts);
        read_forwards(&w, &own, row, head);
        read_backwards(&w, &own, row, head);
        end_tiles(f->parts);
    }
    for (int64_t group = 0; group < f->groups; group++)
        write_map(&w, f, &w.maps[group], p->d_query_weight, p->d_query_bias, task * f->groups + group);
    write_map(&w, f, &w.maps[f->groups], p->d_key_weight, p->d_key_bias, task);
}

/* Work through all rows; returns 0, or 1 where there was no memory to work in. */
int causal_sums_backward(const struct backward *p)
{
    struct work w;
    return run_tasks(read_task, p, p->forward.batches * p->forward.heads, p->forward.threads,
                     arrange_all(&w, p, NULL));
}
