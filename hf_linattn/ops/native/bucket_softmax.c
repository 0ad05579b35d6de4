/* Softmax attention of each query to the keys that share a bucket with it in at least one of several rounds.
 *
 *     out_i = sum_j exp(scaling query_i . key_j) value_j / sum_j exp(scaling query_i . key_j),   j in S_i
 *
 * S_i has, of every round, the keys of the query's bucket: of those not after i the last `behind`, of those after it the
 * first `ahead`; each counts once. Unless they are `shared`, a query without a key in its bucket up to its own place in
 * any round sees its own key too. If they are, it sees its own key only where it sees no other.
 *
 * Keys are listed by bucket, and by place inside one. So those of a query are a run in the list of each round, and
 * queries of one bucket that follow each other have nearly the same run: they are taken together.
 */

#include "softmax.h"

#define SPREAD 64 /* keys by which the runs of queries that are taken together may differ */

struct problem {
    operand query, key, value, out; /* float32, contiguous in their last dimension */
    const int32_t *query_bucket;    /* [rounds, batches, heads * groups, length] */
    const int32_t *key_bucket;      /* [rounds, batches, heads, length] */
    int32_t *member, *bounds;       /* the lists: [rounds, batches, heads, length], [..., buckets + 1] */
    int64_t batches, heads, groups, length, key_size, value_size;
    int64_t rounds, buckets, behind, ahead, shared, threads;
    float scaling;
};

/* What belongs to one key/value head. The first index is the round; `start` and `stop` are of one query head's runs. */
struct lists {
    int32_t *place, *start, *stop; /* [rounds, length]: where in the list a key stands, where a query's run lies */
    int32_t *order, *bounds;       /* [length], [buckets + 1]: the queries by bucket */
    int32_t *count;                /* [buckets] */
    float *top, *weight;           /* [length]: of the queries, as in `scratch` */
    float *bias;                   /* [PIECE, PIECE] */
    int32_t *places, *members;     /* [rounds, PIECE], [PIECE]: of the keys that are being read */
};

static int64_t arrange_lists(struct lists *l, const struct problem *p, float *memory)
{
    const int64_t all = p->rounds * p->length;
    int64_t used = 0;
    l->place = take(memory, &used, all);
    l->start = take(memory, &used, all);
    l->stop = take(memory, &used, all);
    l->order = take(memory, &used, p->length);
    l->bounds = take(memory, &used, p->buckets + 1);
    l->count = take(memory, &used, p->buckets);
    l->top = take(memory, &used, p->length);
    l->weight = take(memory, &used, p->length);
    l->bias = take(memory, &used, PIECE * PIECE);
    l->places = take(memory, &used, p->rounds * PIECE);
    l->members = take(memory, &used, PIECE);
    return used;
}

