/* What the C reads and writes: rows of numbers, some of half the size, where PyTorch has them. */

#pragma once

#include "../abi.h"
#include "simd.h"

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
