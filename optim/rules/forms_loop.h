/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forms_loop.h - elements to codes and back (forms.h), for the lanes of the file that includes this.
 *
 * The dynamic map has seven decades of magnitudes, 10^-7 to 1. A decade is cut into equal parts, twice as many as the
 * one below it, and the middle of a part is a value. Magnitudes are numbered from 0, which is zero: the first of decade
 * d has number 2^d in the signed map (2^(d+1) - 1 in the unsigned one), and the last number is 1.0. So a number that is
 * converted to float has its decade in the exponent, and its part in the fraction: decoding needs no table of values.
 * Values differ from those of bitsandbytes, which rounds more often, by two units in the last place at most.
 *
 * A code of the signed map is the number with its sign, as eight bits in two's complement. 128 is 1.0; -127 is -1.0.
 * Code 0 is zero, so that a hole reads as zero.
 *
 * Encoding finds the decade by the exponent (a binade touches two decades at most), and the number by one fma and a
 * truncation. Offsets are a little lower (by parts * 2^-23), so that no middle between two values is rounded up.
 */
#pragma once

/* A file that may be a mutant includes tiering/base/mutant.h before this header. */
#ifndef HT_MUTANT
#define HT_MUTANT(name) false
#endif

#include "optim/rules/lanes_int.h"
#include "optim/rules/rule.h"

enum { HT_CACHE_LINE = 64, HT_NAN_BITS = 0x7fc00000, HT_INFINITY_BITS = 0x7f800000, HT_MAGNITUDE_BITS = 0x7fffffff };

/* ------------------------------------------------------------- dynamic map */

#define TWICE(...)               \
    {                            \
        __VA_ARGS__, __VA_ARGS__ \
    }

/* By decade from 0; the eighth is 1.0 itself. AVX-512 takes four bits of an index, so all eight are here twice. */
struct ht_dynamic_map {
    float next[16];  /* the middle between this decade and the next one */
    float slope[16]; /* number = slope y + offset, at most last; that of the lowest decade has zero, too */
    float offset[16], last[16];
    float rise[16], first[16]; /* value = rise fraction + first; by the lowest bits of the number's exponent */
};

static const struct ht_dynamic_map signed_map = {
    .next = TWICE(1.89999992e-06f, 1.44999995e-05f, 0.000122500001f, 0.00111249997f, 0.0105625f, 0.102812499f,
                  0.996484399f, INFINITY),
    .slope = TWICE(3636363.75f, 222222.219f, 44444.4453f, 8888.88867f, 1777.77783f, 355.555542f, 71.1111145f, 0.0f),
    .offset =
        TWICE(-1.1920929e-07f, 1.77777755f, 3.55555511f, 7.11111021f, 14.2222204f, 28.4444408f, 56.8888817f, 128.0f),
    .last = TWICE(1.0f, 3.0f, 7.0f, 15.0f, 31.0f, 63.0f, 127.0f, 128.0f),
    .rise = TWICE(9.00000032e-06f, 9.00000014e-05f, 0.000899999985f, 0.00899999961f, 0.0900000036f, 0.899999976f, 0.0f,
                  8.99999975e-07f),
    .first = TWICE(3.24999996e-06f, 2.12499999e-05f, 0.000156249997f, 0.00128125004f, 0.0114062503f, 0.107031249f, 1.0f,
                   5.49999982e-07f),
};
static const struct ht_dynamic_map unsigned_map = {
    .next = TWICE(1.45000001e-06f, 1.22500005e-05f, 0.000111250003f, 0.00105624995f, 0.0102812499f, 0.101406246f,
                  0.998242199f, INFINITY),
    .slope = TWICE(2580645.25f, 444444.438f, 88888.8906f, 17777.7773f, 3555.55566f, 711.111084f, 142.222229f, 0.0f),
    .offset = TWICE(0.580644906f, 2.55555511f, 6.11111021f, 13.2222204f, 27.4444408f, 55.8888817f, 112.777763f, 255.0f),
    .last = TWICE(2.0f, 6.0f, 14.0f, 30.0f, 62.0f, 126.0f, 254.0f, 255.0f),
    .rise = TWICE(8.99999975e-07f, 9.00000032e-06f, 9.00000014e-05f, 0.000899999985f, 0.00899999961f, 0.0900000036f,
                  0.899999976f, 0.0f),
    .first = TWICE(3.25000002e-07f, 2.12500004e-06f, 1.56250007e-05f, 0.000128125001f, 0.00114062498f, 0.010703125f,
                   0.103515625f, 1.0f),
};

