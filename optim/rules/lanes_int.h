/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lanes_int.h - integers beside the floats of lanes.h, and the operations that the forms of state (forms_loop.h) are
 * written in. + - & | ^ are the compiler's own, where nothing overflows. What the compiler does alike with one integer
 * and with several is written once, and so is what both instruction sets have under the same name: LANES(name).
 */
#pragma once

#include "optim/rules/lanes.h"

#ifdef HT_LANES_AVX512

typedef int32_t ht_ints __attribute__((vector_size(64)));
typedef uint32_t ht_uints __attribute__((vector_size(64)));

typedef __mmask16 ht_mask;

HT_LANES_FN ht_mask ints_above(ht_ints a, ht_ints b)
{
    return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b);
}

HT_LANES_FN ht_ints ints_up_where(ht_ints x, ht_mask where)
{
    return (ht_ints)_mm512_mask_add_epi32((__m512i)x, where, (__m512i)x, _mm512_set1_epi32(1));
}

HT_LANES_FN ht_ints ints_only_where(ht_ints x, ht_mask where)
{
    return (ht_ints)_mm512_maskz_mov_epi32(where, (__m512i)x);
}

HT_LANES_FN ht_ints ints_by_sign(ht_ints of, ht_ints negative, ht_ints other)
{
    return (ht_ints)_mm512_mask_blend_epi32(_mm512_movepi32_mask((__m512i)of), (__m512i)other, (__m512i)negative);
}

/* Four bits count; a table has its eight values twice. */
HT_LANES_FN ht_lanes lanes_pick(const float table[16], ht_ints index)
{
    return _mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
}

/* A byte plus more, without a carry, as a number from 0 to 255. */
HT_LANES_FN ht_ints ints_load_bytes(const uint8_t *p, uint8_t more)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)p);

    return (ht_ints)_mm512_cvtepu8_epi32(_mm_add_epi8(bytes, _mm_set1_epi8((char)more)));
}

HT_LANES_FN void ints_store_bytes(uint8_t *p, ht_ints x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)x));
}

HT_LANES_FN void ints_store_upper(void *p, ht_ints x, ht_ints y)
{
    /* Of x the odd halves, then those of y. */
    __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                   21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);

    _mm512_storeu_si512(p, _mm512_permutex2var_epi16((__m512i)x, odd, (__m512i)y));
}

#elif defined(HT_LANES_AVX2)

typedef int32_t ht_ints __attribute__((vector_size(32)));
typedef uint32_t ht_uints __attribute__((vector_size(32)));

typedef ht_ints ht_mask; /* all bits, or none */

HT_LANES_FN ht_mask ints_above(ht_ints a, ht_ints b)
{
    return a > b;
}

HT_LANES_FN ht_ints ints_up_where(ht_ints x, ht_mask where)
{
    return x - where;
}

HT_LANES_FN ht_ints ints_only_where(ht_ints x, ht_mask where)
{
    return x & where;
}

HT_LANES_FN ht_ints ints_by_sign(ht_ints of, ht_ints negative, ht_ints other)
{
    return (ht_ints)_mm256_blendv_ps((__m256)other, (__m256)negative, (__m256)of);
}

HT_LANES_FN ht_lanes lanes_pick(const float table[16], ht_ints index)
{
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
}

HT_LANES_FN ht_ints ints_load_bytes(const uint8_t *p, uint8_t more)
{
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)p);

    return (ht_ints)_mm256_cvtepu8_epi32(_mm_add_epi8(bytes, _mm_set1_epi8((char)more)));
}

HT_LANES_FN void ints_store_bytes(uint8_t *p, ht_ints x)
{
    __m256i low = _mm256_set1_epi32(0x0c080400);
    __m256i fours = _mm256_shuffle_epi8((__m256i)x, low);

    _mm_storel_epi64((__m128i *)(void *)p,
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1)));
}

HT_LANES_FN void ints_store_upper(void *p, ht_ints x, ht_ints y)
{
    __m256i both = _mm256_packus_epi32(_mm256_srli_epi32((__m256i)x, 16), _mm256_srli_epi32((__m256i)y, 16));

    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(both, 0xd8));
}

#else

typedef int32_t ht_ints;
typedef uint32_t ht_uints;

HT_LANES_FN ht_ints ints_times_small(ht_ints x, int16_t by)
{
    return x * by;
}

HT_LANES_FN ht_ints ints_min(ht_ints a, ht_ints b)
{
    return a < b ? a : b;
}

HT_LANES_FN ht_ints ints_max(ht_ints a, ht_ints b)
{
    return a > b ? a : b;
}

