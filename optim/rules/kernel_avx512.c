/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_avx512.c - steps of rules, and forms of state, sixteen elements at a time, for CPUs with AVX-512 F, BW, VL and
 * DQ. Tails go through the kernels of AVX2. Equal to the reference bit for bit.
 */
#if defined(__x86_64__)
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" /* the headers of GCC 12 warn of themselves (GCC bug 105593) */
#endif
#define HT_LANES_AVX512
#include "tiering/base/mutant.h"
#include "optim/rules/forms_loop.h"
#include "optim/rules/kernel_loop.h"

#define KERNEL(number, rule, states, ...)                                                               \
    static uint64_t rule##_avx512(const struct ht_scalars *s, const struct ht_update *u, size_t n)      \
    {                                                                                                   \
        return update_by_dtypes(s, u, n, rule##_step, states) + update_tail(s, u, n, &ht_kernels_avx2); \
    }
HT_KERNELS(KERNEL)

#define ROW(number, rule, states, ...) [number] = rule##_avx512,
const ht_kernel_fn ht_kernel_fns_avx512[HT_KERNEL_COUNT] = {HT_KERNELS(ROW)};
HT_CODECS(avx512)
#else
typedef int nothing_here;
#endif
