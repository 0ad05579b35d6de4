/* Factors of products by the matrix unit: where they are put into tiles, and which of them are kept there until their
 * numbers change, as several products have them.
 */

#pragma once

#include "amx.h"

#define MOST_HELD 40 /* factors that are kept; what finds no place is put into tiles for every product */

enum side { LEFT, RIGHT };

/* Tiles of what lies there, as a factor on one side; without parts they have yet to be made. */
struct held {
    const float *of;
    enum side side;
    int64_t lines, steps;
    struct tiles tiles;
    void *memory;
};

/* Each number is made of so many parts; without parts products are made of float32. */
struct pack_cache {
    void *left, *right; /* memory for what is not kept */
    int64_t parts, count;
    struct held held[MOST_HELD];
};

/* Take memory for factors of so many numbers; a right one may have two parts where left ones have one. */
static inline struct pack_cache take_factors(float *memory, int64_t *used, int64_t left, int64_t right, int64_t parts)
{
    struct pack_cache f = {.parts = parts};
    if (!parts)
        return f;
    f.left = arena_alloc(memory, used, packed_floats(left, parts));
    f.right = arena_alloc(memory, used, packed_floats(right, max_i64(parts, 2)));
    return f;
}

/* Keep what lies at `of`, at most so many numbers, as a factor on one side; whoever changes them says so. */
static inline void hold(struct pack_cache *f, float *memory, int64_t *used, const float *of, int64_t numbers,
                        enum side side)
{
    if (!f->parts || f->count == MOST_HELD)
        return;
    struct held *held = &f->held[f->count++];
    *held = (struct held){.of = of, .side = side};
    held->memory = arena_alloc(memory, used, packed_floats(numbers, side == RIGHT ? max_i64(f->parts, 2) : f->parts));
}

/* What is kept of a factor, or has a place to be kept. */
static inline struct held *find_held(struct pack_cache *f, const float *of, enum side side)
{
    for (int64_t number = 0; number < f->count; number++)
        if (f->held[number].of == of && f->held[number].side == side)
            return &f->held[number];
    return NULL;
}

/* Keep what lies there in a place that has been taken for what would be known later, if one is left. */
static inline void hold_right(struct pack_cache *f, const float *of)
{
    struct held *free = find_held(f, NULL, RIGHT);
    if (free && !find_held(f, of, RIGHT))
        free->of = of;
}

/* Keep what lies at `now` in the place of what lies at `of`. */
static inline void hold_instead(struct pack_cache *f, const float *of, const float *now)
{
    for (int64_t number = 0; number < f->count; number++)
        if (f->held[number].of == of) {
            f->held[number].of = now;
            f->held[number].tiles.parts = 0;
        }
}

/* The numbers that lie there are others now. */
static inline void changed(struct pack_cache *f, const float *of)
{
    for (int64_t number = 0; number < f->count; number++)
        if (f->held[number].of == of)
            f->held[number].tiles.parts = 0;
}

static inline int is_there(const struct held *held, int64_t lines, int64_t steps, int64_t parts)
{
    return held && held->lines == lines && held->steps == steps && held->tiles.parts == parts;
}

static inline struct tiles keep(struct held *held, struct tiles made, int64_t lines, int64_t steps)
{
    if (held) {
        held->lines = lines;
        held->steps = steps;
        held->tiles = made;
    }
    return made;
}

/* Tiles of a left factor [rows, steps] of float32, one of whose distances is 1. */
static inline struct tiles left_tiles(struct pack_cache *f, const float *left, int64_t left_row, int64_t left_step,
                                      int64_t rows, int64_t steps)
{
    struct held *held = left_step == 1 ? find_held(f, left, LEFT) : NULL;
    if (is_there(held, rows, steps, f->parts))
        return held->tiles;
    void *to = held ? held->memory : f->left;
    if (left_step != 1)
        return pack_a_transposed(to, (struct rows){left, left_step, FLOAT32}, rows, steps, f->parts);
    return keep(held, pack_a(to, (struct rows){left, left_row, FLOAT32}, rows, steps, f->parts), rows, steps);
}

/* Tiles of a right factor [steps, columns] of float32; where it is `fine` its numbers have two parts at least. */
static inline struct tiles right_tiles(struct pack_cache *f, const float *right, int64_t right_step, int64_t steps,
                                       int64_t columns, int fine)
{
    const int64_t parts = fine ? max_i64(f->parts, 2) : f->parts;
    struct held *held = find_held(f, right, RIGHT);
    if (is_there(held, columns, steps, parts))
        return held->tiles;
    void *to = held ? held->memory : f->right;
    return keep(held, pack_b(to, (struct rows){right, right_step, FLOAT32}, steps, columns, parts), columns, steps);
}
