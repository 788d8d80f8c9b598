/* SPDX-License-Identifier: Apache-2.0 */
/* The period of a sequence of accesses: exact ones, those with threads that overtake each other, and none. */

#include "tests/support/suite.h"
#include "tiering/tier/runs.h"

enum { MOST = 100000 };

static uint64_t key[MOST];
static uint32_t n;
static uint64_t seed;

static void reset(void)
{
    n = 0;
    seed = 1;
}

static uint32_t random_below(uint32_t most)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33) % most;
}

static uint32_t period(void)
{
    uint32_t found = 12345;

    ck_assert_int_eq(ht_period_find(key, n, &found), 0);
    return found;
}

static void add(const char *keys)
{
    while (*keys)
        key[n++] = (uint64_t)*keys++;
}

/* clang-format off */
static const struct {
    const char *keys;
    uint32_t period;
} exact[] = {
    {"", 0}, {"a", 0}, {"ab", 0}, {"aa", 1}, {"aba", 0}, {"abab", 2}, {"abcabc", 3}, {"xyzabcabc", 3},
    {"abcabcx", 0},          /* the end counts */
    {"abcabdabcabd", 6},     /* a part that comes twice */
    {"abcdefbcadfe", 6},     /* the order may differ */
    {"abbabb", 3},
    {"abcdabce", 0}, {"abababababab", 2}, {"fbfbgfbfbg", 5},
};
/* clang-format on */

TEST_LOOP(short_sequences_have_the_shortest_period_of_their_end, HT_ARRAY_SIZE(exact))
{
    add(exact[_i].keys);
    ck_assert_msg(period() == exact[_i].period, "%s: %u", exact[_i].keys, period());
}

/* A step reads all tensors forward and again backward, and updates each. */
static void add_step(uint32_t tensors)
{
    for (uint32_t i = 0; i < tensors; i++)
        key[n++] = i;
    for (uint32_t i = tensors; i-- > 0;) {
        key[n++] = i;
        key[n++] = i | 1u << 31;
    }
}

TEST(forward_and_backward_make_one_step)
{
    for (unsigned i = 0; i < 3; i++)
        add_step(500);
    ck_assert_uint_eq(period(), 1500);
    for (unsigned i = 0; i < 700; i++) /* the present step is not complete */
        key[n++] = i < 500 ? i : 999 - i;
    uint32_t found = period();
    ck_assert_msg(found == 0 || found == 1500, "%u", found);
}

/* All tensors forward and backward with the same key: half a step is the other half turned round. */
static void add_palindrome(uint32_t tensors)
{
    for (uint32_t i = 0; i < tensors; i++)
        key[n++] = i;
    for (uint32_t i = tensors; i-- > 0;)
        key[n++] = i;
}

TEST_RANGE(backward_is_not_forward_again, 3, 44)
{
    uint32_t tensors = (uint32_t)_i;

    for (unsigned i = 0; i < 6; i++)
        add_palindrome(tensors);
    ck_assert_uint_eq(period(), 2 * tensors);
}

TEST(a_sequence_that_ends_within_a_step_has_its_period)
{
    enum { TENSORS = 96 };

    for (unsigned i = 0; i < 6; i++)
        add_palindrome(TENSORS);
    for (uint32_t all = n, cut = 0; cut < 2 * TENSORS; cut++) {
        n = all - cut;
        ck_assert_msg(period() == 2 * TENSORS, "%u before the end: %u", cut, period());
    }
}

/* A tensor is read in pieces: one after the other. */
TEST_RANGE(pieces_of_a_tensor_are_no_steps, 2, 12)
{
    for (unsigned step = 0; step < 4; step++)
        for (uint32_t i = 0; i < 100; i++)
            for (int piece = 0; piece < _i; piece++)
                key[n++] = i;
    ck_assert_uint_eq(period(), 100 * (uint32_t)_i);
}

TEST(threads_may_overtake_each_other)
{
    for (unsigned i = 0; i < 4; i++)
        add_step(1000);
    for (uint32_t i = 0; i + 4 < n; i++) {
        uint32_t other = i + random_below(4);
        uint64_t was = key[i];
        key[i] = key[other];
        key[other] = was;
    }
    ck_assert_uint_ge(period(), 2980);
    ck_assert_uint_le(period(), 3020);
}

TEST(a_few_other_accesses_do_not_hide_the_period)
{
    for (unsigned i = 0; i < 4; i++) {
        add_step(1000);
        key[n - 700] = 1000000 + i;
    }
    ck_assert_uint_eq(period(), 3000);
}

TEST(accesses_at_random_have_none)
{
    for (n = 0; n < 50000; n++)
        key[n] = random_below(1000);
    ck_assert_uint_eq(period(), 0);
}

TEST(too_many_keys_and_too_many_accesses_are_refused)
{
    uint32_t most = HT_PERIOD_KEYS_MAX + 1, found = 0;
    uint64_t *many = test_alloc(most * sizeof(*many));

    ck_assert_ptr_nonnull(many);
    for (uint32_t i = 0; i < most; i++)
        many[i] = i;
    ck_assert_int_eq(ht_period_find(many, most, &found), -E2BIG);
    ck_assert_int_eq(ht_period_find(many, most - 1, &found), 0);
    ck_assert_uint_eq(found, 0);
    ck_assert_int_eq(ht_period_find(many, HT_PERIOD_ACCESSES_MAX + 1, &found), -E2BIG);
}

RUN_TESTS("period", .setup = reset)
