/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/support/suite.h"
#include "tiering/cache/arena.h"
#include "tiering/cache/staging.h"

static bool may_go;
static unsigned asked;

static bool evict(void *ctx, uint32_t slot)
{
    (void)ctx;
    (void)slot;
    asked++;
    return may_go;
}

static struct ht_arena *made;

static struct ht_arena *make(uint64_t mib, const struct ht_nodes *nodes)
{
    may_go = true;
    asked = 0;
    ck_assert_int_eq(ht_arena_new(mib << 20, nodes, evict, NULL, &made), 0);
    return made;
}

static struct ht_arena *arena(unsigned mib)
{
    return make(mib, NULL);
}

static void teardown(void)
{
    if (made) {
        ht_arena_verify(made);
        ht_arena_free(made);
    }
    made = NULL;
}

static uint32_t get_used(struct ht_arena *a, uint32_t bytes, bool may_evict)
{
    uint32_t n = ht_arena_get(a, bytes, may_evict ? HT_ARENA_ASK_ALL : 0, HT_NUMA_INDEX_ANY);

    if (n != HT_SLOT_NONE)
        ht_arena_image(a, n)->owner = a;
    return n;
}

TEST(slots_do_not_overlap)
{
    struct ht_arena *a = arena(4);
    uint8_t *base = ht_arena_memory(a)->base;
    uint32_t slot[40];
    unsigned n = 0;

    for (int i = 0; i < 2; i++)
        slot[n++] = get_used(a, 1 << 20, false);
    for (int i = 0; i < 32; i++)
        slot[n++] = get_used(a, 1 << 16, false);
    ck_assert_uint_eq(get_used(a, 1 << 16, false), HT_SLOT_NONE);
    ck_assert_uint_eq(ht_arena_sums(a)->used_bytes, 4 << 20);
    uint8_t taken[64] = {0};
    for (unsigned i = 0; i < n; i++) {
        ck_assert_uint_ne(slot[i], HT_SLOT_NONE);
        size_t first = (size_t)(ht_arena_data(a, slot[i]) - base) >> 16;
        for (size_t k = 0; k < ht_arena_slot_bytes(a, slot[i]) >> 16; k++)
            ck_assert_uint_eq(taken[first + k]++, 0);
    }
    for (unsigned i = 0; i < n; i++)
        ht_arena_put(a, slot[i]);
    ck_assert_uint_eq(ht_arena_sums(a)->used_bytes, 0);
    ck_assert_uint_eq(ht_arena_free_slots(a), 4);
}

TEST(referenced_images_get_a_second_chance)
{
    struct ht_arena *a = arena(2);
    uint32_t x = get_used(a, 1 << 20, true), y = get_used(a, 1 << 20, true);

    ht_arena_image(a, x)->referenced = true;
    ht_arena_image(a, y)->referenced = false;
    ck_assert_uint_eq(get_used(a, 1 << 20, true), y);
}

TEST(what_must_not_go_stays)
{
    struct ht_arena *a = arena(2);

    get_used(a, 1 << 20, true);
    get_used(a, 1 << 20, true);
    may_go = false;
    ck_assert_uint_eq(get_used(a, 1 << 20, true), HT_SLOT_NONE);
    ck_assert_uint_eq(get_used(a, 1 << 16, true), HT_SLOT_NONE);
    ck_assert_uint_gt(asked, 0);
    may_go = true;
    ck_assert_uint_ne(get_used(a, 1 << 16, true), HT_SLOT_NONE);
}

/* Images of whole slots with known next uses; the time is at place 10. */
static void fill_in_order(struct ht_arena *a, const uint64_t place[], unsigned n, uint32_t slot[])
{
    ht_arena_order_begin(a, 10, false);
    for (unsigned i = 0; i < n; i++) {
        slot[i] = get_used(a, 1 << 20, false);
        ck_assert_uint_ne(slot[i], HT_SLOT_NONE);
        ht_arena_set_next_use(a, slot[i], place[i], false);
    }
    ht_arena_verify(a);
}

TEST(what_is_needed_last_goes_first)
{
    static const uint64_t place[] = {12, 50, 11, 70, 30, 72, 9};
    static const unsigned order[] = {6, 5, 3, 1, 4, 0, 2}; /* what was not used at its place is the first */
    struct ht_arena *a = arena(7);
    uint32_t slot[7];

    fill_in_order(a, place, 7, slot);
    for (unsigned i = 0; i < 7; i++) {
        uint32_t n = get_used(a, 1 << 20, true);
        ck_assert_uint_eq(n, slot[order[i]]);
        ht_arena_protect(a, n); /* stays from now on */
        ht_arena_verify(a);
    }
    ck_assert_uint_eq(get_used(a, 1 << 20, true), HT_SLOT_NONE);
}

