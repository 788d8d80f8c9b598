/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_scalar.c - the reference: what every other kernel must equal bit for bit.
 *
 * The order of operations is that of the element-wise kernels of PyTorch 2, with their fused multiply-adds (1.13 computes m
 * in two steps, which is less exact):
 *
 *   m = fma(1 - beta1, g - m, m)
 *   v = fma((1 - beta2) * g, g, v * beta2)
 *   p = p * decay + (-step_size * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *
 * The last sum is not fused: the quotient is rounded first. Which of two NaNs an operation hands on differs between
 * instruction sets, so results that are NaN are stored as one fixed quiet NaN. A NaN in m or v always makes p NaN.
 */
#include <math.h>
#include "optim/kernel.h"

static const uint32_t quiet_nan = 0x7fc00000u;

static float load(const void *array, uint8_t dtype, size_t i)
{
    uint16_t half;
    float f;

    if (dtype == HT_DTYPE_BF16) {
        memcpy(&half, (const uint8_t *)array + 2 * i, sizeof(half));
        return ht_bf16_to_f32(half);
    }
    memcpy(&f, (const uint8_t *)array + 4 * i, sizeof(f));
    return f;
}

/* The f32 value that element i of the parameter stands for. */
static float load_master(const struct ht_adamw_arrays *a, size_t i)
{
    uint16_t half;

    if (a->p_dtype != HT_DTYPE_BF16)
        return load(a->p, a->p_dtype, i);
    memcpy(&half, (const uint8_t *)a->p + 2 * i, sizeof(half));
    return ht_f32_to_bf16(a->master[i]) == half ? a->master[i] : ht_bf16_to_f32(half);
}

static void store_master(const struct ht_adamw_arrays *a, size_t i, float p)
{
    uint16_t half;

    if (a->p_dtype != HT_DTYPE_BF16) {
        memcpy((uint8_t *)a->p + 4 * i, &p, sizeof(p));
        return;
    }
    a->master[i] = p;
    half = ht_f32_to_bf16(p);
    memcpy((uint8_t *)a->p + 2 * i, &half, sizeof(half));
}

static float canonical(float x)
{
    if (isnan(x))
        memcpy(&x, &quiet_nan, sizeof(x));
    return x;
}

uint64_t ht_adamw_scalar(const struct ht_adamw_scalars *s, const struct ht_adamw_arrays *a, size_t n)
{
    uint64_t nonfinite = 0;

    for (size_t i = 0; i < n; i++) {
        float g = load(a->g, a->g_dtype, i);
        nonfinite += !isfinite(g);
        if (s->maximize)
            g = -g;
        float m = fmaf(s->one_minus_beta1, g - a->m[i], a->m[i]);
        float v = fmaf(s->one_minus_beta2 * g, g, a->v[i] * s->beta2);
        float denominator = sqrtf(v) / s->sqrt_bc2 + s->eps;
        float p = load_master(a, i) * s->decay + s->minus_step_size * m / denominator;
        a->m[i] = canonical(m);
        a->v[i] = canonical(v);
        store_master(a, i, canonical(p));
    }
    return nonfinite;
}
