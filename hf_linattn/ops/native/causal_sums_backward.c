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
 * all that is read from the start, and the sums over all queries all that is read from the end. Exponents read from the end never exceed zero either: a key's own
 * is no larger than the top of any query that sees it.
 */

#include "causal_chunks.h"

struct backward {
    struct problem forward;  /* sums, factor, log_max_after: as it left them */
    operand d_sums, d_log;   /* d_log, of the log of what all weights add up to: data is NULL where there is none */
    operand d_query, d_key, d_value, d_scale; /* d_scale [batches, heads, length]; data may be NULL */
    /* [batches, heads (, groups), input_size, columns] and [.., columns]; NULL where nobody needs them */
    float *d_query_weight, *d_query_bias, *d_key_weight, *d_key_bias;
    const float *d_state; /* of what it left as state; NULL where there is none */
    float *d_before;      /* of the state it began with */
};

/* One map and what its gradients need. */
struct reverse_map {
    float *turned;            /* weight, [columns, inputs] */
    float *d_weight, *d_bias; /* [inputs, columns], [columns] */
};

struct work {
    struct scratch s;
    float *grad, *slope, *own_log, *grad_pairs, *d_features, *d_input, *turned_value, *turned_state, *before, *weights;
    /* grad [chunk, values] is g, slope [chunk] is h; before [chunks]: log_max at the start of each chunk */
    struct reverse_map *maps; /* of the queries of each group, then of the keys */
    int64_t columns;          /* of a weight, padded */
};

static int64_t arrange_all(struct work *w, const struct backward *p, float *memory)
{
    struct scratch *s = &w->s;
    int64_t used = arrange(s, &p->forward, memory), count = p->forward.groups + 1;
    w->columns = p->forward.activation == SOFTMAX_PAIR ? round_up(p->forward.key_size / 2, TILE_COLUMNS) : s->keys;
    w->grad = take(memory, &used, s->chunk * s->values);
    w->slope = take(memory, &used, s->chunk);
    w->own_log = take(memory, &used, s->chunk);
    w->grad_pairs = take(memory, &used, s->chunk * s->chunk);
    w->d_features = take(memory, &used, s->chunk * s->keys);
    w->d_input = take(memory, &used, s->chunk * s->inputs);
    w->turned_value = take(memory, &used, s->chunk * s->values);
    w->turned_state = take(memory, &used, s->keys * s->values);
    w->weights = take(memory, &used, s->keys);
    w->before = take(memory, &used, p->forward.length / s->chunk + 1);
    w->maps = take(memory, &used, round_up(count * sizeof(struct reverse_map), sizeof(float)) / sizeof(float));
    for (int64_t map = 0; map < count; map++) {
        struct reverse_map found = {
            take(memory, &used, w->columns * s->inputs),
            take(memory, &used, w->columns * s->inputs),
            take(memory, &used, w->columns),
        };
        if (memory)
            w->maps[map] = found;
    }
    return used;
}

static void clear(float *numbers, int64_t count) { memset(numbers, 0, count * sizeof(float)); }

static void scale_rows(float *rows, const float *factor, int64_t count, int64_t size)
{
    for (int64_t row = 0; row < count; row++)
        for (int64_t column = 0; column < size; column++)
            rows[row * size + column] *= factor[row];
}

/* Turn the weights, and begin with gradients of zero. */
static void prepare_maps(struct work *w, const struct backward *p, int64_t head)
{
    const struct problem *f = &p->forward;
    for (int64_t group = 0; group <= f->groups; group++) {
        const operand *weight = group < f->groups ? &f->query_map.weight : &f->key_map.weight;
        struct reverse_map *map = &w->maps[group];
        if (!weight->data)
            continue;
        float *padded = map->d_weight;
        clear(padded, w->s.inputs * w->columns);
        for (int64_t row = 0; row < f->input_size; row++)
            memcpy(padded + row * w->columns, place(weight, 0, head, group < f->groups ? group : 0, row),
                   w->columns * sizeof(float));
        turn(map->turned, w->s.inputs, padded, w->columns, w->s.inputs, w->columns);
        clear(map->d_weight, w->s.inputs * w->columns);
        clear(map->d_bias, w->columns);
    }
}