TEST(what_was_used_last_stays_for_a_moment)
{
    static const uint64_t place[] = {20, 30, 40};
    struct ht_arena *a = arena(3);
    uint32_t slot[3];

    fill_in_order(a, place, 3, slot);
    ht_arena_set_next_use(a, slot[0], 20 + 48, true);
    ck_assert_uint_eq(get_used(a, 1 << 20, true), slot[2]);
    ht_arena_protect(a, slot[2]);
    ht_arena_set_next_use(a, slot[1], 30 + 40, true);
    ck_assert_uint_eq(get_used(a, 1 << 20, true), slot[0]);
    ht_arena_protect(a, slot[0]);
    ck_assert_uint_eq(ht_arena_get(a, 1 << 20, HT_ARENA_ASK_ALL, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
    ck_assert_uint_eq(ht_arena_get(a, 1 << 20, HT_ARENA_FORCE, HT_NUMA_INDEX_ANY), slot[1]);
}

TEST(dirty_images_in_order_go_when_they_are_clean)
{
    static const uint64_t place[] = {20, 30, 40};
    struct ht_arena *a = arena(3);
    uint32_t slot[3];

    fill_in_order(a, place, 3, slot);
    ht_arena_set_dirty(a, slot[2], true);
    ht_arena_set_next_use(a, slot[2], 60, false);
    ht_arena_verify(a);
    ck_assert_uint_eq(get_used(a, 1 << 20, true), slot[1]);
    ht_arena_protect(a, slot[1]);
    ht_arena_set_dirty(a, slot[2], false);
    ht_arena_verify(a);
    ck_assert_uint_eq(get_used(a, 1 << 20, true), slot[2]);
}

/* An image that is read early never takes the room of one that is needed before it. */
TEST(a_read_ahead_takes_room_from_later_images)
{
    static const uint64_t place[] = {12, 50, 30, 72, 31};
    static const unsigned order[] = {3, 1, 4};
    struct ht_arena *a = arena(6);
    uint32_t slot[5], n;

    fill_in_order(a, place, 5, slot);
    n = ht_arena_get_ahead(a, 1 << 20, 72, HT_NUMA_INDEX_ANY); /* the free one */
    ck_assert_uint_ne(n, HT_SLOT_NONE);
    ht_arena_attach(a, n, a, 100, false);
    ck_assert_uint_eq(ht_arena_get_ahead(a, 1 << 20, 72, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
    for (unsigned i = 0; i < 3; i++) {
        n = ht_arena_get_ahead(a, 1 << 20, 30, HT_NUMA_INDEX_ANY);
        ck_assert_uint_eq(n, slot[order[i]]);
        ht_arena_attach(a, n, a, i, false);
        ht_arena_verify(a);
    }
    ck_assert_uint_eq(ht_arena_get_ahead(a, 1 << 20, 30, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
    /* Callers still take what they need. */
    ck_assert_uint_ne(get_used(a, 1 << 20, true), HT_SLOT_NONE);
    ht_arena_order_end(a);
    ck_assert_uint_eq(ht_arena_get_ahead(a, 1 << 20, 11, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
}

/* One of half a slot divides the slot that it takes; the next one takes the other half, and nothing goes for it. */
TEST(a_small_read_ahead_takes_a_part_of_a_later_image)
{
    static const uint64_t place[] = {20, 50};
    struct ht_arena *a = arena(2);
    uint32_t slot[2], n;

    fill_in_order(a, place, 2, slot);
    for (unsigned i = 0; i < 2; i++) {
        n = ht_arena_get_ahead(a, 1 << 19, 30, HT_NUMA_INDEX_ANY);
        ck_assert_uint_eq(n, slot[1] + 8 * i);
        ht_arena_attach(a, n, a, 100 + i, false);
        ht_arena_verify(a);
    }
    ck_assert_uint_eq(ht_arena_get_ahead(a, 1 << 19, 30, HT_NUMA_INDEX_ANY), HT_SLOT_NONE);
}

TEST(after_the_order_the_clock_takes_its_images)
{
    static const uint64_t place[] = {20, 30, 40, 50};
    struct ht_arena *a = arena(4);
    uint32_t slot[4];

    fill_in_order(a, place, 4, slot);
    ht_arena_order_end(a);
    for (unsigned i = 0; i < 4; i++) {
        uint32_t n = get_used(a, 1 << 20, true);
        ck_assert_uint_ne(n, HT_SLOT_NONE);
        ht_arena_protect(a, n);
        ht_arena_verify(a);
    }
}

TEST(a_split_slot_becomes_whole_again)
{
    struct ht_arena *a = arena(1);

    for (int i = 0; i < 16; i++)
        ck_assert_uint_ne(get_used(a, 1 << 16, true), HT_SLOT_NONE);
    uint32_t n = get_used(a, 1 << 20, true);
    ck_assert_uint_ne(n, HT_SLOT_NONE);
    ck_assert_uint_eq(ht_arena_slot_bytes(a, n), 1 << 20);
}

TEST(the_hand_passes_every_used_slot)
{
    struct ht_arena *a = arena(3);

    get_used(a, 1 << 20, true);
    get_used(a, 1 << 16, true);
    get_used(a, 1 << 16, true);
    uint32_t hand = 0, seen[6];
    for (int i = 0; i < 6; i++)
        seen[i] = ht_arena_next_used(a, &hand);
    for (int i = 0; i < 3; i++) {
        ck_assert_uint_eq(seen[i], seen[i + 3]);
        for (int k = 0; k < i; k++)
            ck_assert_uint_ne(seen[i], seen[k]);
    }
}

TEST(staging_gives_all_or_none)
{
    struct ht_staging *p;
    void *buf[32], *more[2];

    ck_assert_int_eq(ht_staging_new(8 << 20, NULL, &p), -EINVAL);
    ck_assert_int_eq(ht_staging_new(16 << 20, NULL, &p), 0);
    unsigned n = ht_staging_count(p, HT_STAGING_UPDATE);
    ck_assert_uint_eq(n, 12);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_UPDATE, n + 1, false, HT_NUMA_INDEX_ANY, buf), -E2BIG);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_UPDATE, n - 1, false, HT_NUMA_INDEX_ANY, buf), 0);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_UPDATE, 2, true, HT_NUMA_INDEX_ANY, more), -EAGAIN);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_FILL, 1, true, HT_NUMA_INDEX_ANY, more), 0);
    ck_assert_uint_eq(ht_staging_used_bytes(p), (uint64_t)n << 20);
    ht_staging_put(p, HT_STAGING_FILL, more[0]);
    for (unsigned i = 0; i < n - 1; i++)
        ht_staging_put(p, HT_STAGING_UPDATE, buf[i]);
    ck_assert_uint_eq(ht_staging_used_bytes(p), 0);
    ht_staging_free(p);
}

