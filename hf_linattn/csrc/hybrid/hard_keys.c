/* Causal hybrid attention with hard keys, block by block: softmax over sinks, the window and the hard keys, and what the
 * state holds of all others; ops/hybrid/hard_keys.py has the definition.
 *
 * Before the queries of a block are read, the block that leaves their window is sorted: its keys, and the hard keys
 * there are, are ranked by how badly the state recalls their values, and all but the worst enter it. With N_i and A_i
 * the sums of the exact weights and of those of the state, and c the gate of the head,
 *
 *     out_i = (1 - s_i) (exact weights' mean)_i + s_i (state's mean)_i,   s_i = c A_i / (A_i + N_i).
 *
 * The state of the delta rule has no weights, and s_i is c times what mixes it, or zero as long as it holds no key.
 *
 * Tokens count by their positions, so that a call may go on anywhere: those before it lie in the ring.
 */

#include "hard_keys.h"

#include <string.h>

#define ERROR_BITS 12 /* as in ops/hybrid/types.py */

/* Some tokens of a head, from a place of an operand on. Those of one name, unless it is zero, are the same. */
struct tokens {
    const tensor_view *key, *value;
    int64_t at, count, name;
};

/* Where tokens lie that have names. */
enum place { IN_CALL, IN_RING, IN_SINKS, IN_STORE, PLACES };

/* What tokens from number `at` of a head on are known by. Heads with the same keys may have other values. */
static inline int64_t name_of(const struct hard_keys_args *p, enum place place, int64_t batch, int64_t head, int64_t at)
{
    const int64_t most = max_i64(max_i64(p->length, p->sinks), CHUNK * (p->back + 1));
    return PLACES * ((batch * p->heads + head) * most + at + 1) + place;
}

/* Find `count` tokens of a head from a position on, no more than CHUNK, in the call or before it; where they lie in
 * both they are copied to `key` and `value`, which are views of the store's memory. */
static struct tokens find_tokens(const struct store *s, const struct hard_keys_args *p, int64_t batch, int64_t head,
                                 int64_t position, int64_t count, const tensor_view *key, const tensor_view *value)
{
    const int64_t start = p->start[batch], earlier = min_i64(count, start - position);
    const int64_t ring = CHUNK * (p->back + 1) - start + position;
    if (earlier <= 0)
        return (struct tokens){&p->key, &p->value, position - start, count,
                               name_of(p, IN_CALL, batch, head, position - start)};
    if (earlier == count)
        return (struct tokens){&p->ring_key, &p->ring_value, ring, count, name_of(p, IN_RING, batch, head, ring)};
    pack(s->block_key, earlier, &p->ring_key, batch, head, 0, ring, earlier, p->key_size, s->keys);
    pack(s->block_value, earlier, &p->ring_value, batch, head, 0, ring, earlier, p->value_size, s->values);
    pack(s->block_key + earlier * s->keys, count - earlier, &p->key, batch, head, 0, 0, count - earlier, p->key_size,
         s->keys);
    pack(s->block_value + earlier * s->values, count - earlier, &p->value, batch, head, 0, 0, count - earlier,
         p->value_size, s->values);
    return (struct tokens){key, value, 0, count, 0};
}

/* A number that is not negative to ERROR_BITS bits, as `to_error_bits` of ops/hybrid/hard_keys.py. */
static inline float to_error_bits(float x)
{
    const uint32_t dropped = 24 - ERROR_BITS;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + (1u << (dropped - 1))) & ~((1u << dropped) - 1);
    memcpy(&x, &bits, sizeof bits);
    return x;
}

/* The error of a value as the state recalls it, `summed` being what it sums up under the weight `total`; so coarse that
 * equal tokens have the same. */
static float error_of(const struct hard_keys_args *p, const float *value, const float *summed, float total,
                      int64_t size)
{
    const float factor = total >= p->least_weight ? 1.0f / total : total == total ? 0.0f : total;
    vec error = {0}, length = {0};
    for (int64_t column = 0; column < size; column += LANES) {
        const vec own = load(value + column), missed = own - factor * load(summed + column);
        error += missed * missed;
        length += own * own;
    }
    const float of = sqrtf(sum_of(length)), missed = sqrtf(sum_of(error));
    const float found = !p->relative ? missed : of != 0.0f ? missed / of : 0.0f;
    if (found != found)
        return INFINITY;
    return p->relative ? to_error_bits(1.0f + found) : to_error_bits(of + found) - to_error_bits(of);
}

