/* What sums over keys work on, the feature maps they know, and what one thread works with chunk by chunk. */

#pragma once

#include "../common/products.h"

#define SEGMENT 512    /* tokens between two states that are kept for the backward pass; a whole number of chunks */
#define CHUNK 64       /* tokens read at a time, at most */
#define FEW 32         /* the same where products are of float32: few pairs, all of them in the first cache */
#define ROWS_AHEAD 4   /* rows of what comes next that are asked for at a time */
#define SLAB 16        /* rows of a product at a time */

/* A feature map of x: an activation of z = x weight + bias, or of x itself where there is no weight. */
typedef struct {
    tensor_view weight; /* [input_size, columns],
        zero beyond the key_size columns that are used; its "token" is a row */
    tensor_view bias;   /* [columns]; data is NULL where there is none */
} feature_map;

enum activation {
    GIVEN,       /* query and key are features */
    ELU,         /* elu(z) + 1 */
    RELU,        /* max(z, 0) */
    EXPONENTIAL, /* e^(z - max z), and the log scale max z + quadratic |x|^2 + offset */
    SOFTMAX_PAIR /* [softmax(z), softmax(-z)] */
};

/* One of the sequences that lie one after another in a row, counted as they are read. */
struct sequence {
    int64_t row, start, length;
};

struct linear_args {
    tensor_view query, key, value, sums; /* contiguous in their last dimension, as all are; of any kind */
    tensor_view log_scale, log_decay;    /* of the keys, float32, as all others; data is NULL where there are none */
    tensor_view row_scale;               /* of the queries; the same */
    tensor_view factor, top;             /* of the queries: what their sums were multiplied by; top_i, and what a
                                        feature map takes out of the query; for one token, data may be NULL */
    const struct sequence *packed;   /* [sequences], row by row; NULL where every row is one */
    int64_t sequences;
    const float *state, *log_max;    /* [batches, heads, key_size, value_size (+ 1)], [batches, heads]: of the first
                                        sequence of each row; NULL where nothing was read before */
    float *state_after, *log_max_after; /* of the last; if bidirectional of every sequence */
    float *kept_states; /* [.., heads, struct checkpoint]: what was before every SEGMENT tokens of each sequence but
                           the first ones; NULL where nobody needs that */
    int64_t batches, heads, groups, length, key_size, value_size;
    int64_t normalise, threads;
    int64_t parts; /* of bfloat16 that numbers have in products; 0 for products of float32 */
    feature_map query_map, key_map;
    int64_t activation, input_size, bidirectional, strict;
    float quadratic, offset, least_weight;
    int64_t continues, leaves; /* of one sequence: whether it begins with the state, whether it leaves one */
};

