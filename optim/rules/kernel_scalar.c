/* SPDX-License-Identifier: Apache-2.0 */
/* kernel_scalar.c - the reference: one element at a time, for any CPU. */
#include "optim/rules/kernel_loop.h"

#define KERNEL(number, rule, states)                                                               \
    static uint64_t rule##_scalar(const struct ht_scalars *s, const struct ht_update *u, size_t n) \
    {                                                                                              \
        return update_by_dtypes(s, u, n, rule##_step, states);                                     \
    }
HT_KERNELS(KERNEL)

#define ROW(number, rule, states) [number] = rule##_scalar,
const struct ht_kernels ht_kernels_scalar = {.name = "scalar", .fn = {HT_KERNELS(ROW)}};