/* Find the errors of all candidates, a whole number of lanes of them: those that are none have -1. */
static void find_errors(struct store *s, const struct hard_keys_args *p)
{
    struct candidates *c = &s->hard;
    gemm_f32(c->recall, s->values, c->mapped, s->mapped, 1, s->state, s->values, round_up(c->count, TILE_ROWS),
             s->values, s->mapped, 0);
    for (int64_t j = 0; j < c->count; j++) {
        const float total = by_delta_rule(p) ? 1.0f : dot(c->mapped + j * s->mapped, s->weights, s->mapped);
        c->error[j] = error_of(p, c->value + j * s->values, c->recall + j * s->values, total, s->values);
    }
    for (int64_t j = c->count; j < round_up(c->count, LANES); j++)
        c->error[j] = -1.0f;
}

/* How many candidates have a larger error than one, or the same and an earlier place. */
static int64_t rank_of(const struct candidates *c, int64_t own)
{
    const mask numbers = LANE_NUMBERS;
    mask count = {0};
    for (int64_t j = 0; j < c->count; j += LANES) {
        const vec error = load(c->error + j);
        count -= (error > c->error[own]) | ((error == c->error[own]) & (numbers + (int32_t)j < (int32_t)own));
    }
    int64_t rank = 0;
    for (int64_t lane = 0; lane < LANES; lane++)
        rank += count[lane];
    return rank;
}

/* S = left S + weight_j phi(k_j) [v_j, 1]^T of the `lost` rows that were put aside, `scale` the logs of their weights */
static void enter(struct store *s, const struct hard_keys_args *p, const float *scale, int64_t lost, float rate)
{
    const float before = s->log_max - rate * CHUNK;
    float top = before;
    for (int64_t j = 0; j < lost; j++)
        top = scale[j] > top ? scale[j] : top;
    for (int64_t j = 0; j < lost && is_scaled(p); j++) {
        const float weight = exp_of_one(scale[j] - top);
        for (int64_t column = 0; column < s->mapped; column += LANES)
            store(s->lost_mapped + j * s->mapped + column, weight * load(s->lost_mapped + j * s->mapped + column));
    }
    if (is_scaled(p)) {
        const float left = exp_of_one(before - top);
        for (int64_t number = 0; number < s->mapped * s->values; number += LANES)
            store(s->state + number, left * load(s->state + number));
        for (int64_t key = 0; key < s->mapped; key += LANES)
            store(s->weights + key, left * load(s->weights + key));
        s->log_max = top;
    }
    gemm_f32(s->state, s->values, s->lost_mapped, 1, s->mapped, s->lost_value, s->values, s->mapped, s->values, lost,
             1);
    for (int64_t j = 0; j < lost; j++)
        for (int64_t key = 0; key < s->mapped; key += LANES)
            store(s->weights + key, load(s->weights + key) + load(s->lost_mapped + j * s->mapped + key));
}

/* S = g_j S + beta_j phi(k_j) (v_j - g_j S^T phi(k_j))^T, one after the other, of the `lost` rows that were put aside */
static void enter_in_turn(struct store *s, const float *log_gate, const float *beta, int64_t lost)
{
    for (int64_t j = 0; j < lost; j++) {
        const float *key = s->lost_mapped + j * s->mapped, left = exp_of_one(log_gate[j]);
        float *written = s->lost_value + j * s->values;
        for (int64_t column = 0; column < s->values; column += TILE_COLUMNS) {
            vec known[4] = {0}; /* sums that need not wait for each other */
            for (int64_t row = 0; row < s->mapped; row += 2)
#pragma GCC unroll 4
                for (int64_t part = 0; part < 4; part++)
                    known[part] += key[row + part / 2]
                                   * load(s->state + (row + part / 2) * s->values + column + part % 2 * LANES);
            for (int64_t part = 0; part < 2; part++) {
                float *at = written + column + part * LANES;
                store(at, beta[j] * (load(at) - left * (known[part] + known[part + 2])));
            }
        }
        for (int64_t row = 0; row < s->mapped; row++)
            for (int64_t column = 0; column < s->values; column += LANES) {
                float *at = s->state + row * s->values + column;
                store(at, left * load(at) + key[row] * load(written + column));
            }
    }
}

