/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_scalar.c - what any CPU runs: conversions of two-byte floats, and the reference, one element at a time. Pure
 * functions, any thread.
 */
#include "tiering/base/mutant.h"
#include "optim/rules/arrays_loop.h"
#include "optim/rules/forms_loop.h"
#include "optim/rules/kernel_loop.h"

float ht_bf16_to_f32(uint16_t x)
{
    return ht_float_of_bits((uint32_t)x << 16);
}

uint16_t ht_f32_to_bf16(float x)
{
    uint32_t bits = ht_float_bits(x);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float ht_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = x >> 10 & 0x1fu, fraction = x & 0x3ffu;

    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact */
        float f = (float)fraction * 0x1p-24f;
        return sign ? -f : f;
    }
    if (exponent == 0x1f)
        return ht_float_of_bits(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));
    return ht_float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

/* fraction: 24 bits with the leading one; the lowest `drop` bits are rounded away. */
static uint32_t round_even(uint32_t fraction, unsigned drop)
{
    uint32_t half = 1u << (drop - 1), rest = fraction & ((half << 1) - 1), kept = fraction >> drop;

    return kept + (rest > half || (rest == half && (kept & 1)));
}

uint16_t ht_f32_to_f16(float x)
{
    uint32_t bits = ht_float_bits(x), sign = bits >> 16 & 0x8000u, exponent = bits >> 23 & 0xffu;
    uint32_t fraction = (bits & 0x7fffffu) | 0x800000u;

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

/* --------------------------------------------------------------- reference */

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