/* List places by bucket: `bounds` [buckets + 1] is where each begins, `next` [buckets] memory. */
static void sort(int32_t *list, int32_t *bounds, int32_t *next, const int32_t *bucket, int64_t length, int64_t buckets)
{
    memset(bounds, 0, (buckets + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < length; i++)
        bounds[bucket[i] + 1]++;
    for (int64_t b = 0; b < buckets; b++)
        bounds[b + 1] += bounds[b];
    memcpy(next, bounds, buckets * sizeof(int32_t));
    for (int64_t i = 0; i < length; i++)
        list[next[bucket[i]]++] = i;
}

/* Where in the list of a round the runs of a head's queries lie. */
static void find_runs(const struct problem *p, int32_t *start, int32_t *stop, int32_t *passed, const int32_t *bounds,
                      const int32_t *of_query, const int32_t *of_key)
{
    memset(passed, 0, p->buckets * sizeof(int32_t));
    for (int64_t i = 0; i < p->length; i++) {
        passed[of_key[i]]++;
        const int64_t bucket = of_query[i], here = bounds[bucket] + passed[bucket];
        start[i] = here - bounds[bucket] > p->behind ? here - p->behind : bounds[bucket];
        stop[i] = smaller(here + p->ahead, bounds[bucket + 1]);
    }
}

/* What is there of each query before any key: nothing, or its own key. */
static void begin(struct lists *l, const struct problem *p, int64_t batch, int64_t head, int64_t group,
                  const int32_t *of_query, const int32_t *of_key, int64_t query_step, int64_t key_step)
{
    for (int64_t i = 0; i < p->length; i++) {
        int alone = !p->shared;
        for (int64_t round = 0; round < p->rounds; round++)
            alone = alone && of_query[round * query_step + i] != of_key[round * key_step + i];
        float *out = place(&p->out, batch, head, group, i);
        l->top[i] = LOWEST / 2;
        l->weight[i] = alone;
        if (alone) {
            const float *query = place(&p->query, batch, head, group, i), *key = place(&p->key, batch, head, 0, i);
            float score = 0.0f;
            for (int64_t column = 0; column < p->key_size; column++)
                score += query[column] * key[column];
            l->top[i] = p->scaling * score;
            memcpy(out, place(&p->value, batch, head, 0, i), p->value_size * sizeof(float));
        } else
            memset(out, 0, p->value_size * sizeof(float));
    }
}

/* Have the keys from `at` to `at` + `count` of a round's list ready, and hide from each query what it does not see. */
static void pack_keys(struct scratch *s, struct lists *l, const struct problem *p, int64_t batch, int64_t head,
                      int64_t round, const int32_t *member, int64_t at, int64_t count, const int32_t *queries,
                      int64_t rows)
{
    for (int64_t j = 0; j < count; j++) {
        pack(s->key + j * s->keys, 1, place(&p->key, batch, head, 0, member[at + j]), 0, 1, s->key_size, s->keys);
        pack(s->value + j * s->values, 1, place(&p->value, batch, head, 0, member[at + j]), 0, 1, p->value_size,
             s->values);
        l->members[j] = member[at + j];
        for (int64_t earlier = 0; earlier < round; earlier++)
            l->places[earlier * PIECE + j] = l->place[earlier * p->length + member[at + j]];
    }
    turn(s->turned, PIECE, s->key, s->keys, PIECE, s->keys);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < count; j += LANES) {
            const mask number = (mask)LANE_NUMBERS + (int32_t)(at + j);
            const int32_t *start = l->start + queries[i], *stop = l->stop + queries[i];
            mask seen = (number >= start[round * p->length]) & (number < stop[round * p->length]);
            for (int64_t earlier = 0; earlier < round; earlier++) {
                const mask there = *(const mask_anywhere *)(l->places + earlier * PIECE + j);
                seen &= (there < start[earlier * p->length]) | (there >= stop[earlier * p->length]);
            }
            if (p->shared)
                seen &= *(const mask_anywhere *)(l->members + j) != queries[i];
            store(l->bias + i * PIECE + j, choose(seen, (lanes){0}, (lanes){0} + LOWEST));
        }
}

/* Some queries of one bucket or of buckets that follow each other take in their runs in the list of one round. */
static void read_runs(struct scratch *s, struct lists *l, const struct problem *p, int64_t batch, int64_t head,
                      int64_t group, int64_t round, const int32_t *member, const int32_t *queries, int64_t rows)
{
    const int32_t *start = l->start + round * p->length, *stop = l->stop + round * p->length;
    const int64_t end = stop[queries[rows - 1]];
    for (int64_t i = 0; i < rows; i++) {
        pack(s->query + i * s->keys, 1, place(&p->query, batch, head, group, queries[i]), 0, 1, s->key_size, s->keys);
        for (int64_t column = 0; column < s->keys; column++)
            s->query[i * s->keys + column] *= p->scaling;
        pack(s->out + i * s->values, 1, place(&p->out, batch, head, group, queries[i]), 0, 1, p->value_size,
             s->values);
        s->top[i] = l->top[queries[i]];
        store(s->weight + i * LANES, (lanes){l->weight[queries[i]]});
    }
    for (int64_t at = start[queries[0]]; at < end; at += PIECE) {
        const int64_t count = smaller(end - at, PIECE);
        pack_keys(s, l, p, batch, head, round, member, at, count, queries, rows);
        read_piece(s, s->value, count, rows, l->bias, PIECE, 0);
    }
    for (int64_t i = 0; i < rows; i++) {
        memcpy(place(&p->out, batch, head, group, queries[i]), s->out + i * s->values, p->value_size * sizeof(float));
        l->top[queries[i]] = s->top[i];
        l->weight[queries[i]] = sum_of(load(s->weight + i * LANES));
    }
}