/* A condition of each lane. */
typedef bool ht_mask;

HT_LANES_FN ht_mask ints_above(ht_ints a, ht_ints b)
{
    return a > b;
}

/* x + 1 where the condition holds, else x. */
HT_LANES_FN ht_ints ints_up_where(ht_ints x, ht_mask where)
{
    return x + where;
}

/* Elsewhere 0. */
HT_LANES_FN ht_ints ints_only_where(ht_ints x, ht_mask where)
{
    return where ? x : 0;
}

HT_LANES_FN ht_ints ints_by_sign(ht_ints of, ht_ints negative, ht_ints other)
{
    return of < 0 ? negative : other;
}

HT_LANES_FN ht_lanes lanes_of_numbers(ht_ints x)
{
    return (float)x;
}

HT_LANES_FN ht_ints ints_trunc(ht_lanes x)
{
    return (ht_ints)x;
}

/* To nearest even. */
HT_LANES_FN ht_ints ints_round(ht_lanes x)
{
    return (ht_ints)rintf(x);
}

/* table[index % 8]; it has its eight values twice. */
HT_LANES_FN ht_lanes lanes_pick(const float table[16], ht_ints index)
{
    return table[index & 7];
}

/* A byte plus more, without a carry, as a number from 0 to 255. */
HT_LANES_FN ht_ints ints_load_bytes(const uint8_t *p, uint8_t more)
{
    return (uint8_t)(*p + more);
}

/* The lowest bits. */
HT_LANES_FN void ints_store_bytes(uint8_t *p, ht_ints x)
{
    *p = (uint8_t)x;
}

HT_LANES_FN ht_ints ints_load_halves(const void *p)
{
    uint16_t half;

    memcpy(&half, p, sizeof(half));
    return half;
}

/* The upper halves of the lanes of x, then those of y. */
HT_LANES_FN void ints_store_upper(void *p, ht_ints x, ht_ints y)
{
    const uint16_t half[] = {(uint16_t)((uint32_t)x >> 16), (uint16_t)((uint32_t)y >> 16)};

    memcpy(p, half, sizeof(half));
}

#endif

#ifdef LANES

HT_LANES_FN ht_ints ints_load_halves(const void *p)
{
    return (ht_ints)bits_load_halves(p);
}

HT_LANES_FN ht_ints ints_times_small(ht_ints x, int16_t by)
{
    return (ht_ints)LANES(madd_epi16)((ht_bits)x, LANES(set1_epi32)(by));
}

HT_LANES_FN ht_ints ints_min(ht_ints a, ht_ints b)
{
    return (ht_ints)LANES(min_epi32)((ht_bits)a, (ht_bits)b);
}

HT_LANES_FN ht_ints ints_max(ht_ints a, ht_ints b)
{
    return (ht_ints)LANES(max_epi32)((ht_bits)a, (ht_bits)b);
}

HT_LANES_FN ht_lanes lanes_of_numbers(ht_ints x)
{
    return LANES(cvtepi32_ps)((ht_bits)x);
}

HT_LANES_FN ht_ints ints_trunc(ht_lanes x)
{
    return (ht_ints)LANES(cvttps_epi32)(x);
}

HT_LANES_FN ht_ints ints_round(ht_lanes x)
{
    return (ht_ints)LANES(cvtps_epi32)(x);
}

#endif

HT_LANES_FN ht_ints ints_set(int32_t x)
{
    return (ht_ints){0} + x;
}

/* first, and in each lane one more than in the lane before. */
HT_LANES_FN ht_ints ints_ascending(int32_t first)
{
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ht_ints numbers;

    memcpy(&numbers, lane, sizeof(numbers));
    return numbers + first;
}

HT_LANES_FN ht_ints ints_of(ht_lanes x)
{
    ht_ints bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

HT_LANES_FN ht_lanes lanes_of_ints(ht_ints x)
{
    ht_lanes f;

    memcpy(&f, &x, sizeof(f));
    return f;
}

HT_LANES_FN ht_ints ints_right(ht_ints x, int bits)
{
    return (ht_ints)((ht_uints)x >> bits);
}

HT_LANES_FN ht_ints ints_left(ht_ints x, int bits)
{
    return (ht_ints)((ht_uints)x << bits);
}

/* The lowest 32 bits of a sum, of a product. */
HT_LANES_FN ht_ints ints_plus(ht_ints x, ht_ints y)
{
    return (ht_ints)((ht_uints)x + (ht_uints)y);
}

HT_LANES_FN ht_ints ints_times(ht_ints x, ht_ints by)
{
    return (ht_ints)((ht_uints)x * (ht_uints)by);
}