/* Two nodes of this many MiB each. */
static struct ht_nodes two = {.count = 2, .node = {0, 0}, .weight = {1, 1}};

static struct ht_arena *divided(unsigned mib)
{
    return make(2ull * mib, &two);
}

static int place(struct ht_arena *a, uint32_t slot)
{
    return (int)ht_pinned_part_of(ht_arena_memory(a), ht_arena_data(a, slot));
}

static uint32_t get_near(struct ht_arena *a, uint32_t bytes, uint32_t tries, int near)
{
    uint32_t n = ht_arena_get(a, bytes, tries, near);

    ck_assert_uint_ne(n, HT_SLOT_NONE);
    ht_arena_image(a, n)->owner = a;
    ht_arena_image(a, n)->referenced = false;
    return n;
}

TEST(slots_are_near_while_there_are_some)
{
    struct ht_arena *a = divided(8);

    for (int i = 0; i < 8; i++)
        ck_assert_int_eq(place(a, get_near(a, 1 << 20, 0, 1)), 1);
    ck_assert_uint_eq(ht_arena_sums(a)->used_on[0], 0);
    ck_assert_uint_eq(ht_arena_sums(a)->used_on[1], 8 << 20);
    ck_assert_int_eq(place(a, get_near(a, 1 << 20, 0, 1)), 0); /* far, but nothing has to go for it */
    ck_assert_uint_eq(asked, 0);
}

TEST(small_images_are_near_too)
{
    struct ht_arena *a = divided(2);

    for (int i = 0; i < 64; i++)
        ck_assert_int_eq(place(a, get_near(a, 1 << 16, 0, i % 2)), i % 2);
    ck_assert_uint_eq(ht_arena_get(a, 1 << 16, 0, 0), HT_SLOT_NONE);
    ck_assert_uint_eq(asked, 0);
}

TEST(whoever_takes_turns_stays_near_in_a_full_arena)
{
    struct ht_arena *a = divided(32);

    for (int i = 0; i < 64; i++)
        get_near(a, 1 << 20, 0, i % 2);
    unsigned near = 0;
    for (int i = 0; i < 256; i++)
        near += place(a, get_near(a, 1 << 20, HT_ARENA_ASK_ALL, (i / 3) % 2)) == (i / 3) % 2;
    ck_assert_uint_ge(near, 250);
    ck_assert_uint_le(asked, 256 + 8);
}

TEST(one_node_alone_may_use_all_memory)
{
    struct ht_arena *a = divided(32);

    for (int i = 0; i < 64; i++)
        get_near(a, 1 << 20, 0, i % 2);
    uint8_t used[2] = {0};
    for (int i = 0; i < 128; i++)
        used[place(a, get_near(a, 1 << 20, HT_ARENA_ASK_ALL, 1))]++;
    ck_assert_uint_ge(used[0], 48); /* the oldest image is evicted first, wherever it is */
    ck_assert_uint_ge(used[1], 48);
}

