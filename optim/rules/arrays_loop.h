/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arrays_loop.h - passes over arrays that are no step of a rule, for the lanes of the file that includes this: sums,
 * masters, the first phase of muon, products of matrices, elements that changed.
 */
#pragma once

#include "optim/rules/all.h"

/* As many elements as fill lanes wholly. */
HT_LANES_FN uint64_t stir_all(const struct ht_scalars *scalars, float *momentum, const void *g, uint16_t *u, size_t n,
                              uint8_t dtype)
{
    struct ht_scalars s = *scalars;
    ht_counts nonfinite = lanes_no_counts();

    for (size_t i = 0; i + HT_LANES <= n; i += HT_LANES) {
        ht_lanes m = lanes_load_f32(momentum + i), x = lanes_load(g, dtype, i);
        nonfinite = lanes_count_nonfinite(nonfinite, x);
        x = muon_stir(&m, lanes_negate(x * lanes_set(s.grad_factor), s.maximize), &s);
        if (__builtin_expect(lanes_any_nan(m, x), 0)) {
            m = lanes_canonical(m);
            x = lanes_canonical(x);
        }
        lanes_store_f32(momentum + i, m);
        lanes_store_halves(u + i, x, HT_DTYPE_BF16);
    }
    return lanes_sum_counts(nonfinite);
}

HT_LANES_FN uint64_t stir_by_gradient(const struct ht_scalars *s, float *m, const void *g, uint8_t dtype, uint16_t *u,
                                      size_t n)
{
    return HT_BY_DTYPE(dtype, stir_all, s, m, g, u, n);
}

/* Rows of c that stay in registers, for a panel of columns. */
enum { HT_TILE_ROWS = 4, HT_TILE_LANES = HT_PANEL / HT_LANES };

HT_LANES_FN void matmul_tile(float *c, size_t columns, const float *a, size_t a_wide, const float *panel, size_t rows,
                             size_t inner)
{
    ht_lanes sum[HT_TILE_ROWS][HT_TILE_LANES];

    for (size_t i = 0; i < rows; i++)
        for (size_t l = 0; l < HT_TILE_LANES; l++)
            sum[i][l] = lanes_set(0);
    for (size_t k = 0; k < inner; k++) {
#pragma GCC unroll 4
        for (size_t i = 0; i < rows; i++)
#pragma GCC unroll 16
            for (size_t l = 0; l < HT_TILE_LANES; l++)
                sum[i][l] = lanes_fma(lanes_set(a[i * a_wide + k]), lanes_load_f32(panel + k * HT_PANEL + l * HT_LANES),
                                      sum[i][l]);
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t l = 0; l < HT_TILE_LANES; l++)
            lanes_store_f32(c + i * columns + l * HT_LANES, sum[i][l]);
}

HT_LANES_FN void matmul_all(float *c, const float *a, size_t a_wide, const float *b, size_t columns, size_t rows,
                            size_t inner, float *panel)
{
    for (size_t j = 0; j < columns; j += HT_PANEL) {
        size_t i = 0;
        for (size_t k = 0; k < inner; k++)
            memcpy(panel + k * HT_PANEL, b + k * columns + j, HT_PANEL * sizeof(float));
        for (; i + HT_TILE_ROWS <= rows; i += HT_TILE_ROWS)
            matmul_tile(c + i * columns + j, columns, a + i * a_wide, a_wide, panel, HT_TILE_ROWS, inner);
        for (; i < rows; i++)
            matmul_tile(c + i * columns + j, columns, a + i * a_wide, a_wide, panel, 1, inner);
    }
}

/* As many elements of a gradient into a sum as fill lanes wholly. */
HT_LANES_FN void add_all(float *sum, const void *g, size_t n, bool first, uint8_t dtype)
{
    for (size_t i = 0; i + HT_LANES <= n; i += HT_LANES) {
        ht_lanes x = lanes_load(g, dtype, i);
        if (!first)
            x = lanes_load_f32(sum + i) + x;
        if (__builtin_expect(lanes_any_nan(x, x), 0))
            x = lanes_canonical(x);
        lanes_store_f32(sum + i, x);
    }
}

HT_LANES_FN void add_by_gradient(float *sum, const void *g, uint8_t dtype, size_t n, bool first)
{
    HT_BY_DTYPE(dtype, add_all, sum, g, n, first);
}

/* As many masters as fill lanes wholly. */
HT_LANES_FN void join_all(float *master, const uint16_t *p, const uint16_t *low, uint32_t upper, size_t n)
{
    for (size_t i = 0; i + HT_LANES <= n; i += HT_LANES)
        lanes_store_f32(master + i, lanes_join(p + i, low + i, upper));
}

HT_LANES_FN bool part_all(uint16_t *low, const float *master, const uint16_t *p, size_t n)
{
    bool ties = false;

    for (size_t i = 0; i + HT_LANES <= n; i += HT_LANES)
        ties |= lanes_part(low + i, lanes_load_f32(master + i), p + i);
    return ties;
}

/* As many elements as fill lanes wholly. */
HT_LANES_FN void halve_all(uint16_t *half, const float *x, size_t n)
{
    for (size_t i = 0; i + HT_LANES <= n; i += HT_LANES)
        lanes_store_halves(half + i, lanes_load_f32(x + i), HT_DTYPE_BF16);
}

/* Elements from i on, one by one; count before i have changed. */
HT_LANES_FN size_t changed_one_by_one(const uint8_t *was, const uint8_t *is, size_t bytes, size_t i, size_t n,
                                      uint32_t first, uint16_t *place, uint8_t *value, size_t count)
{
    for (; i < n; i++) {
        if (!memcmp(was + i * bytes, is + i * bytes, bytes))
            continue;
        place[count] = (uint16_t)(first + i);
        memcpy(value + count++ * bytes, is + i * bytes, bytes);
    }
    return count;
}

/* Adds the eight lanes of a sum. */
HT_LANES_FN double add_up(const double lane[8])
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* Elements from first on, the lane of element i being i % 8. */
HT_LANES_FN void sum_one_by_one(const void *g, uint8_t dtype, size_t first, size_t n, double lane[8],
                                uint64_t *nonfinite)
{
    for (size_t i = first; i < n; i++) {
        float x = ht_kernel_element(g, dtype, i);
        lane[i % 8] += (double)x * (double)x;
        *nonfinite += !isfinite(x);
    }
}
