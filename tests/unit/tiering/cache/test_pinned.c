/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/suite.h"
#include "tiering/cache/arena.h"

static bool evict(void *ctx, uint32_t slot)
{
    (void)ctx;
    (void)slot;
    return true;
}

static void take(struct ht_arena *a, uint32_t n[], unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        n[i] = ht_arena_get(a, 1 << 20, 0, HT_NUMA_INDEX_ANY);
        ht_arena_image(a, n[i])->owner = a;
    }
}

/* 32 slots: at most 24 are protected, and 16 pinned. */
TEST(pinned_images_get_room_from_protected_ones)
{
    struct ht_arena *a;
    uint32_t n[32], pinned = 0;

    ck_assert_int_eq(ht_arena_new(32 << 20, NULL, evict, NULL, &a), 0);
    take(a, n, 32);
    for (int i = 0; i < 20; i++)
        ht_arena_protect(a, n[i]);
    while (ht_arena_pin(a, n[31 - pinned]))
        pinned++;
    ck_assert_uint_eq(pinned, 4);
    ck_assert(!ht_arena_has_pinned_room(a));
    ht_arena_want_pinned(a, 3 << 20);
    ck_assert(ht_arena_lacks_waiting_room(a) && !ht_arena_may_protect(a, n[20]));
    ht_arena_unprotect(a, n[31]); /* a pin stays */
    ck_assert_uint_eq(ht_arena_sums(a)->pinned_bytes, 4 << 20);
    for (int i = 0; i < 3; i++)
        ht_arena_unprotect(a, n[i]);
    ck_assert(!ht_arena_lacks_waiting_room(a));
    for (; pinned < 7; pinned++)
        ck_assert(ht_arena_pin(a, n[31 - pinned]));
    for (int i = 3; i < 20; i++)
        ht_arena_unprotect(a, n[i]);
    for (; pinned < 16; pinned++)
        ck_assert(ht_arena_pin(a, n[31 - pinned]));
    ck_assert(!ht_arena_pin(a, n[0]) && !ht_arena_has_pinned_room(a));
    ht_arena_verify(a);
    for (int i = 0; i < 16; i++)
        ht_arena_unpin(a, n[31 - i]);
    ck_assert_uint_eq(ht_arena_sums(a)->pinned_bytes + ht_arena_sums(a)->protected_bytes, 0);
    ht_arena_free(a);
}

TEST(the_protected_set_gives_way_but_pins_have_all_of_it)
{
    struct ht_arena *a;
    uint32_t n[32];

    ck_assert_int_eq(ht_arena_new(32 << 20, NULL, evict, NULL, &a), 0);
    for (int i = 0; i < 32; i++) {
        n[i] = ht_arena_get(a, 1 << 20, 0, HT_NUMA_INDEX_ANY);
        ht_arena_image(a, n[i])->owner = a;
        if (ht_arena_may_protect(a, n[i]))
            ht_arena_protect(a, n[i]);
    }
    ck_assert_uint_eq(ht_arena_sums(a)->protected_bytes, 24 << 20);
    ht_arena_set_protected_max(a, 20 << 20);
    ck_assert_uint_eq(ht_arena_protected_max_now(a), 20 << 20);
    for (int i = 0; i < 4; i++) {
        ck_assert(ht_arena_lacks_waiting_room(a) && !ht_arena_may_protect(a, n[24]));
        ht_arena_unprotect(a, n[i]);
    }
    ck_assert(!ht_arena_lacks_waiting_room(a) && !ht_arena_has_protected_room(a));
    ck_assert(ht_arena_has_pinned_room(a) && ht_arena_pin(a, n[24]));
    ht_arena_verify(a);
    ht_arena_set_protected_max(a, 100 << 20);
    ck_assert_uint_eq(ht_arena_protected_max_now(a), 24 << 20);
    ck_assert(ht_arena_may_protect(a, n[0]));
    ht_arena_free(a);
}

/* The protected set is small for a while, as when gradients find no room beside it. */
TEST(what_is_expected_has_its_room_again_when_the_set_grows)
{
    struct ht_arena *a;
    uint32_t n[24], count = 0;

    ck_assert_int_eq(ht_arena_new(32 << 20, NULL, evict, NULL, &a), 0);
    take(a, n, 24);
    ht_arena_set_protected_max(a, 4 << 20);
    ht_arena_expect_waiting(a, 10 << 20);
    ck_assert(!ht_arena_lacks_waiting_room(a) && !ht_arena_has_protected_room(a));
    ht_arena_set_protected_max(a, 24 << 20);
    for (; ht_arena_has_protected_room(a); count++)
        ht_arena_protect(a, n[count]);
    ck_assert_uint_eq(count, 14);
    ht_arena_verify(a);
    ht_arena_free(a);
}

/* A model trains no more, and another one does: 24 slots have its images. Those that are pinned, or wait, stay. */
TEST(what_got_no_update_for_many_steps_leaves_the_protected_set)
{
    struct ht_arena *a;
    uint32_t n[32];

    ck_assert_int_eq(ht_arena_new(32 << 20, NULL, evict, NULL, &a), 0);
    take(a, n, 32);
    ck_assert(ht_arena_pin(a, n[0]));
    ht_arena_protect_waiting(a, n[1]);
    for (int i = 2; i < 24; i++)
        ht_arena_protect(a, n[i]);
    for (int step = 1; step <= 48; step++) {
        for (int i = 20; i < 24; i++)
            ht_arena_protect(a, n[i]);
        ht_arena_end_step(a);
        for (int i = 0; i < 4; i++)
            ht_arena_give_back_old(a);
        ht_arena_verify(a);
        if (step <= 16)
            ck_assert(!ht_arena_has_protected_room(a));
    }
    ck_assert_uint_eq(ht_arena_sums(a)->protected_bytes, 6 << 20);
    for (int i = 0; i < 24; i++)
        ck_assert_int_eq(ht_arena_image(a, n[i])->protected, i < 2 || i >= 20);
    ht_arena_free(a);
}

RUN_TESTS("pinned")