/* Negative values lack the last but one before 1.0. */
#define NEGATIVE_LAST 126
#define NEGATIVE_NEXT 0.989453137f

/* The number of the value that is nearest to y; bits: of y, which is at least 0. */
HT_LANES_FN ht_ints number_of(ht_lanes y, ht_ints bits, const struct ht_dynamic_map *map)
{
    /* Decades of 2^-22 (and less) to 1: 82 / 256 is a little more than log10(2). */
    ht_ints exponent = ints_right(ints_max(bits, ints_set(105 << 23)), 23);
    ht_ints decade = ints_right(ints_times_small(exponent, 82) - ints_set(8585), 8);

    decade = ints_up_where(decade, ints_above(bits, ints_of(lanes_pick(map->next, decade))));
    ht_ints line = ints_of(lanes_fma(y, lanes_pick(map->slope, decade), lanes_pick(map->offset, decade)));
    return ints_trunc(lanes_of_ints(ints_min(line, ints_of(lanes_pick(map->last, decade)))));
}

HT_LANES_FN ht_ints signed_code(ht_lanes x, ht_lanes y)
{
    ht_ints bits = ints_of(y) & ints_set(HT_MAGNITUDE_BITS);
    ht_ints number = number_of(lanes_of_ints(bits), bits, &signed_map);
    ht_ints below =
        ints_up_where(ints_min(number, ints_set(NEGATIVE_LAST)), ints_above(bits, ints_of(lanes_set(NEGATIVE_NEXT))));

    return ints_by_sign(ints_of(x), ints_set(0) - below, number);
}

/* A positive x never has code 0; a negative one, which there is not, has. */
HT_LANES_FN ht_ints unsigned_code(ht_lanes x, ht_lanes y)
{
    ht_ints bits = ints_max(ints_of(y), ints_set(0));
    ht_ints least = ints_set(HT_MUTANT("code-zero") ? 0 : 1);

    return ints_max(number_of(lanes_of_ints(bits), bits, &unsigned_map), ints_min(ints_of(x), least));
}

/* bits: of the number as a float, whose exponent chooses the decade; it is not 0. A sign does not count. */
HT_LANES_FN ht_lanes value_of(ht_ints bits, const struct ht_dynamic_map *map)
{
    ht_ints fraction = (bits & ints_set(0x7fffff)) | ints_set(0x3f800000), exponent = ints_right(bits, 23);

    return lanes_fma(lanes_of_ints(fraction) - lanes_set(1), lanes_pick(map->rise, exponent),
                     lanes_pick(map->first, exponent));
}

HT_LANES_FN ht_lanes signed_value(const uint8_t *code)
{
    ht_ints number = ints_load_bytes(code, 127) - ints_set(127);

    number += ints_only_where(ints_set(-1), ints_above(ints_set(-126), number));
    ht_ints bits = ints_of(lanes_of_numbers(number)), magnitude = bits & ints_set(HT_MAGNITUDE_BITS);
    ht_ints value = ints_only_where(ints_of(value_of(bits, &signed_map)), ints_above(magnitude, ints_set(0)));
    return lanes_of_ints(value | (number & ints_set(INT32_MIN)));
}

HT_LANES_FN ht_lanes unsigned_value(const uint8_t *code)
{
    ht_ints number = ints_load_bytes(code, 0);
    ht_ints value = ints_of(value_of(ints_of(lanes_of_numbers(number + ints_set(1))), &unsigned_map));

    return lanes_of_ints(ints_only_where(value, ints_above(number, ints_set(0))));
}

/* ------------------------------------------------------------------ linear */

HT_LANES_FN ht_ints linear_code(ht_lanes x, ht_lanes y)
{
    return ints_round(y * lanes_set(127));
}

HT_LANES_FN ht_lanes linear_value(const uint8_t *code)
{
    ht_ints number = ints_load_bytes(code, 128) - ints_set(128);

    return lanes_of_numbers(number) * lanes_set(1.0f / 127); /* 127 makes 1.0 */
}

/* ------------------------------------------------------------------ blocks */