TEST(staging_buffers_are_near_while_there_are_some)
{
    struct ht_staging *p;
    void *buf[12];

    ck_assert_int_eq(ht_staging_new(16 << 20, &two, &p), 0);
    ck_assert_uint_eq(ht_staging_count(p, HT_STAGING_FILL), 4);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_UPDATE, 12, true, 1, buf), 0);
    for (int i = 0; i < 12; i++) {
        ck_assert_uint_eq(ht_pinned_part_of(ht_staging_memory(p), buf[i]), i < 6);
        for (int k = 0; k < i; k++)
            ck_assert_ptr_ne(buf[i], buf[k]);
    }
    for (int i = 0; i < 12; i++)
        ht_staging_put(p, HT_STAGING_UPDATE, buf[i]);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_FILL, 2, true, 0, buf), 0);
    for (int i = 0; i < 2; i++) {
        ck_assert_uint_eq(ht_pinned_part_of(ht_staging_memory(p), buf[i]), 0);
        ht_staging_put(p, HT_STAGING_FILL, buf[i]);
    }
    ht_staging_free(p);
}

/* ------------------------------------------- pieces, against a plain model */

enum { MODEL_MIB = 12, MODEL_SUBS = MODEL_MIB * 16, MODEL_STEPS = 8000 };

/* By sub-slot in memory: 1 and the number of the image that has it. */
static uint32_t has[MODEL_SUBS];
static uint32_t images[MODEL_SUBS], images_count;
static struct ht_arena *model;
static uint64_t rnd_state;

static uint32_t rnd(uint32_t below)
{
    rnd_state = rnd_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rnd_state >> 33) % below;
}

static void mark(uint32_t n, uint32_t was, uint32_t is)
{
    size_t first = (size_t)(ht_arena_data(model, n) - (uint8_t *)ht_arena_memory(model)->base) >> 16;
    uint32_t subs = ht_arena_slot_bytes(model, n) >> 16;

    ck_assert_uint_eq(first / 16, (first + subs - 1) / 16);
    for (size_t k = first; k < first + subs; k++) {
        ck_assert_uint_eq(has[k], was);
        has[k] = is;
    }
}

static void went(uint32_t n)
{
    uint32_t i = 0;

    while (images[i] != n)
        ck_assert_uint_lt(++i, images_count);
    images[i] = images[--images_count];
    mark(n, n + 1, 0);
}

static bool lets_go(void *ctx, uint32_t n)
{
    (void)ctx;
    if (ht_arena_image(model, n)->dirty || rnd(4) == 0)
        return false;
    went(n);
    return true;
}

/* The arena's figures are those of the model. */
static void compare(void)
{
    uint64_t used = 0, protected = 0, workingset = 0, pieces = 0;
    uint32_t unused = 0, hand = 0;

    for (uint32_t slot = 0; slot < MODEL_MIB; slot++) {
        bool some = false, protects = false, joined = false;
        for (uint32_t k = 0; k < images_count; k++) {
            const struct ht_image *im = ht_arena_image(model, images[k]);
            bool here = images[k] / 16 == slot;
            some |= here;
            protects |= here && im->protected;
            joined |= here && im->workingset;
        }
        unused += !some;
        protected += protects;
        workingset += joined && !protects;
    }
    for (uint32_t k = 0; k < MODEL_SUBS; k++)
        used += has[k] != 0;
    for (uint32_t k = 0; k < images_count; k++)
        pieces += ht_arena_next_used(model, &hand) != HT_SLOT_NONE;
    ck_assert_uint_eq(ht_arena_sums(model)->used_bytes, used << 16);
    ck_assert_uint_eq(ht_arena_sums(model)->protected_bytes, protected << 20);
    ck_assert_uint_eq(ht_arena_sums(model)->workingset_bytes, workingset << 20);
    ck_assert_uint_eq(ht_arena_free_slots(model), unused);
    ck_assert_uint_le(protected, ht_arena_protected_max((uint64_t)MODEL_MIB << 20) >> 20);
    ck_assert_uint_eq(pieces, images_count);
    ck_assert_uint_le(ht_arena_moving_bytes(model), ht_arena_bytes(model));
}

static uint32_t get_any(uint32_t bytes)
{
    static const uint32_t tries[] = {0, 3, HT_ARENA_ASK_ALL, HT_ARENA_FORCE};
    uint32_t n = ht_arena_get(model, bytes, tries[rnd(4)], HT_NUMA_INDEX_ANY);

    if (n == HT_SLOT_NONE)
        return n;
    ck_assert_uint_ge(ht_arena_slot_bytes(model, n), bytes);
    ck_assert_uint_eq(ht_arena_slot_bytes(model, n), ht_round_up(bytes, 1 << 16));
    mark(n, 0, n + 1);
    images[images_count++] = n;
    return n;
}

static void grow(uint32_t from)
{
    uint32_t bytes = ht_arena_slot_bytes(model, from);
    struct ht_image was = *ht_arena_image(model, from);

    ht_arena_set_dirty(model, from, true); /* as one that is held */
    uint32_t to = bytes < 1 << 20 ? get_any((uint32_t)ht_min_u64(2 * bytes, 1 << 20)) : HT_SLOT_NONE;
    ht_arena_set_dirty(model, from, was.dirty);
    if (to == HT_SLOT_NONE)
        return;
    ht_arena_attach(model, to, was.owner, was.index, true);
    was.protected = ht_arena_image(model, from)->protected;
    went(from);
    ht_arena_replace(model, from, to);
    ck_assert_uint_eq(ht_arena_image(model, to)->valid_hi, was.valid_hi);
    ck_assert_uint_eq(ht_arena_image(model, to)->dirty, was.dirty);
    ck_assert(!ht_arena_image(model, to)->protected || was.protected);
    ck_assert_ptr_null(ht_arena_image(model, from)->owner);
}

