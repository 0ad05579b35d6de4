/* Products: of rows of float32, by the matrix unit of a processor that has one, of matrices that keep their tiles. */

#pragma once

#include "tensor.h"

/* out [rows, columns] = left right, more what is there if `adds`, rows and columns being whole numbers of tiles; a
 * function of its own, as its tiles need all registers */
static __attribute__((noinline, unused)) void
gemm_f32(float *out, int64_t out_row, const float *left, int64_t left_row, int64_t left_step, const float *right,
         int64_t right_step, int64_t rows, int64_t columns, int64_t steps, int adds)
{
    for (int64_t column = 0; column < columns; column += TILE_COLUMNS)
        for (int64_t row = 0; row < rows; row += TILE_ROWS)
            make_tile(out + row * out_row + column, out_row, left + row * left_row, left_row, left_step,
                      right + column, right_step, steps, adds);
}

/* Products by the matrix unit (AMX) of a processor that has one, which multiplies numbers of bfloat16 and sums up in
 * float32. A number of a factor becomes
 *
 *     one of them, the nearest: what heads in bfloat16 are, or what was allowed;
 *     two, the second what is left then;
 *     three, cut off one after the other, which have all digits of float32.
 *
 * Of the products of parts those are made that float32 can tell: three by three without the last of both.
 *
 * Tiles are 16 rows of 64 bytes: of a left factor 16 rows of 32 steps, of a right one 16 pairs of steps in 16 columns,
 * of a product 16 rows of 16 columns. Steps n and n + 16 are a pair, so that none of the factors needs to be shuffled.
 */

#define TILE 1024 /* bytes */
#define BLOCK 32  /* rows, columns and steps that are multiplied at a time: two tiles by two, one by one in steps */
#define SLICE 128 /* steps of products in parts at a time, of which the first cache holds what it can */
#define PAIRS 16  /* of steps in a tile */

/* One factor in tiles, each followed by that of the next steps: bytes to the one beside it, and to the next part. */
struct tiles {
    const char *data;
    int64_t beside, part, parts;
};

/* Rows of numbers, so many apart, that are float32 or BFLOAT16. */
struct rows {
    const void *data;
    int64_t row, kind;
};

static inline int64_t max_i64(int64_t one, int64_t other) { return one > other ? one : other; }

/* How many numbers of float32 take as much memory as so many numbers in parts. */
static inline int64_t packed_floats(int64_t numbers, int64_t parts) { return numbers * parts / 2; }

/* Memory for the factors of one product at a time, each number in so many parts; without parts products are made of
 * float32. */
struct pack_buffers {
    void *left, *right;
    int64_t parts;
};

/* Take memory for factors of so many numbers. */
static inline struct pack_buffers take_buffers(float *memory, int64_t *used, int64_t left, int64_t right,
                                               int64_t parts)
{
    struct pack_buffers buffers = {.parts = parts};
    if (!parts)
        return buffers;
    buffers.left = arena_alloc(memory, used, packed_floats(left, parts));
    buffers.right = arena_alloc(memory, used, packed_floats(right, parts));
    return buffers;
}

/* Tiles of a factor of so many rows or columns, and steps. */
static inline struct tiles tiles_at(const void *data, int64_t lines, int64_t steps, int64_t parts)
{
    const int64_t beside = (steps + BLOCK - 1) / BLOCK * TILE;
    return (struct tiles){data, beside, lines / LANES * beside, parts};
}

/* The same factor without its first rows or columns, or steps, in whole tiles. */
static inline struct tiles tiles_from(struct tiles x, int64_t lines, int64_t steps)
{
    x.data += lines / LANES * x.beside + steps / BLOCK * TILE;
    return x;
}

#if defined(__AVX512F__) && (__GNUC__ >= 11 || __clang_major__ >= 12)

#define WITH_TILES __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512bw")))

/* Tell the matrix unit of this thread about the tiles, or that they are done with. */
static inline WITH_TILES void begin_tiles(int64_t parts)
{
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    if (parts)
        _tile_loadconfig(&shapes);
}

static inline WITH_TILES void end_tiles(int64_t parts)
{
    if (parts)
        _tile_release();
}

/* The upper half of each number, in place and in both halves of a lane. */
static inline __attribute__((always_inline)) vec cut(vec x)
{
    return (vec)((mask)x & (int32_t)0xffff0000);
}

static inline __attribute__((always_inline)) vec cut_pair(vec first, vec second)
{
    const __m512i low = _mm512_srli_epi32((__m512i)first, 16), upper = _mm512_set1_epi32((int32_t)0xffff0000);
    return (vec)_mm512_ternarylogic_epi32(low, (__m512i)second, upper, 0xf8); /* low | second & upper */
}

/* The same of the nearest numbers of bfloat16. */
static inline WITH_TILES __attribute__((always_inline)) vec round_pair(vec first, vec second)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (vec)_mm512_permutexvar_epi16(order, (__m512i)both);
}

