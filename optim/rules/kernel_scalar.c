/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_scalar.c - the reference: one element at a time, for any CPU. */
#include "tiering/base/mutant.h"
#include "optim/rules/arrays_loop.h"
#include "optim/rules/forms_loop.h"
#include "optim/rules/kernel_loop.h"

#define KERNEL(number, rule, states, ...)                                                          \
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

static size_t changed_scalar(const void *was, const void *is, size_t bytes, size_t n, uint32_t first, uint16_t *place,
                             void *value)
{
    return bytes == 2 ? changed_one_by_one(was, is, 2, 0, n, first, place, value, 0)
                      : changed_one_by_one(was, is, 4, 0, n, first, place, value, 0);
}

#define ROW(number, rule, states, ...) [number] = rule##_scalar,
const struct ht_kernels ht_kernels_scalar = {.name = "scalar",
                                             .add = add_by_gradient,
                                             .sum_squares = sum_squares_scalar,
                                             .join = join_all,
                                             .part = part_all,
                                             .stir = stir_by_gradient,
                                             .matmul = matmul_all,
                                             .changed = changed_scalar,
                                             .halve = halve_all,
                                             .fn = {HT_KERNELS(ROW)}};

HT_CODECS(scalar)
