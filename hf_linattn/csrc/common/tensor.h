/* What the C of this library is made of: vectors of LANES numbers, products in tiles that stay in registers, and what
 * it reads and writes: rows of numbers, some of half the size, where PyTorch has them.
 *
 * Nothing depends on Python or PyTorch. Every source is compiled for several instruction sets, and the one that the
 * processor has is loaded with ctypes by ops/runtime/cpu.py; the `cpu.py` of each operation mirrors its struct of
 * arguments.
 */

#pragma once

#include "../abi.h"

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define LOWEST -1e38f /* as in ops/common/numerics.py */

#if defined(__AVX512F__)
#define LANES 16
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define TILE_ROWS 8
#else
#define LANES 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#define TILE_ROWS 4
#endif
#define TILE_COLUMNS (2 * LANES)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_unaligned __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES))); /* numbers as bits: sums of these may wrap */
typedef int32_t mask_unaligned __attribute__((vector_size(4 * LANES), aligned(4)));

static inline vec load(const float *from) { return *(const vec_unaligned *)from; }

static inline void store(float *to, vec numbers) { *(vec_unaligned *)to = numbers; }

/* Compilers make branches of conditions and no vectors of branches, so that conditions are masks here. */
static inline vec blend(mask condition, vec yes, vec no)
{
    return (vec)((condition & (mask)yes) | (~condition & (mask)no));
}

static inline vec vmax(vec one, vec other)
{
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)one, (__m512)other);
#else
    return (vec)_mm256_max_ps((__m256)one, (__m256)other);
#endif
}

/* Whether any bit is set. */
static inline int any_of(mask condition)
{
#if LANES == 16
    return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition) != 0;
#else
    return !_mm256_testz_si256((__m256i)condition, (__m256i)condition);
#endif
}

/* e^x for x <= 80 to the precision of float32, zero below e^-87 */
static inline vec exp_of(vec x)
{
    const vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the last bits are the nearest integer */
    const vec n = shifted - 12582912.0f;
    const vec rest = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    const vec power = 1.0f + rest * (9.999997e-1f + rest * (4.9999149e-1f + rest * (1.6667637e-1f
                        + rest * (4.1897977e-2f + rest * 8.2903055e-3f)))); /* to 1e-7, and e^0 is 1 */
    const words bits = (words)power + ((words)shifted << 23);
    return blend(x < -87.0f, (vec){0}, (vec)bits);
}

/* The same to the precision of bfloat16, in half of the time. */
static inline vec rounded_exp_of(vec x)
{
    const vec shifted = x * 1.44269504f + 12582912.0f;
    const vec rest = x * 1.44269504f - (shifted - 12582912.0f);
    const vec power = 1.0f + rest * (0.69328287f + rest * (0.24220999f + rest * 5.500843e-2f)); /* to 1e-4 */
    return blend(x < -87.0f, (vec){0}, (vec)((words)power + ((words)shifted << 23)));
}

/* 1 / x to the precision of float32, for x whose inverse float32 has, too */
static inline vec inverse_of(vec x)
{
#if LANES == 16
    const vec guess = (vec)_mm512_rcp14_ps((__m512)x);
#else
    const vec guess = (vec)_mm256_rcp_ps((__m256)x);
#endif
    return guess * (2.0f - x * guess);
}

