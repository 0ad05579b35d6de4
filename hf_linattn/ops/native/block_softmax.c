/* Softmax attention of blocks of queries over the key blocks that a table names for each, without copying any.
 *
 *     out_i = sum_j exp(scaling query_i . key_j + bias_ij - log_i) value_j,   log_i = log sum_j exp(...)
 *
 * over the first `shared` tokens and those of the blocks in the query block's row of the table; column c of the bias
 * belongs to the c-th of these keys. Without a bias all of them are seen, in a query block's own block and if `causal`
 * only those that come no later. `continued` rows begin with what stands in `out`, as if it had been read with the
 * weight exp(log_i). A query without keys gets zero.
 */

#include "lanes.h"

#define PIECE 64 /* queries, and keys, that are multiplied at a time */

struct problem {
    operand query, key, value, out; /* float32, contiguous in their last dimension */
    operand log;                    /* of the queries */
    operand bias;                   /* "head": of query heads, "group": of query blocks, "token": of queries */
    const int64_t *table;           /* [blocks, table_heads, width], -1 for none; table_heads is 1 or heads * groups */
    int64_t batches, heads, groups, length, key_size, value_size;
    int64_t first, blocks; /* of the query blocks */
    int64_t block_size, table_heads, width, shared, continued, causal, threads;
    float scaling;
};

struct scratch {
    float *query, *key, *turned, *value, *scores, *out;
    float top[PIECE], weight[PIECE * LANES]; /* weight: to be added up over the lanes */
    int64_t keys, values; /* sizes, padded */
};

static int64_t arrange(struct scratch *s, const struct problem *p, float *memory)
{
    s->keys = round_up(p->key_size, LANES);
    s->values = round_up(p->value_size, TILE_COLUMNS);
    const int64_t sizes[] = {PIECE * s->keys,   PIECE * s->keys, PIECE * s->keys,
                             PIECE * s->values, PIECE * PIECE,   PIECE * s->values};
    float **parts[] = {&s->query, &s->key, &s->turned, &s->value, &s->scores, &s->out};
    return divide(memory, parts, sizes, 6);
}

/* What is there of the queries before any key: nothing, or what stands in `out`. */
static void begin(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t group, int64_t at,
                  int64_t count)
{
    pack(s->query, PIECE, place(&p->query, batch, head, group, at), p->query.token, count, p->key_size, s->keys);
    for (int64_t number = 0; number < count * s->keys; number++)
        s->query[number] *= p->scaling;
    memset(s->out, 0, PIECE * s->values * sizeof(float));
    for (int64_t i = 0; i < PIECE; i++) {
        const float log = p->continued && i < count ? *place(&p->log, batch, head, group, at + i) : LOWEST;
        const int begun = log > LOWEST / 2;
        store(s->weight + i * LANES, (lanes){begun ? 1.0f : 0.0f});
        s->top[i] = begun ? log : LOWEST / 2;
        if (begun)
            memcpy(s->out + i * s->values, place(&p->out, batch, head, group, at + i), p->value_size * sizeof(float));
    }
}

static inline int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

/* Whether any of TILE_COLUMNS keys, `count` of them there, is seen by any of `rows` queries. */
static int is_seen(const float *bias, int64_t bias_step, int64_t rows, int64_t count)
{
    mask seen = {0};
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < TILE_COLUMNS; j += LANES)
            if (j + LANES <= count)
                seen |= load(bias + i * bias_step + j) > (lanes){0} + LOWEST / 2;
            else if (j < count)
                return 1;
    for (int lane = 0; lane < LANES; lane++)
        if (seen[lane])
            return 1;
    return 0;
}

/* Scores of one query become weights under the new maximum, to which what was summed up before is brought down. Only
 * the first `count` keys are there. */
static void weigh(struct scratch *s, float *scores, const float *bias, int64_t i, int64_t first, int64_t last,
                  int64_t count)
{
    lanes largest = s->top[i] + (lanes){0}, sum = load(s->weight + i * LANES);
    for (int64_t j = first; bias && j < smaller(last, count); j++)
        scores[j] += bias[j];
    for (int64_t j = count; j < last; j++)
        scores[j] = LOWEST;
    for (int64_t j = first; j < last; j += LANES)
        largest = choose(load(scores + j) > largest, load(scores + j), largest);
    const float top = max_of(largest);
    if (top > s->top[i]) {
        const float left = exp_of_one(s->top[i] - top);
        for (int64_t column = 0; column < s->values; column++)
            s->out[i * s->values + column] *= left;
        sum *= left;
        s->top[i] = top;
    }
    for (int64_t j = first; j < last; j += LANES) {
        const lanes part = exp_of(load(scores + j) - top);
        store(scores + j, part);
        sum += part;
    }
    store(s->weight + i * LANES, sum);
}

