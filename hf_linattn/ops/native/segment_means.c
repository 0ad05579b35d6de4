/* Weighted means of the segments of sequences, read where they lie.
 *
 *     mean_s = sum_j exp(weight_j - total_s) row_j,   total_s = log sum_j exp(weight_j),   j in segment s
 */

#include <math.h>

#include "lanes.h"

struct problem {
    operand row, mean;     /* float32, contiguous in their last dimension; tokens of "mean" are segments */
    operand weight, total; /* of the rows, and of the segments */
    int64_t batches, heads, segments, segment_size, row_size, threads;
};

static void read_task(const void *problem, float *memory, int64_t task)
{
    const struct problem *p = problem;
    const int64_t batch = task / p->segments / p->heads, head = task / p->segments % p->heads;
    const int64_t segment = task % p->segments, first = segment * p->segment_size, size = p->segment_size;
    float *mean = place(&p->mean, batch, head, 0, segment), top = LOWEST, sum = 0.0f;
    for (int64_t j = 0; j < size; j++) {
        memory[j] = *place(&p->weight, batch, head, 0, first + j);
        top = memory[j] > top ? memory[j] : top;
    }
    for (int64_t j = 0; j < size; j++) {
        memory[j] = exp_of_one(memory[j] - top);
        sum += memory[j];
    }
    memset(mean, 0, p->row_size * sizeof(float));
    for (int64_t j = 0; j < size; j++) {
        const float *row = place(&p->row, batch, head, 0, first + j), share = memory[j] / sum;
        for (int64_t column = 0; column < p->row_size; column++)
            mean[column] += share * row[column];
    }
    *place(&p->total, batch, head, 0, segment) = top + logf(sum);
}

/* Work through all segments of a problem; returns 0, or 1 where there was no memory to work in. */
int segment_means(const struct problem *p)
{
    return run_tasks(read_task, p, p->batches * p->heads * p->segments, p->threads, round_up(p->segment_size, 16));
}
