/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_readahead_policy.c - the policy recognises every sequential reader, in whatever order its requests arrive, and
 * no other reader.
 */
#include "tests/support/suite.h"
#include "tiering/tier/readahead_policy.h"

enum { KIB = 1 << 10, MIB = 1 << 20, MOST = 16 * MIB };

static struct ht_readahead_policy st;

static uint64_t note(uint64_t off, uint64_t len)
{
    return ht_readahead_policy_note(&st, off, len, MIB, MOST);
}

TEST(a_reader_from_the_beginning_is_seen_at_once)
{
    st = (struct ht_readahead_policy){0};
    ck_assert_uint_eq(note(0, MIB), 3 * MIB);
    st = (struct ht_readahead_policy){0};
    for (unsigned i = 0; i < 127; i++)
        ck_assert_uint_eq(note(i * 4 * KIB, 4 * KIB), 0);
    ck_assert_uint_gt(note(127 * 4 * KIB, 4 * KIB), 2 * MIB);
}

TEST(a_reader_from_elsewhere_is_seen_after_two_units)
{
    st = (struct ht_readahead_policy){0};
    ck_assert_uint_eq(note(100 * MIB, MIB), 0);
    ck_assert_uint_eq(note(101 * MIB, MIB), 104 * MIB);
}

TEST(the_window_grows_while_the_reader_goes_on)
{
    uint64_t before = 0;

    st = (struct ht_readahead_policy){0};
    for (uint64_t i = 0; i < 100; i++) {
        uint64_t window = note(i * MIB, MIB) - (i + 1) * MIB;
        ck_assert_uint_ge(window, before);
        ck_assert_uint_le(window, MOST);
        before = window;
    }
    ck_assert_uint_eq(before, MOST);
}

TEST(a_read_elsewhere_ends_it_at_once)
{
    st = (struct ht_readahead_policy){0};
    for (uint64_t i = 0; i < 50; i++)
        ck_assert_uint_gt(note(i * MIB, MIB), 0);
    ck_assert_uint_eq(note(500 * MIB, 4 * KIB), 0);
}

/* Eight requests of a MiB in flight, which overtake each other. */
TEST(requests_may_overtake_each_other)
{
    uint64_t x = 88172645463325252ull, ahead = 0;

    st = (struct ht_readahead_policy){0};
    for (uint64_t i = 0; i < 64; i += 4) {
        uint64_t order[4] = {i, i + 1, i + 2, i + 3};
        for (unsigned k = 3; k; k--) {
            uint64_t j = random_next(&x) % (k + 1), was = order[k];
            order[k] = order[j];
            order[j] = was;
        }
        for (unsigned k = 0; k < 4; k++)
            ahead += note(order[k] * MIB, MIB) > 0;
    }
    ck_assert_uint_ge(ahead, 55);
    ck_assert_uint_eq(st.window, MOST);
}

TEST(shuffled_and_strided_reads_are_none)
{
    uint64_t x = 88172645463325252ull, ahead = 0;

    st = (struct ht_readahead_policy){0};
    for (unsigned i = 0; i < 20000; i++)
        ahead += note(random_next(&x) % (1 << 18) * 4 * KIB, 4 * KIB) > 0;
    ck_assert_uint_eq(ahead, 0);
    for (uint64_t i = 1; i < 1000; i++)
        ahead += note(2 * i * MIB, MIB) > 0;
    ck_assert_uint_eq(ahead, 0);
    for (uint64_t i = 1000; i > 1; i--)
        ahead += note(i * MIB, 4 * KIB) > 0;
    ck_assert_uint_eq(ahead, 0);
}

TEST(gaps_end_a_stream)
{
    uint64_t ended_at = 0;

    st = (struct ht_readahead_policy){0};
    for (uint64_t i = 0; i < 1000; i++)
        ck_assert_uint_gt(note(i * MIB, MIB), 0);
    for (uint64_t i = 0; i < 100 && !ended_at; i++)
        if (!note((1000 + 2 * i) * MIB, MIB))
            ended_at = i;
    ck_assert_uint_gt(ended_at, 0);
    ck_assert_uint_le(ended_at, 10);
}