/* Keep the candidates with the largest errors, in order; the others enter the state, whose window begins at `begin`. */
static void keep_worst(struct store *s, const struct hard_keys_args *p, int64_t head, int64_t begin)
{
    struct candidates *c = &s->hard;
    const float rate = p->rate ? p->rate[head] : 0.0f;
    float scale[CHUNK], beta[CHUNK];
    int64_t kept = 0, lost = 0;
    if (p->most && c->count > p->most)
        find_errors(s, p);
    for (int64_t j = 0; j < c->count; j++) {
        const float *mapped = c->mapped + j * s->mapped, *value = c->value + j * s->values;
        if (!p->most || (c->count > p->most && rank_of(c, j) >= p->most)) {
            memcpy(s->lost_mapped + lost * s->mapped, mapped, s->mapped * sizeof(float));
            memcpy(s->lost_value + lost * s->values, value, s->values * sizeof(float));
            beta[lost] = c->beta[j];
            scale[lost++] = c->scale[j] - rate * (begin - c->position[j]);
        } else if (kept++ < j) {
            memcpy(c->mapped + (kept - 1) * s->mapped, mapped, s->mapped * sizeof(float));
            memcpy(c->value + (kept - 1) * s->values, value, s->values * sizeof(float));
            memcpy(c->key + (kept - 1) * s->keys, c->key + j * s->keys, s->keys * sizeof(float));
            c->scale[kept - 1] = c->scale[j];
            c->beta[kept - 1] = c->beta[j];
            c->position[kept - 1] = c->position[j];
        }
    }
    c->count = c->known = kept;
    if (by_delta_rule(p))
        enter_in_turn(s, scale, beta, lost);
    else
        enter(s, p, scale, lost, rate);
}

/* A block leaves the window. */
static void sort_block(struct store *s, const struct hard_keys_args *p, int64_t batch, int64_t head, int64_t block)
{
    struct candidates *c = &s->hard;
    const int64_t first = max_i64(CHUNK * block, p->sinks), count = max_i64(CHUNK * (block + 1) - first, 0);
    const tensor_view key = view_of(s->block_key, s->keys), value = view_of(s->block_value, s->values);
    if (count) {
        const struct tokens own = find_tokens(s, p, batch, head, first, count, &key, &value);
        pack(c->key + c->count * s->keys, count, own.key, batch, head, 0, own.at, count, p->key_size, s->keys);
        pack(c->value + c->count * s->values, count, own.value, batch, head, 0, own.at, count, p->value_size,
             s->values);
    }
    for (int64_t j = 0; j < count; j++)
        c->position[c->count + j] = first + j;
    c->count += count;
    const int64_t ahead = p->ring_key.data ? p->most + CHUNK * (p->back + 1) : 0; /* entries of what was before */
    if (by_delta_rule(p))
        take_entries(s, p, batch, head, ahead + first - p->start[batch], count);
    else
        map_rows(c->mapped + c->known * s->mapped, c->scale + c->known, s, p, &p->key_map, c->key + c->known * s->keys,
                 head, 0, c->count - c->known);
    keep_worst(s, p, head, CHUNK * (block + 1));
}

/* What `count` queries, packed in rows, the first at a position, read of the state: sums, their weight and its log. */
static void read_state(struct store *s, const struct hard_keys_args *p, const float *rows, int64_t batch,
                       int64_t head, int64_t group, int64_t position, int64_t count, int64_t begin)
{
    const float mix = p->log_mix[head * p->groups + group], rate = p->rate ? p->rate[head] : 0.0f;
    if (by_delta_rule(p))
        pack(s->query, count, &p->query_features, batch, head, group, position - p->start[batch], count, p->features,
             s->mapped);
    else
        map_rows(s->query, s->far_log, s, p, &p->query_map, rows, head, group, count);
    gemm_f32(s->far, s->values, s->query, s->mapped, 1, s->state, s->values, round_up(count, TILE_ROWS), s->values,
             s->mapped, 0);
    const float share = begin - p->sinks > s->hard.count ? exp_of_one(mix) : 0.0f; /* zero if no key is there */
    for (int64_t i = 0; i < count && by_delta_rule(p); i++) {
        s->far_weight[i] = 1.0f;
        s->far_log[i] = share;
    }
    for (int64_t i = 0; i < count && !by_delta_rule(p); i++) {
        const float weight = dot(s->query + i * s->mapped, s->weights, s->mapped);
        const int there = !(weight < p->least_weight);
        s->far_weight[i] = there ? weight : 1.0f;
        s->far_log[i] = there ? logf(weight) + mix + s->log_max + s->far_log[i] - rate * (position + i - begin)
                              : 2 * LOWEST;
    }
}

