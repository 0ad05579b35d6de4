/* Products of numbers that are rounded to bfloat16, summed up in float32, by the matrix unit (AMX) of a processor that
 * has one. Tiles are 16 rows of 64 bytes: of a left factor 16 rows of 32 steps, of a right one 16 pairs of steps in 16
 * columns, of a product 16 rows of 16 columns.
 */

#pragma once

#include "lanes.h"

#define TILE 1024 /* bytes */
#define BLOCK 32  /* rows, columns and steps that are multiplied at a time: two tiles by two, one by one in steps */

/* Where factors are put as tiles; without `left` products are made of float32. */
struct rounded {
    void *left, *right;
};

/* One factor in tiles: bytes from one row of a tile to the next, from a tile to the one behind it, which has the next
 * steps, and to the one beside it. */
struct tiles {
    const char *data;
    int64_t row, behind, beside;
};

/* Rows of numbers, so many apart, that are float32 or BFLOAT16. */
struct rows {
    const void *data;
    int64_t row, kind;
};

static inline int64_t larger(int64_t one, int64_t other) { return one > other ? one : other; }

/* Take memory for factors of so many numbers, if they are to be rounded. */
static inline struct rounded take_rounded(float *memory, int64_t *used, int64_t left, int64_t right, int64_t bfloat16)
{
    if (!bfloat16)
        return (struct rounded){0};
    return (struct rounded){take(memory, used, left / 2), take(memory, used, right / 2)};
}

/* Tiles that lie one behind the other, for so many steps. */
static inline struct tiles tiles_at(const void *data, int64_t steps)
{
    return (struct tiles){data, TILE / LANES, TILE, (steps + BLOCK - 1) / BLOCK * TILE};
}

/* Tiles that are there already: of rows of bfloat16, in whole blocks. */
static inline struct tiles tiles_of_rows(const struct rows *rows)
{
    return (struct tiles){rows->data, 2 * rows->row, 2 * BLOCK, 2 * LANES * rows->row};
}

#if defined(__AVX512F__) && (__GNUC__ >= 11 || __clang_major__ >= 12)

#define WITH_TILES __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512bw")))
#define PAIRS 16 /* of steps in a tile */

/* Tell the matrix unit of this thread about the tiles, or that they are done with. */
static inline WITH_TILES void begin_tiles(const struct rounded *factors)
{
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    if (factors->left)
        _tile_loadconfig(&shapes);
}

static inline WITH_TILES void end_tiles(const struct rounded *factors)
{
    if (factors->left)
        _tile_release();
}

/* The numbers of two steps, rounded, or what is `left` of them then, those of a column side by side in one lane. */
static inline WITH_TILES __attribute__((always_inline)) lanes pair(lanes first, lanes second, int left)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    if (left)
        first -= rounded_lanes(first), second -= rounded_lanes(second);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (lanes)_mm512_permutexvar_epi16(order, (__m512i)both);
}

/* The pairs of up to BLOCK steps, LANES columns of each; zero beyond `steps`. */
static inline WITH_TILES __attribute__((always_inline)) void
pair_steps(lanes *pairs, const float *from, int64_t step, int64_t steps, int left)
{
    static const float nothing[LANES];
#pragma GCC unroll 16
    for (int64_t number = 0; number < PAIRS; number++) {
        const float *first = 2 * number < steps ? from + 2 * number * step : nothing;
        const float *second = 2 * number + 1 < steps ? from + (2 * number + 1) * step : nothing;
        pairs[number] = pair(load(first), load(second), left);
    }
}

/* Tiles of a right factor [steps, columns], column by column, or of what is `left` of it when it has been rounded. */
static WITH_TILES struct tiles put_right_part(float *to, const float *from, int64_t step, int64_t steps,
                                              int64_t columns, int left)
{
    const struct tiles made = tiles_at(to, steps);
    for (int64_t column = 0; column < columns; column += LANES)
        for (int64_t at = 0; at < steps; at += BLOCK, to += PAIRS * LANES) {
            lanes pairs[PAIRS];
            pair_steps(pairs, from + at * step + column, step, steps - at, left);
#pragma GCC unroll 16
            for (int number = 0; number < PAIRS; number++)
                store(to + number * LANES, pairs[number]);
        }
    return made;
}

static inline struct tiles put_right(float *to, const float *from, int64_t step, int64_t steps, int64_t columns)
{
    return put_right_part(to, from, step, steps, columns, 0);
}

