/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <stdlib.h>

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

static struct ht_arena *arena(unsigned mib)
{
    struct ht_arena *a;
    may_go = true;
    asked = 0;
    ck_assert_int_eq(ht_arena_new((uint64_t)mib << 20, NULL, evict, NULL, &a), 0);
    return a;
}

static uint32_t get_used(struct ht_arena *a, uint32_t bytes, bool may_evict)
{
    uint32_t n = ht_arena_get(a, bytes, may_evict ? HT_ARENA_ASK_ALL : 0, HT_NEAR_ANY);
    if (n != HT_SLOT_NONE)
        ht_arena_image(a, n)->owner = a;
    return n;
}

START_TEST(slots_do_not_overlap)
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
    ck_assert_uint_eq(ht_arena_used_bytes(a), 4 << 20);
    uint8_t taken[64] = {0};
    for (unsigned i = 0; i < n; i++) {
        ck_assert_uint_ne(slot[i], HT_SLOT_NONE);
        size_t first = (size_t)(ht_arena_data(a, slot[i]) - base) >> 16;
        for (size_t k = 0; k < ht_arena_slot_bytes(a, slot[i]) >> 16; k++)
            ck_assert_uint_eq(taken[first + k]++, 0);
    }
    for (unsigned i = 0; i < n; i++)
        ht_arena_put(a, slot[i]);
    ck_assert_uint_eq(ht_arena_used_bytes(a), 0);
    ck_assert_uint_eq(ht_arena_free_slots(a), 4);
    ht_arena_free(a);
}
END_TEST

START_TEST(referenced_images_get_a_second_chance)
{
    struct ht_arena *a = arena(2);
    uint32_t x = get_used(a, 1 << 20, true), y = get_used(a, 1 << 20, true);
    ht_arena_image(a, x)->referenced = true;
    ht_arena_image(a, y)->referenced = false;
    ck_assert_uint_eq(get_used(a, 1 << 20, true), y);
    ht_arena_free(a);
}
END_TEST

START_TEST(what_must_not_go_stays)
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
    ht_arena_free(a);
}
END_TEST

START_TEST(a_split_slot_becomes_whole_again)
{
    struct ht_arena *a = arena(1);
    for (int i = 0; i < 16; i++)
        ck_assert_uint_ne(get_used(a, 1 << 16, true), HT_SLOT_NONE);
    uint32_t n = get_used(a, 1 << 20, true);
    ck_assert_uint_ne(n, HT_SLOT_NONE);
    ck_assert_uint_eq(ht_arena_slot_bytes(a, n), 1 << 20);
    ht_arena_free(a);
}
END_TEST

START_TEST(the_hand_passes_every_used_slot)
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
    ht_arena_free(a);
}
END_TEST

START_TEST(staging_gives_all_or_none)
{
    struct ht_staging *p;
    void *buf[32], *more[2];
    ck_assert_int_eq(ht_staging_new(8 << 20, NULL, &p), -EINVAL);
    ck_assert_int_eq(ht_staging_new(16 << 20, NULL, &p), 0);
    unsigned n = ht_staging_count(p, HT_STAGING_UPDATE);
    ck_assert_uint_eq(n, 12);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_UPDATE, n + 1, false, HT_NEAR_ANY, buf), -E2BIG);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_UPDATE, n - 1, false, HT_NEAR_ANY, buf), 0);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_UPDATE, 2, true, HT_NEAR_ANY, more), -EAGAIN);
    ck_assert_int_eq(ht_staging_get(p, HT_STAGING_FILL, 1, true, HT_NEAR_ANY, more), 0);
    ck_assert_uint_eq(ht_staging_used_bytes(p), (uint64_t)n << 20);
    ht_staging_put(p, HT_STAGING_FILL, more[0]);
    for (unsigned i = 0; i < n - 1; i++)
        ht_staging_put(p, HT_STAGING_UPDATE, buf[i]);
    ck_assert_uint_eq(ht_staging_used_bytes(p), 0);
    ht_staging_free(p);
}
END_TEST

