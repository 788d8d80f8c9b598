/* SPDX-License-Identifier: Apache-2.0 */
/* test_next_use.c - hints of programs: places in time, the order of reads, and uses that are past. */
#include "tests/support/suite.h"
#include "tests/support/wrap.h"
#include "tiering/tier/next_use.h"

#define MS UINT64_C(1000000)
#define SECOND (1000 * MS)
#define NOW (1000 * SECOND)

static struct ht_next_uses t;

static void set(uint64_t object, uint64_t after_ns, uint64_t lead_ns)
{
    ck_assert_int_eq(ht_next_uses_set(&t, object, after_ns, lead_ns, NOW), 0);
}

static uint64_t due_at(uint64_t now_ns)
{
    const struct ht_next_use *u = ht_next_uses_due(&t, now_ns);

    return u ? u->link.id : 0;
}

TEST(later_uses_have_later_places)
{
    unsigned before = 0;

    for (uint64_t ms = 1; ms < 100 * 24 * 3600 * UINT64_C(1000); ms += ms / 64 + 1) {
        const struct ht_next_use u = {.next_ns = NOW + ms * MS};
        unsigned place = ht_next_use_place(&u, NOW);
        ck_assert_uint_ge(place, before);
        ck_assert_uint_le(place, before + 1);
        if (place > 4 && place < HT_NEXT_USE_PLACES - 2)
            ck_assert_uint_le(ht_next_use_place(&u, NOW + ms * MS / 2), place - 3);
        ck_assert_uint_eq(ht_next_use_place(&u, u.next_ns + 1), 0);
        before = place;
    }
    ck_assert_uint_eq(before, HT_NEXT_USE_PLACES - 2);
    const struct ht_next_use never = {.next_ns = HT_NEXT_USE_NEVER};
    ck_assert_uint_eq(ht_next_use_place(&never, NOW), HT_NEXT_USE_PLACES - 1);
}

TEST(what_is_needed_first_is_read_first)
{
    set(1, 50 * SECOND, 5 * SECOND);
    set(2, 20 * SECOND, 5 * SECOND);
    set(3, 30 * SECOND, 60 * SECOND);
    set(4, HT_NEXT_USE_NEVER, 60 * SECOND);
    ck_assert_uint_eq(due_at(NOW), 3);
    ck_assert_uint_eq(due_at(NOW + 16 * SECOND), 3); /* goes on with it */
    ht_next_use_was_read(&t, ht_next_uses_due(&t, NOW + 16 * SECOND));
    ck_assert_uint_eq(due_at(NOW + 14 * SECOND), 0);
    ck_assert_uint_eq(t.look_ns, NOW + 15 * SECOND);
    ck_assert_uint_eq(due_at(NOW + 16 * SECOND), 2);
    set(2, 21 * SECOND, 5 * SECOND);
    ck_assert_uint_eq(due_at(NOW + 15 * SECOND), 0);
    ck_assert_uint_eq(due_at(NOW + 46 * SECOND), 1);
    ck_assert_uint_eq(ht_next_uses_count(&t), 2); /* 2 and 3 are past */
    ck_assert(ht_next_uses_find(&t, 4, UINT64_MAX - 1));
    ht_next_uses_free(&t);
}

TEST(a_use_may_be_late_by_a_quarter)
{
    set(7, 4 * SECOND, 0);
    ck_assert(ht_next_uses_find(&t, 7, NOW + 5 * SECOND - 1));
    ck_assert(!ht_next_uses_find(&t, 7, NOW + 5 * SECOND));
    ck_assert(!ht_next_uses_find(&t, 8, NOW));
    ck_assert_uint_eq(due_at(NOW + 5 * SECOND), 0);
    ck_assert_uint_eq(ht_next_uses_count(&t), 0);
    ck_assert(!ht_next_uses_forget(&t, 7));
    set(7, 4 * SECOND, 0);
    ck_assert(ht_next_uses_forget(&t, 7));
    ck_assert(!ht_next_uses_find(&t, 7, NOW));
    ht_next_uses_free(&t);
}

TEST(so_many_and_no_more)
{
    for (uint64_t i = 1; i <= HT_NEXT_USES; i++)
        set(i, i == 9 ? SECOND : 100 * SECOND, 0);
    set(5, 60 * SECOND, 0); /* one that is known */
    ck_assert_int_eq(ht_next_uses_set(&t, HT_NEXT_USES + 1, SECOND, 0, NOW), -ENOSPC);
    ck_assert_int_eq(ht_next_uses_set(&t, HT_NEXT_USES + 1, SECOND, 0, NOW + 2 * SECOND), 0);
    ck_assert(!ht_next_uses_find(&t, 9, NOW));
    ck_assert_uint_eq(ht_next_uses_count(&t), HT_NEXT_USES);
    ck_assert_uint_le(ht_next_uses_bytes(&t), 1 << 20);
    ht_next_uses_free(&t);
    ck_assert_uint_eq(ht_next_uses_bytes(&t), 0);
}

TEST(without_memory_nothing_is_set)
{
    for (int nth = 1; nth <= 2; nth++) {
        wrap_fail(WRAP_MEMORY, nth, false);
        ck_assert_int_eq(ht_next_uses_set(&t, 3, SECOND, 0, NOW), -ENOMEM);
        wrap_fail(WRAP_MEMORY, 0, false);
        ck_assert(!ht_next_uses_find(&t, 3, NOW));
        ck_assert_uint_eq(due_at(NOW), 0);
    }
    set(3, SECOND, 0);
    ht_next_uses_free(&t);
}

RUN_TESTS("next_use")