typedef ht_ints (*ht_code_fn)(ht_lanes x, ht_lanes y);
typedef ht_lanes (*ht_value_fn)(const uint8_t *code);

HT_LANES_FN float largest_of(const float *x, size_t n)
{
    ht_ints most = ints_set(0), other = most, mask = ints_set(HT_MAGNITUDE_BITS);
    float lane[HT_LANES];
    uint32_t bits = 0;

    for (size_t i = 0; i < n;
         i += 2 * HT_LANES) { /* n is a multiple: two rows of maxima, for each waits for the last */
        most = ints_max(most, ints_of(lanes_load_f32(x + i)) & mask);
        other = ints_max(other, ints_of(lanes_load_f32(x + i + HT_LANES)) & mask);
    }
    lanes_store_f32(lane, lanes_of_ints(ints_max(most, other)));
    for (unsigned i = 0; i < HT_LANES; i++)
        bits = (uint32_t)ht_max_u64(bits, ht_float_bits(lane[i]));
    return ht_float_of_bits(bits >= HT_INFINITY_BITS ? HT_NAN_BITS : bits);
}

/* Updates go from window to window. Prefetchers end at each page, and would see its codes only when they are needed. */
HT_LANES_FN void prefetch_next(const struct ht_coded *c, size_t element, size_t n, size_t code_bytes)
{
    const uint8_t *codes = c->codes + (element + HT_FORM_WINDOW) * code_bytes;

    for (size_t i = 0; i < n * code_bytes; i += HT_CACHE_LINE)
        __builtin_prefetch(codes + i, 1);
}

/* x: as the elements are; y: the same, or multiplied by a power of two; inverse: of their largest magnitude. */
HT_LANES_FN void encode_elements(uint8_t *codes, const float *x, const float *y, float inverse, size_t n,
                                 ht_code_fn code)
{
    for (size_t i = 0; i < n; i += HT_LANES)
        ints_store_bytes(codes + i, code(lanes_load_f32(x + i), lanes_load_f32(y + i) * lanes_set(inverse)));
}

/*
 * A whole block. Beyond 2^100 either way the inverse of the scale, or a product with it, would be no ordinary number.
 */
HT_LANES_FN void encode_block(uint8_t *codes, float largest, const float *x, size_t n, ht_code_fn code)
{
    float scaled[HT_FORM_WINDOW];

    if (!(largest > 0)) {
        memset(codes, 0, n);
    } else if (largest < 0x1p-100f || largest > 0x1p100f) {
        float by = largest < 1 ? 0x1p100f : 0x1p-100f;
        for (size_t i = 0; i < n; i++)
            scaled[i] = x[i] * by;
        encode_elements(codes, x, scaled, 1 / (largest * by), n, code);
    } else {
        encode_elements(codes, x, x, 1 / largest, n, code);
    }
}

HT_LANES_FN void decode_block(const uint8_t *codes, float scale, float *x, size_t n, ht_value_fn value)
{
    for (size_t i = 0; i < n; i += HT_LANES)
        lanes_store_f32(x + i, value(codes + i) * lanes_set(scale));
}

/* The last block of a range may be short: zeros fill it. */
HT_LANES_FN void encode_blocks(const struct ht_coded *c, const float *x, size_t block, ht_code_fn code)
{
    size_t i = 0, rest = c->n % block;
    float all[HT_FORM_WINDOW];
    uint8_t codes[HT_FORM_WINDOW];

    for (; i + block <= c->n; i += block) /* first, so that no block waits for the end of its own search */
        c->scales[i / block] = largest_of(x + i, block);
    for (i = 0; i + block <= c->n; i += block) {
        prefetch_next(c, i, block, 1);
        encode_block(c->codes + i, c->scales[i / block], x + i, block, code);
    }
    if (!rest)
        return;
    memset(all, 0, block * sizeof(*all));
    memcpy(all, x + i, rest * sizeof(*all));
    c->scales[i / block] = largest_of(all, block);
    encode_block(codes, c->scales[i / block], all, block, code);
    memcpy(c->codes + i, codes, rest);
}

