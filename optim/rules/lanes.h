/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lanes.h - a few floats at a time: the type and the operations that kernels are written in.
 *
 * One lane, or eight where HT_LANES_AVX2 is defined before this file is included. + - * / are the compiler's own on
 * both types; all other operations of rules are here twice, with the same bits as result.
 */
#pragma once

#include <math.h>
#include "optim/rules/kernel.h"

#define HT_LANES_FN static inline __attribute__((always_inline, unused))

#ifdef HT_LANES_AVX2

#include <immintrin.h>

typedef __m256 ht_lanes;
enum { HT_LANES = 8 };

HT_LANES_FN __m256i lanes_bits(ht_lanes x)
{
    return _mm256_castps_si256(x);
}

HT_LANES_FN ht_lanes lanes_of_bits(__m256i bits)
{
    return _mm256_castsi256_ps(bits);
}

HT_LANES_FN ht_lanes lanes_set(float x)
{
    return _mm256_set1_ps(x);
}

/* a * b + c, rounded once */
HT_LANES_FN ht_lanes lanes_fma(ht_lanes a, ht_lanes b, ht_lanes c)
{
    return _mm256_fmadd_ps(a, b, c);
}

HT_LANES_FN ht_lanes lanes_sqrt(ht_lanes x)
{
    return _mm256_sqrt_ps(x);
}

/* 1, 0 or -1; 0 for NaN, as torch.sign */
HT_LANES_FN ht_lanes lanes_sign(ht_lanes x)
{
    ht_lanes zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);

    return _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ), one) -
        _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_LT_OQ), one);
}

HT_LANES_FN ht_lanes lanes_negate(ht_lanes x, bool really)
{
    return _mm256_xor_ps(x, lanes_of_bits(_mm256_set1_epi32(really ? INT32_MIN : 0)));
}

HT_LANES_FN bool lanes_any_nan(ht_lanes a, ht_lanes b)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}

HT_LANES_FN ht_lanes lanes_canonical(ht_lanes x)
{
    ht_lanes nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);

    return _mm256_blendv_ps(x, lanes_of_bits(_mm256_set1_epi32(0x7fc00000)), nan);
}

/* One 32-bit count in each lane: of fewer than 2^32 times. */
typedef __m256i ht_counts;

HT_LANES_FN ht_counts lanes_no_counts(void)
{
    return _mm256_setzero_si256();
}

HT_LANES_FN ht_counts lanes_count_nonfinite(ht_counts c, ht_lanes x)
{
    __m256i exponent = _mm256_set1_epi32(0x7f800000);
    __m256i high = _mm256_and_si256(lanes_bits(x), exponent);

    return _mm256_sub_epi32(c, _mm256_cmpeq_epi32(high, exponent)); /* equal is -1 */
}

HT_LANES_FN uint64_t lanes_sum_counts(ht_counts c)
{
    uint32_t lane[8];
    uint64_t sum = 0;

    _mm256_storeu_si256((__m256i *)(void *)lane, c);
    for (unsigned i = 0; i < 8; i++)
        sum += lane[i];
    return sum;
}

/* Elements of two bytes, in the low halves of 32-bit lanes. */
HT_LANES_FN __m256i lanes_load_halves(const void *p)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}

HT_LANES_FN __m128i lanes_pack(__m256i halves)
{
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);

    return _mm256_castsi256_si128(packed);
}

HT_LANES_FN ht_lanes lanes_widen(__m256i halves, uint8_t dtype)
{
    if (dtype == HT_DTYPE_BF16)
        return lanes_of_bits(_mm256_slli_epi32(halves, 16));
    return _mm256_cvtph_ps(lanes_pack(halves));
}

HT_LANES_FN __m256i lanes_narrow(ht_lanes x, uint8_t dtype)
{
    if (dtype == HT_DTYPE_F16)
        return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));

    __m256i bits = lanes_bits(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = lanes_bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));

    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}

HT_LANES_FN ht_lanes lanes_load_f32(const float *p)
{
    return _mm256_loadu_ps(p);
}

HT_LANES_FN void lanes_store_f32(float *p, ht_lanes x)
{
    _mm256_storeu_ps(p, x);
}

HT_LANES_FN void lanes_store_halves(void *p, ht_lanes x, uint8_t dtype)
{
    _mm_storeu_si128((__m128i *)p, lanes_pack(lanes_narrow(x, dtype)));
}

/* x if it narrows to the value at p, else the value at p. */
HT_LANES_FN ht_lanes lanes_believe(ht_lanes x, const void *p, uint8_t dtype)
{
    __m256i there = lanes_load_halves(p);
    __m256i same = _mm256_cmpeq_epi32(lanes_narrow(x, dtype), there);

    return _mm256_blendv_ps(lanes_widen(there, dtype), x, lanes_of_bits(same));
}

HT_LANES_FN ht_lanes lanes_load(const void *array, uint8_t dtype, size_t i)
{
    if (dtype == HT_DTYPE_F32)
        return lanes_load_f32((const float *)array + i);
    return lanes_widen(lanes_load_halves((const uint16_t *)array + i), dtype);
}