/* The number of the first sequence of a row; of the row behind the last one, how many there are. */
static inline int64_t first_of(const struct linear_args *p, int64_t row)
{
    int64_t low = 0, high = p->sequences;
    if (!p->packed)
        return row;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (p->packed[middle].row < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether all sequences lie in rows that there are, row by row. */
static inline int fits(const struct linear_args *p)
{
    for (int64_t number = 0; number < p->sequences && p->packed; number++) {
        const struct sequence one = p->packed[number];
        const int64_t before = number ? p->packed[number - 1].row : 0;
        if (one.row < before || one.row >= p->batches || one.start < 0 || one.length < 0 || one.start > p->length
            || one.length > p->length - one.start)
            return 0;
    }
    return 1;
}

/* Let an operand begin at a token. */
static inline void begin_at(tensor_view *x, int64_t start)
{
    if (x->data)
        x->data = offset_ptr(x, x->data, start * x->token);
}

/* How many segments so many tokens have. */
static inline int64_t segments_of(int64_t length) { return (length + SEGMENT - 1) / SEGMENT; }

/* What is kept before a segment that is not the first of its sequence: the state [keys, values] and its last column
 * [keys], padded, and log_max. */
struct checkpoint {
    float *state, *weights, *log_max;
};

static inline struct checkpoint checkpoint_of(const struct linear_args *p, int64_t head, int64_t place)
{
    const int64_t keys = round_up(p->key_size, TILE_COLUMNS), values = round_up(p->value_size, TILE_COLUMNS);
    const int64_t size = keys * (values + 1) + 1;
    float *state = p->kept_states + (place * p->heads + head) * size;
    return (struct checkpoint){state, state + keys * values, state + keys * (values + 1)};
}

/* The problem of one sequence of a row. */
static inline struct linear_args problem_of(const struct linear_args *p, int64_t row, int64_t number)
{
    struct linear_args own = *p;
    own.continues = p->state != NULL;
    own.leaves = 1;
    const int64_t start = p->packed ? p->packed[number].start : 0;
    if (p->kept_states) /* a length takes (length - 1) / SEGMENT places: sequences that do not overlap share none */
        own.kept_states = checkpoint_of(p, 0, row * ((p->length - 1) / SEGMENT) + start / SEGMENT).state;
    if (!p->packed)
        return own;
    tensor_view *operands[] = {&own.query,     &own.key,       &own.value,  &own.sums, &own.log_scale,
                           &own.log_decay, &own.row_scale, &own.factor, &own.top};
    for (size_t i = 0; i < sizeof(operands) / sizeof(*operands); i++)
        begin_at(operands[i], start);
    own.length = p->packed[number].length;
    own.continues = own.continues && start == 0;
    own.leaves = p->bidirectional || start + own.length == p->length;
    if (p->bidirectional) {
        const int64_t ahead = (number - row) * p->heads;
        own.state_after += ahead * p->key_size * (p->value_size + (p->normalise ? 1 : 0));
        own.log_max_after += ahead;
    }
    return own;
}

/* Whether keys weigh more than their features say. */
static inline int has_scales(const struct linear_args *p)
{
    return p->log_scale.data || p->log_decay.data || p->activation == EXPONENTIAL;
}

/* The largest exponent before the first key of a sequence; where a map has no log scales, they do nothing but hide. */
static inline float first_top(const struct linear_args *p, int64_t task)
{
    const int given = p->log_scale.data && p->activation == GIVEN;
    return p->continues ? p->log_max[task] : given || p->log_decay.data || p->activation == EXPONENTIAL ? LOWEST / 2 : 0;
}

/* The first `count` lanes. */
static inline mask first_lanes(int64_t count) { return (mask)LANE_NUMBERS < (int32_t)count; }

/* z = e^(z - max z) for the first `count` numbers; return the maximum. */
static float exponentials(float *z, int64_t count)
{
    vec largest = z[0] + (vec){0};
    for (int64_t key = 0; key < count; key += LANES)
        largest = vmax(blend(first_lanes(count - key), load(z + key), largest), largest);
    const float top = max_of(largest);
    for (int64_t key = 0; key < count; key += LANES)
        store(z + key, blend(first_lanes(count - key), exp_of(load(z + key) - top), (vec){0}));
    return top;
}

/* z = e^(z - max z) and opposite = e^-z times whatever, for the first `count` numbers, side by side; return their
 * sums. */
static void exponential_pair(float *z, float *opposite, int64_t count, float *sum, float *opposite_sum)
{
    const vec zero = {0}, first = z[0] + zero;
    vec largest = first, least = -first, total = zero, opposite_total = zero;
    for (int64_t key = 0; key < count; key += LANES) {
        const vec part = blend(first_lanes(count - key), load(z + key), first);
        largest = vmax(part, largest);
        least = vmax(-part, least);
    }
    const float top = max_of(largest), bottom = max_of(least);
    const int close = top + bottom < 60.0f; /* then e^-x is the inverse of e^x, in a fourth of the time */
    for (int64_t key = 0; key < count; key += LANES) {
        const mask there = first_lanes(count - key);
        const vec part = load(z + key), power = exp_of(part - top);
        const vec one = blend(there, power, zero);
        const vec other = blend(there, close ? inverse_of(power) : exp_of(-part - bottom), zero);
        total += one;
        opposite_total += other;
        store(z + key, one);
        store(opposite + key, other);
    }
    *sum = sum_of(total);
    *opposite_sum = sum_of(opposite_total);
}

/* Apply the activation to one row of z; return the log scale without what x adds. `spare` is memory for a row. */
static float activate(float *z, float *spare, const struct linear_args *p, int64_t padded)
{
    float sum, opposite, log_scale = 0.0f;
    const int64_t half = p->key_size / 2;
    switch (p->activation) {
    case ELU:
        for (int64_t key = 0; key < p->key_size; key += LANES) {
            const vec part = load(z + key), high = vmax((vec){0}, part);
            store(z + key, high + exp_of(part - high));
        }
        break;
    case RELU:
        for (int64_t key = 0; key < p->key_size; key += LANES) {
            store(z + key, vmax((vec){0}, load(z + key)));
        }
        break;
    case EXPONENTIAL:
        log_scale = exponentials(z, p->key_size);
        break;
    case SOFTMAX_PAIR:
        exponential_pair(z, spare, half, &sum, &opposite);
        sum = 1.0f / sum;
        opposite = 1.0f / opposite;
        for (int64_t key = 0; key < half; key++)
            z[key] *= sum;
        for (int64_t key = 0; key < half; key++)
            z[half + key] = spare[key] * opposite;
    }
    memset(z + p->key_size, 0, (padded - p->key_size) * sizeof(float));
    return log_scale;
}

/* All that belongs to one chunk of one head. */
struct chunk_space {
    struct matrix input, query, turned, value, weighted, scores, state;
    struct matrix *key; /* of the chunk that is read; it lies outside, as the backward pass has those of many chunks */
    float *out, *weights, *spare;
    /* weights: the last column of a normalised state; spare: a row of features */
    struct matrix *map_weights; /* of the feature maps that were read: nobody writes them, maps may share one */
    int64_t map_count;
    float scale[CHUNK], query_scale[CHUNK], exponent[CHUNK], passed[CHUNK], top[CHUNK], kept[CHUNK], weight[CHUNK];
    int64_t chunk;                /* tokens read at a time: fewer where there are no more */
    int64_t inputs, keys, values; /* sizes, padded */
    int64_t fetched;              /* rows of what comes next that are asked for at a time */
    struct pack_buffers buffers;
    struct prefetch_queue next;
};

/* How many tokens are read at a time. */
static inline int64_t chunk_of(const struct linear_args *p)
{
    return min_i64(p->parts ? CHUNK : FEW, round_up(p->length ? p->length : 1, TILE_COLUMNS));
}

/* Memory for so many structs, in numbers of float32. */
static inline int64_t floats_for(int64_t count, size_t size)
{
    return round_up(count * size, sizeof(float)) / sizeof(float);
}

static inline int64_t chunk_space_init(struct chunk_space *s, const struct linear_args *p, float *memory)
{
    s->next.count = 0;
    s->fetched = ROWS_AHEAD;
    s->chunk = chunk_of(p);
    s->inputs = round_up(p->input_size, TILE_COLUMNS);
    s->keys = round_up(p->key_size, TILE_COLUMNS);
    s->values = round_up(p->value_size, TILE_COLUMNS);
    int64_t used = 0;
    s->input = matrix_alloc(memory, &used, s->chunk, s->inputs, p->parts, KEEP_NONE);
    s->query = matrix_alloc(memory, &used, s->chunk, s->keys, p->parts, KEEP_A);
    s->turned = matrix_alloc(memory, &used, s->keys, s->chunk, p->parts, KEEP_B);
    s->value = matrix_alloc(memory, &used, s->chunk, s->values, p->parts, KEEP_B);
    s->weighted = matrix_alloc(memory, &used, s->chunk, s->values, p->parts, KEEP_NONE);
    s->scores = matrix_alloc(memory, &used, s->chunk, s->chunk, p->parts, KEEP_NONE);
    s->out = arena_alloc(memory, &used, s->chunk * s->values);
    /* sums over all tokens so far are not to lose digits that cancel */
    s->state = matrix_alloc(memory, &used, s->keys, s->values, p->parts, KEEP_FINE_B);
    s->weights = arena_alloc(memory, &used, s->keys);
    s->spare = arena_alloc(memory, &used, s->keys);
    const int64_t maps = p->query_map.weight.data || p->key_map.weight.data ? p->groups + 1 : 0;
    s->map_count = 0;
    s->map_weights = arena_alloc(memory, &used, floats_for(maps, sizeof(struct matrix)));
    for (int64_t map = 0; map < maps; map++) {
        struct pack_entry *entry = entry_alloc(memory, &used, s->inputs * s->keys, p->parts);
        if (memory)
            s->map_weights[map] = (struct matrix){.b = entry};
    }
    const int64_t largest = s->chunk * max_i64(max_i64(s->inputs, s->keys), max_i64(s->values, s->chunk));
    s->buffers = take_buffers(memory, &used, largest, largest, p->parts);
    return used;
}

/* `gemm_f32` while memory is asked for what comes next, if anything does. */
static inline void gemm_slabs(struct chunk_space *s, float *out, int64_t out_row, const float *left, int64_t left_row,
                              int64_t left_step, const float *right, int64_t right_step, int64_t rows,
                              int64_t columns, int64_t steps, int adds)
{
    for (int64_t column = 0; column < columns; column += TILE_COLUMNS) /* of `right` what the first cache holds */
        for (int64_t row = 0; row < rows; row += SLAB) {
            prefetch_some(&s->next, s->fetched);
            gemm_f32(out + row * out_row + column, out_row, left + row * left_row, left_row, left_step,
                     right + column, right_step, min_i64(SLAB, rows - row), TILE_COLUMNS, steps, adds);
        }
}

/* Rows of what comes next that are asked for beside the products of a block of tiles: those of parts take longer. */
static inline int64_t fetched_of(const struct chunk_space *s) { return s->buffers.parts == 3 ? 1 : ROWS_AHEAD / 2; }

/* The same of matrices. The matrix unit multiplies whole blocks of rows. */
static inline void gemm(struct chunk_space *s, float *out, int64_t out_row, const struct matrix *left,
                        const struct matrix *right, int64_t rows, int64_t columns, int64_t steps, int adds)
{
    if (s->buffers.parts) {
        rows = round_up(rows, BLOCK);
        multiply(out, out_row, matrix_a(&s->buffers, left, rows, steps), matrix_b(&s->buffers, right, steps, columns),
                 rows, columns, steps, adds, &s->next, fetched_of(s));
        return;
    }
    gemm_slabs(s, out, out_row, left->data, left->row, 1, right->data, right->row, rows, columns, steps, adds);
}

/* out [rows, columns] = left^T right, of the same */
static inline void gemm_t(struct chunk_space *s, float *out, int64_t out_row, const struct matrix *left,
                          const struct matrix *right, int64_t rows, int64_t columns, int64_t steps, int adds)
{
    if (s->buffers.parts) {
        rows = round_up(rows, BLOCK);
        multiply(out, out_row, matrix_a_transposed(&s->buffers, left, rows, steps),
                 matrix_b(&s->buffers, right, steps, columns), rows, columns, steps, adds, &s->next, fetched_of(s));
        return;
    }
    gemm_slabs(s, out, out_row, left->data, 1, left->row, right->data, right->row, rows, columns, steps, adds);
}

/* out [chunk, columns] += scores right, of pairs [chunk, chunk] whose column is no later than their row */
static inline void gemm_tril(struct chunk_space *s, float *out, const struct matrix *scores,
                             const struct matrix *right, int64_t columns)
{
    const int64_t chunk = s->chunk;
    if (s->buffers.parts) {
        const struct tiles left = matrix_a(&s->buffers, scores, chunk, chunk);
        const struct tiles tiles = matrix_b(&s->buffers, right, chunk, columns);
        for (int64_t row = 0; row < chunk; row += BLOCK)
            multiply(out + row * columns, columns, tiles_from(left, row, 0), tiles, BLOCK, columns, row + BLOCK, 1,
                     &s->next, fetched_of(s));
        return;
    }
    for (int64_t row = 0; row < chunk; row += TILE_ROWS) {
        prefetch_some(&s->next, s->fetched / 2);
        gemm_f32(out + row * columns, columns, scores->data + row * scores->row, scores->row, 1, right->data,
                 right->row, TILE_ROWS, columns, row + TILE_ROWS, 1);
    }
}

/* out [chunk, columns] += scores^T right, of the same */
static inline void gemm_tril_t(struct chunk_space *s, float *out, const struct matrix *scores,
                               const struct matrix *right, int64_t columns)
{
    const int64_t chunk = s->chunk;
    if (s->buffers.parts) {
        const struct tiles left = matrix_a_transposed(&s->buffers, scores, chunk, chunk);
        const struct tiles tiles = matrix_b(&s->buffers, right, chunk, columns);
        for (int64_t row = 0; row < chunk; row += BLOCK)
            multiply(out + row * columns, columns, tiles_from(left, row, row), tiles_from(tiles, 0, row), BLOCK,
                     columns, chunk - row, 1, &s->next, fetched_of(s));
        return;
    }
    for (int64_t row = 0; row < chunk; row += TILE_ROWS)
        gemm_f32(out + row * columns, columns, scores->data + row * scores->row + row, 1, scores->row,
                 right->data + row * right->row, right->row, TILE_ROWS, columns, chunk - row, 1);
}

/* out [chunk, chunk] = rows columns, of pairs whose column is no later than their row, more what is there if `adds` */
static inline void gemm_out_tril(struct chunk_space *s, struct matrix *out, const struct matrix *rows,
                                 const struct matrix *columns, int64_t steps, int adds)
{
    const int64_t chunk = s->chunk;
    float *to = matrix_write(out);
    if (s->buffers.parts) {
        const struct tiles left = matrix_a(&s->buffers, rows, chunk, steps);
        const struct tiles right = matrix_b(&s->buffers, columns, steps, chunk);
        for (int64_t column = 0; column < chunk; column += BLOCK)
            multiply(to + column * out->row + column, out->row, tiles_from(left, column, 0),
                     tiles_from(right, column, 0), chunk - column, BLOCK, steps, adds, &s->next, fetched_of(s));
        return;
    }
    for (int64_t column = 0; column < chunk; column += TILE_COLUMNS)
        gemm_slabs(s, to + column * out->row + column, out->row, rows->data + column * rows->row, rows->row, 1,
                   columns->data + column, columns->row, chunk - column, TILE_COLUMNS, steps, adds);
}

/* sum [size] = left sum + factor^T rows, of `count` rows, in whole lanes; every factor is one for NULL */
static inline void add_rows(float *sum, float left, const float *factor, const float *rows, int64_t count,
                            int64_t size)
{
    for (int64_t column = 0; column < size; column += LANES) {
        vec total = left * load(sum + column);
        for (int64_t row = 0; row < count; row++)
            total += (factor ? factor[row] : 1.0f) * load(rows + row * size + column);
        store(sum + column, total);
    }
}

/* Round what will be a factor of rounded products already where it is added up, too: the sums cancel in gradients. */
static inline void round_factor(const struct chunk_space *s, float *numbers, int64_t count)
{
    for (int64_t number = 0; s->buffers.parts == 1 && number < count; number += LANES)
        store(numbers + number, rounded_lanes(load(numbers + number)));
}

/* The weight of a feature map as a matrix, which is put into tiles once for all chunks. */
static inline const struct matrix *weight_of(struct chunk_space *s, const tensor_view *weight, int64_t head,
                                             int64_t group)
{
    const float *data = row_f32(weight, 0, head, group, 0);
    for (int64_t map = 0; map < s->map_count; map++)
        if (s->map_weights[map].data == data && s->map_weights[map].row == weight->token)
            return &s->map_weights[map];
    struct matrix *own = &s->map_weights[s->map_count++];
    own->data = data;
    own->row = weight->token;
    return own;
}

/* Features [chunk, keys] of `count` tokens from `x`; log scales, where wanted, are added to `scale`. */
static void load_features(struct matrix *features, struct chunk_space *s, const struct linear_args *p,
                          const tensor_view *x, const feature_map *map, float *scale, int64_t batch, int64_t head,
                          int64_t group, int64_t at, int64_t count)
{
    float *to = matrix_write(features);
    if (p->activation == GIVEN) {
        pack(to, s->chunk, x, batch, head, group, at, count, p->key_size, s->keys);
        round_factor(s, to, count * s->keys);
        return;
    }
    if (map->weight.data) {
        const int64_t used = p->activation == SOFTMAX_PAIR ? p->key_size / 2 : p->key_size;
        pack(matrix_write(&s->input), s->chunk, x, batch, head, group, at, count, p->input_size, s->inputs);
        for (int64_t row = 0; row < s->chunk && map->bias.data; row++) {
            memcpy(to + row * s->keys, row_f32(&map->bias, 0, head, group, 0), used * sizeof(float));
            memset(to + row * s->keys + used, 0, (s->keys - used) * sizeof(float));
        }
        const int64_t columns = p->activation == SOFTMAX_PAIR ? round_up(p->key_size / 2, TILE_COLUMNS) : s->keys;
        gemm(s, to, s->keys, &s->input, weight_of(s, &map->weight, head, group), s->chunk, columns, p->input_size,
             map->bias.data != NULL);
    } else
        pack(to, s->chunk, x, batch, head, group, at, count, p->key_size, s->keys);
    for (int64_t row = 0; row < count; row++) {
        const float top = activate(to + row * s->keys, s->spare, p, s->keys);
        if (scale) {
            const float *input = s->input.data + row * s->inputs;
            vec squares = {0};
            for (int64_t column = 0; column < s->inputs; column += LANES)
                squares += load(input + column) * load(input + column);
            scale[row] += top + p->quadratic * sum_of(squares) + p->offset;
        }
    }
    round_factor(s, to, count * s->keys);
    memset(to + count * s->keys, 0, (s->chunk - count) * s->keys * sizeof(float));
}

/* The exponents of a chunk's keys as seen from its start, their running maximum, and what follows from them. */
static float weigh_keys(struct chunk_space *s, const float *decay, int64_t decay_step, int64_t count, float before,
                        float *left)
{
    float passed = 0.0f, top = before < LOWEST / 2 ? LOWEST / 2 : before;
    for (int64_t j = 0; j < s->chunk; j++) {
        passed += decay && j < count ? decay[j * decay_step] : 0.0f;
        s->passed[j] = passed;
        s->exponent[j] = j >= count ? LOWEST : s->scale[j] - passed;
        top = s->exponent[j] > top ? s->exponent[j] : top;
        s->top[j] = top;
    }
    for (int64_t j = 0; j < s->chunk; j += LANES) {
        store(s->kept + j, exp_of(before - load(s->top + j)));
        store(s->weight + j, exp_of(load(s->exponent + j) - top));
    }
    *left = exp_of_one(before - top);
    return top + passed;
}

/* The values of a chunk, and what its keys weigh, whose log scales are there; returns the largest exponent after it,
 * and what is `left` of what was before. */
static float load_values(struct chunk_space *s, const struct linear_args *p, int64_t batch, int64_t head, int64_t at,
                         int64_t count, int scaled, float before, float *left)
{
    pack(matrix_write(&s->value), s->chunk, &p->value, batch, head, 0, at, count, p->value_size, s->values);
    if (!scaled)
        return before;
    const float *decay = p->log_decay.data ? row_f32(&p->log_decay, batch, head, 0, at) : NULL;
    return weigh_keys(s, decay, p->log_decay.token, count, before, left);
}

/* The same with its keys. */
static __attribute__((unused)) float
load_keys(struct chunk_space *s, const struct linear_args *p, int64_t batch, int64_t head, int64_t at, int64_t count,
          int scaled, float before, float *left)
{
    const float *given = p->log_scale.data ? row_f32(&p->log_scale, batch, head, 0, at) : NULL;
    for (int64_t j = 0; j < count && scaled; j++)
        s->scale[j] = given ? given[j * p->log_scale.token] : 0.0f;
    load_features(s->key, s, p, &p->key, &p->key_map, p->activation == EXPONENTIAL ? s->scale : NULL, batch, head, 0,
                  at, count);
    for (int64_t j = 0; j < count && scaled && given; j++)
        if (given[j * p->log_scale.token] <= LOWEST / 2) { /* a hidden key, whose features may be of any size */
            memset(matrix_write(s->key) + j * s->keys, 0, s->keys * sizeof(float));
            s->scale[j] = LOWEST;
        }
    return load_values(s, p, batch, head, at, count, scaled, before, left);
}

static inline void turn_keys(struct chunk_space *s)
{
    transpose(matrix_write(&s->turned), s->turned.row, s->key->data, s->keys, s->chunk, s->keys);
}

/* scores [chunk, chunk]: start_i + row_i . column_j for pairs of a chunk, weighted, those of the future zero */
static __attribute__((unused)) void
form_pairs(struct matrix *scores, struct chunk_space *s, const struct matrix *rows, const struct matrix *columns,
           int64_t steps, const float *start, int scaled)
{
    float *to = matrix_write(scores);
    for (int64_t i = 0; i < s->chunk && start; i++)
        for (int64_t j = 0; j < s->chunk; j += LANES)
            store(to + i * scores->row + j, (vec){0} + start[i]);
    gemm_out_tril(s, scores, rows, columns, steps, start != NULL);
    for (int64_t i = 0; i < s->chunk; i++) {
        float *own = to + i * scores->row;
        if (scaled)
            for (int64_t j = 0; j <= i; j += LANES)
                store(own + j, load(own + j) * exp_of(load(s->exponent + j) - s->top[i]));
        memset(own + i + 1, 0, (s->chunk - 1 - i) * sizeof(float));
        round_factor(s, own, s->chunk);
    }
}
