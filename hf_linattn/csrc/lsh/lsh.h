/* The arguments of one call of softmax attention to keys that share a bucket with the query, and which keys each
 * query meets. */

#pragma once

#include "../common/online_softmax.h"

#define SPREAD 64 /* keys by which the runs of queries that are taken together may differ */

struct lsh_args {
    tensor_view query, key, value, out; /* float32, contiguous in their last dimension */
    tensor_view log;                    /* of the queries: what their weights add up to */
    tensor_view grad, weight_grad;      /* what the backward pass begins with: of out, and as log */
    tensor_view d_query, d_key, d_value;
    const int32_t *query_bucket;    /* [rounds, batches, heads * groups, length] */
    const int32_t *key_bucket;      /* [rounds, batches, heads, length] */
    int32_t *member, *bounds;       /* the lists: [rounds, batches, heads, length], [..., buckets + 1] */
    int64_t batches, heads, groups, length, key_size, value_size;
    int64_t rounds, buckets, behind, ahead, shared, threads;
    int64_t parts; /* of bfloat16 that numbers have in products; 0 for products of float32 */
    float scaling;
};

/* What belongs to one key/value head. The first index is the round; start and stop are of one query head's runs. */
struct lists {
    int32_t *place, *start, *stop; /* [rounds, length]: where in the list a key stands, where a query's run lies */
    int32_t *order, *bounds;       /* [length], [buckets + 1]: the queries by bucket */
    int32_t *count;                /* [buckets] */
    float *top, *weight;           /* [length]: of the queries, as in `workspace` */
    int32_t *starts, *stops;       /* [rounds, PIECE]: of the queries whose keys are being read */
    int32_t *queries;              /* [PIECE]: which these are */
};

/* Whether all buckets are among those that there are. */
static int are_buckets(const int32_t *numbers, int64_t count, int64_t buckets)
{
    int bad = 0;
    for (int64_t i = 0; i < count; i++)
        bad |= numbers[i] < 0 || numbers[i] >= buckets;
    return !bad;
}

static int fits(const struct lsh_args *p)
{
    const int64_t keys = p->rounds * p->batches * p->heads * p->length;
    return are_buckets(p->query_bucket, keys * p->groups, p->buckets) && are_buckets(p->key_bucket, keys, p->buckets);
}