/* Write the output of a query from the sums over its exact weights, `total` e^`top`, and what it reads of the state. */
static void write_joint(const struct store *s, const struct hard_keys_args *p, float *own, float total, float top,
                        int64_t row, int64_t batch, int64_t head, int64_t group, int64_t at, int large)
{
    const float most = p->gate ? p->gate[head * p->groups + group] : 1.0f;
    const float ahead = s->far_log[row] - (top + logf(total)), less = expf(-fabsf(ahead));
    const float joint = by_delta_rule(p) ? s->far_log[row] : (ahead > 0.0f ? 1.0f : less) / (1.0f + less);
    const float share = most * joint;
    const float *far = s->far + row * s->values, near_factor = (1.0f - share) / total;
    const float far_factor = share / s->far_weight[row];
    for (int64_t column = 0; column < s->values; column += LANES)
        store(own + column, near_factor * load(own + column) + far_factor * load(far + column));
    write_row(&p->out, batch, head, group, at, 1.0f, own, p->value_size, large);
}

/* A head's queries in a row, the first at a position, that meet keys. */
struct work {
    struct store *store;
    const struct hard_keys_args *args;
    int64_t batch, head, group, block, position, rows;
};

/* Call `meet` for all keys that stay exact for some queries; the first of these sees `ahead` + 1 of them, the next one
 * another one, and so on. */
static inline __attribute__((always_inline)) void
for_keys(struct work *w, void (*meet)(struct work *w, const struct tokens *met, int64_t ahead))
{
    const struct hard_keys_args *p = w->args;
    struct store *s = w->store;
    const struct candidates *hard = &s->hard;
    const tensor_view key = view_of(hard->key, s->keys), value = view_of(hard->value, s->values);
    const tensor_view own_key = view_of(s->block_key, s->keys), own_value = view_of(s->block_value, s->values);
    for (int64_t at = 0; at < p->sinks; at += PIECE) {
        const int64_t name = name_of(p, IN_SINKS, w->batch, w->head, at);
        meet(w, &(struct tokens){&p->sink_key, &p->sink_value, at, min_i64(p->sinks - at, PIECE), name},
             w->position - at);
    }
    for (int64_t at = 0; at < hard->count; at += PIECE) {
        const int64_t name = PLACES * (s->serial + at / PIECE + 1) + IN_STORE;
        meet(w, &(struct tokens){&key, &value, at, min_i64(hard->count - at, PIECE), name}, PIECE);
    }
    for (int64_t block = max_i64(w->block - p->back, 0); block <= w->block; block++) {
        const int64_t first = max_i64(CHUNK * block, p->sinks), end = p->start[w->batch] + p->end[w->batch];
        const int64_t count = min_i64(CHUNK * (block + 1), end) - first;
        if (count <= 0)
            continue;
        const struct tokens met = find_tokens(s, p, w->batch, w->head, first, count, &own_key, &own_value);
        meet(w, &met, w->position - first);
    }
}

/* Many queries meet some keys. */
static void meet_piece(struct work *w, const struct tokens *met, int64_t ahead)
{
    struct workspace *s = &w->store->exact;
    if (!w->args->parts)
        prefetch_some(&s->next, PIECE / 2);
    const enum shown shown = show(s->bias, NULL, 0, w->rows, met->count, ahead);
    const struct seen seen = find_seen(s->bias, shown);
    if (seen.start >= seen.end)
        return;
    const struct span of = {w->batch, w->head, met->at, met->count};
    read_span(s, &seen, met->key, met->value, &of, met->name, shown, 0.0f);
}

/* One query, the first of the rows, meets some keys. */
static void meet_one(struct work *w, const struct tokens *met, int64_t ahead)
{
    struct workspace *s = &w->store->exact;
    const int64_t count = min_i64(met->count, ahead + 1), key_size = w->args->key_size;
    float top = s->top[0], weight = 0.0f;
    for (int64_t j = 0; j < count; j++) {
        const float *key = read_row(met->key, w->batch, w->head, 0, met->at + j, key_size, s->rows);
        s->scores[j] = dot(s->query, key, key_size);
        top = s->scores[j] > top || s->scores[j] != s->scores[j] ? s->scores[j] : top;
    }
    const float left = exp_of_one(s->top[0] - top);
    for (int64_t column = 0; column < s->values; column++)
        s->out[column] *= left;
    for (int64_t j = 0; j < count; j++) {
        const float own = exp_of_one(s->scores[j] - top);
        add_scaled(s->out, own, read_row(met->value, w->batch, w->head, 0, met->at + j, s->value_size, s->value),
                   s->value_size);
        weight += own;
    }
    s->weight[0] = left * s->weight[0] + weight;
    s->top[0] = top;
}

