/* SPDX-License-Identifier: Apache-2.0 */
/*
 * isa.c - which kernels and codecs this CPU runs.
 *
 * Owns no state but the choice itself, which is a pure function of the CPU and the environment. Any thread.
 */
#include "optim/rules/forms.h"
#include "optim/rules/kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include "tiering/base/log.h"

/* What this CPU runs. */
static const struct ht_kernels *avx2, *avx512;

#if defined(__x86_64__)
static struct ht_kernels with_avx512;

static bool has_avx2(void)
{
    unsigned a, b, c = 0, d;
    /* F16C by hand: not every compiler knows this name. */
    bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;

    return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

/* Once: in a virtual machine the question costs some 50 us. */
__attribute__((constructor)) static void ask_cpu(void)
{
    __builtin_cpu_init();
    if (!has_avx2())
        return;
    avx2 = &ht_kernels_avx2;
    if (!has_avx512())
        return;
    with_avx512 = ht_kernels_avx2;
    with_avx512.name = "avx512";
    memcpy(with_avx512.fn, ht_kernel_fns_avx512, sizeof(with_avx512.fn));
    avx512 = &with_avx512;
}
#endif

const struct ht_kernels *ht_kernels_choose(void)
{
    const char *asked = getenv("HITRAIN_KERNEL");
    const struct ht_kernels *usual = avx2 ? avx2 : &ht_kernels_scalar, *fastest = avx512 ? avx512 : usual;

    if (!asked || !*asked)
        return fastest;
    if (!strcmp(asked, "scalar"))
        return &ht_kernels_scalar;
    if (strcmp(asked, "avx2") != 0 && strcmp(asked, "avx512") != 0)
        ht_warn("HITRAIN_KERNEL=%s: scalar, avx2 and avx512 are known; the fastest that this CPU runs is used", asked);
    else if (!avx2)
        ht_warn("HITRAIN_KERNEL=%s: this CPU has no AVX2, FMA and F16C; the scalar kernels are used", asked);
    else if (!strcmp(asked, "avx512") && !avx512)
        ht_warn("HITRAIN_KERNEL=avx512: this CPU lacks AVX-512 F, BW, VL or DQ; AVX2 is used");
    return strcmp(asked, "avx2") != 0 ? fastest : usual;
}

const struct ht_codecs *ht_codecs_choose(void)
{
#if defined(__x86_64__)
    const struct ht_kernels *k = ht_kernels_choose();

    if (k != &ht_kernels_scalar)
        return k == avx512 ? &ht_codecs_avx512 : &ht_codecs_avx2;
#endif
    return &ht_codecs_scalar;
}