/* Take in `count` keys from place `at`, with the bias of each query in rows of `bias_step` numbers. Without one, query
 * i sees the first `ahead` + i + 1 of them. */
static void read_keys(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t at,
                      int64_t count, int64_t rows, const float *bias, int64_t bias_step, int64_t ahead)
{
    pack(s->key, PIECE, place(&p->key, batch, head, 0, at), p->key.token, count, p->key_size, s->keys);
    turn(s->turned, PIECE, s->key, s->keys, PIECE, s->keys);
    pack(s->value, PIECE, place(&p->value, batch, head, 0, at), p->value.token, count, p->value_size, s->values);
    memset(s->scores, 0, PIECE * PIECE * sizeof(float));
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        const float *shown = bias ? bias + row * bias_step : NULL;
        const int64_t tiled = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
        const int64_t reached = smaller(count, ahead + row + tiled);
        int64_t first = bias ? PIECE : 0, last = bias || reached < 1 ? 0 : round_up(reached, TILE_COLUMNS);
        for (int64_t column = 0; bias && column < count; column += TILE_COLUMNS) /* any query sees keys in between */
            if (is_seen(shown + column, bias_step, tiled, count - column)) {
                first = first < column ? first : column;
                last = column + TILE_COLUMNS;
            }
        if (first >= last)
            continue;
        float *scores = s->scores + row * PIECE;
        for (int64_t column = first; column < last; column += TILE_COLUMNS)
            add_tile(scores + column, PIECE, s->query + row * s->keys, s->keys, 1, s->turned + column, PIECE,
                     p->key_size);
        for (int64_t i = 0; i < tiled; i++)
            weigh(s, scores + i * PIECE, bias ? shown + i * bias_step : NULL, row + i, first, last,
                  bias ? count : smaller(count, ahead + row + i + 1));
        for (int64_t column = 0; column < s->values; column += TILE_COLUMNS)
            add_tile(s->out + row * s->values + column, s->values, scores + first, PIECE, 1,
                     s->value + first * s->values + column, s->values, smaller(last, count) - first);
    }
}

/* One query block of one head. */
static void read_block(struct scratch *s, const struct problem *p, int64_t batch, int64_t head, int64_t group,
                       int64_t block)
{
    const int64_t query_head = head * p->groups + group, start = (p->first + block) * p->block_size;
    const int64_t *row = p->table + (block * p->table_heads + (p->table_heads > 1 ? query_head : 0)) * p->width;
    const int64_t end = smaller(start + p->block_size, p->length);
    for (int64_t at = start; at < end; at += PIECE) {
        const int64_t rows = smaller(end - at, PIECE);
        const float *bias = p->bias.data ? place(&p->bias, batch, query_head, block, at - start) : NULL;
        begin(s, p, batch, head, group, at, rows);
        for (int64_t place = 0; place < p->shared; place += PIECE)
            read_keys(s, p, batch, head, place, smaller(p->shared - place, PIECE), rows, bias ? bias + place : NULL,
                      p->bias.token, p->length);
        for (int64_t column = 0; column < p->width; column++) {
            if (row[column] < 0)
                continue;
            const int64_t first = row[column] * p->block_size, last = smaller(first + p->block_size, p->length);
            const float *shown = bias ? bias + p->shared + column * p->block_size : NULL;
            for (int64_t place = first; place < last; place += PIECE)
                read_keys(s, p, batch, head, place, smaller(last - place, PIECE), rows,
                          shown ? shown + (place - first) : NULL, p->bias.token,
                          p->causal && first == start ? at - place : p->length);
        }
        for (int64_t i = 0; i < rows; i++) {
            float *out = place(&p->out, batch, head, group, at + i);
            const float weight = sum_of(load(s->weight + i * LANES)), factor = weight > 0.0f ? 1.0f / weight : 0.0f;
            for (int64_t column = 0; column < p->value_size; column++)
                out[column] = factor * s->out[i * s->values + column];
        }
    }
}

static void read_task(const void *problem, float *memory, int64_t task)
{
    const struct problem *p = problem;
    const int64_t rows = task / p->blocks, sequence = rows / p->groups;
    struct scratch s;
    arrange(&s, p, memory);
    read_block(&s, p, sequence / p->heads, sequence % p->heads, rows % p->groups, task % p->blocks);
}

/* Work through all query blocks of a problem; returns 0, or 1 where there was no memory to work in. */
int block_softmax(const struct problem *p)
{
    struct scratch s;
    return run_tasks(read_task, p, p->batches * p->heads * p->groups * p->blocks, p->threads, arrange(&s, p, NULL));
}
