/* SPDX-License-Identifier: Apache-2.0 */
/* Final images: dirty ones that are written before their owner has to, in whatever set they are. */
#include "tests/support/suite.h"
#include "tiering/cache/arena.h"

static bool refuse(void *ctx, uint32_t slot)
{
    (void)ctx, (void)slot;
    return false;
}

static uint32_t get_dirty(struct ht_arena *a, uint32_t bytes)
{
    uint32_t n = ht_arena_get(a, bytes, 0, HT_NUMA_INDEX_ANY);

    ht_arena_attach(a, n, a, n, true);
    ht_arena_set_dirty(a, n, true);
    return n;
}

TEST(a_walk_over_final_images_meets_those_of_all_sets_and_no_others)
{
    struct ht_arena *a;
    struct ht_dirty_walk walk = HT_FINAL_WALK, none = HT_FINAL_WALK;
    uint32_t n[8];

    ck_assert_int_eq(ht_arena_new(8 << 20, NULL, refuse, NULL, &a), 0);
    for (int i = 0; i < 8; i++)
        n[i] = get_dirty(a, i < 6 ? 1 << 20 : 1 << 16);
    ck_assert(!ht_arena_has_final(a));
    for (int i = 1; i < 8; i += 2)
        ht_arena_set_final(a, n[i], true);
    ht_arena_protect(a, n[3]);
    ht_arena_set_dirty(a, n[1], false);
    ht_arena_set_final(a, n[1], true); /* clean: nothing */
    ht_arena_put(a, n[5]);
    ht_arena_verify(a);
    ck_assert_uint_eq(ht_dirty_walk_next(a, &walk), n[3]);
    ck_assert_uint_eq(ht_dirty_walk_next(a, &walk), n[7]); /* beside a piece that is not final */
    ck_assert_uint_eq(ht_dirty_walk_next(a, &walk), HT_SLOT_NONE);
    ht_arena_set_final(a, n[3], false);
    ck_assert(ht_arena_has_final(a));
    ht_arena_set_dirty(a, n[7], false);
    ck_assert(!ht_arena_has_final(a));
    ck_assert_uint_eq(ht_dirty_walk_next(a, &none), HT_SLOT_NONE);
    ht_arena_verify(a);
    ht_arena_free(a);
}

RUN_TESTS("final")
