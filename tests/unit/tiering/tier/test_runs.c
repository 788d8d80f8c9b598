/* SPDX-License-Identifier: Apache-2.0 */
/* Accesses to chunks become runs: one for each pass, whatever the order of threads that work beside each other. */

#include "tests/support/suite.h"
#include "tiering/tier/runs.h"

static struct ht_runs r;
static struct ht_run got[HT_RUNS_MIN];
static uint64_t now;

static void begin(void)
{
    ck_assert_int_eq(ht_runs_init(&r), 0);
    now = 0;
}

static void end(void)
{
    ht_runs_destroy(&r);
}

static void note(uint64_t object, uint32_t index, enum ht_plan_use use, bool begins)
{
    const struct ht_run_access a = {
        .object = object, .now_ns = ++now, .index = index, .use = use, .chunk_shift = 20, .begins = begins};

    ht_runs_note(&r, &a);
}

/* A letter is a chunk that is read from its begin on; a digit reads on in the chunk of that number. */
static const struct {
    const char *reads, *runs;
} cases[] = {
    {"a", "a-a"},          {"abcd", "a-d"},   {"a000b1c", "a-c"}, /* parts of a chunk are one access */
    {"abcabc", "a-c a-c"},                                        /* the second pass */
    {"aa", "a-a a-a"},                                            /* one chunk, twice */
    {"abdcfe", "a-f"},                                            /* threads overtake each other */
    {"bac", "a-c"},        {"ab0c1", "a-c"},                      /* a part of the chunk before comes late */
    {"bb", "b-b b-b"},     {"al", "a-a l-l"},                     /* too far */
    {"ai", "a-i"},                                                /* just near enough */
    {"abcba", "a-c a-b"},                                         /* backward */
};

static uint32_t copy_all(void)
{
    return ht_runs_copy(&r, ht_runs_oldest(&r), UINT32_MAX, got);
}

TEST_LOOP(neighbours_make_a_run, HT_ARRAY_SIZE(cases))
{
    char text[64] = "";

    for (const char *p = cases[_i].reads; *p; p++)
        note(7, (uint32_t)(*p >= 'a' ? *p - 'a' : *p - '0'), HT_PLAN_READ, *p >= 'a');
    for (uint32_t i = 0, n = copy_all(); i < n; i++)
        sprintf(text + strlen(text), "%s%c-%c", i ? " " : "", (char)('a' + got[i].first), (char)('a' + got[i].last));
    ck_assert_str_eq(text, cases[_i].runs);
}

/* Chunks of 1 MiB, the last one of 100 KiB; without a figure, a whole one. */
TEST(a_run_knows_the_memory_of_its_last_chunk)
{
    struct ht_run_access a = {.object = 7, .now_ns = 1, .use = HT_PLAN_UPDATE, .chunk_shift = 20, .begins = true};

    for (a.index = 0; a.index < 4; a.index++) {
        a.bytes = a.index == 3 ? 100 << 10 : 1 << 20;
        ht_runs_note(&r, &a);
    }
    a.index = 2;
    a.begins = false;
    ht_runs_note(&r, &a);
    ck_assert_uint_eq(copy_all(), 1);
    ck_assert_uint_eq(got[0].last, 3);
    ck_assert_uint_eq(got[0].last_units, 2);
    note(8, 0, HT_PLAN_READ, true);
    ck_assert_uint_eq(copy_all(), 2);
    ck_assert_uint_eq(got[1].last_units, 16);
}

TEST(objects_and_uses_have_runs_of_their_own)
{
    for (uint32_t i = 0; i < 10; i++) {
        note(1, i, HT_PLAN_READ, true);
        note(2, i, HT_PLAN_READ, true);
        note(1, i, HT_PLAN_UPDATE, true);
    }
    ck_assert_uint_eq(copy_all(), 3);
    ck_assert_uint_eq(got[0].object, 1);
    ck_assert_uint_eq(got[0].begin_ns, 1);
    ck_assert_uint_eq(got[0].end_ns, 28);
    ck_assert_uint_eq(got[1].object, 2);
    ck_assert_uint_eq(got[2].use, HT_PLAN_UPDATE);
    ck_assert_uint_eq(ht_runs_copy(&r, 1, 1, got), 1);
    ck_assert_uint_eq(got[0].object, 2);
}

TEST(the_oldest_runs_make_room)
{
    for (uint32_t i = 0; i < HT_RUNS_MIN + 5; i++) {
        ck_assert(ht_runs_is_full(&r) == (i >= HT_RUNS_MIN));
        note(i + 1, 0, HT_PLAN_READ, true);
    }
    ck_assert_uint_eq(ht_runs_oldest(&r), 5);
    ck_assert_uint_eq(copy_all(), HT_RUNS_MIN);
    ck_assert_uint_eq(got[0].object, 6);
    ck_assert_uint_eq(got[HT_RUNS_MIN - 1].object, HT_RUNS_MIN + 5);
    note(1, 1, HT_PLAN_READ, true); /* its run is gone */
    ck_assert_uint_eq(r.count, HT_RUNS_MIN + 6);
}

/* No run of the old array goes on in the new one. */
TEST(in_a_larger_ring_history_begins_anew)
{
    enum { LARGE = 2 * HT_RUNS_MIN };
    struct ht_run *large = calloc(LARGE, sizeof(*large));

    ck_assert(large);
    for (uint32_t i = 0; i < HT_RUNS_MIN + 7; i++)
        note(i + 1, 0, HT_PLAN_READ, true);
    free(ht_runs_replace(&r, large, LARGE));
    ck_assert(!ht_runs_is_full(&r));
    ck_assert_uint_eq(copy_all(), 0);
    ck_assert_uint_eq(ht_runs_bytes(&r), LARGE * sizeof(*large));
    note(HT_RUNS_MIN + 7, 1, HT_PLAN_READ, true); /* goes on with the newest run, which is gone */
    ck_assert_uint_eq(copy_all(), 1);
    ck_assert_uint_eq(got[0].first, 1);
    for (uint32_t i = 1; i < LARGE; i++)
        note(i, 0, HT_PLAN_UPDATE, true);
    ck_assert(ht_runs_is_full(&r));
    ck_assert_uint_eq(ht_runs_oldest(&r), HT_RUNS_MIN + 7);
    ck_assert_uint_eq(ht_runs_copy(&r, r.count - 2, UINT32_MAX, got), 2);
    ck_assert_uint_eq(got[1].object, LARGE - 1);
}

RUN_TESTS("runs", .setup = begin, .teardown = end)