static void one_step(void)
{
    uint32_t n = images_count ? images[rnd(images_count)] : HT_SLOT_NONE;
    uint32_t what = n == HT_SLOT_NONE ? 0 : rnd(9);

    if (what < 3) {
        n = get_any(1 + rnd(1u << (12 + rnd(9))));
        if (n == HT_SLOT_NONE)
            return;
        ht_arena_attach(model, n, has + rnd(64), rnd(3), true);
        ht_arena_image(model, n)->valid_hi = rnd(1000);
    } else if (what == 3) {
        went(n);
        ht_arena_set_dirty(model, n, false);
        ht_arena_put(model, n);
    } else if (what == 4) {
        if (ht_arena_may_protect(model, n))
            ht_arena_protect(model, n);
        else if (rnd(2))
            ht_arena_protect_waiting(model, n);
    } else if (what == 5) {
        (rnd(2) ? ht_arena_unpin : ht_arena_unprotect)(model, n);
        ht_arena_expect_waiting(model, (uint64_t)rnd(MODEL_MIB) << 20);
    } else if (what == 6) {
        ht_arena_set_dirty(model, n, rnd(2));
        ht_arena_set_final(model, n, rnd(2));
        ht_arena_use(model, n);
    } else if (what == 7) {
        ht_arena_want_pinned(model, ht_arena_pin(model, n) ? 0 : (uint64_t)rnd(MODEL_MIB) << 20);
    } else {
        grow(n);
    }
}

TEST_LOOP(pieces_do_what_a_plain_model_does, 3)
{
    rnd_state = (uint64_t)_i;
    ck_assert_int_eq(ht_arena_new((uint64_t)MODEL_MIB << 20, NULL, lets_go, NULL, &model), 0);
    for (int i = 0; i < MODEL_STEPS; i++) {
        one_step();
        ht_arena_verify(model);
        if (i % 64 == 0)
            compare();
    }
    while (images_count) {
        uint32_t n = images[0];
        went(n);
        ht_arena_set_dirty(model, n, false);
        ht_arena_put(model, n);
    }
    compare();
    ck_assert_uint_eq(ht_arena_free_slots(model), MODEL_MIB);
    ck_assert(!ht_arena_under_pressure(model));
    ht_arena_free(model);
}

TEST(pieces_of_a_length_gather)
{
    struct ht_arena *a = arena(8);

    for (uint32_t i = 0; i < 16; i++)
        for (uint32_t bytes = 1 << 16; bytes < 1 << 20; bytes *= 2)
            if (i << 16 < 1 << 20 && i * bytes < 1 << 20)
                ck_assert_uint_ne(get_used(a, bytes, false), HT_SLOT_NONE);
    ck_assert_uint_eq(ht_arena_sums(a)->used_bytes, 4 << 20);
    ck_assert_uint_eq(ht_arena_free_slots(a), 4);
}

/* As gradients leave while the state that they made comes. */
TEST(pieces_fill_the_room_that_others_leave)
{
    struct ht_arena *a = arena(64);
    uint32_t n[128], slots = 0;
    bool has_some[64] = {false};

    for (int i = 0; i < 128; i++)
        n[i] = get_used(a, 1 << 16, false);
    for (int i = 0; i < 128; i++) {
        for (int k = 0; k < 2; k++)
            has_some[get_used(a, 1 << 16, false) / 16] = true;
        ht_arena_put(a, n[i]);
    }
    for (int i = 0; i < 64; i++)
        slots += has_some[i];
    ck_assert_uint_le(slots, 256 / 16 + 2);
    ck_assert_uint_ge(ht_arena_free_slots(a), 64 - 256 / 16 - 2);
}

TEST(one_piece_in_each_slot_gives_way_to_whole_ones)
{
    struct ht_arena *a = arena(8);
    uint32_t n[128];

    for (int i = 0; i < 128; i++)
        n[i] = get_used(a, 1 << 16, false);
    for (int i = 0; i < 128; i++)
        if (i % 16)
            ht_arena_put(a, n[i]);
    ck_assert_uint_eq(ht_arena_sums(a)->used_bytes, 8 << 16);
    ck_assert_uint_eq(ht_arena_free_slots(a), 0);
    for (int i = 0; i < 8; i++)
        ck_assert_uint_ne(get_used(a, 1 << 20, true), HT_SLOT_NONE);
    ck_assert_uint_eq(ht_arena_sums(a)->used_bytes, 8 << 20);
}

