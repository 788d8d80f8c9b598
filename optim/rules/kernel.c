/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel.c - conversions of two-byte floats, and which kernels this CPU runs.
 *
 * Owns no state but the choice itself, which is a pure function of the CPU and the environment. Any thread.
 */
#include "optim/rules/kernel.h"
#include "optim/rules/forms.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include "tiering/base/log.h"

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

float ht_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = x >> 10 & 0x1fu, fraction = x & 0x3ffu, bits;
    float f;

    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact */
        f = (float)fraction * 0x1p-24f;
        return sign ? -f : f;
    }
    if (exponent == 0x1f)
        bits = sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0);
    else
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* fraction: 24 bits with the leading one; the lowest `drop` bits are rounded away. */
static uint32_t round_even(uint32_t fraction, unsigned drop)
{
    uint32_t half = 1u << (drop - 1), rest = fraction & ((half << 1) - 1), kept = fraction >> drop;

    return kept + (rest > half || (rest == half && (kept & 1)));
}

uint16_t ht_f32_to_f16(float x)
{
    uint32_t bits, sign, exponent, fraction;

    memcpy(&bits, &x, sizeof(bits));
    sign = bits >> 16 & 0x8000u;
    exponent = bits >> 23 & 0xffu;
    fraction = (bits & 0x7fffffu) | 0x800000u;
    if (exponent == 0xff)
        return (uint16_t)(sign | 0x7c00u | (bits & 0x7fffffu ? 0x200u | (bits & 0x7fffffu) >> 13 : 0));
    if (exponent > 142) /* 2^16 and more */
        return (uint16_t)(sign | 0x7c00u);
    if (exponent < 102) /* below half of the smallest subnormal */
        return (uint16_t)sign;
    if (exponent < 113) /* subnormal: a fraction of 2^-24; a carry makes the smallest normal number, as it should */
        return (uint16_t)(sign | round_even(fraction, 126 - exponent));
    return (uint16_t)(sign | (((exponent - 113) << 10) + round_even(fraction, 13)));
}

float ht_kernel_element(const void *array, uint8_t dtype, size_t i)
{
    uint16_t half;
    float f;

    if (dtype == HT_DTYPE_F32) {
        memcpy(&f, (const float *)array + i, sizeof(f));
        return f;
    }
    memcpy(&half, (const uint16_t *)array + i, sizeof(half));
    return dtype == HT_DTYPE_BF16 ? ht_bf16_to_f32(half) : ht_f16_to_f32(half);
}

#if defined(__x86_64__)
static bool has_f16c;

/* Once: in a virtual machine the question costs some 50 us. By hand: not every compiler knows this name. */
__attribute__((constructor)) static void ask_for_f16c(void)
{
    unsigned a, b, c = 0, d;

    has_f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

/* NULL: this CPU lacks instructions that they need. */
static const struct ht_kernels *avx2(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2") && has_f16c)
        return &ht_kernels_avx2;
#endif
    return NULL;
}

static bool has_avx512(void)
{
#if defined(__x86_64__)
    return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

bool ht_kernels_avx512(void)
{
    const char *asked = getenv("HITRAIN_KERNEL");

    return has_avx512() && (!asked || (strcmp(asked, "scalar") != 0 && strcmp(asked, "avx2") != 0));
}

const struct ht_kernels *ht_kernels_choose(void)
{
    const char *asked = getenv("HITRAIN_KERNEL");
    const struct ht_kernels *fastest = avx2();

    if (!asked || !*asked)
        return fastest ? fastest : &ht_kernels_scalar;
    if (!strcmp(asked, "scalar"))
        return &ht_kernels_scalar;
    if (strcmp(asked, "avx2") != 0 && strcmp(asked, "avx512") != 0)
        ht_warn("HITRAIN_KERNEL=%s: scalar, avx2 and avx512 are known; the fastest that this CPU runs is used", asked);
    else if (!fastest)
        ht_warn("HITRAIN_KERNEL=%s: this CPU has no AVX2, FMA and F16C; the scalar kernels are used", asked);
    else if (!strcmp(asked, "avx512") && !has_avx512())
        ht_warn("HITRAIN_KERNEL=avx512: this CPU lacks AVX-512 F, BW, VL or DQ; AVX2 is used");
    return fastest ? fastest : &ht_kernels_scalar;
}

const struct ht_codecs *ht_codecs_choose(void)
{
    const struct ht_kernels *k = ht_kernels_choose();

#if defined(__x86_64__)
    if (k == &ht_kernels_avx2)
        return ht_kernels_avx512() ? &ht_codecs_avx512 : &ht_codecs_avx2;
#endif
    return &ht_codecs_scalar;
}
