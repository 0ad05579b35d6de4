/* Pieces of keys and values in tiles, and the memory for the last ones: blocks of queries that follow each other meet
 * nearly the same.
 */

#pragma once

#include "amx.h"

#define PIECE 64            /* queries, and keys, that are multiplied at a time */
#define FETCHED 2           /* rows of what comes next that are asked for at a time */
#define MOST_PIECES 16      /* that are kept, */
#define KEPT_NUMBERS 200000 /* in so much memory for numbers of float32, which the second cache holds */

/* The rows of keys and of values, and what lies turned: forward the values, back the keys. */
struct piece {
    struct tiles key, value, turned;
};

struct pieces {
    int64_t *names; /* of the pieces that are there, zero for none; these two are there for all tasks of a thread */
    int64_t *next;  /* which one is given up */
    float *memory;
    int64_t count, key_size, value_size, turned_size, parts;
};

/* Comes first in a thread's memory, of which `run_tasks` clears the beginning; a size of zero is for what none has. */
static inline int64_t arrange_pieces(struct pieces *p, int64_t key_size, int64_t value_size, int64_t turned_size,
                                     int64_t parts, float *memory)
{
    *p = (struct pieces){.key_size = round_up(key_size, BLOCK), .value_size = round_up(value_size, BLOCK),
                         .turned_size = turned_size, .parts = parts};
    if (!parts)
        return 0;
    const int64_t room = packed_floats(PIECE * (p->key_size + p->value_size + p->turned_size), parts);
    int64_t used = 0;
    p->count = max_i64(1, min_i64(MOST_PIECES, KEPT_NUMBERS / room));
    p->names = arena_alloc(memory, &used, 2 * MOST_PIECES);
    p->next = arena_alloc(memory, &used, 2);
    p->memory = arena_alloc(memory, &used, p->count * room);
    return used;
}

/* Up to PIECE rows of a head, from a place on. */
struct span {
    int64_t batch, head, at, count;
};

/* Rows of a head's keys or values, zero up to `padded` numbers and PIECE rows: where they lie if tiles can be made of
 * that, or copied to `spare`. */
static inline struct rows rows_for_tiles(const struct pieces *p, const tensor_view *x, const struct span *of,
                                         int64_t size, int64_t padded, float *spare)
{
    const int readable = x->kind == FLOAT32 || (x->kind == BFLOAT16 && p->parts == 1);
    if (readable && of->count == PIECE && size == padded)
        return (struct rows){row_ptr(x, of->batch, of->head, 0, of->at), x->token, x->kind};
    pack(spare, PIECE, x, of->batch, of->head, 0, of->at, of->count, size, padded);
    return (struct rows){spare, padded, FLOAT32};
}

/* Find the piece of that name; returns whether it is there, or has yet to be put into its tiles. What has no name, but
 * zero, is never found again. */
static inline int find_piece(struct pieces *p, int64_t name, struct piece *found)
{
    const int64_t parts = p->parts, sizes = p->key_size + p->value_size + p->turned_size;
    int64_t place = 0;
    while (place < p->count && (!name || p->names[place] != name))
        place++;
    const int there = place < p->count;
    if (!there) {
        place = *p->next;
        *p->next = (place + 1) % p->count;
        p->names[place] = name;
    }
    float *key = p->memory + place * packed_floats(PIECE * sizes, parts);
    float *value = key + packed_floats(PIECE * p->key_size, parts),
        *turned = value + packed_floats(PIECE * p->value_size, parts);
    *found = (struct piece){tiles_at(key, PIECE, p->key_size, parts), tiles_at(value, PIECE, p->value_size, parts),
                            tiles_at(turned, p->turned_size, PIECE, parts)};
    return there;
}
