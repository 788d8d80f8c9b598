/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Masters of bf16 in two bytes are the f32 that they stand for, bit for bit, ties, specials
 * and strangers' changes included.
 */
#include <math.h>

#include "optim/rules/master.h"
#include "optim/rules/rule.h"
#include "tests/support/suite.h"

enum { BLOCK = HT_MASTER_BLOCK, UPPER = 0x8000 };

static uint64_t rnd = 88172645463325252ull;

static const struct ht_kernels *kernels(int i)
{
    return i ? ht_kernels_choose() : &ht_kernels_scalar;
}

static float from_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, 4);
    return x;
}

/* As a kernel leaves them: parameters are masters, rounded. */
struct block {
    struct ht_disk_master known;
    size_t n;
    float master[BLOCK], got[BLOCK];
    uint16_t p[BLOCK], low[BLOCK];
};

static void add(struct block *b, uint32_t bits)
{
    b->master[b->n] = from_bits(bits);
    b->p[b->n] = ht_f32_to_bf16(b->master[b->n]);
    b->n++;
}

/* Into two bytes and back; then it is empty. */
static void round_trip(const struct ht_kernels *k, struct block *b)
{
    memset(b->low, 0xa5, sizeof(b->low));
    memset(&b->known, 0xa5, sizeof(b->known));
    ht_master_compress(k, b->master, b->p, b->n, b->low, &b->known);
    ht_master_expand(k, &b->known, b->p, b->low, b->n, b->got);
    for (size_t i = 0; i < b->n; i++)
        ck_assert_msg(!memcmp(&b->got[i], &b->master[i], 4), "%a became %a", (double)b->master[i], (double)b->got[i]);
    b->n = 0;
}

/* The values that round to one parameter: all values, or the ends and the surroundings of the middle. */
static void add_preimages(const struct ht_kernels *k, struct block *b, uint16_t p, uint32_t step)
{
    for (int32_t d = -0x8000; d <= 0x8000; d += d > -0x8000 + 2 && d < -2 ? (int32_t)step : 1) {
        if (d > 2 && d < 0x7ffd)
            d = (int32_t)ht_min_u64((uint64_t)d + step - 1, 0x7ffd);
        uint32_t bits = ((uint32_t)p << 16) + (uint32_t)d;
        if (isnan(from_bits(bits)) || ht_f32_to_bf16(from_bits(bits)) != p)
            continue;
        add(b, bits);
        if (b->n == BLOCK)
            round_trip(k, b);
    }
}

#ifdef __SANITIZE_ADDRESS__
enum { PREIMAGES_APART = 65521 }; /* more are looked at without it */
#else
enum { PREIMAGES_APART = 4099 };
#endif

TEST_LOOP(every_f32_that_is_a_number_comes_back, 2)
{
    static struct block b;
    uint32_t step = getenv("HITRAIN_LONG") ? 1 : PREIMAGES_APART;

    b.n = 0;
    for (uint32_t p = 0; p <= 0xffff; p++)
        add_preimages(kernels(_i), &b, (uint16_t)p, step);
    round_trip(kernels(_i), &b);
}

TEST_LOOP(a_nan_stays_the_one_that_kernels_store, 2)
{
    static struct block b;

    b.n = 0;
    add(&b, 0x7fc00000);
    add(&b, 0x7f800000);
    add(&b, 0xff800000);
    round_trip(kernels(_i), &b);
}

/* Both kinds of ties in one block, in any number up to the whole block; and codes that are used already. */
TEST_LOOP(ties_of_both_kinds_are_told_apart, 2)
{
    static struct block b;

    b.n = 0;
    for (unsigned round = 0; round < 400; round++) {
        size_t n = 1 + random_next(&rnd) % BLOCK;
        unsigned share = round % 5;
        while (b.n < n) {
            uint32_t even = (uint32_t)(random_next(&rnd) & 0x7ffe) + 2;
            uint32_t low = (uint32_t)(b.n % 3 ? b.n : random_next(&rnd) & 0x7fff);
            bool tie = random_next(&rnd) % 4 < share;
            uint32_t bits = (even << 16) + (tie ? random_next(&rnd) % 2 ? UPPER : (uint32_t)-UPPER : low);
            if (!isnan(from_bits(bits)))
                add(&b, bits);
        }
        round_trip(kernels(_i), &b);
    }
}

TEST_LOOP(a_block_that_a_stranger_changed_is_its_parameters, 2)
{
    static struct block b;

    b.n = 0;
    for (size_t i = 0; i < 1000; i++)
        add(&b, (uint32_t)random_next(&rnd) & 0xbfffffff);
    ht_master_compress(kernels(_i), b.master, b.p, b.n, b.low, &b.known);
    b.p[777] ^= 1;
    ht_master_expand(kernels(_i), &b.known, b.p, b.low, b.n, b.got);
    for (size_t i = 0; i < b.n; i++)
        ck_assert(b.got[i] == ht_bf16_to_f32(b.p[i]));
    b.p[777] ^= 1;
    ht_master_expand(kernels(_i), &b.known, b.p, b.low, b.n, b.got);
    ck_assert(!memcmp(b.got, b.master, b.n * 4));
    memset(&b.known, 0, sizeof(b.known)); /* as in state that is new */
    memset(b.low, 0, sizeof(b.low));
    ht_master_expand(kernels(_i), &b.known, b.p, b.low, b.n, b.got);
    for (size_t i = 0; i < b.n; i++)
        ck_assert(b.got[i] == ht_bf16_to_f32(b.p[i]));
}

