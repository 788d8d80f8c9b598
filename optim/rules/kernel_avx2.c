/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_avx2.c - eight elements at a time, for CPUs with AVX2, FMA and F16C. Tails go through the reference.
 *
 * Equal to it bit for bit: vsqrtps and vdivps round correctly, conversions to nearest even.
 */
#if defined(__x86_64__)
#define HT_LANES_AVX2
#include "tiering/base/mutant.h"
#include "optim/rules/arrays_loop.h"
#include "optim/rules/forms_loop.h"
#include "optim/rules/kernel_loop.h"

#define KERNEL(number, rule, states, ...)                                                                 \
    static uint64_t rule##_avx2(const struct ht_scalars *s, const struct ht_update *u, size_t n)          \
    {                                                                                                     \
        return update_by_dtypes(s, u, n, rule##_step, states) + update_tail(s, u, n, &ht_kernels_scalar); \
    }
HT_KERNELS(KERNEL)

HT_LANES_FN double sum_of(const void *g, size_t n, uint64_t *nonfinite, uint8_t dtype)
{
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    double lane[8];
    ht_counts counts = lanes_no_counts();
    size_t i = 0;

    for (; i + HT_LANES <= n; i += HT_LANES) {
        ht_lanes x = lanes_load(g, dtype, i);
        __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        low = _mm256_fmadd_pd(a, a, low);
        high = _mm256_fmadd_pd(b, b, high);
        counts = lanes_count_nonfinite(counts, x);
    }
    *nonfinite += lanes_sum_counts(counts);
    _mm256_storeu_pd(lane, low);
    _mm256_storeu_pd(lane + 4, high);
    sum_one_by_one(g, dtype, i, n, lane, nonfinite);
    return add_up(lane);
}

static double sum_squares_avx2(const void *g, uint8_t dtype, size_t n, uint64_t *nonfinite)
{
    return HT_BY_DTYPE(dtype, sum_of, g, n, nonfinite);
}

static void add_avx2(float *sum, const void *g, uint8_t dtype, size_t n, bool first)
{
    size_t done = n & ~(size_t)(HT_LANES - 1);

    add_by_gradient(sum, g, dtype, n, first);
    ht_kernels_scalar.add(sum + done, (const uint8_t *)g + done * ht_dtype_trained_bytes(dtype), dtype, n - done,
                          first);
}

static void join_avx2(float *master, const uint16_t *p, const uint16_t *low, uint32_t upper, size_t n)
{
    size_t done = n & ~(size_t)(HT_LANES - 1);

    join_all(master, p, low, upper, n);
    ht_kernels_scalar.join(master + done, p + done, low + done, upper, n - done);
}

static bool part_avx2(uint16_t *low, const float *master, const uint16_t *p, size_t n)
{
    size_t done = n & ~(size_t)(HT_LANES - 1);
    bool ties = part_all(low, master, p, n);

    return ht_kernels_scalar.part(low + done, master + done, p + done, n - done) || ties;
}

static uint64_t stir_avx2(const struct ht_scalars *s, float *m, const void *g, uint8_t dtype, uint16_t *u, size_t n)
{
    size_t done = n & ~(size_t)(HT_LANES - 1);
    const uint8_t *tail = (const uint8_t *)g + done * ht_dtype_trained_bytes(dtype);

    return stir_by_gradient(s, m, g, dtype, u, n) +
        ht_kernels_scalar.stir(s, m + done, tail, dtype, u + done, n - done);
}

/* Lanes that the bits of a number name, ascending, a byte each; then lane 0. */
#define LANE(rest, bits, i) ((rest) * ((bits) >> (i)&1 ? 256 : 1) + ((bits) >> (i)&1 ? (i) : 0))
#define LANES_OF(n) LANE(LANE(LANE(LANE(LANE(LANE(LANE(LANE(0ull, n, 7), n, 6), n, 5), n, 4), n, 3), n, 2), n, 1), n, 0)
#define FOUR(n) LANES_OF(n), LANES_OF((n) + 1), LANES_OF((n) + 2), LANES_OF((n) + 3)
#define SIXTEEN(n) FOUR(n), FOUR((n) + 4), FOUR((n) + 8), FOUR((n) + 12)
#define SIXTY_FOUR(n) SIXTEEN(n), SIXTEEN((n) + 16), SIXTEEN((n) + 32), SIXTEEN((n) + 48)
static const uint64_t lanes_of[256] = {SIXTY_FOUR(0), SIXTY_FOUR(64), SIXTY_FOUR(128), SIXTY_FOUR(192)};

/* A bit for each of 8 elements of 4 bytes, or of 16 of 2 bytes, that differs. */
HT_LANES_FN uint64_t differing(const uint8_t *was, const uint8_t *is, size_t bytes)
{
    __m256i a = _mm256_loadu_si256((const void *)was), b = _mm256_loadu_si256((const void *)is);

    if (bytes == 4)
        return 0xff & ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)));
    __m256i same = _mm256_cmpeq_epi16(a, b);
    __m128i packed = _mm_packs_epi16(_mm256_castsi256_si128(same), _mm256_extracti128_si256(same, 1));
    return 0xffff & ~(uint32_t)_mm_movemask_epi8(packed);
}

