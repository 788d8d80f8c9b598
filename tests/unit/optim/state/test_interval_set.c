/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of intervals against an array of flags. */

#include "optim/state/interval_set.h"
#include "tests/support/suite.h"

enum { SIZE = 300, ROUNDS = 50000 };

static bool flag[SIZE];
static struct ht_interval_set set;

/* Assertions are counted by the framework, which is slow: one per question. */
static void check_equal(void)
{
    const struct ht_interval *v = ht_interval_set_all(&set);
    uint32_t at = 0;
    bool same = true;

    for (uint32_t i = 0; i < set.count; i++) {
        same &= v[i].begin < v[i].end && (i == 0 || v[i - 1].end < v[i].begin);
        for (; at < v[i].begin; at++)
            same &= !flag[at];
        for (; at < v[i].end; at++)
            same &= flag[at];
    }
    for (; at < SIZE; at++)
        same &= !flag[at];
    ck_assert(same);
}

static void check_questions(uint32_t begin, uint32_t end)
{
    bool any = false, all = true, inside = true;
    uint32_t first = end, stop;

    for (uint32_t i = begin; i < end; i++) {
        any |= flag[i];
        all &= flag[i];
        if (flag[i] && first == end)
            first = i;
    }
    ck_assert(ht_interval_set_overlap(&set, begin, end) == any);
    ck_assert(ht_interval_set_cover(&set, begin, end) == all);
    ck_assert_uint_eq(ht_interval_set_next(&set, begin, end, &stop), first);
    for (uint32_t i = first; i < stop; i++)
        inside &= first == end || flag[i];
    ck_assert(inside && (stop == end || !flag[stop]));
}

TEST(a_set_behaves_as_flags_do)
{
    srand(7);
    for (unsigned i = 0; i < ROUNDS; i++) {
        uint32_t a = (uint32_t)rand() % SIZE, b = a + (uint32_t)rand() % (i & 64 ? 8 : 60);
        bool add = rand() & 1;
        b = b < SIZE ? b : SIZE;
        ck_assert_int_eq(add ? ht_interval_set_add(&set, a, b) : ht_interval_set_remove(&set, a, b), 0);
        for (uint32_t k = a; k < b; k++)
            flag[k] = add;
        check_equal();
        check_questions(a / 2, b);
    }
    ht_interval_set_free(&set);
}

typedef int both_fn(struct ht_interval_set *s, const struct ht_interval_set *other);

/* Elements of both sets stay, or those of the first one alone. */
TEST_LOOP(two_sets_are_joined_as_their_elements, 2)
{
    both_fn *join = _i ? ht_interval_set_subtract : ht_interval_set_intersect;
    struct ht_interval_set other = {0};

    srand(8);
    memset(flag, 0, sizeof(flag));
    for (unsigned i = 0; i < ROUNDS / 50; i++) {
        bool in_other[SIZE] = {false};
        for (unsigned k = 0; k < 20; k++) {
            uint32_t a = (uint32_t)rand() % SIZE, b = (uint32_t)rand() % SIZE, pieces = i % 4 ? 8 : 60;
            ck_assert_int_eq(ht_interval_set_add(&set, a, a + 1), 0);
            flag[a] = true;
            for (b = b < pieces ? pieces : b; pieces; pieces--)
                in_other[b - pieces] = true;
            ck_assert_int_eq(ht_interval_set_add(&other, b - (i % 4 ? 8 : 60), b), 0);
        }
        ck_assert_int_eq(join(&set, &other), 0);
        for (uint32_t k = 0; k < SIZE; k++)
            flag[k] &= in_other[k] != _i;
        check_equal();
        ht_interval_set_clear(&other);
    }
    ht_interval_set_free(&other);
    ht_interval_set_free(&set);
}

TEST(joined_sets_have_bounds_and_need_no_memory_for_nothing)
{
    struct ht_interval_set other = {0};

    for (uint32_t i = 0; i < HT_INTERVALS_MAX; i++)
        ck_assert_int_eq(ht_interval_set_add(&set, 4 * i, 4 * i + 3), 0);
    for (uint32_t i = 0; i < 2; i++)
        ck_assert_int_eq(ht_interval_set_add(&other, i ? 2 : 0, i ? 4 * HT_INTERVALS_MAX : 1), 0);
    ck_assert_int_eq(ht_interval_set_intersect(&set, &other), -E2BIG);
    ck_assert_uint_eq(set.count, HT_INTERVALS_MAX);
    ht_interval_set_free(&other);
    ck_assert_int_eq(ht_interval_set_add(&other, 5, 6), 0);
    ck_assert_int_eq(ht_interval_set_subtract(&set, &other), -E2BIG);
    ck_assert_uint_eq(set.count, HT_INTERVALS_MAX);
    ck_assert_int_eq(ht_interval_set_add(&other, 0, 4 * HT_INTERVALS_MAX), 0);
    ck_assert_int_eq(ht_interval_set_subtract(&set, &other), 0);
    ck_assert(set.count == 0 && set.cap == 0);
    ck_assert_int_eq(ht_interval_set_add(&set, 1, 2), 0);
    ht_interval_set_free(&other);
    ck_assert_int_eq(ht_interval_set_intersect(&set, &other), 0);
    ck_assert(set.count == 0 && set.cap == 0);
}

TEST(too_many_pieces_are_refused_and_change_nothing)
{
    for (uint32_t i = 0; i < HT_INTERVALS_MAX; i++)
        ck_assert_int_eq(ht_interval_set_add(&set, 3 * i, 3 * i + 2), 0);
    ck_assert_int_eq(ht_interval_set_add(&set, 3 * HT_INTERVALS_MAX, 3 * HT_INTERVALS_MAX + 1), -E2BIG);
    ck_assert_int_eq(ht_interval_set_remove(&set, 0, 1), 0);
    ck_assert_int_eq(ht_interval_set_add(&set, 0, 3), 0); /* joins two */
    ck_assert_uint_eq(set.count, HT_INTERVALS_MAX - 1);
    ht_interval_set_free(&set);
}

TEST(one_piece_needs_no_memory)
{
    for (uint32_t i = 0; i < 1000; i++)
        ck_assert_int_eq(ht_interval_set_add(&set, 10 * i, 10 * i + 10), 0);
    ck_assert(set.count == 1 && set.cap == 0);
    ck_assert(ht_interval_set_cover(&set, 0, 10000) && !ht_interval_set_cover(&set, 0, 10001));
    ht_interval_set_clear(&set);
    ck_assert(!ht_interval_set_overlap(&set, 0, 10000) && ht_interval_set_cover(&set, 5, 5));
}

RUN_TESTS("intervals", .timeout_s = 120)