/* A master from its bf16 and the bits that those miss; `upper`: the code of an upper tie (master.h). */
HT_LANES_FN ht_lanes lanes_join(const uint16_t *p, const uint16_t *low, uint32_t upper)
{
    __m256i code = lanes_load_halves(low);
    __m256i is_upper = _mm256_cmpeq_epi32(code, _mm256_set1_epi32((int)upper));
    __m256i missing = _mm256_srai_epi32(_mm256_slli_epi32(code, 16), 16);

    missing = _mm256_blendv_epi8(missing, _mm256_set1_epi32(0x8000), is_upper);
    return lanes_of_bits(_mm256_add_epi32(_mm256_slli_epi32(lanes_load_halves(p), 16), missing));
}

/* The bits of a master that its bf16 misses. True: one is a tie. */
HT_LANES_FN bool lanes_part(uint16_t *low, ht_lanes x, const uint16_t *p)
{
    __m256i numa_index = _mm256_slli_epi32(lanes_load_halves(p), 16);
    __m256i missing = _mm256_and_si256(_mm256_sub_epi32(lanes_bits(x), numa_index), _mm256_set1_epi32(0xffff));

    _mm_storeu_si128((__m128i *)(void *)low, lanes_pack(missing));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(missing, _mm256_set1_epi32(0x8000))) != 0;
}

#else

typedef float ht_lanes;
enum { HT_LANES = 1 };

HT_LANES_FN ht_lanes lanes_set(float x)
{
    return x;
}

HT_LANES_FN ht_lanes lanes_fma(ht_lanes a, ht_lanes b, ht_lanes c)
{
    return fmaf(a, b, c);
}

HT_LANES_FN ht_lanes lanes_sqrt(ht_lanes x)
{
    return sqrtf(x);
}

HT_LANES_FN ht_lanes lanes_sign(ht_lanes x)
{
    return (float)(x > 0) - (float)(x < 0);
}

HT_LANES_FN ht_lanes lanes_negate(ht_lanes x, bool really)
{
    return really ? -x : x;
}

HT_LANES_FN bool lanes_any_nan(ht_lanes a, ht_lanes b)
{
    return isnan(a) || isnan(b);
}

HT_LANES_FN ht_lanes lanes_canonical(ht_lanes x)
{
    static const uint32_t quiet_nan = 0x7fc00000u;

    if (isnan(x))
        memcpy(&x, &quiet_nan, sizeof(x));
    return x;
}

typedef uint64_t ht_counts;

HT_LANES_FN ht_counts lanes_no_counts(void)
{
    return 0;
}

HT_LANES_FN ht_counts lanes_count_nonfinite(ht_counts c, ht_lanes x)
{
    return c + !isfinite(x);
}

HT_LANES_FN uint64_t lanes_sum_counts(ht_counts c)
{
    return c;
}

HT_LANES_FN ht_lanes lanes_load_f32(const float *p)
{
    ht_lanes x;

    memcpy(&x, p, sizeof(x));
    return x;
}

HT_LANES_FN void lanes_store_f32(float *p, ht_lanes x)
{
    memcpy(p, &x, sizeof(x));
}

HT_LANES_FN uint16_t lanes_narrow(ht_lanes x, uint8_t dtype)
{
    return dtype == HT_DTYPE_BF16 ? ht_f32_to_bf16(x) : ht_f32_to_f16(x);
}

HT_LANES_FN void lanes_store_halves(void *p, ht_lanes x, uint8_t dtype)
{
    uint16_t half = lanes_narrow(x, dtype);

    memcpy(p, &half, sizeof(half));
}

HT_LANES_FN ht_lanes lanes_load(const void *array, uint8_t dtype, size_t i)
{
    return ht_kernel_element(array, dtype, i);
}

HT_LANES_FN ht_lanes lanes_believe(ht_lanes x, const void *p, uint8_t dtype)
{
    uint16_t there;

    memcpy(&there, p, sizeof(there));
    return lanes_narrow(x, dtype) == there ? x : lanes_load(p, dtype, 0);
}

HT_LANES_FN ht_lanes lanes_join(const uint16_t *p, const uint16_t *low, uint32_t upper)
{
    uint32_t missing = *low == upper ? 0x8000 : (uint32_t)(int16_t)*low, bits = ((uint32_t)*p << 16) + missing;
    ht_lanes x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

HT_LANES_FN bool lanes_part(uint16_t *low, ht_lanes x, const uint16_t *p)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    *low = (uint16_t)(bits - ((uint32_t)*p << 16));
    return *low == 0x8000;
}

#endif

/*
 * start + weight (end - start), as torch.lerp computes it: from the nearer side, with one fused operation. The caller
 * decides once for all elements, by ht_lerp_near_end.
 */
HT_LANES_FN ht_lanes lanes_lerp(ht_lanes start, ht_lanes end, float weight, bool near_end)
{
    return lanes_fma(lanes_set(near_end ? weight - 1 : weight), end - start, near_end ? end : start);
}

static inline bool ht_lerp_near_end(float weight)
{
    return !(fabsf(weight) < 0.5f);
}
