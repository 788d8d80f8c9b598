/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_scalar.c - the reference: one element at a time, for any CPU. */
#include "optim/rules/forms_loop.h"
#include "optim/rules/kernel_loop.h"

#define KERNEL(number, rule, states)                                                               \
    static uint64_t rule##_scalar(const struct ht_scalars *s, const struct ht_update *u, size_t n) \
    {                                                                                              \
        return update_by_dtypes(s, u, n, rule##_step, states);                                     \
    }
HT_KERNELS(KERNEL)

static double sum_squares_scalar(const void *g, uint8_t dtype, size_t n, uint64_t *nonfinite)
{
    double lane[8] = {0};

    sum_one_by_one(g, dtype, 0, n, lane, nonfinite);
    return add_up(lane);
}

static void add_scalar(float *sum, const void *g, uint8_t dtype, size_t n, bool first)
{
    add_by_gradient(sum, g, dtype, n, first);
}

static void join_scalar(float *master, const uint16_t *p, const uint16_t *low, uint32_t upper, size_t n)
{
    join_all(master, p, low, upper, n);
}

static bool part_scalar(uint16_t *low, const float *master, const uint16_t *p, size_t n)
{
    return part_all(low, master, p, n);
}

static uint64_t stir_scalar(const struct ht_scalars *s, float *m, const void *g, uint8_t dtype, uint16_t *u, size_t n)
{
    return stir_by_gradient(s, m, g, dtype, u, n);
}

static void matmul_scalar(float *c, const float *a, size_t a_wide, const float *b, size_t columns, size_t rows,
                          size_t inner, float *panel)
{
    matmul_all(c, a, a_wide, b, columns, rows, inner, panel);
}

#define ROW(number, rule, states) [number] = rule##_scalar,
const struct ht_kernels ht_kernels_scalar = {.name = "scalar",
                                             .add = add_scalar,
                                             .sum_squares = sum_squares_scalar,
                                             .join = join_scalar,
                                             .part = part_scalar,
                                             .stir = stir_scalar,
                                             .matmul = matmul_scalar,
                                             .fn = {HT_KERNELS(ROW)}};

HT_CODECS(scalar)
