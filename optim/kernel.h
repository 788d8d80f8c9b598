/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel.h - the arithmetic of one update, element by element.
 *
 * Formulas are those of torch.optim.AdamW (https://pytorch.org/docs/stable/generated/torch.optim.AdamW.html;
 * Loshchilov and Hutter, arXiv:1711.05101), in fp32; the scalars that depend on the step are computed once in double:
 *
 *   p *= 1 - lr * weight_decay
 *   m += (1 - beta1) (g - m)
 *   v  = beta2 v + (1 - beta2) g^2
 *   p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *
 * Operations and roundings stand in PyTorch's order (kernel_scalar.c), so that a run can move between the two.
 * Every kernel of a kind gives the same bits for the same inputs: the scalar one uses fmaf
 * where the vector ones fuse, and a NaN is always stored as 7fc00000. No kernel writes beyond n elements.
 * Pure functions, any thread.
 */
#ifndef HITRAIN_OPTIM_KERNEL_H
#define HITRAIN_OPTIM_KERNEL_H

#include "tiering/base/base.h"
#include <hitrain/words.h>

/* What the elements of one parameter share in one step. */
struct ht_adamw_scalars {
    float decay; /* 1 - lr * weight_decay */
    float one_minus_beta1;
    float beta2, one_minus_beta2;
    float minus_step_size; /* -lr / (1 - beta1^t) */
    float sqrt_bc2;        /* sqrt(1 - beta2^t) */
    float eps;
    bool maximize;
};
/* t: number of this parameter's step, from 1. */
void ht_adamw_scalars(struct ht_adamw_scalars *out, double lr, double beta1, double beta2, double eps,
                      double weight_decay, bool maximize, uint64_t t);

/*
 * One fused pass over n elements.
 *   p       f32 or bf16 (p_dtype), updated
 *   master  f32, only for bf16 p (else NULL): where round(master) differs from p the
 *           element restarts from p, so that a parameter loaded from outside is believed
 *   m, v    f32, updated
 *   g       f32 or bf16 (g_dtype)
 * Arrays need no alignment beyond their element's and do not overlap. Returns how many gradient elements were NaN or infinite.
 */
struct ht_adamw_arrays {
    void *p;
    float *master;
    float *m, *v;
    const void *g;
    uint8_t p_dtype, g_dtype; /* enum ht_dtype */
};
typedef uint64_t (*ht_adamw_fn)(const struct ht_adamw_scalars *s, const struct ht_adamw_arrays *a, size_t n);

uint64_t ht_adamw_scalar(const struct ht_adamw_scalars *s, const struct ht_adamw_arrays *a, size_t n);
#if defined(__x86_64__)
uint64_t ht_adamw_avx2(const struct ht_adamw_scalars *s, const struct ht_adamw_arrays *a, size_t n);
#endif
/* The fastest one this CPU runs; the environment variable HITRAIN_KERNEL=scalar|avx2 overrides. */
ht_adamw_fn ht_adamw_choose(const char **out_name);

/* bf16 <-> f32, round to nearest even; NaN stays NaN (quiet). */
uint16_t ht_f32_to_bf16(float x);
float ht_bf16_to_f32(uint16_t x);

#endif