/* Put LANES pairs where a tile has them, part after part. */
static inline WITH_TILES __attribute__((always_inline)) void
put_pairs(char *tile, int64_t part_size, vec first, vec second, int parts)
{
#pragma GCC unroll 3
    for (int part = 0; part < parts; part++) {
        store((float *)(tile + part * part_size), parts == 3 ? cut_pair(first, second) : round_pair(first, second));
        first -= parts == 3 ? cut(first) : rounded_lanes(first);
        second -= parts == 3 ? cut(second) : rounded_lanes(second);
    }
}

/* LANES numbers of a row, zero behind the last row. */
static inline __attribute__((always_inline)) vec
number_at(struct rows x, int64_t row, int64_t rows, int64_t column, int64_t kind)
{
    const char *data = x.data;
    return row < rows ? widened(data + (kind ? 2 : 4) * row * x.row, column, kind) : (vec){0};
}

static inline WITH_TILES __attribute__((always_inline)) struct tiles
pack_a_terms(char *to, struct rows x, int64_t rows, int64_t steps, int parts, int64_t kind)
{
    const struct tiles made = tiles_at(to, rows, steps, parts);
    for (int64_t first = 0; first < rows; first += LANES)
        for (int64_t at = 0; at < steps; at += BLOCK, to += TILE)
#pragma GCC unroll 4
            for (int64_t row = 0; row < LANES; row++)
                put_pairs(to + row * sizeof(vec), made.part, number_at(x, first + row, rows, at, kind),
                          number_at(x, first + row, rows, at + PAIRS, kind), parts);
    return made;
}

static inline WITH_TILES __attribute__((always_inline)) struct tiles
pack_b_terms(char *to, struct rows x, int64_t steps, int64_t columns, int parts)
{
    const struct tiles made = tiles_at(to, columns, steps, parts);
    for (int64_t column = 0; column < columns; column += LANES)
        for (int64_t at = 0; at < steps; at += BLOCK, to += TILE)
#pragma GCC unroll 4
            for (int64_t number = 0; number < PAIRS; number++)
                put_pairs(to + number * sizeof(vec), made.part, number_at(x, at + number, steps, column, FLOAT32),
                          number_at(x, at + number + PAIRS, steps, column, FLOAT32), parts);
    return made;
}

static inline WITH_TILES __attribute__((always_inline)) struct tiles
pack_a_transposed_terms(char *to, struct rows x, int64_t rows, int64_t steps, int parts, int64_t kind)
{
    const struct tiles made = tiles_at(to, rows, steps, parts);
    for (int64_t first = 0; first < rows; first += LANES)
        for (int64_t at = 0; at < steps; at += BLOCK, to += TILE) {
            vec first_steps[PAIRS], last_steps[PAIRS]; /* then the rows' numbers of these steps */
#pragma GCC unroll 16
            for (int64_t number = 0; number < PAIRS; number++) {
                first_steps[number] = number_at(x, at + number, steps, first, kind);
                last_steps[number] = number_at(x, at + number + PAIRS, steps, first, kind);
            }
            transpose_block(first_steps);
            transpose_block(last_steps);
#pragma GCC unroll 16
            for (int64_t number = 0; number < PAIRS; number++)
                put_pairs(to + number * sizeof(vec), made.part, first_steps[number], last_steps[number], parts);
        }
    return made;
}

/* Tiles of a left factor [rows, steps], whose rows have numbers, or zeros, up to whole blocks of steps. */
static WITH_TILES struct tiles pack_a(void *to, struct rows x, int64_t rows, int64_t steps, int64_t parts)
{
    if (parts == 3)
        return pack_a_terms(to, x, rows, steps, 3, FLOAT32);
    return x.kind ? pack_a_terms(to, x, rows, steps, 1, BFLOAT16) : pack_a_terms(to, x, rows, steps, 1, FLOAT32);
}

/* The same of a factor that lies turned, [steps, rows]. */
static WITH_TILES struct tiles pack_a_transposed(void *to, struct rows x, int64_t rows, int64_t steps, int64_t parts)
{
    if (parts == 3)
        return pack_a_transposed_terms(to, x, rows, steps, 3, FLOAT32);
    return x.kind ? pack_a_transposed_terms(to, x, rows, steps, 1, BFLOAT16)
                  : pack_a_transposed_terms(to, x, rows, steps, 1, FLOAT32);
}

/* Tiles of a right factor [steps, columns] of float32. */
static WITH_TILES struct tiles pack_b(void *to, struct rows x, int64_t steps, int64_t columns, int64_t parts)
{
    if (parts == 3)
        return pack_b_terms(to, x, steps, columns, 3);
    return parts == 2 ? pack_b_terms(to, x, steps, columns, 2) : pack_b_terms(to, x, steps, columns, 1);
}

#define LOAD_LEFT(number) \
    do { \
        _tile_loadd(4, over + (number) * left.part, 64); \
        _tile_loadd(5, under + (number) * left.part, 64); \
    } while (0)
