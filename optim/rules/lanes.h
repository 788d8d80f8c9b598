/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lanes.h - a few floats at a time: the type and the operations that kernels are written in.
 *
 * One lane, eight where HT_LANES_AVX2 is defined before this file is included, or sixteen with HT_LANES_AVX512. + - * /
 * are the compiler's own on all types; all other operations of rules give the same bits.
 */
#pragma once

#include <math.h>
#include "optim/rules/kernel.h"

#define HT_LANES_FN static inline __attribute__((always_inline, unused))

/* Calls fn, whose last argument is a dtype, for each dtype apart, so that no choice is left inside it. */
#define HT_BY_DTYPE(dtype, fn, ...)                                  \
    ((dtype) == HT_DTYPE_F32        ? fn(__VA_ARGS__, HT_DTYPE_F32)  \
         : (dtype) == HT_DTYPE_BF16 ? fn(__VA_ARGS__, HT_DTYPE_BF16) \
                                    : fn(__VA_ARGS__, HT_DTYPE_F16))

#ifdef HT_LANES_AVX512

#include <immintrin.h>

typedef __m512 ht_lanes;
typedef __m512i ht_bits;
typedef __m256i ht_halves; /* elements of two bytes */
enum { HT_LANES = 16 };
#define LANES(name) _mm512_##name

/* 1, 0 or -1; 0 for NaN, as torch.sign */
HT_LANES_FN ht_lanes lanes_sign(ht_lanes x)
{
    ht_lanes zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1.0f);

    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), one) -
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), one);
}

HT_LANES_FN bool lanes_any_nan(ht_lanes a, ht_lanes b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
}

/* In lanes where x is NaN `nan`, elsewhere `other`. */
HT_LANES_FN ht_bits bits_by_nan(ht_lanes x, ht_bits nan, ht_bits other)
{
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), other, nan);
}

/* In lanes where a and b are the same `same`, elsewhere `other`. */
HT_LANES_FN ht_bits bits_by_same(ht_bits a, ht_bits b, ht_bits same, ht_bits other)
{
    return _mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(a, b), other, same);
}

HT_LANES_FN bool bits_any_same(ht_bits a, ht_bits b)
{
    return _mm512_cmpeq_epi32_mask(a, b) != 0;
}

/* The low halves of 32-bit lanes, and back. */
HT_LANES_FN ht_halves bits_pack(ht_bits halves)
{
    return _mm512_cvtepi32_epi16(halves);
}

#elif defined(HT_LANES_AVX2)

#include <immintrin.h>

typedef __m256 ht_lanes;
typedef __m256i ht_bits;
typedef __m128i ht_halves;
enum { HT_LANES = 8 };
#define LANES(name) _mm256_##name

HT_LANES_FN ht_lanes lanes_sign(ht_lanes x)
{
    ht_lanes zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);

    return _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ), one) -
        _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_LT_OQ), one);
}

HT_LANES_FN bool lanes_any_nan(ht_lanes a, ht_lanes b)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}

HT_LANES_FN ht_bits bits_by_nan(ht_lanes x, ht_bits nan, ht_bits other)
{
    return _mm256_blendv_epi8(other, nan, (ht_bits)_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

HT_LANES_FN ht_bits bits_by_same(ht_bits a, ht_bits b, ht_bits same, ht_bits other)
{
    return _mm256_blendv_epi8(other, same, _mm256_cmpeq_epi32(a, b));
}

HT_LANES_FN bool bits_any_same(ht_bits a, ht_bits b)
{
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(a, b)) != 0;
}

HT_LANES_FN ht_halves bits_pack(ht_bits halves)
{
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08));
}

#endif

#ifdef LANES /* what both have under the same name */

HT_LANES_FN ht_lanes lanes_set(float x)
{
    return LANES(set1_ps)(x);
}

/* a * b + c, rounded once */
HT_LANES_FN ht_lanes lanes_fma(ht_lanes a, ht_lanes b, ht_lanes c)
{
    return LANES(fmadd_ps)(a, b, c);
}

HT_LANES_FN ht_lanes lanes_sqrt(ht_lanes x)
{
    return LANES(sqrt_ps)(x);
}

HT_LANES_FN ht_bits bits_set(uint32_t x)
{
    return LANES(set1_epi32)((int)x);
}

HT_LANES_FN ht_lanes lanes_negate(ht_lanes x, bool really)
{
    return (ht_lanes)((ht_bits)x ^ bits_set(really ? 0x80000000 : 0));
}

HT_LANES_FN ht_lanes lanes_canonical(ht_lanes x)
{
    return (ht_lanes)bits_by_nan(x, bits_set(0x7fc00000), (ht_bits)x);
}