/* x as bfloat16 has it, for finite numbers */
static inline vec rounded_lanes(vec x)
{
    const words bits = (words)x;
    return (vec)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

static inline float exp_of_one(float x) { return exp_of(x + (vec){0})[0]; }

static inline float sum_of(vec numbers)
{
    for (int distance = LANES / 2; distance; distance /= 2)
        numbers += __builtin_shuffle(numbers, (mask)LANE_NUMBERS ^ distance);
    return numbers[0];
}

static inline float max_of(vec numbers)
{
    for (int distance = LANES / 2; distance; distance /= 2)
        numbers = vmax(numbers, __builtin_shuffle(numbers, (mask)LANE_NUMBERS ^ distance));
    return numbers[0];
}

/* Exchange, between rows that are `distance` apart, the halves of each group of 2 distance lanes. */
static inline __attribute__((always_inline)) void exchange(vec *rows, int distance)
{
    const mask number = LANE_NUMBERS, upper = (number & distance) != 0;
    const mask low = (upper & (number + LANES - distance)) | (~upper & number);
    const mask high = (upper & (number + LANES)) | (~upper & (number + distance));
#pragma GCC unroll 16
    for (int row = 0; row < LANES; row++)
        if (!(row & distance)) {
            const vec first = rows[row], second = rows[row | distance];
            rows[row] = __builtin_shuffle(first, second, low);
            rows[row | distance] = __builtin_shuffle(first, second, high);
        }
}

/* Transpose LANES rows. */
static inline __attribute__((always_inline)) void transpose_block(vec *rows)
{
    exchange(rows, 1);
    exchange(rows, 2);
    exchange(rows, 4);
    if (LANES > 8)
        exchange(rows, 8);
}

/* to [columns, to_row] = the transpose of from [rows, columns], both whole numbers of LANES */
static inline void transpose(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows,
                             int64_t columns)
{
    for (int64_t column = 0; column < columns; column += LANES)
        for (int64_t row = 0; row < rows; row += LANES) {
            vec block[LANES];
#pragma GCC unroll 16
            for (int number = 0; number < LANES; number++)
                block[number] = load(from + (row + number) * from_row + column);
            transpose_block(block);
#pragma GCC unroll 16
            for (int number = 0; number < LANES; number++)
                store(to + (column + number) * to_row + row, block[number]);
        }
}

static inline int64_t min_i64(int64_t one, int64_t other) { return one < other ? one : other; }

static int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

/* out [TILE_ROWS, TILE_COLUMNS] = left [TILE_ROWS, steps] right [steps, TILE_COLUMNS], more what is there if `adds` */
static inline __attribute__((always_inline)) void
make_tile(float *restrict out, int64_t out_row, const float *restrict left, int64_t left_row, int64_t left_step,
          const float *restrict right, int64_t right_step, int64_t steps, int adds)
{
    vec sums[TILE_ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < TILE_ROWS; row++) {
        sums[row][0] = adds ? load(out + row * out_row) : (vec){0};
        sums[row][1] = adds ? load(out + row * out_row + LANES) : (vec){0};
    }
    for (int64_t step = 0; step < steps; step++) {
        const vec first = load(right + step * right_step), second = load(right + step * right_step + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < TILE_ROWS; row++) {
            const float one = left[row * left_row + step * left_step];
            sums[row][0] += one * first;
            sums[row][1] += one * second;
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < TILE_ROWS; row++) {
        store(out + row * out_row, sums[row][0]);
        store(out + row * out_row + LANES, sums[row][1]);
    }
}

/* out += left right */
static inline __attribute__((always_inline)) void
add_tile(float *restrict out, int64_t out_row, const float *restrict left, int64_t left_row, int64_t left_step,
         const float *restrict right, int64_t right_step, int64_t steps)
{
    make_tile(out, out_row, left, left_row, left_step, right, right_step, steps, 1);
}

/* In lanes by hand: to a compiler the order of a sum is part of its result. */
static inline float dot(const float *one, const float *other, int64_t size)
{
    const int64_t whole = size / LANES * LANES;
    vec sums = {0};
    for (int64_t column = 0; column < whole; column += LANES)
        sums += load(one + column) * load(other + column);
    float sum = sum_of(sums);
    for (int64_t column = whole; column < size; column++)
        sum += one[column] * other[column];
    return sum;
}

/* to += factor from */
static inline void add_scaled(float *to, float factor, const float *from, int64_t size)
{
    for (int64_t column = 0; column < size; column++)
        to[column] += factor * from[column];
}

/* The next `count` numbers of `memory`, on cache lines of their own; without memory it only counts what is used. */
static inline void *arena_alloc(float *memory, int64_t *used, int64_t count)
{
    const int64_t first = *used;
    *used += round_up(count, 16);
    return memory ? memory + first : NULL;
}

#define BAD_NUMBERS 2 /* what a function returns for numbers that name what is not there; it has done nothing then */

#define CLEARED 64 /* numbers that are kept for all tasks of a thread, at most */

/* Do `tasks` pieces of work on `threads` threads, each with `size` numbers of memory, of which the first CLEARED are
 * zero in the beginning; returns 1 if there is none. */
static int run_tasks(void (*work)(const void *args, float *memory, int64_t task), const void *args,
                     int64_t tasks, int64_t threads, int64_t size)
{
    threads = min_i64(threads, tasks);
    const int64_t share = tasks / (16 * threads + 1) + 1; /* neighbours often read the same, and what follows */
    if (!tasks)
        return 0;
    float *memory = aligned_alloc(64, threads * size * sizeof(float));
    if (!memory)
        return 1;
#pragma omp parallel num_threads(threads)
    {
        float *own = memory;
#ifdef _OPENMP
        own += omp_get_thread_num() * size;
#endif
        memset(own, 0, min_i64(size, CLEARED) * sizeof(float));
#pragma omp for schedule(dynamic, share)
        for (int64_t task = 0; task < tasks; task++)
            work(args, own, task);
        _mm_sfence(); /* other threads read what went past the caches */
    }
    free(memory);
    return 0;
}

#define LINE 64 /* bytes of a cache line */

/* What the numbers of an operand are; those of half the size are widened when they are read. */
enum kind { FLOAT32, BFLOAT16, FLOAT16 };

/* One operand: numbers between its sequences, its heads, the queries of a key/value head, and its tokens. */
typedef struct {
    void *data;
    int64_t batch, head, group, token, kind;
} tensor_view;

/* The bytes of so many numbers. */
static inline int64_t bytes_of(const tensor_view *x, int64_t numbers) { return (x->kind == FLOAT32 ? 4 : 2) * numbers; }

/* The place that lies so many numbers behind another one. */
static inline void *offset_ptr(const tensor_view *of, const void *from, int64_t numbers)
{
    return (char *)from + bytes_of(of, numbers);
}

/* Where a row lies, of whatever kind. */
static inline void *row_ptr(const tensor_view *of, int64_t batch, int64_t head, int64_t group, int64_t token)
{
    return offset_ptr(of, of->data, batch * of->batch + head * of->head + group * of->group + token * of->token);
}

/* The same of an operand that is float32. */
static inline float *row_f32(const tensor_view *of, int64_t batch, int64_t head, int64_t group, int64_t token)
{
    return row_ptr(of, batch, head, group, token);
}

static inline __attribute__((always_inline)) vec widened(const void *row, int64_t column, int64_t kind)
{
    const uint16_t *halves = (const uint16_t *)row + column;
    if (kind == FLOAT32)
        return load((const float *)row + column);
#if LANES == 16
    const __m256i loaded = _mm256_loadu_si256((const __m256i *)halves);
    return kind == BFLOAT16 ? (vec)((words)_mm512_cvtepu16_epi32(loaded) << 16) : (vec)_mm512_cvtph_ps(loaded);
#else
    const __m128i loaded = _mm_loadu_si128((const __m128i *)halves);
    return kind == BFLOAT16 ? (vec)((words)_mm256_cvtepu16_epi32(loaded) << 16) : (vec)_mm256_cvtph_ps(loaded);
#endif
}

/* The inverse: lanes of half the size, rounded to the nearest, ties to even; not for FLOAT32. */
#if LANES == 16
typedef __m256i halves;
#else
typedef __m128i halves;
#endif

static inline __attribute__((always_inline)) halves halved(vec x, int64_t kind)
{
    const words bits = (words)x, quiet = (bits >> 16) | 0x40;
    const words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const mask rounded = (mask)blend(x == x, (vec)nearest, (vec)quiet) & 0xffff; /* no NaN becomes a number */
#if LANES == 16
    if (kind == FLOAT16)
        return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    return _mm512_cvtepi32_epi16((__m512i)rounded);
#else
    if (kind == FLOAT16)
        return _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)rounded), _mm256_extracti128_si256((__m256i)rounded, 1));