/* Those of 8 elements that the bits name. */
HT_LANES_FN void put_changed(uint8_t bits, const uint8_t *is, size_t bytes, size_t first, uint16_t *place,
                             uint8_t *value)
{
    __m128i lane = _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)&lanes_of[bits]));

    _mm_storeu_si128((void *)place, _mm_add_epi16(lane, _mm_set1_epi16((short)first)));
    if (bytes == 4) {
        __m256i all = _mm256_loadu_si256((const void *)is);
        _mm256_storeu_si256((void *)value, _mm256_permutevar8x32_epi32(all, _mm256_cvtepu16_epi32(lane)));
    } else {
        __m128i both = _mm_add_epi16(_mm_mullo_epi16(lane, _mm_set1_epi16(0x202)), _mm_set1_epi16(0x100));
        _mm_storeu_si128((void *)value, _mm_shuffle_epi8(_mm_loadu_si128((const void *)is), both));
    }
}

enum { FEW = 4 };

/* Up to FEW of 64 elements. No branch depends on how many. */
HT_LANES_FN void put_few_changed(uint64_t differ, const uint8_t *is, size_t bytes, size_t first, uint16_t *place,
                                 uint8_t *value)
{
#pragma GCC unroll 4
    for (unsigned k = 0; k < FEW; k++, differ &= differ - 1) {
        size_t at = _tzcnt_u64(differ) % 64;
        place[k] = (uint16_t)(first + at);
        memcpy(value + k * bytes, is + at * bytes, bytes);
    }
}

/* 64 elements at a time, of which mostly few have changed. */
HT_LANES_FN size_t changed_all(const uint8_t *was, const uint8_t *is, size_t bytes, size_t n, uint32_t first,
                               uint16_t *place, uint8_t *value)
{
    size_t per_load = sizeof(__m256i) / bytes, count = 0, i = 0;

    for (; i + 64 <= n; i += 64) {
        uint64_t differ = 0;
#pragma GCC unroll 8
        for (size_t k = 0; k < 64; k += per_load)
            differ |= differing(was + (i + k) * bytes, is + (i + k) * bytes, bytes) << k;
        size_t all = (size_t)__builtin_popcountll(differ), done = all > FEW ? 0 : all;
        if (done == all)
            put_few_changed(differ, is + i * bytes, bytes, first + i, place + count, value + count * bytes);
#pragma GCC unroll 8
        for (size_t k = 0; done < all && k < 64; k += 8) {
            uint8_t bits = (uint8_t)(differ >> k);
            put_changed(bits, is + (i + k) * bytes, bytes, first + i + k, place + count + done,
                        value + (count + done) * bytes);
            done += (size_t)__builtin_popcount(bits);
        }
        count += all;
    }
    return changed_one_by_one(was, is, bytes, i, n, first, place, value, count);
}

static size_t changed_avx2(const void *was, const void *is, size_t bytes, size_t n, uint32_t first, uint16_t *place,
                           void *value)
{
    return bytes == 2 ? changed_all(was, is, 2, n, first, place, value)
                      : changed_all(was, is, 4, n, first, place, value);
}

static void halve_avx2(uint16_t *half, const float *x, size_t n)
{
    size_t done = n & ~(size_t)(HT_LANES - 1);

    halve_all(half, x, n);
    ht_kernels_scalar.halve(half + done, x + done, n - done);
}

#define ROW(number, rule, states, ...) [number] = rule##_avx2,
const struct ht_kernels ht_kernels_avx2 = {.name = "avx2",
                                           .add = add_avx2,
                                           .sum_squares = sum_squares_avx2,
                                           .join = join_avx2,
                                           .part = part_avx2,
                                           .stir = stir_avx2,
                                           .matmul = matmul_all,
                                           .changed = changed_avx2,
                                           .halve = halve_avx2,
                                           .fn = {HT_KERNELS(ROW)}};

HT_CODECS(avx2)
#else
typedef int nothing_here;
#endif
