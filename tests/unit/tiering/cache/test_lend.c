/* SPDX-License-Identifier: Apache-2.0 */
/* Slots that the arena lends: their pages are gone, its bounds follow, and images in use stay. */
#include "tests/support/suite.h"
#include "tiering/cache/arena.h"

#include <signal.h>
#include <sys/mman.h>

enum { MIB = 1 << 20, PAIR = 2, PAIRS_MAX = 32 };

static struct ht_arena *a;
static bool may_go;

static bool evict(void *ctx, uint32_t slot)
{
    return may_go && !ht_arena_image(a, slot)->dirty;
}

static void make(unsigned mib, const struct ht_nodes *nodes)
{
    may_go = true;
    ck_assert_int_eq(ht_arena_new((uint64_t)mib * MIB, nodes, evict, NULL, &a), 0);
    ht_pinned_stop_populating(ht_arena_memory(a));
}

static void teardown(void)
{
    if (a) {
        ht_arena_verify(a);
        ht_arena_free(a);
    }
    a = NULL;
}

static uint32_t get(uint32_t bytes)
{
    uint32_t n = ht_arena_get(a, bytes, 0, HT_NUMA_INDEX_ANY);

    ck_assert_uint_ne(n, HT_SLOT_NONE);
    ht_arena_attach(a, n, a, n, true);
    memset(ht_arena_data(a, n), (int)n + 1, ht_arena_slot_bytes(a, n));
    return n;
}

/* Looks at all pairs, at some of them several times. */
static unsigned lend(enum ht_lend whom, unsigned most)
{
    unsigned lent = 0;
    uint32_t dirty;

    for (uint32_t k = 0; k < PAIRS_MAX && lent < most; k++)
        lent += ht_arena_lend(a, whom, &dirty);
    ht_arena_verify(a);
    return lent;
}

static uint64_t resident(void)
{
    const struct ht_pinned *m = ht_arena_memory(a);
    static unsigned char page[1 << 16];
    uint64_t pages = 0;

    ck_assert_uint_le(m->bytes / 4096, sizeof(page));
    ck_assert_int_eq(mincore(m->base, m->bytes, page), 0);
    for (size_t i = 0; i < m->bytes / 4096; i++)
        pages += page[i] & 1;
    return pages * 4096;
}

TEST(pages_go_and_come_back_as_zeros)
{
    make(32, NULL);
    uint32_t kept = get(MIB);
    ck_assert_int_eq(ht_mem_populate(ht_arena_memory(a)->base, 32 * MIB), 0);
    ck_assert_uint_eq(resident(), 32 * MIB);
    ck_assert_uint_eq(lend(HT_LEND_FREE, 5), 5);
    ck_assert_uint_eq(resident(), 22 * MIB);
    ck_assert_uint_eq(ht_arena_bytes(a), 22 * MIB);
    ck_assert_uint_eq(ht_arena_lent_bytes(a), 10 * MIB);
    ck_assert_uint_eq(ht_arena_free_slots(a), 21);
    for (int i = 0; i < 5; i++)
        ck_assert(ht_arena_take_back(a));
    ck_assert(!ht_arena_take_back(a));
    ck_assert_uint_eq(ht_arena_free_slots(a), 31);
    for (int i = 0; i < 10; i++) { /* those that came back last go first */
        uint32_t n = ht_arena_get(a, MIB, 0, HT_NUMA_INDEX_ANY);
        ht_arena_attach(a, n, a, n, true);
        ck_assert_int_eq(ht_arena_data(a, n)[MIB - 1], 0);
        memset(ht_arena_data(a, n), 7, MIB);
    }
    ck_assert_uint_eq(resident(), 32 * MIB);
    ck_assert_int_eq(ht_arena_data(a, kept)[MIB - 1], (uint8_t)(kept + 1));
}

TEST(images_go_in_the_order_of_their_use)
{
    make(32, NULL);
    uint32_t n[32];
    for (int i = 0; i < 32; i++)
        n[i] = get(MIB);
    ck_assert_uint_eq(lend(HT_LEND_FREE, 99), 0);
    for (int i = 0; i < 8; i++) /* four pairs */
        ht_arena_protect(a, n[i]);
    for (int i = 8; i < 16; i++)
        ht_arena_set_dirty(a, n[i], true);
    for (int i = 16; i < 24; i++)
        ck_assert(ht_arena_pin(a, n[i]));
    ck_assert_uint_eq(lend(HT_LEND_CLEAN, 99), 4); /* the last eight */
    uint32_t dirty;
    bool found = false;
    for (int k = 0; k < 16; k++) {
        bool lent = ht_arena_lend(a, HT_LEND_ANY, &dirty);
        ck_assert(!lent || dirty == HT_SLOT_NONE);
        found |= dirty == n[15] || dirty == n[14];
    }
    ck_assert(found);
    ck_assert_uint_eq(ht_arena_bytes(a), 16 * MIB); /* pinned and dirty ones */
    for (int i = 8; i < 16; i++)
        ht_arena_set_dirty(a, n[i], false);
    ck_assert_uint_eq(lend(HT_LEND_ANY, 99), 0); /* pinned images have half */
    for (int i = 8; i < 24; i++)
        ck_assert_int_eq(ht_arena_data(a, n[i])[5], (uint8_t)(n[i] + 1));
}

TEST(images_that_are_held_stay)
{
    make(16, NULL);
    for (int i = 0; i < 8 * 16; i++)
        get(1 << 16);
    may_go = false;
    ck_assert_uint_eq(lend(HT_LEND_ANY, 99), 4); /* the unused half */
    ck_assert_uint_eq(ht_arena_bytes(a), 8 * MIB);
    may_go = true;
    ck_assert_uint_eq(lend(HT_LEND_ANY, 99), 0); /* so much stays */
}

