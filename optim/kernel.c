/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel.c - the scalars of a step, bf16 conversion, and which kernel this CPU runs.
 *
 * Owns no state but the choice itself, which is a pure function of the CPU and the environment. Any thread.
 */
#include "optim/kernel.h"

#include <math.h>
#include <stdlib.h>
#include "tiering/base/log.h"

/*
 * Everything is computed in double and rounded once, as PyTorch does with the Python floats it is given: the same
 * roundings in the same places keep the two trajectories together over thousands of steps.
 */
void ht_adamw_scalars(struct ht_adamw_scalars *out, double lr, double beta1, double beta2, double eps,
                      double weight_decay, bool maximize, uint64_t t)
{
    double bc1 = 1.0 - pow(beta1, (double)t);
    double bc2 = 1.0 - pow(beta2, (double)t);

    *out = (struct ht_adamw_scalars){
        .decay = (float)(1.0 - lr * weight_decay),
        .one_minus_beta1 = (float)(1.0 - beta1),
        .beta2 = (float)beta2,
        .one_minus_beta2 = (float)(1.0 - beta2),
        .minus_step_size = (float)-(lr / bc1),
        .sqrt_bc2 = (float)sqrt(bc2),
        .eps = (float)eps,
        .maximize = maximize,
    };
}

float ht_bf16_to_f32(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

uint16_t ht_f32_to_bf16(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static bool have_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

static ht_adamw_fn use_avx2(const char **out_name)
{
#if defined(__x86_64__)
    *out_name = "avx2";
    return ht_adamw_avx2;
#else
    *out_name = "scalar";
    return ht_adamw_scalar;
#endif
}

ht_adamw_fn ht_adamw_choose(const char **out_name)
{
    const char *asked = getenv("HITRAIN_KERNEL");
    const char *name;
    bool vector = have_avx2();

    if (!out_name)
        out_name = &name;
    if (asked && !strcmp(asked, "scalar"))
        vector = false;
    else if (asked && !strcmp(asked, "avx2") && !vector)
        ht_warn("HITRAIN_KERNEL=avx2: this CPU has no AVX2 and FMA; the scalar kernel is used");
    else if (asked && *asked && strcmp(asked, "avx2") != 0)
        ht_warn("HITRAIN_KERNEL=%s: scalar and avx2 are known; the fastest that this CPU runs is used", asked);
    if (vector)
        return use_avx2(out_name);
    *out_name = "scalar";
    return ht_adamw_scalar;
}
