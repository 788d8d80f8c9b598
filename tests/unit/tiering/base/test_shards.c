/* SPDX-License-Identifier: Apache-2.0 */
/* Shards: texts of histories, and tables that move as little as an even share allows. */
#include "tests/support/suite.h"
#include "tiering/base/shards.h"

enum { BLOCKS = 1009 };

static struct ht_shards of(const char *text)
{
    struct ht_shards s;

    ck_assert_msg(ht_shards_parse(text, strlen(text), &s) == 0, "%s", text);
    return s;
}

TEST(texts_of_histories_are_read_and_written)
{
    static const char *const good[] = {"1", "4", "256", "4 3", "4 3-1", "4 4-0 8 2-7", "1 2", "4 1-2"};
    static const char *const bad[] = {"",   "0",   "257", "4 ",  " 4", "4  3", "4-0",    "4 3-4",        "4 3-",
                                      "-1", "4,3", "04",  "4 0", "+4", "4\n3", "4 3-01", "1000000000000"};
    char text[HT_SHARDS_TEXT_MAX];
    struct ht_shards s;

    for (size_t i = 0; i < HT_ARRAY_SIZE(good); i++) {
        s = of(good[i]);
        ht_shards_format(&s, text);
        ck_assert_str_eq(text, good[i]);
    }
    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_msg(ht_shards_parse(bad[i], strlen(bad[i]), &s) == -EINVAL, "%s", bad[i]);
    ck_assert_int_eq(ht_shards_parse("4\0003", 3, &s), -EINVAL);
}

TEST(histories_have_an_end)
{
    struct ht_shards s = ht_shards_even(256), again;
    char text[HT_SHARDS_TEXT_MAX];

    for (unsigned i = 1; i < HT_SHARDS_CHANGES_MAX; i++)
        ck_assert_int_eq(ht_shards_change(&s, 256, 255), 0);
    ck_assert_int_eq(ht_shards_change(&s, 2, HT_SHARDS_NONE), -E2BIG);
    ht_shards_format(&s, text);
    ck_assert_int_eq(ht_shards_parse(text, strlen(text), &again), 0);
    ck_assert_int_eq(ht_shards_change(&s, 0, HT_SHARDS_NONE), -EINVAL);
    ck_assert_int_eq(ht_shards_change(&s, 257, HT_SHARDS_NONE), -EINVAL);
    ck_assert_int_eq(ht_shards_change(&s, 1, 256), -EINVAL);
}

TEST(names_are_a_rank_and_how_many_there_are)
{
    static const char *const bad[] = {"", "of", "1", "4of4", "1of0", "1of", "of4", "1of4x", "01of4", "1of257", "-1of4"};
    unsigned rank, ranks;

    ck_assert(ht_shard_parse_name("0of1", &rank, &ranks) && rank == 0 && ranks == 1);
    ck_assert(ht_shard_parse_name("255of256", &rank, &ranks) && rank == 255 && ranks == 256);
    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_msg(!ht_shard_parse_name(bad[i], &rank, &ranks), "%s", bad[i]);
}

TEST(the_first_table_deals_blocks_in_turn)
{
    struct ht_shards s = of("3");
    uint16_t owner[BLOCKS];

    ht_shards_owners(&s, BLOCKS, owner);
    for (unsigned b = 0; b < BLOCKS; b++)
        ck_assert_uint_eq(owner[b], b % 3);
    ck_assert_uint_eq(s.changes, 1);
}

/* Without the last change. */
static void find_before(const struct ht_shards *s, uint64_t blocks, uint16_t *owner)
{
    struct ht_shards was = *s;

    ck_assert_uint_ge(was.changes--, 2);
    ht_shards_owners(&was, blocks, owner);
}