#define LOAD_RIGHT(number) \
    do { \
        _tile_loadd(6, first + (number) * right.part, 64); \
        _tile_loadd(7, second + (number) * right.part, 64); \
    } while (0)
#define ADD_PRODUCTS() \
    do { \
        _tile_dpbf16ps(0, 4, 6); \
        _tile_dpbf16ps(1, 4, 7); \
        _tile_dpbf16ps(2, 5, 6); \
        _tile_dpbf16ps(3, 5, 7); \
    } while (0)

/* out [rows, columns] = left right, more what is there if `adds`, in whole blocks of rows and columns. Of what comes
 * next so many rows are asked for beside the products of each block. */
static inline WITH_TILES __attribute__((always_inline)) void
multiply_parts(float *out, int64_t out_row, struct tiles left, struct tiles right, int64_t rows, int64_t columns,
               int64_t steps, int adds, struct prefetch_queue *next, int64_t fetched, int left_parts, int right_parts)
{
    for (int64_t column = 0; column < columns; column += BLOCK)
        for (int64_t row = 0; row < rows; row += BLOCK) {
            float *upper = out + row * out_row + column, *lower = upper + LANES * out_row;
            const char *over = left.data + row / LANES * left.beside, *under = over + left.beside;
            const char *first = right.data + column / LANES * right.beside, *second = first + right.beside;
            if (adds) {
                _tile_loadd(0, upper, 4 * out_row);
                _tile_loadd(1, upper + LANES, 4 * out_row);
                _tile_loadd(2, lower, 4 * out_row);
                _tile_loadd(3, lower + LANES, 4 * out_row);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t step = 0; step < steps; step += BLOCK) {
                if (left_parts == 3) { /* the smallest first, and in the order that loads the fewest */
                    LOAD_LEFT(2);
                    LOAD_RIGHT(0);
                    ADD_PRODUCTS();
                    LOAD_LEFT(1);
                    ADD_PRODUCTS();
                    LOAD_RIGHT(1);
                    ADD_PRODUCTS();
                    LOAD_LEFT(0);
                    ADD_PRODUCTS();
                    LOAD_RIGHT(2);
                    ADD_PRODUCTS();
                } else {
                    LOAD_LEFT(0);
                    if (right_parts == 2) {
                        LOAD_RIGHT(1);
                        ADD_PRODUCTS();
                    }
                }
                LOAD_RIGHT(0);
                ADD_PRODUCTS();
                prefetch_some(next, fetched);
                over += TILE, under += TILE, first += TILE, second += TILE;
            }
            _tile_stored(0, upper, 4 * out_row);
            _tile_stored(1, upper + LANES, 4 * out_row);
            _tile_stored(2, lower, 4 * out_row);
            _tile_stored(3, lower + LANES, 4 * out_row);
        }
}

static WITH_TILES __attribute__((noinline, unused)) void
multiply(float *out, int64_t out_row, struct tiles left, struct tiles right, int64_t rows, int64_t columns,
         int64_t steps, int adds, struct prefetch_queue *next, int64_t fetched)
{
    if (left.parts == 3)
        for (int64_t step = 0; step < steps; step += SLICE)
            multiply_parts(out, out_row, tiles_from(left, 0, step), tiles_from(right, 0, step), rows, columns,
                           steps - step < SLICE ? steps - step : SLICE, adds || step, next, fetched, 3, 3);
    else if (right.parts == 2)
        multiply_parts(out, out_row, left, right, rows, columns, steps, adds, next, fetched, 1, 2);
    else
        multiply_parts(out, out_row, left, right, rows, columns, steps, adds, next, fetched, 1, 1);
}

#else

#define HAS_NO_TILES
#define WITH_TILES
#define NEVER(result, name, ...) static inline result name(__VA_ARGS__) { __builtin_unreachable(); }

/* has_matrix_unit says so */
NEVER(void, put_pairs, char *tile, int64_t part_size, vec first, vec second, int parts)
NEVER(struct tiles, pack_a, void *to, struct rows x, int64_t rows, int64_t steps, int64_t parts)
NEVER(struct tiles, pack_a_transposed, void *to, struct rows x, int64_t rows, int64_t steps, int64_t parts)
NEVER(struct tiles, pack_b, void *to, struct rows x, int64_t steps, int64_t columns, int64_t parts)
NEVER(void, multiply, float *out, int64_t out_row, struct tiles left, struct tiles right, int64_t rows,
      int64_t columns, int64_t steps, int adds, struct prefetch_queue *next, int64_t fetched)

static inline void begin_tiles(int64_t parts) { (void)parts; }

static inline void end_tiles(int64_t parts) { (void)parts; }

#endif

/* Matrices of float32 that products read. A matrix owns the tiles that the matrix unit needs of it: they are made by
 * the first product that reads them, and serve the next ones until somebody writes numbers. As there is one way to get
 * a pointer to write to, nobody has to say that numbers changed.
 */

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