static void write_map(const struct work *w, const struct problem *f, const struct reverse_map *map, float *d_weight,
                      float *d_bias, int64_t number)
{
    const int64_t columns = f->activation == SOFTMAX_PAIR ? f->key_size / 2 : f->key_size;
    for (int64_t row = 0; row < f->input_size && d_weight; row++)
        memcpy(d_weight + (number * f->input_size + row) * columns, map->d_weight + row * w->columns,
               columns * sizeof(float));
    if (d_bias)
        memcpy(d_bias + number * columns, map->d_bias, columns * sizeof(float));
}

/* d z from d phi(z), in place, for one row of features. */
static void reverse_activation(float *d, const float *features, const struct problem *p)
{
    const int64_t half = p->key_size / 2;
    switch (p->activation) {
    case ELU:
        for (int64_t key = 0; key < p->key_size; key++)
            d[key] *= features[key] < 1.0f ? features[key] : 1.0f;
        break;
    case RELU:
        for (int64_t key = 0; key < p->key_size; key++)
            d[key] = features[key] > 0.0f ? d[key] : 0.0f;
        break;
    case EXPONENTIAL:
        for (int64_t key = 0; key < p->key_size; key++)
            d[key] *= features[key];
        break;
    case SOFTMAX_PAIR: {
        const float mean = dot(d, features, half), opposite = dot(d + half, features + half, half);
        for (int64_t key = 0; key < half; key++)
            d[key] = features[key] * (d[key] - mean) - features[half + key] * (d[half + key] - opposite);
        clear(d + half, half);
    }
    }
}

/* From d_features and the features to the gradient of what lies in `input`; `d_scale` is that of the log scales. */
static void reverse_features(struct work *w, const struct problem *p, struct reverse_map *map, const float *features,
                             int has_weight, int learned, const float *d_scale, const operand *to, int64_t batch,
                             int64_t head, int64_t group, int64_t at, int64_t count)
{
    struct scratch *s = &w->s;
    for (int64_t row = 0; row < count; row++)
        reverse_activation(w->d_features + row * s->keys, features + row * s->keys, p);
    const float *from = w->d_features;
    int64_t size = s->keys;
    if (has_weight) {
        clear(w->d_features + count * s->keys, (s->chunk - count) * s->keys);
        clear(w->d_input, s->chunk * s->inputs);
        add_product(w->d_input, s->inputs, w->d_features, s->keys, 1, map->turned, s->inputs, s->chunk, s->inputs,
                    p->activation == SOFTMAX_PAIR ? p->key_size / 2 : p->key_size);
        if (learned) {
            add_product(map->d_weight, w->columns, s->input, 1, s->inputs, w->d_features, s->keys,
                        round_up(p->input_size, TILE_ROWS), w->columns, s->chunk);
            for (int64_t row = 0; row < count; row++)
                add_scaled(map->d_bias, 1.0f, w->d_features + row * s->keys, w->columns);
        }
        from = w->d_input;
        size = s->inputs;
    }
    for (int64_t row = 0; row < count; row++) {
        float *d = place(to, batch, head, group, at + row);
        memcpy(d, from + row * size, p->input_size * sizeof(float));
        if (p->quadratic && d_scale)
            add_scaled(d, 2 * p->quadratic * d_scale[row], s->input + row * s->inputs, p->input_size);
    }
}