TEST(what_does_no_good_is_halved_and_comes_back_slowly)
{
    st = (struct ht_readahead_policy){0};
    for (uint64_t i = 0; i < 50; i++)
        (void)note(i * MIB, MIB);
    ht_readahead_policy_shrink(&st, MIB);
    ck_assert_uint_eq(note(50 * MIB, MIB), 51 * MIB + MOST / 2);
    for (unsigned i = 0; i < 20; i++)
        ht_readahead_policy_shrink(&st, MIB);
    ck_assert_uint_eq(note(51 * MIB, MIB), 53 * MIB);
}

TEST(ends_of_the_numbers_are_no_trouble)
{
    st = (struct ht_readahead_policy){0};
    ck_assert_uint_eq(note((1ull << 44) - 1, 1), 0);
    ck_assert_uint_eq(note(0, 1), 0);
    ck_assert_uint_eq(ht_readahead_policy_note(&(struct ht_readahead_policy){0}, 0, MIB, MIB, 0),
                      2 * MIB); /* no less than a unit */
}

/* ---------------------------------------------------------------- downwards */

static struct ht_readahead_both both;

static struct ht_readahead_target note_both(uint64_t off, uint64_t len)
{
    return ht_readahead_both_note(&both, off, len, MIB, MOST);
}

TEST(a_reader_that_goes_down_is_seen_after_two_units)
{
    both = (struct ht_readahead_both){0};
    ck_assert(!note_both(100 * MIB, MIB).any);
    struct ht_readahead_target t = note_both(99 * MIB, MIB);
    ck_assert(t.any && t.downwards);
    ck_assert_uint_eq(t.to, 97 * MIB);
    for (uint64_t at = 98; at > 40; at--) {
        t = note_both(at * MIB, MIB);
        ck_assert(t.any && t.downwards);
    }
    ck_assert_uint_eq(t.to, 41 * MIB - MOST);
    ck_assert_uint_eq(ht_readahead_both_low(&both), 41 * MIB);
    for (uint64_t at = 40; at > 10; at--)
        t = note_both(at * MIB, MIB);
    ck_assert_uint_eq(t.to, 0);
}

/* Each block in ascending requests, the last block first. */
TEST(blocks_that_come_in_descending_order_are_a_stream_downwards)
{
    unsigned down = 0;

    both = (struct ht_readahead_both){0};
    for (uint64_t block = 20; block--;)
        for (uint64_t i = 0; i < 4; i++)
            down += note_both((100 + 4 * block + i) * MIB, MIB).downwards;
    ck_assert_uint_ge(down, 17 * 4);
    ck_assert_uint_eq(both.down.window, MOST);
}

TEST(a_reader_that_goes_up_never_goes_down)
{
    both = (struct ht_readahead_both){0};
    for (uint64_t i = 0; i < 100; i++) {
        struct ht_readahead_target t = note_both((i ^ 1) * MIB, MIB);
        ck_assert(i < 4 || (t.any && !t.downwards)); /* the first two went down */
    }
    both = (struct ht_readahead_both){0};
    for (uint64_t i = 0; i < 1000; i++) {
        ck_assert(!note_both(64 * MIB + i * 4 * KIB, 4 * KIB).downwards);
        ck_assert(!ht_readahead_both_note(&both, 64 * MIB + i * 4 * KIB, 4 * KIB, MIB, MOST).downwards);
    }
}

TEST(a_reader_that_turns_is_followed)
{
    unsigned down = 0, up = 0;

    both = (struct ht_readahead_both){0};
    for (uint64_t i = 0; i < 50; i++)
        ck_assert(note_both(i * MIB, MIB).any);
    for (uint64_t i = 50; i--;)
        down += note_both(i * MIB, MIB).downwards;
    ck_assert_uint_ge(down, 35);
    for (uint64_t i = 0; i < 50; i++) {
        struct ht_readahead_target t = note_both(i * MIB, MIB);
        up += t.any && !t.downwards;
    }
    ck_assert_uint_ge(up, 35);
}

TEST(shuffled_reads_are_none_in_any_direction)
{
    uint64_t x = 88172645463325252ull, any = 0;

    both = (struct ht_readahead_both){0};
    for (unsigned i = 0; i < 20000; i++)
        any += note_both(random_next(&x) % (1 << 18) * 4 * KIB, 4 * KIB).any;
    for (uint64_t i = 1000; i > 1; i--)
        any += note_both(i * MIB, 4 * KIB).any;
    for (uint64_t i = 1000; i > 1; i--)
        any += note_both(2 * i * MIB, MIB).any;
    ck_assert_uint_eq(any, 0);
}

RUN_TESTS("readahead_policy")
