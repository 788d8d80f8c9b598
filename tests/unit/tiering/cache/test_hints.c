/* SPDX-License-Identifier: Apache-2.0 */
/* test_hints.c - the order of images with hints: others go before, and one that no program needs goes first. */
#include "tests/support/suite.h"
#include "tiering/cache/arena.h"

enum { SLOTS = 6 };

static uint32_t held; /* may not go */

static bool evict(void *ctx, uint32_t slot)
{
    (void)ctx;
    return slot != held;
}

static uint32_t get(struct ht_arena *a, uint32_t tries)
{
    uint32_t n = ht_arena_get(a, HT_MIB, tries, HT_NUMA_INDEX_ANY);

    if (n != HT_SLOT_NONE)
        ht_arena_image(a, n)->owner = a;
    return n;
}

TEST(hinted_images_go_after_others)
{
    struct ht_arena *a;
    uint32_t slot[SLOTS], n;

    ck_assert_int_eq(ht_arena_new(SLOTS * (uint64_t)HT_MIB, NULL, evict, NULL, &a), 0);
    for (unsigned i = 0; i < SLOTS; i++)
        slot[i] = get(a, 0);
    ht_arena_order_begin(a, 0, true);
    ht_arena_set_next_use(a, slot[0], HT_ORDER_PLACES - 1, false);
    ht_arena_set_next_use(a, slot[1], 40, false);
    held = slot[0];
    n = get(a, HT_ARENA_ASK_ALL);
    ck_assert(n != slot[0] && n != slot[1]);
    ht_arena_verify(a);
    held = HT_SLOT_NONE;
    ck_assert_uint_eq(get(a, HT_ARENA_ASK_ALL), slot[0]);
    for (unsigned i = 0; i < 2 * SLOTS; i++) {
        n = get(a, HT_ARENA_ASK_ALL);
        ck_assert(n != HT_SLOT_NONE && n != slot[1]);
    }
    for (unsigned i = 0; i < SLOTS; i++)
        if (i != 1)
            ht_arena_protect(a, slot[i]);
    ck_assert_uint_eq(get(a, HT_ARENA_ASK_ALL), HT_SLOT_NONE);
    ck_assert_uint_eq(get(a, HT_ARENA_FORCE), slot[1]);
    ht_arena_verify(a);
    ht_arena_free(a);
}

RUN_TESTS("hints")
