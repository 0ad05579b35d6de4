/* Weighted means of the segments of sequences, read where they lie.
 *
 *     mean_s = sum_j exp(weight_j - total_s) row_j,   total_s = log sum_j exp(weight_j),   j in segment s
 *
 * and back, with share_j = exp(weight_j - total_s):
 *
 *     d row_j = share_j d mean_s,   d weight_j = share_j ((row_j - mean_s) . d mean_s + d total_s)
 */

#include <math.h>

#include "../common/tensor.h"

#define ROWS_AHEAD 16 /* rows that memory is asked for before they are read */

struct segment_mean_args {
    tensor_view row, mean;     /* float32; tokens of "mean" are segments */
    tensor_view weight, total; /* of the rows, and of the segments */
    tensor_view d_row, d_mean, d_weight, d_total;
    int64_t batches, heads, segments, segment_size, row_size, threads;
};

static void read_task(const void *args, float *memory, int64_t task)
{
    const struct segment_mean_args *p = args;
    const int64_t batch = task / p->segments / p->heads, head = task / p->segments % p->heads;
    const int64_t segment = task % p->segments, first = segment * p->segment_size, size = p->segment_size;
    float *mean = row_f32(&p->mean, batch, head, 0, segment), top = LOWEST, sum = 0.0f;
    for (int64_t j = 0; j < size; j++) {
        memory[j] = *row_f32(&p->weight, batch, head, 0, first + j);
        top = memory[j] > top ? memory[j] : top;
    }
    for (int64_t j = 0; j < size; j++) {
        memory[j] = exp_of_one(memory[j] - top);
        sum += memory[j];
    }
    memset(mean, 0, p->row_size * sizeof(float));
    for (int64_t j = 0; j < size; j++) {
        const float *row = row_f32(&p->row, batch, head, 0, first + j), share = memory[j] / sum;
        fetch_row(&p->row, batch, head, 0, first + j + ROWS_AHEAD, p->row_size); /* past the end, too: that is free */
        for (int64_t column = 0; column < p->row_size; column++)
            mean[column] += share * row[column];
    }
    *row_f32(&p->total, batch, head, 0, segment) = top + logf(sum);
}

/* Work through all segments of a call; returns 0, or 1 where there was no memory to work in. */
int segment_means(const struct segment_mean_args *p)
{
    return run_tasks(read_task, p, p->batches * p->heads * p->segments, p->threads, round_up(p->segment_size, 16));
}

static void reverse_task(const void *args, float *memory, int64_t task)
{
    (void)memory;
    const struct segment_mean_args *p = args;
    const int64_t batch = task / p->segments / p->heads, head = task / p->segments % p->heads;
    const int64_t segment = task % p->segments, first = segment * p->segment_size;
    const float *mean = row_f32(&p->mean, batch, head, 0, segment), *d_mean = row_f32(&p->d_mean, batch, head, 0,
                                                                                      segment);
    const float total = *row_f32(&p->total, batch, head, 0, segment);
    const float rest = *row_f32(&p->d_total, batch, head, 0, segment) - dot(mean, d_mean, p->row_size);
    for (int64_t j = first; j < first + p->segment_size; j++) {
        const float share = exp_of_one(*row_f32(&p->weight, batch, head, 0, j) - total);
        float *d_row = row_f32(&p->d_row, batch, head, 0, j);
        fetch_row(&p->row, batch, head, 0, j + ROWS_AHEAD, p->row_size);
        fetch_row(&p->d_row, batch, head, 0, j + ROWS_AHEAD, p->row_size);
        for (int64_t column = 0; column < p->row_size; column++)
            d_row[column] += share * d_mean[column];
        *row_f32(&p->d_weight, batch, head, 0, j) +=
            share * (dot(row_f32(&p->row, batch, head, 0, j), d_mean, p->row_size) + rest);
    }
}

/* Add to the gradients of all segments' rows and weights; returns as above. */
int segment_means_backward(const struct segment_mean_args *p)
{
    return run_tasks(reverse_task, p, p->batches * p->heads * p->segments, p->threads, 16);
}

LAYOUT(segment_means, struct segment_mean_args, 0xa630b913)
LAYOUT(segment_means_backward, struct segment_mean_args, 0xa630b913)