/* Whatever lies on a device: defined, and within the arrays. */
TEST(any_bytes_are_some_masters)
{
    static struct block a, b;

    for (unsigned round = 0; round < 50; round++) {
        for (size_t i = 0; i < BLOCK; i++) {
            a.p[i] = b.p[i] = (uint16_t)random_next(&rnd);
            a.low[i] = b.low[i] = (uint16_t)random_next(&rnd);
        }
        uint64_t upper = random_next(&rnd);
        ht_master_compress(&ht_kernels_scalar, a.master, a.p, BLOCK, a.low, &a.known);
        memcpy(&a.known.upper, &upper, 4);
        memcpy(a.low, b.low, sizeof(a.low));
        ht_master_expand(&ht_kernels_scalar, &a.known, a.p, a.low, BLOCK, a.got);
        ht_master_expand(ht_kernels_choose(), &a.known, a.p, a.low, BLOCK, b.got);
        ck_assert(!memcmp(a.got, b.got, sizeof(a.got)));
    }
}

/* ------------------------------------------------------------------- steps */

static const char *const configs[] = {"adamw lr=1e-3 weight_decay=0.1",
                                      "adam lr=1e-3",
                                      "sgd lr=0.5 momentum=0.9",
                                      "sgd lr=1",
                                      "lion lr=1e-4",
                                      "adagrad lr=1e-2"};

#ifdef __SANITIZE_ADDRESS__
enum { STEPS = 100 }; /* the bits of all are compared without it */
#else
enum { STEPS = 1000 };
#endif

static uint64_t ties_seen;

/* Gradients of which sums are often half way between two bf16, and ordinary ones. */
static float gradient(bool coarse)
{
    int64_t r = (int64_t)(random_next(&rnd) % 4097) - 2048;

    return coarse ? (float)r * 0x1p-15f : (float)r * 1.2345e-4f;
}

/* One step of both: f32 masters, and two bytes that become f32 for the step. */
static void step_both(const struct ht_kernels *k, const struct ht_scalars *s, struct block *b, uint16_t *p,
                      float state[2][2][BLOCK], const float *g)
{
    struct ht_update plain = {b->p, b->master, {state[0][0], state[0][1]}, g, HT_DTYPE_BF16, HT_DTYPE_F32};
    struct ht_update small = {p, b->got, {state[1][0], state[1][1]}, g, HT_DTYPE_BF16, HT_DTYPE_F32};

    ht_kernels_scalar.fn[s->kernel](s, &plain, b->n);
    ht_master_expand(k, &b->known, p, b->low, b->n, b->got);
    k->fn[s->kernel](s, &small, b->n);
    ht_master_compress(k, b->got, p, b->n, b->low, &b->known);
    ck_assert(!memcmp(p, b->p, b->n * 2));
    ht_master_expand(k, &b->known, p, b->low, b->n, b->got);
    ck_assert(!memcmp(b->got, b->master, b->n * 4));
}

TEST_LOOP(a_thousand_steps_give_the_bits_of_f32_masters, 2 * HT_ARRAY_SIZE(configs))
{
    static struct block b;
    static float state[2][2][BLOCK], g[BLOCK];
    static uint16_t p[BLOCK];
    struct ht_optim_config c;
    char err[HT_OPTIM_ERROR_MAX];

    memset(&b, 0, sizeof(b));
    memset(state, 0, sizeof(state));
    ck_assert_int_eq(ht_optim_config_parse(configs[_i / 2], strlen(configs[_i / 2]), &c, err), 0);
    while (b.n < 1003)
        add(&b, 0x3f000000 + (uint32_t)(random_next(&rnd) % 0x1000) * 0x10000);
    memcpy(p, b.p, sizeof(p));
    ties_seen = 0;
    bool grid = !strcmp(configs[_i / 2], "sgd lr=1"); /* then masters stay on it */
    for (unsigned t = 1; t <= STEPS; t++) {
        struct ht_scalars s;
        ht_rule_scalars(&c, t, &s);
        for (size_t i = 0; i < b.n; i++)
            g[i] = gradient(grid || t % 2);
        step_both(kernels(_i % 2), &s, &b, p, state, g);
        for (size_t i = 0; i < b.n; i++) {
            uint32_t bits;
            memcpy(&bits, &b.master[i], 4);
            ties_seen += (bits & 0xffff) == 0x8000;
        }
    }
    ck_assert_uint_ge(ties_seen, grid ? STEPS / 2 : 0);
}

RUN_TESTS("master", .timeout_s = 600)
