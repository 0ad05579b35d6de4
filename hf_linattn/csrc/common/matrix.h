/* Matrices of float32 that products read. A matrix owns the tiles that the matrix unit needs of it: they are made by
 * the first product that reads them, and serve the next ones until somebody writes numbers. As there is one way to get
 * a pointer to write to, nobody has to say that numbers changed.
 */

#pragma once

#include "amx.h"

/* Which tiles a matrix keeps: as a left factor; as a right one; as a right one each of whose numbers has two parts at
 * least. Of others every product makes its own. */
enum { KEEP_NONE = 0, KEEP_A = 1, KEEP_B = 2, KEEP_FINE_B = 4 };

struct matrix;

/* Tiles of a matrix as a factor of so many rows or columns, and steps; the tiles themselves lie behind. */
struct pack_entry {
    const struct matrix *owner; /* whose tiles they are; NULL if they are stale */
    struct tiles tiles;
    int64_t lines, steps;
};

_Static_assert(sizeof(struct pack_entry) <= LINE, "tiles begin on the next line of a cache");

struct matrix {
    const float *data;        /* whoever writes numbers asks `matrix_write` where */
    int64_t row;              /* numbers from one row to the next */
    int fine;                 /* whether each number has two parts at least, as a right factor */
    struct pack_entry *a, *b; /* NULL where no tiles are kept */
};

/* The parts that a number of a right factor has. */
static inline int64_t parts_of(const struct matrix *m, int64_t parts) { return m->fine ? max_i64(parts, 2) : parts; }

/* Memory for tiles of so many numbers, none of which are made yet; NULL where products need none. */
static inline struct pack_entry *entry_alloc(float *memory, int64_t *used, int64_t numbers, int64_t parts)
{
    if (!parts)
        return NULL;
    struct pack_entry *entry = arena_alloc(memory, used, LINE / sizeof(float) + packed_floats(numbers, parts));
    if (entry)
        entry->owner = NULL;
    return entry;
}

/* Where the tiles of an entry lie. */
static inline void *entry_tiles(struct pack_entry *entry) { return (char *)entry + LINE; }

/* A matrix of so many rows, `row` numbers each, and memory for the tiles that it keeps. */
static inline struct matrix matrix_alloc(float *memory, int64_t *used, int64_t rows, int64_t row, int64_t parts,
                                         int keep)
{
    struct matrix m = {.data = arena_alloc(memory, used, rows * row), .row = row, .fine = keep & KEEP_FINE_B};
    if (keep & KEEP_A)
        m.a = entry_alloc(memory, used, rows * row, parts);
    if (keep & (KEEP_B | KEEP_FINE_B))
        m.b = entry_alloc(memory, used, rows * row, parts_of(&m, parts));
    return m;
}

/* Another matrix of as many rows, which keeps its tiles in the same place: those of the one that was read last are
 * there. Matrices that take turns need no more of a cache then. */
static inline struct matrix matrix_like(const struct matrix *first, float *memory, int64_t *used, int64_t rows)
{
    struct matrix m = *first;
    m.data = arena_alloc(memory, used, rows * m.row);
    return m;
}

/* Where to write numbers, until the next product reads the matrix: its tiles are stale. */
static inline float *matrix_write(struct matrix *m)
{
    if (m->a)
        m->a->owner = NULL;
    if (m->b)
        m->b->owner = NULL;
    return (float *)m->data;
}

/* Whether tiles are there of what a product needs. */
static inline int is_packed(const struct pack_entry *entry, const struct matrix *m, int64_t lines, int64_t steps)
{
    return entry->owner == m && entry->lines == lines && entry->steps == steps;
}

/* Tiles of the first rows of a matrix, and of the first numbers of each, as a left factor. */
static inline struct tiles matrix_a(const struct pack_buffers *buffers, const struct matrix *m, int64_t rows,
                                    int64_t steps)
{
    struct pack_entry *entry = m->a;
    const struct rows from = {m->data, m->row, FLOAT32};
    if (!entry)
        return pack_a(buffers->left, from, rows, steps, buffers->parts);
    if (!is_packed(entry, m, rows, steps))
        *entry = (struct pack_entry){m, pack_a(entry_tiles(entry), from, rows, steps, buffers->parts), rows, steps};
    return entry->tiles;
}

/* The same of the transposed matrix, whose rows are columns here; they are not kept. */
static inline struct tiles matrix_a_transposed(const struct pack_buffers *buffers, const struct matrix *m,
                                               int64_t rows, int64_t steps)
{
    return pack_a_transposed(buffers->left, (struct rows){m->data, m->row, FLOAT32}, rows, steps, buffers->parts);
}

/* Tiles of the first rows and columns of a matrix as a right factor. */
static inline struct tiles matrix_b(const struct pack_buffers *buffers, const struct matrix *m, int64_t steps,
                                    int64_t columns)
{
    struct pack_entry *entry = m->b;
    const struct rows from = {m->data, m->row, FLOAT32};
    const int64_t parts = parts_of(m, buffers->parts);
    if (!entry)
        return pack_b(buffers->right, from, steps, columns, parts);
    if (!is_packed(entry, m, columns, steps))
        *entry = (struct pack_entry){m, pack_b(entry_tiles(entry), from, steps, columns, parts), columns, steps};
    return entry->tiles;
}