TEST(the_protected_set_follows)
{
    make(64, NULL);
    uint64_t before = ht_arena_protected_max_now(a);
    ht_arena_set_protected_max(a, before - 3 * MIB); /* for content that passes */
    ck_assert_uint_eq(lend(HT_LEND_FREE, 16), 16);
    ck_assert_uint_eq(ht_arena_protected_max_now(a), ht_arena_protected_max(32 * MIB) - 3 * MIB);
    while (ht_arena_take_back(a))
        ;
    ck_assert_uint_eq(ht_arena_protected_max_now(a), before - 3 * MIB);
    ck_assert_uint_eq(lend(HT_LEND_FREE, 99), 28);
    uint32_t n[8];
    for (int i = 0; i < 8; i++)
        n[i] = get(MIB);
    for (int i = 0; i < 8 && ht_arena_may_protect(a, n[i]); i++)
        ht_arena_protect(a, n[i]);
    ck_assert_uint_le(ht_arena_sums(a)->protected_bytes, ht_arena_protected_max(8 * MIB));
    ck_assert_uint_eq(ht_arena_get(a, MIB, 0, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
}

TEST(a_free_pair_is_found_at_once)
{
    make(64, NULL);
    uint32_t n[64], dirty;
    for (int i = 0; i < 64; i++)
        n[i] = get(MIB);
    for (int i = 1; i < 32; i += 2) /* halves of pairs */
        ht_arena_put(a, n[i]);
    ck_assert(!ht_arena_lend(a, HT_LEND_FREE, &dirty));
    ht_arena_put(a, n[20]);
    ck_assert(ht_arena_lend(a, HT_LEND_FREE, &dirty));
    ck_assert(!ht_arena_lend(a, HT_LEND_FREE, &dirty));
    ck_assert_uint_eq(ht_arena_free_slots(a), 15);
}

/* So a request for a slot finds one, whatever was lent. */
TEST(passing_images_keep_their_room)
{
    make(40, NULL);
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t n = get(MIB);
        if (i < 30)
            ht_arena_protect(a, n);
    }
    ck_assert_uint_eq(lend(HT_LEND_CLEAN, 99), 0); /* the protected set has all that it may have */
    ck_assert_uint_eq(lend(HT_LEND_ANY, 5), 5);
    ck_assert_uint_le(ht_arena_sums(a)->protected_bytes, ht_arena_protected_max(30 * MIB));
    ck_assert_uint_ne(ht_arena_get(a, MIB, HT_ARENA_FORCE, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
}

/* Also of an arena whose last slot has no other half. */
TEST(pairs_lie_side_by_side_on_each_node)
{
    static struct ht_nodes two = {.count = 2, .node = {0, 0}, .weight = {1, 2}};

    make(33, &two);
    uint8_t *base = ht_arena_memory(a)->base;
    for (uint32_t n = 0; n < 33; n++)
        get(MIB);
    for (uint32_t i = 0; i + 1 < 33; i += PAIR) {
        size_t at = (size_t)(ht_arena_data(a, i * 16) - base);
        ck_assert_uint_eq(at % (2 * MIB), 0);
        ck_assert_ptr_eq(ht_arena_data(a, (i + 1) * 16), base + at + MIB);
        ck_assert_int_eq(ht_arena_numa_index(a, i * 16), ht_arena_numa_index(a, (i + 1) * 16));
    }
    ck_assert_uint_eq(lend(HT_LEND_CLEAN, 99), 12); /* 8 MiB and the odd one stay */
}

TEST_SIGNAL(a_lent_slot_has_no_address, SIGABRT, 1)
{
    make(16, NULL);
    uint32_t n = get(MIB);
    ht_arena_put(a, n);
    ck_assert_uint_eq(lend(HT_LEND_FREE, 99), 4);
    while (lend(HT_LEND_FREE, 1))
        ;
    for (uint32_t i = 0; i < 16; i++)
        (void)ht_arena_data(a, i * 16);
}

/* Requests of all sizes beside lending. */
TEST_LOOP(anything_at_any_time, 8)
{
    uint64_t rnd = (uint64_t)_i + 1;
    uint32_t image[512], count = 0;

    make(24, NULL);
    may_go = false; /* the model puts images itself */
    for (int step = 0; step < 4000; step++) {
        rnd = rnd * 6364136223846793005u + 1442695040888963407u;
        uint32_t r = (uint32_t)(rnd >> 33), dirty;
        if (r % 8 < 4 && count < 512) {
            uint32_t n = ht_arena_get(a, r % 16 ? 1 + (r >> 8) % (200 << 10) : MIB, 0, HT_NUMA_INDEX_ANY);
            if (n == HT_SLOT_NONE)
                continue;
            ht_arena_attach(a, n, a, n, true);
            memset(ht_arena_data(a, n), (int)(n % 251), ht_arena_slot_bytes(a, n));
            image[count++] = n;
        } else if (r % 8 == 4) {
            (void)ht_arena_lend(a, (enum ht_lend)(r / 8 % 3), &dirty);
        } else if (r % 8 == 5) {
            (void)ht_arena_take_back(a);
        } else if (count) {
            uint32_t k = r / 8 % count, n = image[k];
            ck_assert_int_eq(ht_arena_data(a, n)[ht_arena_slot_bytes(a, n) - 1], (uint8_t)(n % 251));
            ht_arena_put(a, n);
            image[k] = image[--count];
        }
        if (step % 64 == 0)
            ht_arena_verify(a);
    }
}

RUN_TESTS("lend", .teardown = teardown)
