/* Products of rows of float32. */

#pragma once

#include "simd.h"

/* out [rows, columns] = left right, more what is there if `adds`, rows and columns being whole numbers of tiles; a
 * function of its own, as its tiles need all registers */
static __attribute__((noinline)) void
gemm_f32(float *out, int64_t out_row, const float *left, int64_t left_row, int64_t left_step, const float *right,
         int64_t right_step, int64_t rows, int64_t columns, int64_t steps, int adds)
{
    for (int64_t column = 0; column < columns; column += TILE_COLUMNS)
        for (int64_t row = 0; row < rows; row += TILE_ROWS)
            make_tile(out + row * out_row + column, out_row, left + row * left_row, left_row, left_step,
                      right + column, right_step, steps, adds);
}