/* g and h of the queries of one group, their features and, where a map has log scales, d_log. */
static void load_queries(struct work *w, const struct backward *p, int64_t batch, int64_t head, int64_t group,
                         int64_t at, int64_t count)
{
    const struct problem *f = &p->forward;
    struct scratch *s = &w->s;
    load_features(s->query, s, f, &f->query, &f->query_map, NULL, batch, head, group, at, count);
    pack(w->grad, s->chunk, place(&p->d_sums, batch, head, group, at), p->d_sums.token, count, f->value_size,
         s->values);
    clear(w->slope, s->chunk);
    for (int64_t i = 0; i < count; i++) {
        const float factor = *place(&f->factor, batch, head, group, at + i);
        const float *sums = place(&f->sums, batch, head, group, at + i);
        w->own_log[i] = p->d_log.data && factor > 0.0f ? *place(&p->d_log, batch, head, group, at + i) : 0.0f;
        float *grad = w->grad + i * s->values;
        w->slope[i] = factor * (w->own_log[i] - dot(grad, sums, f->value_size));
        for (int64_t column = 0; column < s->values; column++)
            grad[column] *= factor;
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
    float top = f->log_max[sequence], left = 1.0f;
    clear(s->state, s->keys * s->values);
    clear(s->weights, s->keys);
    for (int64_t key = 0; key < f->key_size; key++) {
        for (int64_t column = 0; column < f->value_size; column++)
            s->state[column * s->keys + key] = given[key * width + column];
        s->weights[key] = given[key * width + f->value_size];
    }
    for (int64_t at = 0; at < f->length; at += s->chunk) {
        const int64_t count = smaller(s->chunk, f->length - at);
        if (pairs) {
            w->before[at / s->chunk] = top;
            top = load_keys(s, f, batch, head, at, count, scaled, top, &left);
            turn(w->turned_value, s->chunk, s->value, s->values, s->chunk, s->values);
        }
        for (int64_t group = 0; group < f->groups; group++) {
            load_queries(w, p, batch, head, group, at, count);
            for (int64_t i = 0; i < s->chunk; i++)
                for (int64_t key = 0; key < s->keys; key++)
                    w->d_features[i * s->keys + key] = w->slope[i] * s->weights[key];
            add_product(w->d_features, s->keys, w->grad, s->values, 1, s->state, s->keys, s->chunk, s->keys,
                        f->value_size);
            if (pairs && scaled)
                scale_rows(w->d_features, s->kept, s->chunk, s->keys);
            if (pairs)
                form_pairs(w->grad_pairs, s, w->grad, s->values, w->turned_value, f->value_size, w->slope, scaled);
            for (int64_t row = 0; pairs && row < s->chunk; row += TILE_ROWS)
                add_product(w->d_features + row * s->keys, s->keys, w->grad_pairs + row * s->chunk, s->chunk, 1,
                            s->key, s->keys, TILE_ROWS, s->keys, row + TILE_ROWS);
            reverse_features(w, f, &w->maps[group], s->query, f->query_map.weight.data != NULL,
                             p->d_query_weight != NULL, w->own_log, &p->d_query, batch, head, group, at, count);
        }
        if (!pairs)
            continue;
        if (scaled) {
            scale_rows(s->value, s->weight, s->chunk, s->values);
            for (int64_t number = 0; number < s->keys * s->values; number++)
                s->state[number] *= left;
            for (int64_t key = 0; key < s->keys; key++)
                s->weights[key] *= left;
        }
        add_product(s->state, s->keys, s->value, 1, s->values, s->key, s->keys, round_up(f->value_size, TILE_ROWS),
                    s->keys, s->chunk);
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
    add_product(s->state, s->values, s->query, 1, s->keys, w->grad, s->values, round_up(f->key_size, TILE_ROWS),
                s->values, s->chunk);
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
    for (int64_t row = 0; row < s->chunk; row += TILE_ROWS) {
        const int64_t first = row * s->chunk + row; /* no earlier query sees these keys */
        add_product(w->d_features + row * s->keys, s->keys, w->grad_pairs + first, 1, s->chunk,
                    s->query + row * s->keys, s->keys, TILE_ROWS, s->keys, s->chunk - row);
        add_product(d_value + row * s->values, s->values, s->scores + first, 1, s->chunk, w->grad + row * s->values,
                    s->values, TILE_ROWS, s->values, s->chunk - row);
    }
    if (scaled)
        for (int64_t i = 0; i < count; i++) {
            const float seen = *place(&f->factor, batch, head, group, at + i);
            const float weight = seen > 0.0f ? exp_of_one(-s->top[i] - top) : 0.0f;
            w->slope[i] *= weight;
            for (int64_t column = 0; column < s->values; column++)
                w->grad[i * s->values + column] *= weight;
        }
    fold_queries(w, f, count);
}

/* Gradients of keys and values of one chunk; `state` [keys, values] and `weights` sum up query [g, h]^T of later ones,
 * their largest exponent `later` as seen from the end of the chunk. Returns it as seen from the start. */
static float read_chunk(struct work *w, const struct backward *p, int64_t batch, int64_t head, int64_t at, float later)
{
    const struct problem *f = &p->forward;
    struct scratch *s = &w->s;
    const int scaled = has_scales(f), pairs = !f->bidirectional;
    const int64_t count = smaller(s->chunk, f->length - at);
    float left, *d_value = s->out;
    load_keys(s, f, batch, head, at, count, scaled, pairs ? w->before[at / s->chunk] : LOWEST, &left);
    turn(w->turned_value, s->chunk, s->value, s->values, s->chunk, s->values);
    turn(w->turned_state, s->keys, s->state, s->values, s->keys, s->values);
    clear(d_value, s->chunk * s->values);
    for (int64_t j = 0; j < s->chunk; j++)
        memcpy(w->d_features + j * s->keys, s->weights, s->keys * sizeof(float));
    add_product(w->d_features, s->keys, s->value, s->values, 1, w->turned_state, s->keys, s->chunk, s->keys,
                f->value_size);
    add_product(d_value, s->values, s->key, s->keys, 1, s->state, s->values, s->chunk, s->values, f->key_size);
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
        later = top;
    }
    for (int64_t group = 0; pairs && group < f->groups; group++) {
        load_queries(w, p, batch, head, group, at, count);
        add_queries(w, f, d_value, batch, head, group, at, count, scaled, later);
    }
    for (int64_t j = 0; j < count; j++) {
        memcpy(place(&p->d_value, batch, head, 0, at + j), d_value + j * s->values, f->value_size * sizeof(float));
        w->slope[j] = dot(w->d_features + j * s->keys, s->key + j * s->keys, f->key_size);
        if (p->d_scale.data)
            *place(&p->d_scale, batch, head, 0, at + j) = w->slope[j];
    }
    pack(s->input, s->chunk, place(&f->key, batch, head, 0, at), f->key.token, count, f->input_size, s->inputs);
    reverse_features(w, f, &w->maps[f->groups], s->key, f->key_map.weight.data != NULL, p->d_key_weight != NULL,
                     w->slope, &p->d_key, batch, head, 0, at, count);
    return later;
}

static void read_backwards(struct work *w, const struct backward *p, int64_t batch, int64_t head)
{
    const struct problem *f = &p->forward;
    struct scratch *s = &w->s;
    const int64_t sequence = batch * f->heads + head, width = f->value_size + 1, size = f->key_size * width;
    float later = p->d_state || f->bidirectional ? -f->log_max_after[sequence] : LOWEST;
    clear(s->state, s->keys * s->values);
    clear(s->weights, s->keys);
    for (int64_t key = 0; key < f->key_size && p->d_state; key++) {
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
    for (int64_t at = (f->length - 1) / s->chunk * s->chunk; at >= 0; at -= s->chunk)
        later = read_chunk(w, p, batch, head, at, later);
    const float left = has_scales(f) ? exp_of_one(later + f->log_max[sequence]) : 1.0f;
    for (int64_t key = 0; key < f->key_size && p->d_before; key++) {
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
    const int64_t batch = task / f->heads, head = task % f->heads;
    struct work w;
    arrange_all(&w, p, memory);
    prepare_maps(&w, p, head);
    read_forwards(&w, p, batch, head);
    read_backwards(&w, p, batch, head);
    for (int64_t group = 0; group < f->groups; group++)
        write_map(&w, f, &w.maps[group], p->d_query_weight, p->d_query_bias, task * f->groups + group);
    write_map(&w, f, &w.maps[f->groups], p->d_key_weight, p->d_key_bias, task);
}

/* Work through all sequences; returns 0, or 1 where there was no memory to work in. */
int causal_sums_backward(const struct backward *p)
{
    struct work w;
    return run_tasks(read_task, p, p->forward.batches * p->forward.heads, p->forward.threads,
                     arrange_all(&w, p, NULL));
}
