/* One more token for many sequences side by side, as in decoding: `causal_sums` of length 1, without tiles.
 *
 *     state_after = exp(log_max + log_decay - log_max_after) state + exp(log_scale - log_max_after) key [value, 1]^T
 *     sums        = query state_after, divided by the last column
 *
 * or if `strict` the state before the key, to which log_decay has come.
 */

#include "linear.h"

struct workspace {
    float *query, *scale, *key, *value, *out, *spare; /* query [groups, keys], scale [groups], out [groups, width];
                                                         spare: a row of features */
    int64_t keys, width;
};

static int64_t workspace_init(struct workspace *s, const struct linear_args *p, float *memory)
{
    s->keys = round_up(p->key_size, TILE_COLUMNS);
    s->width = p->value_size + 1;
    int64_t used = 0;
    s->query = arena_alloc(memory, &used, p->groups * s->keys);
    s->scale = arena_alloc(memory, &used, p->groups);
    s->key = arena_alloc(memory, &used, s->keys);
    s->value = arena_alloc(memory, &used, s->width);
    s->out = arena_alloc(memory, &used, p->groups * s->width);
    s->spare = arena_alloc(memory, &used, s->keys);
    return used;
}

/* Features of one token; returns their log scale. */
static float read_features(float *to, float *spare, const struct linear_args *p, const tensor_view *x,
                           const feature_map *map, int64_t batch, int64_t head, int64_t group, int64_t padded)
{
    const float *from = row_f32(x, batch, head, group, 0);
    memset(to, 0, padded * sizeof(float));
    if (map->weight.data) {
        const int64_t columns = p->activation == SOFTMAX_PAIR ? p->key_size / 2 : p->key_size;
        if (map->bias.data)
            memcpy(to, row_f32(&map->bias, 0, head, group, 0), columns * sizeof(float));
        for (int64_t row = 0; row < p->input_size; row++)
            add_scaled(to, from[row], row_f32(&map->weight, 0, head, group, row), columns);
    } else
        memcpy(to, from, p->key_size * sizeof(float));
    const float log_scale = activate(to, spare, p, padded);
    return p->quadratic ? log_scale + p->quadratic * dot(from, from, p->input_size) + p->offset : log_scale + p->offset;
}

static void read_token(const void *args, float *memory, int64_t task)
{
    const struct linear_args *p = args;
    struct workspace s;
    workspace_init(&s, p, memory);
    const int64_t batch = task / p->heads, head = task % p->heads;
    for (int64_t group = 0; group < p->groups; group++)
        s.scale[group] = read_features(s.query + group * s.keys, s.spare, p, &p->query, &p->query_map, batch, head,
                                       group, s.keys);
    float scale = read_features(s.key, s.spare, p, &p->key, &p->key_map, batch, head, 0, s.keys);
    float left = 1.0f, weight = 1.0f, before = p->log_max[task], after = before;
    if (has_scales(p)) {
        scale += p->log_scale.data ? *row_f32(&p->log_scale, batch, head, 0, 0) : 0.0f;
        before += p->log_decay.data ? *row_f32(&p->log_decay, batch, head, 0, 0) : 0.0f;
        after = scale > before ? scale : before;
        left = exp_of_one(before - after);
        weight = exp_of_one(scale - after);
    }
    p->log_max_after[task] = after;
    memcpy(s.value, row_f32(&p->value, batch, head, 0, 0), p->value_size * sizeof(float));
    s.value[p->value_size] = 1.0f;
    memset(s.out, 0, p->groups * s.width * sizeof(float));
    for (int64_t key = 0; key < p->key_size; key++) {
        const int64_t row = (task * p->key_size + key) * s.width;
        const float *restrict old = p->state + row, added = weight * s.key[key];
        float *restrict new = p->state_after + row;
        for (int64_t column = 0; column < s.width; column++)
            new[column] = left * old[column] + added * s.value[column];
        for (int64_t group = 0; group < p->groups; group++)
            add_scaled(s.out + group * s.width, s.query[group * s.keys + key], p->strict ? old : new, s.width);
    }
    for (int64_t group = 0; group < p->groups; group++) {
        const float *out = s.out + group * s.width, total = out[p->value_size];
        const float factor = total < p->least_weight ? 0.0f : 1.0f / total; /* NaN of NaN */
        float *sums = row_f32(&p->sums, batch, head, group, 0);
        for (int64_t column = 0; column < p->value_size; column++)
            sums[column] = factor * out[column];
        if (p->factor.data) {
            *row_f32(&p->factor, batch, head, group, 0) = factor;
            *row_f32(&p->top, batch, head, group, 0) = (p->strict ? before : after) + s.scale[group];
        }
    }
}

/* Read one token of every sequence; returns 0, or 1 where there was no memory to work in. */
int causal_step(const struct linear_args *p)
{
    struct workspace s;
    return run_tasks(read_token, p, p->batches * p->heads, p->threads, workspace_init(&s, p, NULL));
}

LAYOUT(causal_step, struct linear_args, 0x85260022)
