/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of slots: any number of sub-slots, which leave the rest of the slot to others. */
#include "tests/support/suite.h"
#include "tiering/cache/arena.h"

static bool refuse(void *ctx, uint32_t slot)
{
    (void)ctx, (void)slot;
    return false;
}

static uint32_t get_clean(struct ht_arena *a, uint32_t bytes)
{
    uint32_t n = ht_arena_get(a, bytes, 0, HT_NUMA_INDEX_ANY);

    ck_assert_uint_ne(n, HT_SLOT_NONE);
    ht_arena_attach(a, n, a, n, true);
    return n;
}

/* 11, 3 and 2 sub-slots; so a slot is full. */
TEST(a_piece_takes_what_it_needs_and_leaves_the_rest)
{
    static const uint32_t bytes[] = {671 << 10, 168 << 10, 128 << 10};
    struct ht_arena *a;

    ck_assert_int_eq(ht_arena_new(4 << 20, NULL, refuse, NULL, &a), 0);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t k = 0; k < 3; k++)
            (void)get_clean(a, bytes[k]);
    ck_assert_uint_eq(ht_arena_sums(a)->used_bytes, 4 << 20);
    ck_assert_uint_eq(ht_arena_get(a, 1 << 16, 0, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
    ht_arena_verify(a);
    ht_arena_free(a);
}

TEST(a_piece_takes_the_tightest_room)
{
    struct ht_arena *a;

    ck_assert_int_eq(ht_arena_new(2 << 20, NULL, refuse, NULL, &a), 0);
    uint32_t seven = get_clean(a, 7 << 16), nine = get_clean(a, 9 << 16), ten = get_clean(a, 10 << 16);
    ck_assert_uint_eq(seven / 16, nine / 16);
    ck_assert_uint_ne(seven / 16, ten / 16);
    ht_arena_put(a, nine);
    ck_assert_uint_eq(get_clean(a, 6 << 16) / 16, ten / 16);
    ck_assert_uint_eq(get_clean(a, 9 << 16) / 16, seven / 16);
    ht_arena_verify(a);
    ht_arena_free(a);
}

RUN_TESTS("pieces")
