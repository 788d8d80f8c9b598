/* SPDX-License-Identifier: Apache-2.0 */
/* State in 16 and 8 bits: codecs agree bit for bit, codes are the nearest, roundings have no bias and replay. */
#include <math.h>

#include "optim/rules/forms.h"
#include "optim/rules/rule.h"
#include "tests/support/suite.h"

enum { RANGE = 3 * HT_FORM_WINDOW + 77, BYTES = 4 * RANGE + 64, GUARD = 64 };

static uint64_t rnd = 88172645463325252ull;

static float of_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static const struct ht_codecs *others[2];
static unsigned other_count;

static bool has_avx512(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

static void find_codecs(void)
{
    other_count = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        others[other_count++] = &ht_codecs_avx2;
    if (has_avx512())
        others[other_count++] = &ht_codecs_avx512;
    else
        printf("skipped: avx512: this processor lacks AVX-512 F, BW, VL or DQ\n");
#endif
}

/* ---------------------------------------------------- equal on all processors */

/* Numbers of one size, of all sizes, all bits, or denormals; now and then nothing but zeros. */
static void fill_block(float *x, size_t n, unsigned how)
{
    int exponent = (int)(random_next(&rnd) % 278) - 149;

    for (size_t i = 0; i < n; i++) {
        uint64_t r = random_next(&rnd);
        double unit = (double)(r >> 11) * 0x1p-53 * (r & 1 ? -1 : 1);
        switch (how) {
        case 0:
            x[i] = (float)ldexp(unit, exponent);
            break;
        case 1:
            x[i] = (float)ldexp(unit, exponent - (int)(r >> 2 & 31));
            break;
        case 2:
            x[i] = of_bits((uint32_t)r);
            break;
        case 3:
            x[i] = of_bits((uint32_t)r & 0x807fffffu);
            break;
        case 4:
            x[i] = of_bits((uint32_t)r & 0x80000000u);
            break;
        default: /* finite, of any exponent */
            x[i] = of_bits((uint32_t)r & 0xbfffffffu);
        }
    }
}

static struct ht_coded coded_at(unsigned form, uint8_t kind, uint8_t *range, uint64_t first, size_t n)
{
    struct ht_coded c = ht_coded_at(form, range, RANGE, first, n);

    c.kind = kind;
    c.salt = 0x1234567;
    c.t = 41;
    c.element = first + (UINT64_C(1) << 34) - 512;
    return c;
}

static const uint8_t kinds[] = {HT_STATE_EXP_AVG, HT_STATE_EXP_AVG_SQ};

static void compare(const struct ht_codecs *k, unsigned form, uint8_t kind, bool nearest, uint64_t first, size_t n)
{
    static _Alignas(64) uint8_t a[BYTES], b[BYTES];
    static float x[RANGE + GUARD], y[RANGE + GUARD], in[RANGE];
    struct ht_coded ca = coded_at(form, kind, a, first, n), cb = coded_at(form, kind, b, first, n);

    ca.nearest = cb.nearest = nearest;
    for (size_t i = 0; i < n; i += 256)
        fill_block(in + i, ht_min_u64(256, n - i), (unsigned)(random_next(&rnd) % 6));
    memset(a, 0x5a, sizeof(a));
    memset(b, 0x5a, sizeof(b));
    ht_codecs_scalar.encode[form](&ca, in);
    k->encode[form](&cb, in);
    ck_assert_int_eq(memcmp(a, b, sizeof(a)), 0);
    memset(x, 0x5a, sizeof(x));
    memset(y, 0x5a, sizeof(y));
    ht_codecs_scalar.decode[form](&ca, x);
    k->decode[form](&cb, y);
    ck_assert_int_eq(memcmp(x, y, sizeof(x)), 0); /* nothing beyond n, either */
    for (size_t i = 0; i < sizeof(a); i++)
        a[i] = (uint8_t)random_next(&rnd);
    memcpy(b, a, sizeof(a));
    ht_codecs_scalar.decode[form](&ca, x);
    k->decode[form](&cb, y);
    for (size_t i = 0; i < n; i++)
        ck_assert(bits_of(x[i]) == bits_of(y[i]) || (isnan(x[i]) && isnan(y[i])));
}

TEST_LOOP(all_codecs_have_the_same_bits, 2 * HT_FORMS)
{
    unsigned form = (unsigned)_i / 2;
    uint8_t kind = kinds[_i % 2];

    find_codecs();
    for (unsigned k = 0; k < other_count; k++) {
        for (unsigned round = 0; round < 200; round++) {
            uint64_t window = random_next(&rnd) % 4;
            size_t n = window == 3 ? RANGE - 3 * HT_FORM_WINDOW : HT_FORM_WINDOW;
            compare(others[k], form, kind, round & 1, window * HT_FORM_WINDOW, n);
        }
        for (size_t n = 1; n <= RANGE - 3 * HT_FORM_WINDOW; n++)
            compare(others[k], form, kind, n & 1, 3 * HT_FORM_WINDOW, n);
    }
}

/* --------------------------------------------------------------- the map */

static void encode(unsigned form, uint8_t kind, uint8_t *range, const float *x, size_t n)
{
    struct ht_coded c = ht_coded_at(form, range, n, 0, n);

    c.kind = kind;
    c.nearest = true;
    ht_codecs_scalar.encode[form](&c, x);
}

static void decode(unsigned form, uint8_t kind, uint8_t *range, float *x, size_t n)
{
    struct ht_coded c = ht_coded_at(form, range, n, 0, n);

    c.kind = kind;
    ht_codecs_scalar.decode[form](&c, x);
}

struct block {
    uint8_t bytes[HT_FORM_BLOCK_LINEAR + 64];
};

/* The values of the map, ascending, by the formula of the paper. Returns how many. */
static size_t published_values(bool is_signed, double *value)
{
    size_t n = 0;

    value[n++] = 0;
    for (int d = 0; d < 7; d++) {
        int parts = is_signed ? 1 << d : 2 << d;
        for (int j = 0; j < parts; j++)
            value[n++] = pow(10, d - 6) * (0.1 + 0.9 * (j + 0.5) / parts);
    }
    value[n++] = 1;
    return n;
}

/* Decoded values of all codes with scale 1, ascending. */
static void our_values(uint8_t kind, float scale, float value[256])
{
    struct block b;
    float x[256];

    for (unsigned i = 0; i < 256; i++)
        b.bytes[i] = (uint8_t)i;
    memcpy(b.bytes + 256, &scale, sizeof(scale));
    decode(HT_FORM_DYNAMIC, kind, b.bytes, x, 256);
    for (unsigned i = 0; i < 256; i++)
        value[i] = ht_state_is_positive(kind) ? x[i] : x[(i + 129) & 255]; /* signed: 0 to 128, then -127 to -1 */
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

TEST_LOOP(the_values_are_those_of_the_paper, 2)
{
    bool is_signed = !_i;
    double magnitude[256];
    float value[256];
    size_t n = published_values(is_signed, magnitude);

    ck_assert_uint_eq(n, is_signed ? 129 : 256);
    our_values(kinds[_i], 1, value);
    if (!is_signed) {
        for (size_t i = 0; i < 256; i++)
            ck_assert_double_le(fabs(value[i] - magnitude[i]), magnitude[i] * 0x1p-22);
        return;
    }
    ck_assert(value[0] == -1);
    for (size_t i = 1; i < 127; i++) /* in place of -0.993 it has -1 */
        ck_assert_double_le(fabs(value[i] + magnitude[127 - i]), magnitude[127 - i] * 0x1p-22);
    for (size_t i = 0; i < n; i++)
        ck_assert_double_le(fabs(value[127 + i] - magnitude[i]), magnitude[i] * 0x1p-22);
    ck_assert(bits_of(value[127]) == 0);
}

/* The nearest value in double; in the middle, and up to 2^-20 above it, that of the lower magnitude. */
static float nearest_of(const float value[256], double x, float lowest_positive)
{
    size_t low = 0, high = 255;

    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (value[middle] <= x)
            low = middle;
        else
            high = middle;
    }
    double a = value[low], b = value[high], middle = (a + b) / 2;
    double slack = fabs(middle) * 0x1p-20;
    bool up = x >= 0 ? x > middle + slack : x >= middle - slack;
    if (x >= 0 && x > middle && x <= middle + slack)
        return NAN; /* either */
    if (x < 0 && x < middle && x >= middle - slack)
        return NAN;
    float chosen = up ? value[high] : value[low];
    return x > 0 && lowest_positive > 0 && chosen == 0 ? lowest_positive : chosen;
}

static unsigned checked;

/* x / scale is exact: scale is a power of two. Blocks of 256 with the scale first. */
static void check_nearest(uint8_t kind, float scale, const float *x, size_t n, const float value[256])
{
    bool positive = ht_state_is_positive(kind);
    float all[256] = {scale}, got[256];
    struct block b;

    memcpy(all + 1, x, n * sizeof(*x));
    encode(HT_FORM_DYNAMIC, kind, b.bytes, all, 256);
    decode(HT_FORM_DYNAMIC, kind, b.bytes, got, 256);
    ck_assert(got[0] == scale);
    for (size_t i = 0; i < n; i++) {
        float want = nearest_of(value, (double)x[i] / scale, positive ? value[1] : 0);
        if (isnan(want))
            continue;
        checked++;
        ck_assert_msg(got[i + 1] == want * scale, "%.9g of %.9g: %.9g, not %.9g", (double)x[i], (double)scale,
                      (double)got[i + 1], (double)(want * scale));
    }
}

/* All middles between two values, and what is next to them; both signs. */
TEST_LOOP(middles_and_their_neighbours_get_the_nearest_code, 2)
{
    uint8_t kind = kinds[_i];
    float value[256];

    our_values(kind, 1, value);
    qsort(value, 256, sizeof(*value), by_value);
    for (int exponent = -90; exponent <= 90; exponent += 15) {
        float scale = (float)ldexp(1, exponent);
        for (size_t i = 0; i + 1 < 256; i++) {
            float middle = (float)(((double)value[i] + value[i + 1]) / 2) * scale, near[41];
            for (int k = -20; k <= 20; k++)
                near[k + 20] = of_bits(bits_of(middle) + (uint32_t)k);
            check_nearest(kind, scale, near, 41, value);
        }
    }
    ck_assert_uint_gt(checked, 13 * 255 * 20);
}

/* Every exponent of the elements and of the scale, also where the scale or its inverse is a denormal number. */
TEST_LOOP(all_exponents_get_the_nearest_code, 2)
{
    uint8_t kind = kinds[_i];
    float value[256], x[255];

    our_values(kind, 1, value);
    qsort(value, 256, sizeof(*value), by_value);
    for (int exponent = -149; exponent <= 127; exponent++) {
        float scale = (float)ldexp(1, exponent);
        for (unsigned round = 0; round < 20; round++) {
            for (size_t i = 0; i < 255; i++) {
                double unit = (double)(random_next(&rnd) >> 11) * 0x1p-53;
                x[i] = (float)ldexp(unit, exponent - (int)(random_next(&rnd) % 28));
                x[i] = kind == HT_STATE_EXP_AVG && random_next(&rnd) & 1 ? -x[i] : x[i];
            }
            check_nearest(kind, scale, x, 255, value);
        }
    }
}

/* Where the values of some codes are denormal numbers, two codes may have one value: that stays. */
TEST(state_that_decodes_encodes_to_the_same_codes)
{
    static uint8_t a[RANGE * 4], b[RANGE * 4];
    static float x[RANGE], y[RANGE];

    for (unsigned round = 0; round < 400; round++) {
        unsigned form = 1 + round % 3;
        uint8_t kind = form == HT_FORM_LINEAR ? HT_STATE_MOMENTUM_BUFFER : kinds[round / 3 % 2];
        size_t bytes = ht_form_bytes(form, HT_FORM_WINDOW);
        for (size_t i = 0; i < HT_FORM_WINDOW; i += 256)
            fill_block(x + i, 256, round % 2);
        for (size_t i = 0; kind == HT_STATE_EXP_AVG_SQ && i < HT_FORM_WINDOW; i++)
            x[i] = fabsf(x[i]);
        memset(a, 0, bytes);
        memset(b, 0, bytes);
        encode(form, kind, a, x, HT_FORM_WINDOW);
        decode(form, kind, a, x, HT_FORM_WINDOW);
        struct ht_coded c = ht_coded_at(form, b, HT_FORM_WINDOW, 0, HT_FORM_WINDOW);
        c.kind = kind; /* of bf16 by hash: nothing is cut */
        ht_codecs_scalar.encode[form](&c, x);
        ht_codecs_scalar.decode[form](&c, y);
        ck_assert_int_eq(memcmp(x, y, sizeof(*x) * HT_FORM_WINDOW), 0);
        for (size_t i = 0; i < HT_FORM_WINDOW; i++) {
            float scale = form == HT_FORM_BF16 ? 1 : c.scales[i / ht_form_block(form)];
            size_t at = form == HT_FORM_BF16 ? 2 * i : i;
            ck_assert(a[at] == b[at] || scale < 0x1p-96f);
        }
    }
}

TEST(the_largest_magnitude_is_exact)
{
    float x[HT_FORM_BLOCK_LINEAR], y[HT_FORM_BLOCK_LINEAR];
    struct block b;

    for (unsigned round = 0; round < 3000; round++) {
        unsigned form = HT_FORM_DYNAMIC + round % 2;
        size_t n = ht_form_block(form), most = 0;
        uint8_t kind = form == HT_FORM_LINEAR ? HT_STATE_MOMENTUM_BUFFER : kinds[round / 2 % 2];
        fill_block(x, n, 0);
        for (size_t i = 0; i < n; i++) {
            x[i] = kind == HT_STATE_EXP_AVG_SQ ? fabsf(x[i]) : x[i];
            most = fabsf(x[i]) > fabsf(x[most]) ? i : most;
        }
        encode(form, kind, b.bytes, x, n);
        decode(form, kind, b.bytes, y, n);
        ck_assert_uint_eq(bits_of(x[most]), bits_of(y[most]));
    }
}

TEST(linear_codes_are_the_nearest)
{
    float x[HT_FORM_BLOCK_LINEAR], y[HT_FORM_BLOCK_LINEAR];
    struct block b;

    for (int exponent = -126; exponent <= 127; exponent++) {
        double scale = ldexp(1, exponent);
        fill_block(x, HT_FORM_BLOCK_LINEAR, 0);
        for (size_t i = 0; i < HT_FORM_BLOCK_LINEAR; i++)
            x[i] = (float)(scale * ((double)(random_next(&rnd) >> 11) * 0x1p-52 - 1));
        x[7] = (float)scale;
        encode(HT_FORM_LINEAR, HT_STATE_MOMENTUM_BUFFER, b.bytes, x, HT_FORM_BLOCK_LINEAR);
        decode(HT_FORM_LINEAR, HT_STATE_MOMENTUM_BUFFER, b.bytes, y, HT_FORM_BLOCK_LINEAR);
        for (size_t i = 0; i < HT_FORM_BLOCK_LINEAR; i++) {
            ck_assert_double_le(fabs((double)x[i] - y[i]), scale * (0.5 / 127 * (1 + 1e-5)));
            ck_assert_int_eq((int8_t)b.bytes[i], (int)rint(y[i] / scale * 127));
        }
    }
}

/* ------------------------------------------------------------ special blocks */

TEST_LOOP(a_block_with_nan_or_infinity_is_nan, 3)
{
    static const uint32_t bad[] = {0x7f800000, 0xff800000, 0xffc12345};
    float x[2 * HT_FORM_BLOCK_DYNAMIC], y[2 * HT_FORM_BLOCK_DYNAMIC];
    uint8_t range[4 * HT_FORM_BLOCK_DYNAMIC];

    for (size_t i = 0; i < HT_ARRAY_SIZE(x); i++)
        x[i] = 1;
    x[300] = of_bits(bad[_i]);
    encode(HT_FORM_DYNAMIC, HT_STATE_EXP_AVG, range, x, HT_ARRAY_SIZE(x));
    decode(HT_FORM_DYNAMIC, HT_STATE_EXP_AVG, range, y, HT_ARRAY_SIZE(y));
    for (size_t i = 0; i < HT_ARRAY_SIZE(x); i++)
        ck_assert_uint_eq(bits_of(y[i]), i < 256 ? bits_of(1) : 0x7fc00000);
}

TEST(infinity_and_nan_stay_in_16_bits)
{
    float x[] = {INFINITY, -INFINITY, of_bits(0x7f800001), of_bits(0xffffffff), of_bits(0x7f7fffff)}, y[5];
    uint8_t range[10];

    for (unsigned nearest = 0; nearest < 2; nearest++) {
        struct ht_coded c = ht_coded_at(HT_FORM_BF16, range, 5, 0, 5);
        c.nearest = nearest;
        ht_codecs_scalar.encode[HT_FORM_BF16](&c, x);
        ht_codecs_scalar.decode[HT_FORM_BF16](&c, y);
        ck_assert(y[0] == INFINITY && y[1] == -INFINITY);
        ck_assert_uint_eq(bits_of(y[2]), 0x7fc00000);
        ck_assert_uint_eq(bits_of(y[3]), 0x7fc00000);
        ck_assert(y[4] == INFINITY || bits_of(y[4]) == 0x7f7f0000);
    }
}

TEST_LOOP(zeros_and_holes_are_zero, 2 * HT_FORMS)
{
    unsigned form = (unsigned)_i / 2;
    uint8_t range[4 * HT_FORM_BLOCK_LINEAR + 64] = {0};
    float x[HT_FORM_BLOCK_LINEAR] = {0}, y[HT_FORM_BLOCK_LINEAR];

    decode(form, kinds[_i % 2], range, y, HT_FORM_BLOCK_LINEAR);
    ck_assert_int_eq(memcmp(x, y, sizeof(x)), 0);
    memset(range, 0x5a, sizeof(range));
    encode(form, kinds[_i % 2], range, x, HT_FORM_BLOCK_LINEAR);
    for (size_t i = 0; i < ht_form_code_bytes(form, HT_FORM_BLOCK_LINEAR); i++)
        ck_assert_uint_eq(range[i], 0);
    decode(form, kinds[_i % 2], range, y, HT_FORM_BLOCK_LINEAR);
    ck_assert_int_eq(memcmp(x, y, sizeof(x)), 0);
}

/* However small it is beside the largest of its block. */
TEST(a_positive_second_moment_never_gets_code_0)
{
    float x[HT_FORM_BLOCK_DYNAMIC];
    struct block b;

    for (int exponent = -149; exponent <= 127; exponent++) {
        float scale = (float)ldexp(1, exponent);
        for (size_t i = 0; i < HT_FORM_BLOCK_DYNAMIC; i++)
            x[i] = of_bits((uint32_t)(random_next(&rnd) % (bits_of(scale) + 1)));
        x[0] = scale;
        x[1] = of_bits(1);
        x[2] = 0;
        encode(HT_FORM_DYNAMIC, HT_STATE_EXP_AVG_SQ, b.bytes, x, HT_FORM_BLOCK_DYNAMIC);
        for (size_t i = 0; i < HT_FORM_BLOCK_DYNAMIC; i++)
            ck_assert_int_eq(b.bytes[i] > 0, x[i] > 0);
    }
}

/* ---------------------------------------------------------- rounding by hash */

enum { MANY = 1000000 };

static void round_many(const struct ht_codecs *k, float x, uint32_t salt, uint64_t t, uint64_t element, uint16_t *half)
{
    static float in[MANY];
    struct ht_coded c = {
        .codes = (uint8_t *)half,
        .n = MANY,
        .kind = HT_STATE_EXP_AVG,
        .salt = salt,
        .t = t,
        .element = element,
    };

    for (size_t i = 0; i < MANY; i++)
        in[i] = x;
    k->encode[HT_FORM_BF16](&c, in);
}

static size_t count_up(const uint16_t *half, float x)
{
    uint16_t down = (uint16_t)(bits_of(x) >> 16);
    size_t ups = 0;

    for (size_t i = 0; i < MANY; i++) {
        ck_assert(half[i] == down || half[i] == down + 1);
        ups += half[i] != down;
    }
    return ups;
}

TEST_LOOP(rounding_by_hash_has_no_bias, 6)
{
    static const uint32_t cut[] = {1, 0x40, 0x1000, 0x8000, 0xc123, 0xffff};
    static uint16_t half[MANY];
    float x = of_bits((_i & 1 ? 0xbf810000 : 0x3c120000) + cut[_i]);
    double chance = cut[_i] / 65536.0, sigma = sqrt(MANY * chance * (1 - chance));

    round_many(ht_codecs_choose(), x, 7, 1, 0, half);
    ck_assert_double_le(fabs((double)count_up(half, x) - MANY * chance), 4 * sigma + 1);
    for (uint64_t t = 2; t < 2 + 16; t++) { /* of one element over steps, as well */
        round_many(ht_codecs_choose(), x, 7, t << (2 * t), 1 + t, half);
        ck_assert_double_le(fabs((double)count_up(half, x) - MANY * chance), 5 * sigma + 1);
    }
}

/* Of one element, over the steps. */
TEST(an_element_rounds_without_bias_over_its_steps)
{
    enum { STEPS = 100000 };
    float x[HT_FORM_NOISE];
    uint16_t half[HT_FORM_NOISE];
    size_t ups[HT_FORM_NOISE] = {0};

    for (size_t i = 0; i < HT_FORM_NOISE; i++)
        x[i] = of_bits(0x3f804000); /* a quarter */
    for (uint64_t t = 1; t <= STEPS; t++) {
        struct ht_coded c = {.codes = (uint8_t *)half, .n = HT_FORM_NOISE, .kind = 2, .salt = 99, .t = t};
        ht_codecs_scalar.encode[HT_FORM_BF16](&c, x);
        for (size_t i = 0; i < HT_FORM_NOISE; i++)
            ups[i] += half[i] == 0x3f81;
    }
    for (size_t i = 0; i < HT_FORM_NOISE; i++)
        ck_assert_double_le(fabs((double)ups[i] - STEPS / 4.0), 4.5 * sqrt(STEPS * 0.25 * 0.75));
}

static size_t count_same(const uint16_t *a, const uint16_t *b)
{
    size_t same = 0;

    for (size_t i = 0; i < MANY; i++)
        same += a[i] == b[i];
    return same;
}

/* Halves of the roundings agree by chance; a replay has all. */
TEST(roundings_differ_by_salt_step_and_element_and_replay)
{
    static const struct {
        uint32_t salt;
        uint64_t t, element;
    } other[] = {
        {8, 1, 0},  {7, 2, 0},   {7, (UINT64_C(1) << 40) + 1, 0}, {7, 1, UINT64_C(1) << 36}, {7, 1, 16}, {7, 1, 32},
        {7, 1, 64}, {7, 1, 1024}};
    static uint16_t a[MANY], b[MANY];
    const struct ht_codecs *k = ht_codecs_choose();
    float x = of_bits(0x3f808000);

    round_many(k, x, 7, 1, 0, a);
    round_many(k, x, 7, 1, 0, b);
    ck_assert_uint_eq(count_same(a, b), MANY);
    for (size_t i = 0; i < HT_ARRAY_SIZE(other); i++) {
        round_many(k, x, other[i].salt, other[i].t, other[i].element, b);
        ck_assert_double_le(fabs((double)count_same(a, b) - MANY / 2.0), 5 * sqrt(MANY / 4.0));
    }
}

/* Sums of errors over blocks have the variance of independent ones. */
TEST_LOOP(errors_of_neighbours_are_independent, 4)
{
    enum { STEPS = 40, BLOCK = 1024, BLOCKS = MANY / BLOCK };
    static const uint32_t cut[] = {0x400, 0x1000, 0x8000, 0xc123};
    static uint16_t half[MANY];
    double chance = cut[_i] / 65536.0, squares = 0;

    for (uint64_t t = 1; t <= STEPS; t++) {
        double of_step = 0;
        round_many(ht_codecs_choose(), of_bits(0x3f800000 + cut[_i]), 7, t, 0, half);
        for (size_t b = 0; b < BLOCKS; b++) {
            double sum = -chance * BLOCK;
            for (size_t i = 0; i < BLOCK; i++)
                sum += half[b * BLOCK + i] != 0x3f80;
            of_step += sum * sum;
        }
        of_step /= BLOCKS * BLOCK * chance * (1 - chance);
        ck_assert_double_le(fabs(of_step - 1), 0.3); /* of 976 blocks: 0.045 is a sigma */
        squares += of_step / STEPS;
    }
    ck_assert_double_le(fabs(squares - 1), 0.1);
}

/* Where a window begins changes no bit. */
TEST(bits_do_not_depend_on_windows)
{
    uint16_t whole[1000], pieces[1000];
    float x[1000];

    for (size_t i = 0; i < 1000; i++)
        x[i] = of_bits((uint32_t)(0x3f800000 + (random_next(&rnd) & 0xffffff)));
    struct ht_coded c = {.codes = (uint8_t *)whole, .n = 1000, .kind = 1, .salt = 3, .t = 4, .element = 17};
    ht_codecs_choose()->encode[HT_FORM_BF16](&c, x);
    for (size_t i = 0, n; i < 1000; i += n) {
        n = ht_min_u64(random_next(&rnd) % 100 + 1, 1000 - i);
        c.codes = (uint8_t *)(pieces + i);
        c.n = n;
        c.element = 17 + i;
        ht_codecs_choose()->encode[HT_FORM_BF16](&c, x + i);
    }
    ck_assert_int_eq(memcmp(whole, pieces, sizeof(whole)), 0);
}

RUN_TESTS("forms", .timeout_s = 300)