/* A caller that needs a whole slot finds one, however few pieces are protected. */
TEST(protected_pieces_take_no_more_slots_than_protected_images)
{
    struct ht_arena *a = arena(8);
    uint32_t n[128], protected = 0;

    for (int i = 0; i < 128; i++)
        n[i] = get_used(a, 1 << 16, false);
    for (int i = 0; i < 128; i++)
        if (i % 16) {
            ht_arena_put(a, n[i]);
        } else if (ht_arena_may_protect(a, n[i])) {
            ht_arena_protect(a, n[i]);
            protected++;
        }
    ck_assert_uint_eq(protected, 6);
    ck_assert(!ht_arena_has_protected_room(a));
    uint32_t whole = get_used(a, 1 << 20, true), more = get_used(a, 1 << 16, true);
    ck_assert_uint_ne(whole, HT_SLOT_NONE);
    ck_assert(!ht_arena_may_protect(a, whole));
    if (ht_arena_may_protect(a, more)) /* beside one that is protected it costs nothing */
        ht_arena_protect(a, more);
    ck_assert_uint_eq(ht_arena_sums(a)->protected_bytes, 6 << 20);
}

/* --------------------------------------------------------- dirty images */

static uint32_t get_dirty(struct ht_arena *a, uint32_t bytes, bool durable, int near)
{
    uint32_t n = get_near(a, bytes, 0, near);

    ht_arena_attach(a, n, a, n, durable);
    ht_arena_set_dirty(a, n, true);
    return n;
}

/* A request asks none, so its price does not depend on their number. */
TEST(dirty_images_are_not_in_the_way)
{
    struct ht_arena *a = arena(64);
    uint32_t n[64];

    for (int i = 0; i < 64; i++)
        n[i] = get_dirty(a, 1 << 20, i % 2, HT_NUMA_INDEX_ANY);
    ck_assert_uint_eq(get_used(a, 1 << 20, true), HT_SLOT_NONE);
    ck_assert_uint_eq(get_used(a, 1 << 16, true), HT_SLOT_NONE);
    ck_assert_uint_eq(asked, 0);
    ht_arena_set_dirty(a, n[40], false);
    ck_assert_uint_eq(get_used(a, 1 << 20, true), n[40]);
    ck_assert_uint_eq(asked, 1);
}

TEST(a_walk_meets_durable_images_first_and_the_oldest_of_them)
{
    struct ht_arena *a = arena(8);
    struct ht_dirty_walk durable = HT_DIRTY_WALK(false, HT_NUMA_INDEX_ANY), all = HT_DIRTY_WALK(true, -1);
    uint32_t n[8];

    for (int i = 0; i < 8; i++)
        n[i] = get_dirty(a, 1 << 20, i % 2, HT_NUMA_INDEX_ANY);
    ht_arena_protect(a, n[1]);
    ht_arena_set_dirty(a, n[3], false);
    ht_arena_set_dirty(a, n[3], true); /* the newest now */
    for (int i = 0; i < 3; i++)
        ck_assert_uint_eq(ht_dirty_walk_next(a, &durable), n[i < 2 ? 5 + 2 * i : 3]);
    ck_assert_uint_eq(ht_dirty_walk_next(a, &durable), HT_SLOT_NONE);
    for (int i = 0; i < 7; i++) {
        uint32_t next = ht_dirty_walk_next(a, &all);
        ck_assert_uint_eq(next, n[i < 2 ? 5 + 2 * i : i == 2 ? 3 : 2 * (i - 3)]);
    }
    ck_assert_uint_eq(ht_dirty_walk_next(a, &all), HT_SLOT_NONE);
}

/* What a walk has seen is the newest for the next one. */
TEST(walks_take_turns)
{
    struct ht_arena *a = arena(4);
    uint32_t n[4];

    for (int i = 0; i < 4; i++)
        n[i] = get_dirty(a, 1 << 20, true, HT_NUMA_INDEX_ANY);
    for (int i = 0; i < 12; i++) {
        struct ht_dirty_walk w = HT_DIRTY_WALK(false, HT_NUMA_INDEX_ANY);
        ck_assert_uint_eq(ht_dirty_walk_next(a, &w), n[i % 4]);
    }
}

TEST(a_walk_stays_on_its_node)
{
    struct ht_arena *a = divided(4);
    struct ht_dirty_walk near = HT_DIRTY_WALK(true, 1), all = HT_DIRTY_WALK(true, HT_NUMA_INDEX_ANY);
    unsigned seen = 0;

    for (int i = 0; i < 6; i++)
        get_dirty(a, 1 << 20, i % 3, i % 2);
    for (uint32_t n; (n = ht_dirty_walk_next(a, &near)) != HT_SLOT_NONE; seen++)
        ck_assert_int_eq(place(a, n), 1);
    ck_assert_uint_eq(seen, 3);
    while (ht_dirty_walk_next(a, &all) != HT_SLOT_NONE)
        seen++;
    ck_assert_uint_eq(seen, 3 + 6);
}