/* Ask for the head's next queries and keys while these are read. */
static void look_ahead_of(struct work *w)
{
    const struct hard_keys_args *p = w->args;
    struct prefetch_queue *u = &w->store->exact.next;
    const int64_t own = w->position - p->start[w->batch], last = w->group == p->groups - 1;
    const int64_t next = own + w->rows, rows = min_i64(PIECE, p->length - next), at = last ? next : own;
    u->count = 0;
    prefetch_push(u, &p->query, w->batch, w->head, last ? 0 : w->group + 1, at, last ? rows : w->rows, p->key_size);
    if (last) {
        prefetch_push(u, &p->key, w->batch, w->head, 0, next, rows, p->key_size);
        prefetch_push(u, &p->value, w->batch, w->head, 0, next, rows, p->value_size);
    }
}

/* Queries of one block and one group. */
static void read_block(struct work *w)
{
    const struct hard_keys_args *p = w->args;
    struct store *s = w->store;
    struct workspace *exact = &s->exact;
    const int64_t at = w->position - p->start[w->batch], one = w->rows == 1;
    const int large = is_large(p->batches * p->heads * p->groups * p->length * p->value_size);
    const float *sink = p->sink ? p->sink + w->head * p->groups + w->group : NULL;
    pack(exact->rows, one ? 1 : PIECE, &p->query, w->batch, w->head, w->group, at, w->rows, p->key_size, s->keys);
    read_state(s, p, exact->rows, w->batch, w->head, w->group, w->position, w->rows, CHUNK * (w->block - p->back));
    memset(exact->out, 0, (one ? 1 : PIECE) * s->values * sizeof(float));
    for (int64_t i = 0; i < PIECE; i++) {
        exact->weight[i] = sink ? 1.0f : 0.0f;
        exact->top[i] = sink ? *sink : LOWEST / 2;
    }
    look_ahead_of(w);
    if (one) {
        for (int64_t column = 0; column < s->keys; column++)
            exact->query[column] = p->scaling * exact->rows[column];
        for_keys(w, meet_one);
    } else {
        begin_queries(exact, p->scaling);
        for_keys(w, meet_piece);
        end_queries(exact);
    }
    for (int64_t i = 0; i < w->rows; i++)
        write_joint(s, p, exact->out + i * s->values, exact->weight[i], exact->top[i], i, w->batch, w->head, w->group,
                    at + i, large);
}

/* One key/value head of one row. */
static void read_head(const void *args, float *memory, int64_t task)
{
    const struct hard_keys_args *p = args;
    const int64_t batch = task / p->heads, head = task % p->heads, start = p->start[batch];
    const int64_t end = start + p->end[batch], pieces = (p->most + PIECE - 1) / PIECE;
    struct store s;
    store_init(&s, p, memory);
    load_store(&s, p, batch, head);
    begin_tiles(p->parts);
    const int64_t before = start ? (start - 1) / CHUNK : 0; /* the block of the last token */
    for (int64_t block = start / CHUNK; start < end && block <= (end - 1) / CHUNK; block++) {
        const int64_t position = max_i64(CHUNK * block, start);
        if (block > before && block > p->back)
            sort_block(&s, p, batch, head, block - p->back - 1);
        s.serial = (task * (p->length / CHUNK + 2) + block - start / CHUNK) * pieces;
        for (int64_t group = 0; group < p->groups; group++)
            read_block(&(struct work){&s, p, batch, head, group, block, position,
                                      min_i64(CHUNK * (block + 1), end) - position});
    }
    end_tiles(p->parts);
    save_store(&s, p, batch, head);
}

/* Whether a block of a row leaves the window in a call. */
static int leaves(const struct hard_keys_args *p, int64_t row)
{
    const int64_t start = p->start[row], before = start ? (start - 1) / CHUNK : 0;
    return p->end[row] && (start + p->end[row] - 1) / CHUNK > max_i64(before, p->back);
}

/* Whether positions and numbers of tokens are such as there can be. */
static int fits_call(const struct hard_keys_args *p)
{
    for (int64_t row = 0; row < p->batches; row++)
        if (p->start[row] < 0 || p->start[row] >= INT32_MAX || p->end[row] < 0 || p->end[row] > p->length
            || (p->start[row] && !p->ring_key.data)
            || (by_delta_rule(p) && !p->key_features.data && leaves(p, row)))
            return 0;
    for (int64_t place = 0; p->hard_key.data && place < p->batches * p->heads * p->most; place++)
        if (p->hard_position[place] >= p->start[place / (p->heads * p->most)])
            return 0;
    return 1;
}

/* Work through all heads of a call; returns 0, 1 where there was no memory to work in, or BAD_NUMBERS. */
int hard_keys(const struct hard_keys_args *p)
{
    struct store s;
    if (!fits_call(p))
        return BAD_NUMBERS;
    return run_tasks(read_head, p, p->batches * p->heads, p->threads, store_init(&s, p, NULL));
}

LAYOUT(hard_keys, struct hard_keys_args, 0x184bad78)