static int64_t arrange_lists(struct lists *l, const struct lsh_args *p, float *memory)
{
    const int64_t all = p->rounds * p->length;
    int64_t used = 0;
    l->place = arena_alloc(memory, &used, all);
    l->start = arena_alloc(memory, &used, all);
    l->stop = arena_alloc(memory, &used, all);
    l->order = arena_alloc(memory, &used, p->length);
    l->bounds = arena_alloc(memory, &used, p->buckets + 1);
    l->count = arena_alloc(memory, &used, p->buckets);
    l->top = arena_alloc(memory, &used, p->length);
    l->weight = arena_alloc(memory, &used, p->length);
    l->starts = arena_alloc(memory, &used, p->rounds * PIECE);
    l->stops = arena_alloc(memory, &used, p->rounds * PIECE);
    l->queries = arena_alloc(memory, &used, PIECE);
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
static void find_runs(const struct lsh_args *p, int32_t *start, int32_t *stop, int32_t *passed, const int32_t *bounds,
                      const int32_t *of_query, const int32_t *of_key)
{
    memset(passed, 0, p->buckets * sizeof(int32_t));
    for (int64_t i = 0; i < p->length; i++) {
        passed[of_key[i]]++;
        const int64_t bucket = of_query[i], here = bounds[bucket] + passed[bucket];
        start[i] = here - bounds[bucket] > p->behind ? here - p->behind : bounds[bucket];
        stop[i] = min_i64(here + p->ahead, bounds[bucket + 1]);
    }
}

/* Note the queries whose keys are to be read, and where their runs in this and all earlier rounds lie. */
static void note_runs(struct lists *l, const struct lsh_args *p, int64_t round, const int32_t *queries, int64_t rows)
{
    memset(l->starts, 0, (round + 1) * PIECE * sizeof(int32_t));
    memset(l->stops, 0, (round + 1) * PIECE * sizeof(int32_t));
    for (int64_t i = 0; i < rows; i++) {
        l->queries[i] = queries[i];
        for (int64_t earlier = 0; earlier <= round; earlier++) {
            l->starts[earlier * PIECE + i] = l->start[earlier * p->length + queries[i]];
            l->stops[earlier * PIECE + i] = l->stop[earlier * p->length + queries[i]];
        }
    }
}

/* Find the bias of the keys from `at` to `at` + `count` of a round's list, which hides from each query what it does not
 * see or has seen in an earlier round. */
static void hide_keys(float *bias, const struct lists *l, const struct lsh_args *p, int64_t round,
                      const int32_t *member, int64_t at, int64_t count)
{
    for (int64_t j = 0; j < PIECE; j++)
        for (int64_t i = 0; i < PIECE; i += LANES) {
            mask seen = {0};
            for (int64_t earlier = 0; earlier <= round && j < count; earlier++) {
                const int32_t there = l->place[earlier * p->length + member[at + j]];
                const mask start = *(const mask_unaligned *)(l->starts + earlier * PIECE + i);
                const mask stop = *(const mask_unaligned *)(l->stops + earlier * PIECE + i);
                const mask met = (start <= there) & (stop > there);
                seen = earlier == round ? met & ~seen : seen | met;
            }
            if (p->shared && j < count)
                seen &= *(const mask_unaligned *)(l->queries + i) != member[at + j];
            store(bias + j * PIECE + i, blend(seen, (vec){0}, (vec){0} + LOWEST));
        }
}

/* List the keys of a key/value head in all rounds. */
static void list_keys(struct lists *l, const struct lsh_args *p, int64_t sequence)
{
    const int64_t sequences = p->batches * p->heads, listed = p->buckets + 1;
    for (int64_t round = 0; round < p->rounds; round++) {
        int32_t *member = p->member + (round * sequences + sequence) * p->length;
        sort(member, p->bounds + (round * sequences + sequence) * listed, l->count,
             p->key_bucket + (round * sequences + sequence) * p->length, p->length, p->buckets);
        for (int64_t at = 0; at < p->length; at++)
            l->place[round * p->length + member[at]] = at;
    }
}

/* Whether a query sees its own key apart from all rounds. */
static int is_alone(const struct lsh_args *p, int64_t sequence, int64_t group, int64_t at)
{
    const int64_t sequences = p->batches * p->heads;
    for (int64_t round = 0; round < p->rounds; round++)
        if (p->query_bucket[((round * sequences + sequence) * p->groups + group) * p->length + at]
            == p->key_bucket[(round * sequences + sequence) * p->length + at])
            return 0;
    return !p->shared;
}

/* Call `meet` for all queries of one head, some of one bucket or of buckets that follow each other at a time, in every
 * round; their keys in the list of the round, `member`, are from the start of the first to the stop of the last. */
static void for_runs(struct lists *l, const struct lsh_args *p, int64_t sequence, int64_t group,
                     void (*meet)(void *work, int64_t round, const int32_t *member, const int32_t *queries,
                                  int64_t rows),
                     void *work)
{
    const int64_t sequences = p->batches * p->heads, listed = p->buckets + 1;
    for (int64_t round = 0; round < p->rounds; round++) {
        const int64_t row = round * sequences + sequence;
        find_runs(p, l->start + round * p->length, l->stop + round * p->length, l->count, p->bounds + row * listed,
                  p->query_bucket + (row * p->groups + group) * p->length, p->key_bucket + row * p->length);
    }
    for (int64_t round = 0; round < p->rounds; round++) {
        const int64_t row = round * sequences + sequence;
        const int32_t *start = l->start + round * p->length;
        sort(l->order, l->bounds, l->count, p->query_bucket + (row * p->groups + group) * p->length, p->length,
             p->buckets);
        for (int64_t first = 0, last; first < p->length; first = last) {
            for (last = first + 1; last < p->length && last < first + PIECE; last++)
                if (start[l->order[last]] - start[l->order[first]] > SPREAD)
                    break;
            meet(work, round, p->member + row * p->length, l->order + first, last - first);
        }
    }
}
