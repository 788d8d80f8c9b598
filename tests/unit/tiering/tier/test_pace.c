/* SPDX-License-Identifier: Apache-2.0 */
/* test_pace.c - background work keeps to its rate, and to a part of the rate beside other work. */
#include "tests/support/suite.h"
#include "tiering/tier/pace.h"

enum { SECOND = 1000000000 };

/*
 * Moves pieces for so many seconds of a clock of its own; returns the bytes. others: bytes they move beside each piece.
 */
static uint64_t moved(uint64_t rate, uint64_t seconds, uint64_t piece, uint64_t others)
{
    struct ht_pace p = {.rate_bytes = rate};
    uint64_t now = SECOND, sum = 0, theirs = 0;

    while (now < SECOND + seconds * SECOND) {
        now += 100000; /* the time of the piece itself */
        sum += piece;
        theirs += others;
        now += ht_pace_wait_ns(&p, now, piece, theirs);
    }
    return sum;
}

TEST(the_rate_is_kept_whatever_the_pieces)
{
    for (uint64_t piece = 4096; piece <= 1 << 20; piece *= 4) {
        uint64_t n = moved(64 << 20, 10, piece, 0);
        ck_assert_uint_le(n, (uint64_t)(10.2 * (64 << 20)));
        if (piece > 16384) /* smaller ones do not come so fast */
            ck_assert_uint_ge(n, (uint64_t)(9.5 * (64 << 20)));
    }
}

TEST(others_make_it_slower_but_never_stop_it)
{
    uint64_t n = moved(64 << 20, 10, 1 << 20, 4096);

    ck_assert_uint_le(n, 3ull * (64 << 20));
    ck_assert_uint_ge(n, 2ull * (64 << 20));
}

TEST(an_idle_time_is_no_credit)
{
    struct ht_pace p = {.rate_bytes = 1 << 20};
    uint64_t now = SECOND;

    (void)ht_pace_wait_ns(&p, now, 4096, 0);
    now += 100ull * SECOND;
    ck_assert_uint_gt(ht_pace_wait_ns(&p, now, 1 << 20, 0), SECOND / 2);
}

TEST(any_rate_can_be_asked_for)
{
    ck_assert_uint_eq(moved(UINT64_MAX, 1, 4096, 0) / 4096, 10000);
    struct ht_pace p = {.rate_bytes = 1};
    ck_assert_uint_gt(ht_pace_wait_ns(&p, SECOND, 4096, 0), 4000ull * SECOND);
}

RUN_TESTS("pace")