/* Two nodes of this many MiB each. */
static struct ht_nodes two = {.count = 2, .node = {0, 0}, .weight = {1, 1}};

static struct ht_arena *divided(unsigned mib)
{
    struct ht_arena *a;
    may_go = true;
    asked = 0;
    ck_assert_int_eq(ht_arena_new(2ull * mib << 20, &two, evict, NULL, &a), 0);
    return a;
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

START_TEST(slots_are_near_while_there_are_some)
{
    struct ht_arena *a = divided(8);
    for (int i = 0; i < 8; i++)
        ck_assert_int_eq(place(a, get_near(a, 1 << 20, 0, 1)), 1);
    ck_assert_uint_eq(ht_arena_used_on(a, 0), 0);
    ck_assert_uint_eq(ht_arena_used_on(a, 1), 8 << 20);
    ck_assert_int_eq(place(a, get_near(a, 1 << 20, 0, 1)), 0); /* far, but nothing has to go for it */
    ck_assert_uint_eq(asked, 0);
    ht_arena_free(a);
}
END_TEST

START_TEST(small_images_are_near_too)
{
    struct ht_arena *a = divided(2);
    for (int i = 0; i < 64; i++)
        ck_assert_int_eq(place(a, get_near(a, 1 << 16, 0, i % 2)), i % 2);
    ck_assert_uint_eq(ht_arena_get(a, 1 << 16, 0, 0), HT_SLOT_NONE);
    ck_assert_uint_eq(asked, 0);
    ht_arena_free(a);
}
END_TEST

START_TEST(whoever_takes_turns_stays_near_in_a_full_arena)
{
    struct ht_arena *a = divided(32);
    for (int i = 0; i < 64; i++)
        get_near(a, 1 << 20, 0, i % 2);
    unsigned near = 0;
    for (int i = 0; i < 256; i++)
        near += place(a, get_near(a, 1 << 20, HT_ARENA_ASK_ALL, (i / 3) % 2)) == (i / 3) % 2;
    ck_assert_uint_ge(near, 250);
    ck_assert_uint_le(asked, 256 + 8);
    ht_arena_free(a);
}
END_TEST

START_TEST(one_node_alone_may_use_all_memory)
{
    struct ht_arena *a = divided(32);
    for (int i = 0; i < 64; i++)
        get_near(a, 1 << 20, 0, i % 2);
    uint8_t used[2] = {0};
    for (int i = 0; i < 128; i++)
        used[place(a, get_near(a, 1 << 20, HT_ARENA_ASK_ALL, 1))]++;
    ck_assert_uint_ge(used[0], 48); /* what is old goes first, wherever it is */
    ck_assert_uint_ge(used[1], 48);
    ht_arena_free(a);
}
END_TEST

START_TEST(staging_buffers_are_near_while_there_are_some)
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
END_TEST

int main(void)
{
    Suite *suite = suite_create("DRAM tier");
    TCase *tc = tcase_create("arena and staging");
    tcase_add_test(tc, slots_do_not_overlap);
    tcase_add_test(tc, referenced_images_get_a_second_chance);
    tcase_add_test(tc, what_must_not_go_stays);
    tcase_add_test(tc, a_split_slot_becomes_whole_again);
    tcase_add_test(tc, the_hand_passes_every_used_slot);
    tcase_add_test(tc, staging_gives_all_or_none);
    tcase_add_test(tc, slots_are_near_while_there_are_some);
    tcase_add_test(tc, small_images_are_near_too);
    tcase_add_test(tc, whoever_takes_turns_stays_near_in_a_full_arena);
    tcase_add_test(tc, one_node_alone_may_use_all_memory);
    tcase_add_test(tc, staging_buffers_are_near_while_there_are_some);
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