/* One query head, of a key/value head whose keys are listed. */
static void read_head(struct scratch *s, struct lists *l, const struct problem *p, int64_t batch, int64_t head,
                      int64_t group)
{
    const int64_t sequences = p->batches * p->heads, sequence = batch * p->heads + head;
    const int64_t key_step = sequences * p->length, query_step = key_step * p->groups, listed = p->buckets + 1;
    const int32_t *of_query = p->query_bucket + (sequence * p->groups + group) * p->length;
    const int32_t *of_key = p->key_bucket + sequence * p->length;
    begin(l, p, batch, head, group, of_query, of_key, query_step, key_step);
    for (int64_t round = 0; round < p->rounds; round++)
        find_runs(p, l->start + round * p->length, l->stop + round * p->length, l->count,
                  p->bounds + (round * sequences + sequence) * listed, of_query + round * query_step,
                  of_key + round * key_step);
    for (int64_t round = 0; round < p->rounds; round++) {
        const int32_t *start = l->start + round * p->length;
        sort(l->order, l->bounds, l->count, of_query + round * query_step, p->length, p->buckets);
        for (int64_t first = 0, last; first < p->length; first = last) {
            for (last = first + 1; last < p->length && last < first + PIECE; last++)
                if (start[l->order[last]] - start[l->order[first]] > SPREAD)
                    break;
            read_runs(s, l, p, batch, head, group, round, p->member + round * key_step + sequence * p->length,
                      l->order + first, last - first);
        }
    }
    for (int64_t i = 0; i < p->length; i++) {
        float *out = place(&p->out, batch, head, group, i);
        const float factor = l->weight[i] > 0.0f ? 1.0f / l->weight[i] : 0.0f;
        for (int64_t column = 0; column < p->value_size; column++)
            out[column] *= factor;
        if (!factor)
            memcpy(out, place(&p->value, batch, head, 0, i), p->value_size * sizeof(float));
    }
}

static void read_task(const void *problem, float *memory, int64_t task)
{
    const struct problem *p = problem;
    const int64_t sequences = p->batches * p->heads, listed = p->buckets + 1;
    struct scratch s;
    struct lists l;
    arrange_lists(&l, p, memory + arrange(&s, p->key_size, p->value_size, memory));
    for (int64_t round = 0; round < p->rounds; round++) {
        int32_t *member = p->member + (round * sequences + task) * p->length;
        sort(member, p->bounds + (round * sequences + task) * listed, l.count,
             p->key_bucket + (round * sequences + task) * p->length, p->length, p->buckets);
        for (int64_t at = 0; at < p->length; at++)
            l.place[round * p->length + member[at]] = at;
    }
    for (int64_t group = 0; group < p->groups; group++)
        read_head(&s, &l, p, task / p->heads, task % p->heads, group);
}

/* Work through all key/value heads of a problem; returns 0, or 1 where there was no memory to work in. */
int bucket_softmax(const struct problem *p)
{
    struct scratch s;
    struct lists l;
    const int64_t size = arrange(&s, p->key_size, p->value_size, NULL) + arrange_lists(&l, p, NULL);
    return run_tasks(read_task, p, p->batches * p->heads, p->threads, size);
}
