/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel.h - the arithmetic of one update, element by element.
 *
 * A kernel is the element-wise part of an update rule; a rule may have several, for its variants. The formula is
 * written once, in lanes (lanes.h), and compiled for each instruction set: one element at a time without any (the
 * reference), eight with AVX2, FMA and F16C, sixteen with AVX-512. All give the same bits for the same inputs: fused
 * operations say fma, and results that are NaN are stored as one quiet NaN, because which NaN an operation hands on
 * differs between instruction sets. No kernel writes beyond n elements. Pure functions, any thread.
 *
 * AVX-512 has the steps of rules, and codecs of state (forms.h): state of few bits is decoded into a cache, and there
 * divisions and roots are the limit. Everything else is bound by memory, and AVX2's.
 */
#pragma once

#include "tiering/base/base.h"
#include <hitrain/words.h>

/* Numbers are on disk. */
enum ht_kernel {
    HT_KERNEL_ADAMW,
    HT_KERNEL_ADAM,
    HT_KERNEL_SGD,
    HT_KERNEL_SGD_MOMENTUM,
    HT_KERNEL_SGD_NESTEROV,
    HT_KERNEL_LION,
    HT_KERNEL_ADAGRAD,
    HT_KERNEL_ADAMW_NEAR_G, /* beta1 up to 0.5 */
    HT_KERNEL_ADAM_NEAR_G,
    HT_KERNEL_MUON, /* its second phase; g is the orthogonalised update */
    HT_KERNEL_COUNT
};

/* The numbers that the elements of one parameter share in one step; filled by the rule, in double, and rounded once. */
struct ht_scalars {
    enum ht_kernel kernel;
    float grad_factor; /* the gradient is multiplied by it before anything else */
    bool maximize;     /* and its sign turned */
    union {
        float number[8]; /* all of them */
        struct {
            float decay;        /* 1 - lr * weight_decay (adamw) */
            float weight_decay; /* (adam) */
            float one_minus_beta1, beta2, one_minus_beta2;
            float minus_step_size; /* -lr / (1 - beta1^t) */
            float sqrt_bc2;        /* sqrt(1 - beta2^t) */
            float eps;
        } adam;
        struct {
            float weight_decay, momentum, nesterov_momentum, one_minus_dampening, minus_lr;
        } sgd;
        struct {
            float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, minus_lr;
        } lion;
        struct {
            float weight_decay, minus_lr, eps;
        } adagrad;
        struct {
            float decay;           /* 1 - lr * weight_decay */
            float minus_step_size; /* -lr * ratio */
            float one_minus_momentum, momentum;
            float nesterov; /* 0 or 1 */
        } muon;
    };
};

enum { HT_KERNEL_STATES_MAX = 2 };

/*
 * The arrays of one fused pass, n elements of each:
 *   p       f32, bf16 or f16 (p_dtype), updated
 *   master  f32, only for p of two bytes (else NULL), updated: where round(master) differs from p the
 *           element restarts from p, so that a parameter loaded from outside is believed
 *   state   f32, as many as the kernel keeps, in the order of its rule; updated
 *   g       f32, bf16 or f16 (g_dtype)
 * Arrays need no alignment beyond their element's and do not overlap.
 */
struct ht_update {
    void *p;
    float *master;
    float *state[HT_KERNEL_STATES_MAX];
    const void *g;
    uint8_t p_dtype, g_dtype; /* enum ht_dtype */
};

/* Returns how many gradient elements were NaN or infinite. */
typedef uint64_t (*ht_kernel_fn)(const struct ht_scalars *s, const struct ht_update *u, size_t n);

/* Sums of squares are cut at multiples of this number, so that they do not depend on how ranges are cut. */
enum { HT_SUM_BLOCK = 1024 };
/*
 * The squares of n elements (at most a block), added in double in a fixed order: lane i takes elements i, i + 8, ... (a
 * product of two f32 is exact in double, so that fusing operations does not matter). Adds to *nonfinite how many were
 * NaN or infinite.
 */
typedef double (*ht_sum_fn)(const void *g, uint8_t dtype, size_t n, uint64_t *nonfinite);

/*
 * The first phase of muon: n elements of a gradient into the momentum m; u becomes what is to be orthogonalised, in
 * bf16. Returns how many gradient elements were NaN or infinite.
 */
typedef uint64_t (*ht_stir_fn)(const struct ht_scalars *s, float *m, const void *g, uint8_t dtype, uint16_t *u,
                               size_t n);

/* Adds n elements of a gradient to a sum of f32; first: the sum becomes them, signs of zeros and all. */
typedef void (*ht_add_fn)(float *sum, const void *g, uint8_t dtype, size_t n, bool first);

/*
 * Masters from bf16 and the bits that those miss, and these bits again; true: some are ties (master.h explains upper).
 */
typedef void (*ht_join_fn)(float *master, const uint16_t *p, const uint16_t *low, uint32_t upper, size_t n);
typedef bool (*ht_part_fn)(uint16_t *low, const float *master, const uint16_t *p, size_t n);

/*
 * c = a b in f32: each element a sum by fused multiply-adds, in ascending order of the inner index. a has `rows` rows,
 * a_wide floats apart; b has `inner` rows of `columns` floats, a multiple of HT_PANEL, and c has as many columns.
 * panel: room for inner * HT_PANEL floats. Arrays do not overlap.
 */
enum { HT_PANEL = 16 };
typedef void (*ht_matmul_fn)(float *c, const float *a, size_t a_wide, const float *b, size_t columns, size_t rows,
                             size_t inner, float *panel);

/*
 * Which of n elements of two arrays, of `bytes` (2 or 4) each, have other bits: place gets their numbers plus first, in
 * ascending order, and value their bytes in `is`. Returns how many. first + n is at most 65536; place and value have
 * room for n elements and HT_CHANGED_MORE, which may be written, too.
 */
enum { HT_CHANGED_MORE = 8 };
typedef size_t (*ht_changed_fn)(const void *was, const void *is, size_t bytes, size_t n, uint32_t first,
                                uint16_t *place, void *value);
/* n elements of f32, rounded to bf16. */
typedef void (*ht_halve_fn)(uint16_t *half, const float *x, size_t n);

struct ht_kernels {   /* test_torch_numerics.py has both structs, too */
    const char *name; /* of the instruction set */
    ht_add_fn add;
    ht_sum_fn sum_squares;
    ht_join_fn join;
    ht_part_fn part;
    ht_stir_fn stir;
    ht_matmul_fn matmul;
    ht_changed_fn changed;
    ht_halve_fn halve;
    ht_kernel_fn fn[HT_KERNEL_COUNT];
};
extern const struct ht_kernels ht_kernels_scalar;
#if defined(__x86_64__)
extern const struct ht_kernels ht_kernels_avx2;
extern const ht_kernel_fn ht_kernel_fns_avx512[HT_KERNEL_COUNT];
#endif
/* The fastest ones this CPU runs; the environment variable HITRAIN_KERNEL=scalar|avx2|avx512 overrides. */
const struct ht_kernels *ht_kernels_choose(void);
/* Element i of an array of a dtype that gradients can have. */
float ht_kernel_element(const void *array, uint8_t dtype, size_t i);

static inline uint32_t ht_float_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float ht_float_of_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* bf16, f16 <-> f32, round to nearest even, subnormals kept; NaN stays NaN (quiet). */
uint16_t ht_f32_to_bf16(float x);
float ht_bf16_to_f32(uint16_t x);
uint16_t ht_f32_to_f16(float x);
float ht_f16_to_f32(uint16_t x);
