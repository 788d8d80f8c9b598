/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/suite.h"
#include "tiering/cache/arena.h"

enum { SLOTS = 64, WORKINGSET_MAX = SLOTS * 3 / 4, THINGS = 16 * SLOTS, CHUNK = 1 << 20 };

/* Things that have an image now and then; all of one owner. */
static struct ht_arena *arena;
static uint32_t slot_of[THINGS];
static int owner;

static bool unprotect(void *ctx, uint32_t slot)
{
    struct ht_image *im = ht_arena_image(arena, slot);

    if (im->dirty)
        return false;
    slot_of[im->index] = HT_SLOT_NONE;
    return true;
}

static void end(void)
{
    if (arena)
        ht_arena_free(arena);
    arena = NULL;
}

/* In place of the arena that there may be. */
static void begin(void)
{
    end();
    ck_assert_int_eq(ht_arena_new((uint64_t)SLOTS * CHUNK, NULL, unprotect, NULL, &arena), 0);
    for (unsigned i = 0; i < THINGS; i++)
        slot_of[i] = HT_SLOT_NONE;
}

/* True: its image was there. */
static bool use(unsigned thing)
{
    bool hit = slot_of[thing] != HT_SLOT_NONE;

    if (!hit) {
        slot_of[thing] = ht_arena_get(arena, CHUNK, HT_ARENA_ASK_ALL, HT_NUMA_INDEX_ANY);
        ck_assert_uint_ne(slot_of[thing], HT_SLOT_NONE);
        ht_arena_attach(arena, slot_of[thing], &owner, thing, true);
    }
    ht_arena_use(arena, slot_of[thing]);
    return hit;
}

/* Hits of one pass over [first, first + count). */
static unsigned pass(unsigned first, unsigned count)
{
    unsigned hits = 0;

    for (unsigned i = 0; i < count; i++)
        hits += use(first + i);
    return hits;
}

TEST(passes_over_more_than_fits_hit_the_workingset)
{
    static const unsigned sizes[] = {SLOTS * 5 / 4, SLOTS * 2, SLOTS * 4, SLOTS * 8};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(sizes); i++) {
        begin();
        ck_assert_uint_eq(pass(0, sizes[i]), 0);
        pass(0, sizes[i]);
        for (int n = 0; n < 20; n++)
            ck_assert_uint_ge(pass(0, sizes[i]), WORKINGSET_MAX - 1);
        ck_assert_uint_eq(ht_arena_sums(arena)->workingset_bytes, (uint64_t)WORKINGSET_MAX * CHUNK);
    }
}

TEST(what_fits_hits_always_after_other_work)
{
    for (int n = 0; n < 10; n++)
        pass(0, 2 * SLOTS);
    unsigned passes = 0;
    while (pass(2 * SLOTS, SLOTS * 3 / 4) < SLOTS * 3 / 4)
        ck_assert_uint_lt(++passes, 12);
    ck_assert_uint_eq(pass(2 * SLOTS, SLOTS * 3 / 4), SLOTS * 3 / 4);
}

TEST(one_pass_over_something_else_leaves_the_workingset)
{
    for (int n = 0; n < 5; n++)
        pass(0, 2 * SLOTS);
    pass(4 * SLOTS, SLOTS);
    ck_assert_uint_ge(pass(0, 2 * SLOTS), WORKINGSET_MAX - 1);
}

TEST(protected_images_take_the_room_of_the_workingset)
{
    for (int n = 0; n < 3; n++)
        pass(0, 2 * SLOTS);
    for (unsigned i = 0; i < SLOTS / 2; i++) {
        use(8 * SLOTS + i);
        ck_assert(ht_arena_has_protected_room(arena));
        ht_arena_protect(arena, slot_of[8 * SLOTS + i]);
    }
    pass(0, 2 * SLOTS);
    ck_assert_uint_le(ht_arena_sums(arena)->protected_bytes + ht_arena_sums(arena)->workingset_bytes,
                      (uint64_t)WORKINGSET_MAX * CHUNK);
    for (unsigned i = 0; i < SLOTS / 2; i++)
        ck_assert(use(8 * SLOTS + i));
}

TEST(by_force_all_may_go)
{
    for (int n = 0; n < 3; n++)
        pass(0, 2 * SLOTS);
    for (unsigned i = 0; i < THINGS; i++)
        if (slot_of[i] != HT_SLOT_NONE && !ht_arena_image(arena, slot_of[i])->workingset)
            ht_arena_set_dirty(arena, slot_of[i], true);
    ck_assert_uint_eq(ht_arena_get(arena, CHUNK, HT_ARENA_ASK_ALL, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
    ck_assert_uint_ne(ht_arena_get(arena, CHUNK, HT_ARENA_FORCE, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
}

static void dirty(unsigned thing)
{
    use(thing);
    ht_arena_set_dirty(arena, slot_of[thing], true);
}

TEST(scratch_presses_only_when_room_was_short)
{
    for (unsigned i = 0; i < SLOTS; i++) {
        dirty(i);
        ht_arena_set_dirty(arena, slot_of[i], false);
        ht_arena_image(arena, slot_of[i])->durable = false;
        ht_arena_set_dirty(arena, slot_of[i], true);
    }
    ck_assert(!ht_arena_under_pressure(arena));
    ck_assert(!ht_arena_presses(arena, slot_of[0], false));
    ck_assert_uint_eq(ht_arena_get(arena, CHUNK, HT_ARENA_ASK_ALL, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
    ck_assert(ht_arena_under_pressure(arena));
    ck_assert(ht_arena_presses(arena, slot_of[0], false));
}

TEST(what_passes_has_room)
{
    const uint64_t mib = 1 << 20;

    ck_assert_uint_eq(ht_arena_protected_max(8 * mib), 6 * mib);
    ck_assert_uint_eq(ht_arena_protected_max(128 * mib), 96 * mib);
    ck_assert_uint_eq(ht_arena_protected_max(256 * mib), 224 * mib);
    ck_assert_uint_eq(ht_arena_protected_max(1024 * mib), 896 * mib);
}

TEST(dirty_images_of_the_workingset_do_not_press)
{
    for (int n = 0; n < 3; n++)
        pass(0, 2 * SLOTS);
    unsigned workingset = 0;
    for (unsigned i = 0; i < THINGS; i++)
        if (slot_of[i] != HT_SLOT_NONE && ht_arena_image(arena, slot_of[i])->workingset) {
            ht_arena_set_dirty(arena, slot_of[i], true);
            workingset++;
        }
    ck_assert_uint_eq(workingset, WORKINGSET_MAX);
    ck_assert(!ht_arena_under_pressure(arena));
}

RUN_TESTS("workingset", .setup = begin, .teardown = end)