static uint64_t moved(const char *text, uint64_t blocks)
{
    struct ht_shards s = of(text);
    uint16_t before[BLOCKS], after[BLOCKS];
    uint64_t n = 0;

    find_before(&s, blocks, before);
    ht_shards_owners(&s, blocks, after);
    for (uint64_t b = 0; b < blocks; b++)
        n += ht_shards_renumber(&s, before[b]) != after[b];
    return n;
}

TEST(changes_move_the_share_that_they_must)
{
    ck_assert_uint_eq(moved("4 3", 960), 240);
    ck_assert_uint_eq(moved("4 3-0", 960), 240);
    ck_assert_uint_eq(moved("4 3-2", 960), 240);
    ck_assert_uint_eq(moved("3 8", 960), 600);
    ck_assert_uint_eq(moved("4 4-2", 960), 240);
    ck_assert_uint_eq(moved("4 4", 960), 0);
    ck_assert_uint_eq(moved("2 1", 0), 0);
    ck_assert_uint_eq(moved("4 1", 960), 720);
}

/* The fewest: what ranks have beyond their shares, when those with most blocks have the larger shares. */
static uint64_t fewest(const uint64_t *count, unsigned ranks, uint64_t blocks)
{
    uint64_t larger = blocks % ranks, small = blocks / ranks, kept = 0;

    for (unsigned r = 0; r < ranks; r++) {
        kept += count[r] < small ? count[r] : small;
        if (count[r] > small && larger) {
            larger--;
            kept++;
        }
    }
    return blocks - kept;
}

static void check_change(const struct ht_shards *s, uint64_t blocks)
{
    uint64_t count[HT_SHARDS_RANKS_MAX] = {0}, kept[HT_SHARDS_RANKS_MAX] = {0}, n = 0;
    unsigned ranks = ht_shards_ranks(s);
    uint16_t before[BLOCKS], after[BLOCKS];

    find_before(s, blocks, before);
    ht_shards_owners(s, blocks, after);
    for (uint64_t b = 0; b < blocks; b++) {
        unsigned now = ht_shards_renumber(s, before[b]);
        ck_assert_uint_lt(after[b], ranks);
        count[after[b]]++;
        kept[now == HT_SHARDS_NONE ? 0 : now] += now != HT_SHARDS_NONE;
        n += now != after[b];
    }
    for (unsigned r = 0; r < ranks; r++)
        ck_assert(count[r] == blocks / ranks || count[r] == blocks / ranks + 1);
    ck_assert_uint_eq(n, fewest(kept, ranks, blocks));
}

TEST(any_history_stays_even_and_moves_the_fewest_blocks)
{
    srand(1);
    for (unsigned i = 0; i < 300; i++) {
        struct ht_shards s = ht_shards_even(1 + (unsigned)rand() % 9);
        for (unsigned k = 0; k < 6; k++) {
            bool loses = rand() % 2 == 0;
            unsigned lost = loses ? (unsigned)rand() % ht_shards_ranks(&s) : HT_SHARDS_NONE;
            ck_assert_int_eq(ht_shards_change(&s, 1 + (unsigned)rand() % 9, lost), 0);
            check_change(&s, (uint64_t)rand() % BLOCKS);
            check_change(&s, (uint64_t)rand() % 12);
        }
    }
}

TEST(a_long_history_is_of_smaller_parameters)
{
    struct ht_shards s = ht_shards_even(3);

    ck_assert(ht_shards_fit(&s, 1 << 20));
    ck_assert(!ht_shards_fit(&s, (1 << 20) + 1));
    ck_assert(!ht_shards_fit(&s, UINT64_MAX));
    for (unsigned i = 1; i < HT_SHARDS_CHANGES_MAX; i++)
        ck_assert_int_eq(ht_shards_change(&s, 3 + i % 2, HT_SHARDS_NONE), 0);
    ck_assert(ht_shards_fit(&s, 1 << 16));
    ck_assert(!ht_shards_fit(&s, (1 << 16) + 1));
}

RUN_TESTS("shards")