/* The lock is released between two steps: images come, go, and become clean. */
TEST(a_walk_survives_changes)
{
    struct ht_arena *a = arena(4);
    uint32_t piece[16], whole[3];

    for (int i = 0; i < 16; i++)
        piece[i] = get_dirty(a, 1 << 16, true, HT_NUMA_INDEX_ANY);
    for (int i = 0; i < 3; i++)
        whole[i] = get_dirty(a, 1 << 20, true, HT_NUMA_INDEX_ANY);
    struct ht_dirty_walk w = HT_DIRTY_WALK(true, HT_NUMA_INDEX_ANY);
    ck_assert_uint_eq(ht_dirty_walk_next(a, &w), piece[0]);
    for (int i = 0; i < 16; i++)
        ht_arena_put(a, piece[i]);
    uint32_t again = get_dirty(a, 1 << 20, true, HT_NUMA_INDEX_ANY); /* where the pieces were */
    ht_arena_set_dirty(a, whole[0], false);
    ck_assert_uint_eq(again / 16, piece[0] / 16);
    ck_assert_uint_eq(ht_dirty_walk_next(a, &w), whole[1]);
    ht_arena_put(a, whole[2]);
    ck_assert_uint_eq(ht_dirty_walk_next(a, &w), again);
    ht_arena_verify(a);
    ht_arena_put(a, whole[1]);
    ht_arena_put(a, again);
    ht_arena_put(a, whole[0]);
    ck_assert_uint_eq(ht_dirty_walk_next(a, &w), HT_SLOT_NONE);
}

/* One image at a time, as threads that wait for room clean them. */
static uint32_t clean_next(struct ht_arena *a)
{
    struct ht_dirty_walk w = HT_DIRTY_WALK(true, HT_NUMA_INDEX_ANY);
    uint32_t n = ht_dirty_walk_next(a, &w);

    if (n != HT_SLOT_NONE)
        ht_arena_set_dirty(a, n, false);
    return n;
}

/* A walk that was inside of a slot goes on there, and the slot has longer pieces now. */
TEST(a_walk_meets_a_piece_where_shorter_ones_were)
{
    struct ht_arena *a = arena(2);
    uint32_t n = get_dirty(a, 1 << 16, true, HT_NUMA_INDEX_ANY), next = get_dirty(a, 1 << 20, true, HT_NUMA_INDEX_ANY);
    uint32_t more = get_dirty(a, 1 << 16, true, HT_NUMA_INDEX_ANY);
    struct ht_dirty_walk w = HT_DIRTY_WALK(true, HT_NUMA_INDEX_ANY);

    ck_assert_uint_eq(ht_dirty_walk_next(a, &w), n);
    ht_arena_put(a, n);
    ht_arena_put(a, more);
    uint32_t longer = get_dirty(a, 1 << 19, true, HT_NUMA_INDEX_ANY);
    ck_assert_uint_eq(longer, n);
    for (uint32_t seen = 0, now; (now = ht_dirty_walk_next(a, &w)) != HT_SLOT_NONE;) {
        ck_assert(now == next || now == longer);
        ck_assert_uint_le(++seen, 3);
    }
}

/* Who waits for a whole slot needs all pieces of one, not one piece of all. */
TEST(slots_are_cleaned_one_after_the_other)
{
    enum { SLOTS = 64 };
    struct ht_arena *a = arena(SLOTS);
    unsigned cleaned = 0;

    for (int i = 0; i < SLOTS * 16; i++)
        get_dirty(a, 1 << 16, true, HT_NUMA_INDEX_ANY);
    while (get_used(a, 1 << 20, true) == HT_SLOT_NONE) {
        ck_assert_uint_ne(clean_next(a), HT_SLOT_NONE);
        ck_assert_uint_le(++cleaned, 16);
    }
}

TEST(a_hot_piece_does_not_keep_others_from_being_cleaned)
{
    struct ht_arena *a = arena(1);
    uint32_t n[4], hot = 0;

    for (int i = 0; i < 4; i++)
        n[i] = get_dirty(a, 1 << 16, true, HT_NUMA_INDEX_ANY);
    for (int i = 0; i < 8; i++) {
        hot += clean_next(a) == n[0];
        ht_arena_set_dirty(a, n[0], true);
    }
    for (int i = 1; i < 4; i++)
        ck_assert(!ht_arena_image(a, n[i])->dirty);
    ck_assert_uint_le(hot, 5);
}

TEST(walks_over_all_nodes_begin_on_each_in_turn)
{
    struct ht_arena *a = divided(8);
    unsigned on[2] = {0};

    for (int i = 0; i < 8; i++)
        get_dirty(a, 1 << 20, true, i % 2);
    for (int i = 0; i < 100; i++) {
        uint32_t n = clean_next(a);
        on[place(a, n)]++;
        ht_arena_set_dirty(a, n, true);
    }
    ck_assert_uint_eq(on[0], on[1]);
}