HT_LANES_FN void decode_blocks(const struct ht_coded *c, float *x, size_t block, ht_value_fn value)
{
    size_t i = 0, rest = c->n % block;
    float all[HT_FORM_WINDOW];
    uint8_t codes[HT_FORM_WINDOW];

    for (; i + block <= c->n; i += block)
        decode_block(c->codes + i, c->scales[i / block], x + i, block, value);
    if (!rest)
        return;
    memset(codes, 0, block);
    memcpy(codes, c->codes + i, rest);
    decode_block(codes, c->scales[i / block], all, block, value);
    memcpy(x + i, all, rest * sizeof(*all));
}

HT_LANES_FN void encode_dynamic(const struct ht_coded *c, const float *x)
{
    if (ht_state_is_positive(c->kind))
        encode_blocks(c, x, HT_FORM_BLOCK_DYNAMIC, unsigned_code);
    else
        encode_blocks(c, x, HT_FORM_BLOCK_DYNAMIC, signed_code);
}

HT_LANES_FN void decode_dynamic(const struct ht_coded *c, float *x)
{
    if (ht_state_is_positive(c->kind))
        decode_blocks(c, x, HT_FORM_BLOCK_DYNAMIC, unsigned_value);
    else
        decode_blocks(c, x, HT_FORM_BLOCK_DYNAMIC, signed_value);
}

HT_LANES_FN void encode_linear(const struct ht_coded *c, const float *x)
{
    encode_blocks(c, x, HT_FORM_BLOCK_LINEAR, linear_code);
}

HT_LANES_FN void decode_linear(const struct ht_coded *c, float *x)
{
    decode_blocks(c, x, HT_FORM_BLOCK_LINEAR, linear_value);
}

/* -------------------------------------------------------------------- bf16 */

/* The upper half of bits + noise, which is less than one unit of that half, for a whole group. */
HT_LANES_FN void store_rounded(uint8_t *codes, const float *x, const ht_ints noise[HT_FORM_NOISE / HT_LANES])
{
#pragma GCC unroll 16
    for (unsigned k = 0; k < HT_FORM_NOISE / HT_LANES; k += 2) {
        unsigned i = k * HT_LANES;
        ints_store_upper(codes + 2 * i, ints_of(lanes_load_f32(x + i)) + noise[k],
                         ints_of(lanes_load_f32(x + i + HT_LANES)) + noise[k + 1]);
    }
}

/*
 * Multiply-shift hashing (Dietzfelbinger et al., 1997). The key is a hash and has factor and summand, so that the noise
 * of a step is independent of that of other steps, and uniform over the elements. Such noise alone is an arithmetic
 * progression, and errors of neighbours would add up or cancel. Two more multiplications scatter it.
 */
enum { HT_HASHES = HT_FORM_NOISE / 2 / HT_LANES }; /* of a group, each for two elements */

struct ht_progression {
    ht_ints next[HT_HASHES], step; /* from group to group */
};

/* e: the number of the group's first element. */
HT_LANES_FN void begin_progression(struct ht_progression *p, uint64_t key, uint64_t e)
{
    ht_ints factor = ints_set((int32_t)(key >> 32 | 1));

    for (unsigned k = 0; k < HT_HASHES; k++)
        p->next[k] =
            ints_plus(ints_times(ints_ascending((int32_t)(e / 2 + k * HT_LANES)), factor), ints_set((int32_t)key));
    p->step = ints_times(factor, ints_set(HT_FORM_NOISE / 2));
}

HT_LANES_FN void make_noise(struct ht_progression *p, ht_ints noise[HT_FORM_NOISE / HT_LANES])
{
#pragma GCC unroll 16
    for (unsigned k = 0; k < HT_HASHES; k++) {
        ht_ints h = p->next[k];
        p->next[k] = ints_plus(h, p->step);
        h = ints_times(h ^ ints_right(h, 16), ints_set(0x21f0aaad));
        h = ints_times(h ^ ints_right(h, 15), ints_set(0x735a2d97));
        h = h ^ ints_right(h, 16);
        noise[k] = h & ints_set(0xffff);
        noise[k + HT_HASHES] = ints_right(h, 16);
    }
}

HT_LANES_FN bool group_has_nan(const float *x)
{
    bool nan = false;

#pragma GCC unroll 16
    for (unsigned i = 0; i < HT_FORM_NOISE; i += 2 * HT_LANES)
        nan |= lanes_any_nan(lanes_load_f32(x + i), lanes_load_f32(x + i + HT_LANES));
    return nan;
}