#endif
}

/* to [padded] = a row of `size` numbers, zero behind them */
static inline __attribute__((always_inline)) void
widen_row(float *to, const void *row, int64_t size, int64_t padded, int64_t kind)
{
    const int64_t whole = size / LANES * LANES;
    for (int64_t column = 0; column < whole; column += LANES) /* shorter than what a call of memcpy takes */
        store(to + column, widened(row, column, kind));
    if (whole < size) {
        char last[sizeof(vec)] = {0};
        const int64_t width = kind == FLOAT32 ? 4 : 2;
        memcpy(last, (const char *)row + width * whole, width * (size - whole));
        store(to + whole, widened(last, 0, kind)); /* padded is a whole number of LANES, or `to` has room for them */
    }
    for (int64_t column = round_up(size, LANES); column < padded; column += LANES)
        store(to + column, (vec){0});
}

/* Copy `count` of `rows` rows of an operand from token `at` on, `padded` wide, zero where there is nothing. */
static inline void pack(float *to, int64_t rows, const tensor_view *x, int64_t batch, int64_t head, int64_t group,
                        int64_t at, int64_t count, int64_t size, int64_t padded)
{
    const char *from = row_ptr(x, batch, head, group, at);
    const int64_t token = bytes_of(x, x->token);
    if (x->kind == FLOAT32)
        for (int64_t row = 0; row < count; row++)
            widen_row(to + row * padded, from + row * token, size, padded, FLOAT32);
    else if (x->kind == BFLOAT16)
        for (int64_t row = 0; row < count; row++)
            widen_row(to + row * padded, from + row * token, size, padded, BFLOAT16);
    else
        for (int64_t row = 0; row < count; row++)
            widen_row(to + row * padded, from + row * token, size, padded, FLOAT16);
    if (count < rows)
        memset(to + count * padded, 0, (rows - count) * padded * sizeof(float));
}