/* One 32-bit count in each lane: of fewer than 2^32 times. */
typedef ht_bits ht_counts;

HT_LANES_FN ht_counts lanes_no_counts(void)
{
    return bits_set(0);
}

HT_LANES_FN ht_counts lanes_count_nonfinite(ht_counts c, ht_lanes x)
{
    ht_bits exponent = bits_set(0x7f800000);

    return LANES(add_epi32)(c, bits_by_same((ht_bits)x & exponent, exponent, bits_set(1), bits_set(0)));
}

HT_LANES_FN uint64_t lanes_sum_counts(ht_counts c)
{
    uint32_t lane[HT_LANES];
    uint64_t sum = 0;

    memcpy(lane, &c, sizeof(c));
    for (unsigned i = 0; i < HT_LANES; i++)
        sum += lane[i];
    return sum;
}

HT_LANES_FN ht_bits bits_load_halves(const void *p)
{
    ht_halves halves;

    memcpy(&halves, p, sizeof(halves));
    return LANES(cvtepu16_epi32)(halves);
}

HT_LANES_FN ht_lanes lanes_widen(ht_bits halves, uint8_t dtype)
{
    if (dtype == HT_DTYPE_BF16)
        return (ht_lanes)LANES(slli_epi32)(halves, 16);
    return LANES(cvtph_ps)(bits_pack(halves));
}

HT_LANES_FN ht_bits lanes_narrow(ht_lanes x, uint8_t dtype)
{
    if (dtype == HT_DTYPE_F16)
        return LANES(cvtepu16_epi32)(LANES(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT));

    ht_bits bits = (ht_bits)x, odd = LANES(srli_epi32)(bits, 16) & bits_set(1);
    ht_bits up = LANES(add_epi32)(LANES(add_epi32)(bits, bits_set(0x7fff)), odd);

    return LANES(srli_epi32)(bits_by_nan(x, bits | bits_set(0x400000), up), 16);
}

HT_LANES_FN ht_lanes lanes_load_f32(const float *p)
{
    return LANES(loadu_ps)(p);
}

HT_LANES_FN void lanes_store_f32(float *p, ht_lanes x)
{
    LANES(storeu_ps)(p, x);
}

HT_LANES_FN void lanes_store_halves(void *p, ht_lanes x, uint8_t dtype)
{
    ht_halves halves = bits_pack(lanes_narrow(x, dtype));

    memcpy(p, &halves, sizeof(halves));
}

/* x if it narrows to the value at p, else the value at p. */
HT_LANES_FN ht_lanes lanes_believe(ht_lanes x, const void *p, uint8_t dtype)
{
    ht_bits there = bits_load_halves(p);

    return (ht_lanes)bits_by_same(lanes_narrow(x, dtype), there, (ht_bits)x, (ht_bits)lanes_widen(there, dtype));
}

HT_LANES_FN ht_lanes lanes_load(const void *array, uint8_t dtype, size_t i)
{
    if (dtype == HT_DTYPE_F32)
        return lanes_load_f32((const float *)array + i);
    return lanes_widen(bits_load_halves((const uint16_t *)array + i), dtype);
}

/* A master from its bf16 and the bits that those miss; `upper`: the code of an upper tie (master.h). */
HT_LANES_FN ht_lanes lanes_join(const uint16_t *p, const uint16_t *low, uint32_t upper)
{
    ht_bits code = bits_load_halves(low), missing = LANES(srai_epi32)(LANES(slli_epi32)(code, 16), 16);

    missing = bits_by_same(code, bits_set(upper), bits_set(0x8000), missing);
    return (ht_lanes)LANES(add_epi32)(LANES(slli_epi32)(bits_load_halves(p), 16), missing);
}

/* The bits of a master that its bf16 misses. True: one is a tie. */
HT_LANES_FN bool lanes_part(uint16_t *low, ht_lanes x, const uint16_t *p)
{
    ht_bits upper = LANES(slli_epi32)(bits_load_halves(p), 16);
    ht_bits missing = LANES(sub_epi32)((ht_bits)x, upper) & bits_set(0xffff);
    ht_halves halves = bits_pack(missing);

    memcpy(low, &halves, sizeof(halves));
    return bits_any_same(missing, bits_set(0x8000));
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
    return isnan(x) ? ht_float_of_bits(0x7fc00000u) : x;
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
    uint32_t missing = *low == upper ? 0x8000 : (uint32_t)(int16_t)*low;

    return ht_float_of_bits(((uint32_t)*p << 16) + missing);
}

HT_LANES_FN bool lanes_part(uint16_t *low, ht_lanes x, const uint16_t *p)
{
    *low = (uint16_t)(ht_float_bits(x) - ((uint32_t)*p << 16));
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
