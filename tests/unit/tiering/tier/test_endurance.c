/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes of the last 24 hours, and when they exceed a budget. */
#include "tests/support/suite.h"
#include "tiering/tier/endurance.h"

#define HOUR HT_ENDURANCE_HOUR_NS
#define START (100 * HOUR)

static struct ht_endurance e;
static uint64_t written;

static void reset(void)
{
    memset(&e, 0, sizeof(e));
    written = 0;
}

/* Bytes are written, and found at a time after the first look. */
static uint64_t look(uint64_t after_ns, uint64_t bytes)
{
    written += bytes;
    ht_endurance_look(&e, START + after_ns, written);
    return ht_endurance_day_bytes(&e);
}

TEST(all_bytes_of_a_day_count_once)
{
    uint64_t sum = 0;

    ck_assert_uint_eq(ht_endurance_day_bytes(&e), 0);
    for (uint64_t i = 0; i < 24 * 60; i++)
        ck_assert_uint_eq(look(i * HOUR / 60, i), sum += i);
}

TEST(bytes_of_the_hour_before_the_last_23_are_forgotten)
{
    for (uint64_t i = 0; i < 100; i++) {
        uint64_t in_window = i < 24 ? i + 1 : 24;
        ck_assert_uint_eq(look(i * HOUR, 10), 15 * in_window - 5);
        ck_assert_uint_eq(look((i + 1) * HOUR - 1, 5), 15 * in_window);
    }
    ck_assert_uint_eq(look(99 * HOUR + 23 * HOUR, 0), 15);
    ck_assert_uint_eq(look(99 * HOUR + 24 * HOUR, 0), 0);
}

static const struct {
    int64_t jump_ns;
    uint64_t kept; /* of 100 bytes before it */
} jumps[] = {
    {-(int64_t)START, 100}, {-1, 100},      {-(int64_t)HOUR, 100}, {0, 100},           {HOUR, 100},
    {23 * HOUR, 100},       {24 * HOUR, 0}, {1000 * HOUR, 0},      {INT64_MAX / 2, 0},
};

/* A clock that jumps back loses nothing; one that jumps forward ends hours, and never invents bytes. */
TEST_LOOP(a_jump_of_the_clock_neither_loses_nor_invents_bytes, HT_ARRAY_SIZE(jumps))
{
    look(0, 0);
    ck_assert_uint_eq(look(HOUR / 2, 100), 100);
    ck_assert_uint_eq(look((uint64_t)((int64_t)(HOUR / 2) + jumps[_i].jump_ns), 7), jumps[_i].kept + 7);
    ck_assert_uint_eq(look((uint64_t)((int64_t)(HOUR / 2) + jumps[_i].jump_ns), 0), jumps[_i].kept + 7);
}

TEST(after_a_jump_back_time_goes_on_at_the_highest_hour)
{
    look(0, 0);
    look(10 * HOUR, 100);
    ck_assert_uint_eq(look(2 * HOUR, 1), 101);
    ck_assert_uint_eq(look(10 * HOUR, 1), 102);
    ck_assert_uint_eq(look(33 * HOUR, 1), 103);
    ck_assert_uint_eq(look(34 * HOUR, 1), 2);
}

TEST(a_count_that_shrinks_adds_nothing)
{
    look(0, 1000);
    written = 400; /* a device is gone */
    ck_assert_uint_eq(look(HOUR, 0), 1000);
    ck_assert_uint_eq(look(HOUR, 50), 1050);
}

TEST(the_warning_comes_once_in_24_hours)
{
    unsigned warnings = 0;

    ht_endurance_set(&e, 100);
    ck_assert_uint_eq(look(0, 100), 100);
    ck_assert(!ht_endurance_must_warn(&e, START)); /* as much as allowed */
    look(1, 1);
    for (uint64_t i = 0; i < 72 * 4; i++) {
        look(HOUR + i * HOUR / 4, 60);
        warnings += ht_endurance_must_warn(&e, START + HOUR + i * HOUR / 4);
    }
    ck_assert_uint_eq(warnings, 3);
    for (uint64_t i = 0; i < 30; i++)
        look((80 + i) * HOUR, 1);
    ck_assert(!ht_endurance_must_warn(&e, START + 110 * HOUR)); /* 24 bytes a day */
}

TEST(a_changed_budget_may_be_exceeded_anew)
{
    look(0, 1000);
    ck_assert(!ht_endurance_must_warn(&e, START)); /* there is none */
    ht_endurance_set(&e, 10);
    ck_assert(ht_endurance_must_warn(&e, START));
    ht_endurance_set(&e, 10);
    ck_assert(!ht_endurance_must_warn(&e, START));
    ht_endurance_set(&e, 20);
    ck_assert(ht_endurance_must_warn(&e, START));
    ht_endurance_set(&e, 2000);
    ck_assert(!ht_endurance_must_warn(&e, START));
    ht_endurance_set(&e, 0);
    ck_assert(!ht_endurance_must_warn(&e, START));
    ht_endurance_set(&e, UINT64_MAX);
    ck_assert(!ht_endurance_must_warn(&e, START));
}

RUN_TESTS("endurance", .setup = reset)