/* One row in float32: where it lies, or widened in `spare`, which has room for whole lanes. */
static inline const float *read_row(const tensor_view *x, int64_t batch, int64_t head, int64_t group, int64_t at,
                                    int64_t size, float *spare)
{
    if (x->kind == FLOAT32)
        return row_f32(x, batch, head, group, at);
    pack(spare, 1, x, batch, head, group, at, 1, size, round_up(size, LANES));
    return spare;
}

/* Ask for a row of so many bytes that will be read soon, so that memory answers meanwhile. */
static inline void fetch(const void *row, int64_t bytes)
{
    for (int64_t line = 0; line < bytes; line += LINE)
        __builtin_prefetch((const char *)row + line, 0, 2);
}

static inline void fetch_row(const tensor_view *x, int64_t batch, int64_t head, int64_t group, int64_t at, int64_t size)
{
    fetch(row_ptr(x, batch, head, group, at), bytes_of(x, size));
}

/* Operands whose rows will be read soon, and what has not been asked for of them. */
#define MOST_UPCOMING 6

struct prefetch_queue {
    struct {
        const tensor_view *of;
        const char *row;
        int64_t bytes, left;
    } operands[MOST_UPCOMING];
    int64_t count;
};

/* Remember `count` rows of one operand, if there are any. */
static inline void prefetch_push(struct prefetch_queue *u, const tensor_view *x, int64_t batch, int64_t head,
                                 int64_t group,
                              int64_t at, int64_t count, int64_t size)
{
    if (count <= 0)
        return;
    u->operands[u->count].of = x;
    u->operands[u->count].row = row_ptr(x, batch, head, group, at);
    u->operands[u->count].bytes = bytes_of(x, size);
    u->operands[u->count++].left = count;
}

/* Ask for the next few rows of each: memory answers while tiles are multiplied. */
static inline void prefetch_some(struct prefetch_queue *u, int64_t rows)
{
    for (int64_t number = 0; number < u->count; number++)
        for (int64_t row = 0; row < rows && u->operands[number].left; row++, u->operands[number].left--) {
            fetch(u->operands[number].row, u->operands[number].bytes);
            u->operands[number].row = offset_ptr(u->operands[number].of, u->operands[number].row,
                                              u->operands[number].of->token);
        }
}

/* Whether memory of so many numbers is more than caches hold; LARGE_BYTES of ops/runtime/cpu.py. */
static inline int is_large(int64_t numbers) { return numbers >= 1 << 21; }

/* to = factor from, both of the same kind. What is `large` goes past the caches, which need not read first what is
 * overwritten. */
static inline void write_floats(float *to, float factor, const float *from, int64_t size, int large)
{
    int64_t column = 0;
    if (large && !((uintptr_t)to % sizeof(vec)))
        for (; column + LANES <= size; column += LANES) {
            const vec row = factor * load(from + column);
#if LANES == 16
            _mm512_stream_ps(to + column, (__m512)row);
#else
            _mm256_stream_ps(to + column, (__m256)row);
#endif
        }
    for (; column < size; column++)
        to[column] = factor * from[column];
}

/* The same in numbers of half the size. */
static inline __attribute__((always_inline)) void
write_halves(uint16_t *to, float factor, const float *from, int64_t size, int large, int64_t kind)
{
    int64_t column = 0;
    large = large && !((uintptr_t)to % sizeof(halves));
    for (; column + LANES <= size; column += LANES) {
        const halves row = halved(factor * load(from + column), kind);
#if LANES == 16
        if (large)
            _mm256_stream_si256((halves *)(to + column), row);
        else
            _mm256_storeu_si256((halves *)(to + column), row);
#else
        if (large)
            _mm_stream_si128((halves *)(to + column), row);
        else
            _mm_storeu_si128((halves *)(to + column), row);
#endif
    }
    if (column < size) {
        float last[LANES] = {0};
        memcpy(last, from + column, (size - column) * sizeof(float));
        const halves row = halved(factor * load(last), kind);
        memcpy(to + column, &row, (size - column) * sizeof(uint16_t));
    }
}

/* A row of an operand = factor from. */
static inline void write_row(const tensor_view *x, int64_t batch, int64_t head, int64_t group, int64_t at, float factor,
                             const float *from, int64_t size, int large)
{
    void *to = row_ptr(x, batch, head, group, at);
    if (x->kind == FLOAT32)
        write_floats(to, factor, from, size, large);
    else if (x->kind == BFLOAT16)
        write_halves(to, factor, from, size, large, BFLOAT16);
    else
        write_halves(to, factor, from, size, large, FLOAT16);
}