TEST(a_walk_leaves_a_list_that_cannot_be_written)
{
    struct ht_arena *a = divided(8);
    struct ht_dirty_walk w = HT_DIRTY_WALK(true, HT_NUMA_INDEX_ANY);
    unsigned seen = 0;

    for (int i = 0; i < 16; i++)
        get_dirty(a, 1 << 20, i < 12, i % 2);
    for (uint32_t n, last = 0; (n = ht_dirty_walk_next(a, &w)) != HT_SLOT_NONE; last = n) {
        ck_assert(!seen || place(a, n) != place(a, last));
        ck_assert_int_eq(ht_arena_image(a, n)->durable, seen++ < 2);
        ht_dirty_walk_skip_list(&w);
    }
    ck_assert_uint_eq(seen, 4);
}

/* Readahead takes no image that was read ahead just now, however few are clean. */
TEST(a_request_with_few_tries_leaves_a_second_chance)
{
    struct ht_arena *a = arena(64);

    for (int i = 0; i < 60; i++)
        get_dirty(a, 1 << 20, true, HT_NUMA_INDEX_ANY);
    for (uint64_t i = 0; i < 5; i++) {
        uint32_t n = ht_arena_get(a, 1 << 20, 1024, HT_NUMA_INDEX_ANY);
        ck_assert_int_eq(n == HT_SLOT_NONE, i == 4);
        if (n == HT_SLOT_NONE)
            continue;
        ht_arena_attach(a, n, a, 1000 + i, true);
        ht_arena_mark_readahead(a, n);
    }
    ck_assert_uint_eq(ht_arena_sums(a)->readahead_wasted, 0);
}

/* Such a tier is usual: an image is used when it comes. */
TEST(a_request_passes_few_images_that_were_used)
{
    enum { SLOTS = 1024 };
    struct ht_arena *a = arena(SLOTS);
    unsigned passed = 0;

    for (int i = 0; i < SLOTS; i++)
        ck_assert_uint_ne(get_used(a, 1 << 20, false), HT_SLOT_NONE);
    ck_assert_uint_ne(get_used(a, 1 << 20, true), HT_SLOT_NONE);
    for (uint32_t i = 0; i < SLOTS; i++)
        passed += !ht_arena_image(a, i * 16)->referenced;
    ck_assert_uint_gt(passed, 0);
    ck_assert_uint_le(passed, 16);
}

/* 32 slots: at most 24 are protected. */
TEST(waiting_images_find_the_room_that_was_kept_for_them)
{
    struct ht_arena *a = arena(32);
    uint32_t n[32], count = 0;

    for (int i = 0; i < 32; i++)
        n[i] = get_used(a, 1 << 20, true);
    ht_arena_expect_waiting(a, 10 << 20);
    for (; ht_arena_has_protected_room(a); count++) {
        ck_assert(ht_arena_may_protect(a, n[count]));
        ht_arena_protect(a, n[count]);
    }
    ck_assert_uint_eq(count, 14);
    ck_assert(!ht_arena_may_protect(a, n[count]));
    for (int round = 0; round < 3; round++) {
        for (int i = 14; i < 26; i++) /* two more than expected find no room: nothing is taken from the others */
            ht_arena_protect_waiting(a, n[i]);
        ck_assert_uint_eq(ht_arena_sums(a)->protected_bytes, 24 << 20);
        ck_assert(ht_arena_image(a, n[23])->waiting && !ht_arena_image(a, n[24])->protected);
        ht_arena_verify(a);
        for (int i = 14; i < 26; i++) {
            ht_arena_put(a, n[i]);
            ck_assert(!ht_arena_has_protected_room(a)); /* the next step's come */
            n[i] = get_used(a, 1 << 20, true);
        }
    }
    ht_arena_expect_waiting(a, 0);
    ck_assert(ht_arena_has_protected_room(a) && ht_arena_may_protect(a, n[14]));
}

TEST(images_that_were_protected_before_are_in_the_way)
{
    struct ht_arena *a = arena(32);
    uint32_t n[24];

    for (int i = 0; i < 24; i++) {
        n[i] = get_used(a, 1 << 20, true);
        ht_arena_protect(a, n[i]);
    }
    ck_assert(!ht_arena_lacks_waiting_room(a));
    ht_arena_expect_waiting(a, 5 << 20);
    for (int i = 0; i < 5; i++) {
        ck_assert(ht_arena_lacks_waiting_room(a));
        ht_arena_unprotect(a, n[i]);
    }
    ck_assert(!ht_arena_lacks_waiting_room(a) && !ht_arena_has_protected_room(a));
    for (int i = 0; i < 5; i++) {
        ht_arena_protect_waiting(a, n[i]);
        ck_assert(ht_arena_image(a, n[i])->waiting);
    }
    ht_arena_expect_waiting(a, 100 << 20); /* more than there is: all of the protected set */
    for (int i = 5; i < 24; i++)
        ht_arena_unprotect(a, n[i]);
    ck_assert(!ht_arena_lacks_waiting_room(a) && !ht_arena_has_protected_room(a));
}

RUN_TESTS("DRAM tier", .teardown = teardown)
