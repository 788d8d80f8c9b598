/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_avx2.c - eight elements at a time, for CPUs with AVX2 and FMA. Equals kernel_scalar.c bit for bit:
 * vsqrtps and vdivps round correctly, fused and unfused operations stand where the reference has them.
 *
 * The loop is instantiated per dtype pair, so that no choice is left inside it. Tails go through the reference.
 */
#include "optim/kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

struct vec_scalars {
    __m256 decay, one_minus_beta1, beta2, one_minus_beta2, minus_step_size, sqrt_bc2, eps, flip;
};

#define HT_INLINE static inline __attribute__((always_inline))

HT_INLINE __m256 bits_to_f32(__m256i bits)
{
    return _mm256_castsi256_ps(bits);
}

/* bf16 bits in the low halves of 32-bit lanes -> f32 */
HT_INLINE __m256 widen(__m256i halves)
{
    return bits_to_f32(_mm256_slli_epi32(halves, 16));
}

HT_INLINE __m256i load_halves(const void *p)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}

/* f32 -> bf16 bits in 32-bit lanes, as ht_f32_to_bf16 */
HT_INLINE __m256i narrow(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));

    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}

HT_INLINE void store_halves(void *p, __m256i halves)
{
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);

    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}

HT_INLINE unsigned count_nonfinite(__m256 g)
{
    __m256i exponent = _mm256_set1_epi32(0x7f800000);
    __m256i high = _mm256_and_si256(_mm256_castps_si256(g), exponent);
    int mask = _mm256_movemask_ps(bits_to_f32(_mm256_cmpeq_epi32(high, exponent)));

    return (unsigned)__builtin_popcount((unsigned)mask);
}

HT_INLINE __m256 canonical(__m256 x)
{
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);

    return _mm256_blendv_ps(x, bits_to_f32(_mm256_set1_epi32(0x7fc00000)), nan);
}

HT_INLINE __m256 load_master(const struct ht_adamw_arrays *a, size_t i, bool p_half)
{
    if (!p_half)
        return _mm256_loadu_ps((const float *)a->p + i);

    __m256 master = _mm256_loadu_ps(a->master + i);
    __m256i halves = load_halves((const uint16_t *)a->p + i);
    __m256i same = _mm256_cmpeq_epi32(narrow(master), halves);

    return _mm256_blendv_ps(widen(halves), master, bits_to_f32(same));
}

HT_INLINE void store_master(const struct ht_adamw_arrays *a, size_t i, __m256 p, bool p_half)
{
    if (!p_half) {
        _mm256_storeu_ps((float *)a->p + i, p);
        return;
    }
    _mm256_storeu_ps(a->master + i, p);
    store_halves((uint16_t *)a->p + i, narrow(p));
}

HT_INLINE unsigned update8(const struct vec_scalars *s, const struct ht_adamw_arrays *a, size_t i, bool p_half,
                           bool g_half)
{
    __m256 g = g_half ? widen(load_halves((const uint16_t *)a->g + i)) : _mm256_loadu_ps((const float *)a->g + i);
    unsigned nonfinite = count_nonfinite(g);

    g = _mm256_xor_ps(g, s->flip);
    __m256 m = _mm256_loadu_ps(a->m + i);
    m = _mm256_fmadd_ps(s->one_minus_beta1, _mm256_sub_ps(g, m), m);
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(a->v + i), s->beta2);
    v = _mm256_fmadd_ps(_mm256_mul_ps(s->one_minus_beta2, g), g, v);
    __m256 denominator = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v), s->sqrt_bc2), s->eps);
    __m256 change = _mm256_div_ps(_mm256_mul_ps(s->minus_step_size, m), denominator);
    __m256 p = _mm256_add_ps(_mm256_mul_ps(load_master(a, i, p_half), s->decay), change);

    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(p, p, _CMP_UNORD_Q)), 0)) {
        p = canonical(p);
        m = canonical(m);
        v = canonical(v);
    }
    _mm256_storeu_ps(a->m + i, m);
    _mm256_storeu_ps(a->v + i, v);
    store_master(a, i, p, p_half);
    return nonfinite;
}

/* i: how many elements were done, a multiple of 8 */
HT_INLINE uint64_t update_all(const struct vec_scalars *s, const struct ht_adamw_arrays *a, size_t n, bool p_half,
                              bool g_half)
{
    uint64_t nonfinite = 0;

    for (size_t i = 0; i + 8 <= n; i += 8)
        nonfinite += update8(s, a, i, p_half, g_half);
    return nonfinite;
}

static uint64_t update_tail(const struct ht_adamw_scalars *s, const struct ht_adamw_arrays *a, size_t n)
{
    size_t done = n & ~(size_t)7;
    struct ht_adamw_arrays tail = *a;

    tail.p = (uint8_t *)a->p + done * (a->p_dtype == HT_DTYPE_BF16 ? 2 : 4);
    tail.g = (const uint8_t *)a->g + done * (a->g_dtype == HT_DTYPE_BF16 ? 2 : 4);
    tail.master = a->master ? a->master + done : NULL;
    tail.m = a->m + done;
    tail.v = a->v + done;
    return ht_adamw_scalar(s, &tail, n - done);
}

static void broadcast(struct vec_scalars *out, const struct ht_adamw_scalars *s)
{
    out->decay = _mm256_set1_ps(s->decay);
    out->one_minus_beta1 = _mm256_set1_ps(s->one_minus_beta1);
    out->beta2 = _mm256_set1_ps(s->beta2);
    out->one_minus_beta2 = _mm256_set1_ps(s->one_minus_beta2);
    out->minus_step_size = _mm256_set1_ps(s->minus_step_size);
    out->sqrt_bc2 = _mm256_set1_ps(s->sqrt_bc2);
    out->eps = _mm256_set1_ps(s->eps);
    out->flip = bits_to_f32(_mm256_set1_epi32(s->maximize ? INT32_MIN : 0));
}

uint64_t ht_adamw_avx2(const struct ht_adamw_scalars *s, const struct ht_adamw_arrays *a, size_t n)
{
    bool p_half = a->p_dtype == HT_DTYPE_BF16, g_half = a->g_dtype == HT_DTYPE_BF16;
    struct vec_scalars vec;
    uint64_t nonfinite;

    broadcast(&vec, s);
    if (p_half)
        nonfinite = g_half ? update_all(&vec, a, n, true, true) : update_all(&vec, a, n, true, false);
    else
        nonfinite = g_half ? update_all(&vec, a, n, false, true) : update_all(&vec, a, n, false, false);
    return nonfinite + update_tail(s, a, n);
}
#endif
