/* SPDX-License-Identifier: Apache-2.0 */
/* test_passing.c - room for passing content follows gradients that had none, but only where that moves fewer bytes. */
#include "tests/support/suite.h"
#include "tiering/tier/passing.h"

enum { TIER = 32, LEAST = 8, MOST = 28 }; /* MiB */

static struct ht_passing p;

/* Each of `layers` gradients of a step needs so much room at a time. A part without room is read back. */
struct work {
    uint64_t need_bytes, layers;
    uint64_t always_bytes; /* are read back with any room */
};

static uint64_t read_back(const struct work *w)
{
    return w->always_bytes + (w->need_bytes > p.bytes ? (w->need_bytes - p.bytes) * w->layers : 0);
}

/* Returns the bytes that these steps moved: the lost part of the protected set is read, the rest written and read. */
static uint64_t steps(unsigned count, struct work w)
{
    uint64_t moved = 0;

    for (unsigned i = 0; i < count; i++) {
        uint64_t bytes = read_back(&w), before = p.bytes;
        moved += p.bytes - p.least_bytes + 2 * bytes;
        p.read_back_bytes += bytes / 2;
        p.read_back_bytes += bytes - bytes / 2;
        ck_assert(ht_passing_end_step(&p, false) == (p.bytes != before));
        ck_assert(p.bytes >= p.least_bytes && p.bytes <= p.most_bytes);
    }
    return moved;
}

static void begin(void)
{
    ht_passing_init(&p, TIER * HT_MIB, LEAST * HT_MIB);
    ck_assert_uint_eq(p.most_bytes, MOST * HT_MIB);
}

TEST(it_stands_while_gradients_have_room)
{
    begin();
    ck_assert_uint_eq(steps(100, (struct work){.need_bytes = LEAST * HT_MIB, .layers = 12}), 0);
    ck_assert_uint_eq(p.bytes, LEAST * HT_MIB);
}

TEST(gradients_get_the_room_that_they_need)
{
    const struct work w = {.need_bytes = 20 * HT_MIB, .layers = 12};

    begin();
    steps(3, w);
    ck_assert_uint_eq(read_back(&w), 0);
    steps(200, w); /* it finds out how little will do */
    ck_assert_uint_eq(read_back(&w), 0);
    ck_assert_uint_le(p.bytes, (20 + 2) * HT_MIB);
    uint64_t best = UINT64_C(1000) * (20 - LEAST) * HT_MIB;
    ck_assert_uint_le(steps(1000, w), best + best / 8);
}

TEST_LOOP(more_room_that_moves_no_fewer_bytes_is_taken_back, 5)
{
    const struct work work[] = {
        {.always_bytes = 100 * HT_MIB},                      /* room is no help */
        {.need_bytes = 200 * HT_MIB},                        /* nothing is read back */
        {.always_bytes = 3 * HT_MIB},                        /* little */
        {.need_bytes = 9 * HT_MIB, .layers = 1},             /* less than a change costs */
        {.need_bytes = LEAST * HT_MIB + 4096, .layers = 10}, /* of many layers */
    };
    struct work w = work[_i];

    begin();
    uint64_t stands = 1000 * 2 * read_back(&w);
    uint64_t moved = steps(1000, w);
    ck_assert_uint_eq(p.bytes, LEAST * HT_MIB);
    ck_assert_uint_le(moved, stands + UINT64_C(1000) * HT_MIB / 2);
}

TEST(the_protected_set_gets_back_what_nothing_needs_any_more)
{
    begin();
    steps(20, (struct work){.need_bytes = 26 * HT_MIB, .layers = 12});
    ck_assert_uint_ge(p.bytes, 26 * HT_MIB);
    steps(200, (struct work){.need_bytes = 4 * HT_MIB, .layers = 12});
    ck_assert_uint_eq(p.bytes, LEAST * HT_MIB);
}

TEST(gradients_that_wait_have_the_protected_set)
{
    begin();
    steps(20, (struct work){.need_bytes = 26 * HT_MIB, .layers = 12});
    ck_assert(ht_passing_end_step(&p, true));
    ck_assert_uint_eq(p.bytes, LEAST * HT_MIB);
    for (unsigned i = 0; i < 100; i++) {
        p.read_back_bytes += 100 * HT_MIB;
        ck_assert(!ht_passing_end_step(&p, true));
    }
    steps(3, (struct work){.need_bytes = 26 * HT_MIB, .layers = 12});
    ck_assert_uint_ge(p.bytes, 26 * HT_MIB);
}

TEST(a_large_tier_keeps_a_half)
{
    ht_passing_init(&p, 4096 * HT_MIB, 512 * HT_MIB);
    steps(20, (struct work){.need_bytes = 4096 * HT_MIB, .layers = 12});
    ck_assert_uint_eq(p.bytes, 2048 * HT_MIB);
    ht_passing_init(&p, HT_MIB, HT_MIB); /* nothing to give */
    steps(20, (struct work){.need_bytes = 4 * HT_MIB, .layers = 12});
    ck_assert_uint_eq(p.bytes, HT_MIB);
}

RUN_TESTS("passing")