/* HT_FORM_NOISE elements, whose noise the progression has. */
HT_LANES_FN void round_group(uint8_t *codes, const float *x, struct ht_progression *p, bool nearest)
{
    ht_ints noise[HT_FORM_NOISE / HT_LANES];
    float clean[HT_FORM_NOISE];

    if (__builtin_expect(group_has_nan(x), 0)) { /* a sum with noise might be none */
        for (unsigned i = 0; i < HT_FORM_NOISE; i++)
            clean[i] = isnan(x[i]) ? __builtin_nanf("") : x[i];
        x = clean;
    }
    for (unsigned k = 0; nearest && k < HT_FORM_NOISE / HT_LANES; k++)
        noise[k] = ints_set(0x7fff) + (ints_right(ints_of(lanes_load_f32(x + k * HT_LANES)), 16) & ints_set(1));
    if (!nearest)
        make_noise(p, noise);
    store_rounded(codes, x, noise);
}

/* Every bit of x changes every bit of the result. */
static inline uint64_t mix_bits(uint64_t x)
{
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

/* A hash of salt, kind, step, and the upper half of an element's number. */
static inline uint64_t key_of(const struct ht_coded *c, uint64_t element)
{
    return mix_bits(mix_bits(mix_bits((uint64_t)c->salt << 8 | c->kind) + c->t) + (element >> 32));
}

HT_LANES_FN void encode_bf16(const struct ht_coded *c, const float *x)
{
    bool nearest = c->nearest || HT_MUTANT("round-nearest");
    float all[HT_FORM_NOISE] = {0};
    uint8_t codes[2 * HT_FORM_NOISE];
    struct ht_progression p;

    for (size_t i = 0, n; i < c->n; i += n) {
        uint64_t e = c->element + i, skip = e % HT_FORM_NOISE;
        n = ht_min_u64(HT_FORM_NOISE - skip, c->n - i);
        if (!i || !(e & UINT32_MAX)) /* its upper bits are part of the key */
            begin_progression(&p, key_of(c, e), e - skip);
        if (n == HT_FORM_NOISE) {
            prefetch_next(c, i, n, 2);
            round_group(c->codes + 2 * i, x + i, &p, nearest);
            continue;
        }
        memcpy(all + skip, x + i, n * sizeof(*all));
        round_group(codes, all, &p, nearest);
        memcpy(c->codes + 2 * i, codes + 2 * skip, 2 * n);
    }
}

HT_LANES_FN void decode_bf16(const struct ht_coded *c, float *x)
{
    size_t i = 0;

    for (; i + HT_LANES <= c->n; i += HT_LANES)
        lanes_store_f32(x + i, lanes_of_ints(ints_left(ints_load_halves(c->codes + 2 * i), 16)));
    for (; i < c->n; i++) {
        memset(x + i, 0, 2);
        memcpy((uint8_t *)(x + i) + 2, c->codes + 2 * i, 2);
    }
}

HT_LANES_FN void encode_f32(const struct ht_coded *c, const float *x)
{
    memcpy(c->codes, x, c->n * sizeof(*x));
}

HT_LANES_FN void decode_f32(const struct ht_coded *c, float *x)
{
    memcpy(x, c->codes, c->n * sizeof(*x));
}

/* The codecs of an instruction set. */
#define HT_CODEC(isa, form)                                                   \
    static void form##_encode_##isa(const struct ht_coded *c, const float *x) \
    {                                                                         \
        encode_##form(c, x);                                                  \
    }                                                                         \
    static void form##_decode_##isa(const struct ht_coded *c, float *x)       \
    {                                                                         \
        decode_##form(c, x);                                                  \
    }
#define HT_CODECS(isa)                                                                              \
    HT_CODEC(isa, f32)                                                                              \
    HT_CODEC(isa, bf16)                                                                             \
    HT_CODEC(isa, dynamic)                                                                          \
    HT_CODEC(isa, linear)                                                                           \
    const struct ht_codecs ht_codecs_##isa = {                                                      \
        .name = #isa,                                                                               \
        .decode = {f32_decode_##isa, bf16_decode_##isa, dynamic_decode_##isa, linear_decode_##isa}, \
        .encode = {f32_encode_##isa, bf16_encode_##isa, dynamic_encode_##isa, linear_encode_##isa}, \
    };