/* The same from rows of bfloat16. */
static WITH_TILES struct tiles put_right_halves(float *to, const uint16_t *from, int64_t step, int64_t steps,
                                                int64_t columns)
{
    static const uint16_t nothing[BLOCK];
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_or_si512(low, _mm512_set1_epi16(16));
    const struct tiles made = tiles_at(to, steps);
    for (int64_t column = 0; column < columns; column += BLOCK)
        for (int64_t at = 0; at < steps; at += 2) {
            const uint16_t *first = from + at * step + column, *second = at + 1 < steps ? first + step : nothing;
            const __m512i one = _mm512_loadu_si512(first), other = _mm512_loadu_si512(second);
            char *tile = (char *)made.data + column / LANES * made.beside + at / BLOCK * TILE + at % BLOCK / 2 * 64;
            store((float *)tile, (lanes)_mm512_permutex2var_epi16(one, low, other));
            store((float *)(tile + made.beside), (lanes)_mm512_permutex2var_epi16(one, high, other));
        }
    for (int64_t at = round_up(steps, 2); at % BLOCK; at += 2)
        for (int64_t column = 0; column < columns; column += LANES)
            store((float *)(made.data + column / LANES * made.beside + at / BLOCK * TILE + at % BLOCK / 2 * 64),
                  (lanes){0});
    return made;
}

/* Tiles of a left factor [rows, steps], row by row, whose rows have numbers, or zeros, up to whole blocks of steps. */
static WITH_TILES struct tiles put_left(float *to, const float *from, int64_t row, int64_t rows, int64_t steps)
{
    const struct tiles made = tiles_at(to, steps);
    for (int64_t first = 0; first < rows; first += LANES)
        for (int64_t at = 0; at < steps; at += BLOCK, to += PAIRS * LANES)
#pragma GCC unroll 16
            for (int64_t number = 0; number < LANES; number++) {
                const float *numbers = from + (first + number) * row + at;
                const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(numbers + LANES), (__m512)load(numbers));
                store(to + number * LANES, (lanes)both);
            }
    return made;
}

/* The same of a factor that lies turned, [steps, rows]. */
static WITH_TILES struct tiles put_turned_left(float *to, const float *from, int64_t step, int64_t rows, int64_t steps)
{
    const struct tiles made = tiles_at(to, steps);
    for (int64_t first = 0; first < rows; first += LANES)
        for (int64_t at = 0; at < steps; at += BLOCK, to += PAIRS * LANES) {
            lanes pairs[PAIRS];
            pair_steps(pairs, from + at * step + first, step, steps - at, 0);
            exchange(pairs, 1);
            exchange(pairs, 2);
            exchange(pairs, 4);
            exchange(pairs, 8);
#pragma GCC unroll 16
            for (int number = 0; number < PAIRS; number++)
                store(to + number * LANES, pairs[number]);
        }
    return made;
}

/* out [rows, columns] = left right, more what is there if `adds`, in whole blocks of rows and columns. */
static WITH_TILES __attribute__((noinline)) void
multiply(float *out, int64_t out_row, struct tiles left, struct tiles right, int64_t rows, int64_t columns,
         int64_t steps, int adds)
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
                _tile_loadd(4, over, left.row);
                _tile_loadd(6, first, right.row);
                _tile_loadd(7, second, right.row);
                _tile_loadd(5, under, left.row);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
                over += left.behind, under += left.behind, first += right.behind, second += right.behind;
            }
            _tile_stored(0, upper, 4 * out_row);
            _tile_stored(1, upper + LANES, 4 * out_row);
            _tile_stored(2, lower, 4 * out_row);
            _tile_stored(3, lower + LANES, 4 * out_row);
        }
}

#else

#define HAS_NO_TILES
#define NEVER(result, name, ...) static inline result name(__VA_ARGS__) { __builtin_unreachable(); }

/* has_matrix_unit says so */
NEVER(struct tiles, put_right_part, float *to, const float *from, int64_t step, int64_t steps, int64_t columns,
      int left)
NEVER(struct tiles, put_right, float *to, const float *from, int64_t step, int64_t steps, int64_t columns)
NEVER(struct tiles, put_right_halves, float *to, const uint16_t *from, int64_t step, int64_t steps, int64_t columns)
NEVER(struct tiles, put_left, float *to, const float *from, int64_t row, int64_t rows, int64_t steps)
NEVER(struct tiles, put_turned_left, float *to, const float *from, int64_t step, int64_t rows, int64_t steps)
NEVER(void, multiply, float *out, int64_t out_row, struct tiles left, struct tiles right, int64_t rows,
      int64_t columns, int64_t steps, int adds)

static inline void begin_tiles(const struct rounded *factors) { (void)factors; }

static inline void end_tiles(const struct rounded *factors) { (void)factors; }

#endif

/* The same of factors that are not there as tiles yet. One of left_row and left_step is 1. Where it is `fine` the right
 * factor counts as two numbers of bfloat16 each. */
static inline void make_rounded(const struct rounded *factors, float *out, int64_t out_row, const float *left,
                                int64_t left_row, int64_t left_step, const float *right, int64_t right_step,
                                int64_t rows, int64_t columns, int64_t steps, int adds, int fine)
{
    const struct tiles made = left_step == 1 ? put_left(factors->left, left, left_row, rows, steps)
                                             : put_turned_left(factors->left, left, left_step, rows, steps);
    for (int part = 0; part <= fine; part++)
        multiply(out, out_row, made, put_right_part(factors->right, right, right_step, steps, columns, part), rows,
                 columns, steps, adds || part);
}
