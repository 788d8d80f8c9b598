/* SPDX-License-Identifier: Apache-2.0 */
/* test_space_map.c - the map of one device: its index against naive bitmaps, and how free space stays together. */
#include "tests/support/suite.h"
#include "tiering/space/space_map.h"

enum { G = HT_GROUP_BLOCKS };

/* --------------------------------------------------------------- index */

TEST(classes_cover_all_lengths_in_order)
{
    for (unsigned n = 1; n <= G; n++) {
        unsigned class = ht_free_class_of(n), with = ht_free_class_with(n);
        ck_assert_uint_le(ht_free_class_min(class), n);
        ck_assert(class == HT_FREE_LARGEST || ht_free_class_min(class + 1) > n);
        ck_assert_uint_ge(ht_free_class_min(with), n);
        ck_assert(with == 0 || ht_free_class_min(with - 1) < n);
        /* a run of its class is at most a quarter longer than the shortest */
        ck_assert_uint_le(n - ht_free_class_min(class), ht_free_class_min(class) / 4);
    }
    ck_assert_uint_eq(ht_free_class_of(G), HT_FREE_LARGEST);
}

enum { GROUPS_MAX = 20000 };
struct naive {
    uint64_t groups;
    uint8_t class[GROUPS_MAX];
};

static uint64_t naive_next(const struct naive *n, unsigned class, uint64_t from)
{
    for (uint64_t g = from; g < n->groups; g++)
        if (n->class[g] == class)
            return g;
    return HT_NO_GROUP;
}

static uint64_t naive_last(const struct naive *n, unsigned class)
{
    for (uint64_t g = n->groups; g-- > 0;)
        if (n->class[g] == class)
            return g;
    return HT_NO_GROUP;
}

static unsigned naive_whole_below(const struct naive *n, uint64_t group)
{
    unsigned below = 0;

    while ((group - below) % 64 && n->class[group - below - 1] == HT_FREE_WHOLE)
        below++;
    return below;
}

/* Devices of one word, of two levels and of three. */
TEST_LOOP(the_index_finds_what_a_naive_one_finds, 7)
{
    static const uint64_t sizes[] = {1, 63, 64, 65, 4096, 4097, GROUPS_MAX};
    static struct naive n;
    struct ht_free_index x;

    srand((unsigned)_i);
    n.groups = sizes[_i];
    memset(n.class, HT_FREE_WHOLE, sizeof(n.class));
    ck_assert_int_eq(ht_free_index_init(&x, n.groups), 0);
    for (unsigned step = 0; step < 3000; step++) {
        uint64_t g = (uint64_t)rand() % n.groups, from = (uint64_t)rand() % n.groups;
        /* often whole, often in few classes: words become empty and full */
        unsigned longest = rand() % 3 ? 1 + (unsigned)rand() % 3 : (unsigned)rand() % (G + 1);
        bool whole = rand() % 4 == 0;
        ht_free_index_set(&x, g, whole, longest);
        n.class[g] = (uint8_t)(whole ? HT_FREE_WHOLE : longest ? ht_free_class_of(longest) : HT_FREE_NONE);
        ht_free_index_verify(&x, g, whole, longest);
        ck_assert_uint_eq(ht_free_index_longest(&x, g), whole ? G : longest);
        unsigned class = rand() % 2 ? HT_FREE_WHOLE : (unsigned)rand() % 3;
        ck_assert_uint_eq(ht_free_index_next(&x, class, from), naive_next(&n, class, from));
        ck_assert_uint_eq(ht_free_index_last(&x, class), naive_last(&n, class));
        ck_assert_uint_eq(ht_free_index_whole_below(&x, from), naive_whole_below(&n, from));
    }
    ht_free_index_destroy(&x);
}

/* ---------------------------------------------------------------- runs */

TEST(odd_sizes_leave_no_rest_in_a_group)
{
    enum { GROUPS = 90, SIZE = 180 };
    struct ht_space_map m;
    struct ht_run run;

    ck_assert_int_eq(ht_space_map_init(&m, GROUPS * G), 0);
    /* a rest is left at the end of the device only */
    for (unsigned i = 0; i < GROUPS * G / SIZE - 1; i++) {
        ck_assert_msg(ht_space_map_take(&m, SIZE, &run), "request %u", i);
        ht_space_map_verify(&m);
    }
    ck_assert_uint_lt(m.free_blocks, 2 * SIZE);
    ht_space_map_destroy(&m);
}

TEST(content_in_order_lies_in_order)
{
    static const uint32_t sizes[] = {16, 3, 100, 200, 255, 7, 64};
    struct ht_space_map m;
    struct ht_run run, last = {0, 0};

    ck_assert_int_eq(ht_space_map_init(&m, 40 * G), 0);
    for (unsigned i = 0; i < 40; i++) {
        ck_assert(ht_space_map_take(&m, sizes[i % HT_ARRAY_SIZE(sizes)], &run));
        ck_assert(i == 0 || run.block == last.block + last.blocks);
        last = run;
    }
    ht_space_map_destroy(&m);
}

TEST(an_index_that_was_deferred_catches_up)
{
    struct ht_space_map m, n;

    ck_assert_int_eq(ht_space_map_init(&m, 1000 * G - 5), 0);
    ck_assert_int_eq(ht_space_map_init(&n, 1000 * G - 5), 0);
    srand(3);
    ht_space_map_defer_index(&m, true);
    for (uint64_t at = 0, len; at < 400 * G; at += len + (unsigned)rand() % 300) {
        len = 1 + (unsigned)rand() % 400;
        ht_space_map_set(&m, at, len, true);
        ht_space_map_set(&n, at, len, true);
    }
    ht_space_map_defer_index(&m, false);
    ck_assert_uint_eq(ht_space_map_verify(&m), ht_space_map_verify(&n));
    ck_assert_int_eq(memcmp(m.index.count, n.index.count, sizeof(m.index.count)), 0);
    ht_space_map_destroy(&m);
    ht_space_map_destroy(&n);
}

TEST(large_requests_keep_away_from_small_ones)
{
    enum { GROUPS = 200, BIG = 90, SMALL = 600 };
    static struct ht_run small[SMALL];
    struct ht_space_map m;
    struct ht_run run;

    ck_assert_int_eq(ht_space_map_init(&m, GROUPS * G), 0);
    for (unsigned i = 0; i < SMALL; i++) {
        ck_assert(ht_space_map_take(&m, 16 + i % 5, &small[i]));
        if (i % (SMALL / BIG) == 0)
            ck_assert(ht_space_map_take(&m, G, &run) && run.block % G == 0);
    }
    /* all small ones lie in as many groups as they need */
    ck_assert_uint_ge(m.index.count[HT_FREE_WHOLE], GROUPS - SMALL / (SMALL / BIG) - (SMALL * 18 + G - 1) / G - 1);
    for (unsigned i = 0; i < SMALL; i++)
        ht_space_map_set(&m, small[i].block, small[i].blocks, false);
    ck_assert_uint_eq(m.index.count[HT_FREE_WHOLE], GROUPS - SMALL / (SMALL / BIG));
    ht_space_map_destroy(&m);
}

TEST(a_large_request_takes_a_run_across_groups_when_no_group_is_whole)
{
    struct ht_space_map m;
    struct ht_run run;

    ck_assert_int_eq(ht_space_map_init(&m, 4 * G), 0);
    ht_space_map_set(&m, 0, 100, true);
    ht_space_map_set(&m, 100 + G, 2 * G, true);
    ht_space_map_set(&m, 100 + 3 * G, 5, true);
    ck_assert(ht_space_map_take(&m, G, &run));
    ck_assert_uint_eq(run.block, 100);
    ck_assert(!ht_space_map_take(&m, G, &run));
    ck_assert(!ht_space_map_take(&m, G - 104, &run));
    ck_assert(ht_space_map_take(&m, G - 105, &run));
    ht_space_map_verify(&m);
    ht_space_map_destroy(&m);
}

TEST(a_close_run_is_taken_before_a_longer_one)
{
    static const struct ht_run holes[] = {{3 * G + 20, 90}, {7 * G + 200, 100}, {11 * G, 40}, {13 * G + 5, 36}};
    struct ht_space_map m;
    struct ht_run run;

    ck_assert_int_eq(ht_space_map_init(&m, 20 * G), 0);
    ht_space_map_set(&m, 0, 20 * G, true);
    for (size_t i = 0; i < HT_ARRAY_SIZE(holes); i++)
        ht_space_map_set(&m, holes[i].block, holes[i].blocks, false);
    ck_assert(ht_space_map_take(&m, 38, &run) && run.block == 11 * G);
    ck_assert(ht_space_map_take(&m, 98, &run) && run.block == 7 * G + 200); /* ends in the next group */
    ck_assert(ht_space_map_take(&m, 36, &run) && run.block == 13 * G + 5);
    ck_assert(ht_space_map_take(&m, 64, &run) && run.block == 3 * G + 20);
    ht_space_map_destroy(&m);
}

/* One block is taken behind each 16 free ones: out is full in the middle of the device, and never of a group. */
TEST(each_free_run_is_discarded_once)
{
    enum { GROUPS = 64, RUN = 16, MAX = 64 };
    struct ht_space_map m;
    struct ht_run run[MAX];
    uint64_t from = 0, discarded = 0;

    ck_assert_int_eq(ht_space_map_init(&m, GROUPS * G), 0);
    for (uint64_t b = RUN; b < GROUPS * G; b += RUN + 1)
        ht_space_map_set(&m, b, 1, true);
    uint64_t free_blocks = m.free_blocks;
    while (from != HT_NO_GROUP) {
        unsigned n = ht_space_map_take_freed(&m, true, &from, GROUPS * G, run, MAX);
        for (unsigned i = 0; i < n; i++) {
            discarded += run[i].blocks;
            ht_space_map_set(&m, run[i].block, run[i].blocks, false);
        }
    }
    ck_assert_uint_gt(discarded, free_blocks * 9 / 10);
    ck_assert_uint_le(discarded, free_blocks);
    ht_space_map_destroy(&m);
}

TEST_LOOP(pieces_are_the_longest_first, 2)
{
    struct ht_space_map m;
    struct ht_run out[G] = {{0}};

    ck_assert_int_eq(ht_space_map_init(&m, 4 * G), 0);
    ht_space_map_set(&m, 0, 4 * G, true);
    for (uint64_t b = 0; b < G; b += 2)
        ht_space_map_set(&m, b, 1, false);
    ht_space_map_set(&m, 2 * G - 30, 60, false);
    ht_space_map_set(&m, 3 * G + 10, 40, false);
    ck_assert(!ht_space_map_take(&m, 200, out));
    ck_assert_uint_eq(ht_space_map_take_pieces(&m, _i ? 200 : 70, out), _i ? 102 : 1);
    ck_assert_uint_eq(out[0].block, 2 * G - 30);
    ck_assert_uint_eq(out[0].blocks, 60);
    ck_assert_uint_eq(out[1].blocks, _i ? 40 : 0); /* or the caller finds the closest run for the rest */
    for (unsigned i = 2; _i && i < 102; i++)
        ck_assert_uint_eq(out[i].blocks, 1);
    ck_assert_uint_eq(m.free_blocks, _i ? 28 : 168);
    ht_space_map_verify(&m);
    ht_space_map_destroy(&m);
}

/* --------------------------------------------------------------- churn */

enum { CHURN_GROUPS = 2048, LIVE_MAX = 4096 };

struct churn {
    struct ht_space_map map;
    struct {
        struct ht_run run[G];
        unsigned n;
    } * live;
    unsigned count;
    uint64_t requests, runs;
};

static uint32_t next_random(void)
{
    return (uint32_t)rand();
}

static void churn_take(struct churn *c, uint32_t blocks)
{
    struct ht_run *run = c->live[c->count].run;
    unsigned n = 0;

    ck_assert_uint_lt(c->count, LIVE_MAX);
    for (uint32_t left = blocks; left > 0;) {
        unsigned got = ht_space_map_take(&c->map, left, run + n) ? 1 : ht_space_map_take_pieces(&c->map, left, run + n);
        for (unsigned i = 0; i < got; i++)
            left -= run[n + i].blocks;
        n += got;
    }
    c->live[c->count++].n = n;
    c->requests++;
    c->runs += n;
}

static void churn_free(struct churn *c, unsigned i)
{
    for (unsigned k = 0; k < c->live[i].n; k++)
        ht_space_map_set(&c->map, c->live[i].run[k].block, c->live[i].run[k].blocks, false);
    c->live[i] = c->live[--c->count];
}

/* Sizes of a mix: of ten requests so many are whole, so many compressed chunks, and the rest up to 64 KiB. */
static const struct mix {
    const char *name;
    unsigned whole, odd;
    unsigned share_min;      /* of the free space, in per cent: in runs of 1 MiB */
    unsigned runs_mille_max; /* runs for 1,000 requests */
} mixes[] = {
    {"whole chunks and small ones", 8, 0, 90, 1010},
    {"whole, compressed and small", 5, 3, 50, 1050},
    {"compressed chunks", 0, 10, 20, 1050},
};

static uint32_t size_of_mix(const struct mix *mix)
{
    unsigned pick = next_random() % 10;

    if (pick < mix->whole)
        return G;
    return pick < mix->whole + mix->odd ? 130 + next_random() % 111 : 1 + next_random() % 16;
}

/* Copy-on-write at 90 % full: new content first, then an old piece goes. */
TEST_LOOP(free_space_stays_together_under_churn, HT_ARRAY_SIZE(mixes))
{
    const struct mix *mix = &mixes[_i];
    struct churn c = {.live = calloc(LIVE_MAX, sizeof(*c.live))};
    uint64_t most = (uint64_t)CHURN_GROUPS * G / 10 * 9;

    ck_assert_ptr_nonnull(c.live);
    srand(7);
    ck_assert_int_eq(ht_space_map_init(&c.map, CHURN_GROUPS * G), 0);
    for (unsigned step = 0; step < 120000; step++) {
        churn_take(&c, size_of_mix(mix));
        while ((uint64_t)CHURN_GROUPS * G - c.map.free_blocks > most)
            churn_free(&c, next_random() % c.count);
        if (step == 60000)
            c.requests = c.runs = 0;
    }
    ht_space_map_verify(&c.map);
    uint64_t whole = c.map.index.count[HT_FREE_WHOLE] * G, share = whole * 100 / c.map.free_blocks;
    uint64_t mille = c.runs * 1000 / c.requests;
    printf("%s: %llu %% of the free space in whole MiB, %llu runs for 1,000 requests\n", mix->name,
           (unsigned long long)share, (unsigned long long)mille);
    ck_assert_uint_ge(share, mix->share_min);
    ck_assert_uint_le(mille, mix->runs_mille_max);
    ht_space_map_destroy(&c.map);
    free(c.live);
}

/* Also beside blocks that a device discards, in a closed group, and in an index that was deferred. */
TEST(sparse_groups_are_those_in_which_few_blocks_are_taken)
{
    enum { FEW = HT_SPARSE_TAKEN_MAX };
    struct ht_space_map m;
    struct ht_run run[G];
    uint64_t from = 0;

    ck_assert_int_eq(ht_space_map_init(&m, 9 * G + FEW), 0); /* the last group is short */
    ck_assert_uint_eq(m.index.count[HT_FREE_SPARSE], 0);
    ck_assert_uint_eq(ht_free_index_next(&m.index, HT_FREE_SPARSE, 0), HT_NO_GROUP);
    ht_space_map_set(&m, 9 * G, 1, true);
    ck_assert_uint_eq(m.index.count[HT_FREE_SPARSE], 0);
    ht_space_map_set(&m, 3 * G - 1, FEW + 1, true); /* one block in group 2 */
    ht_space_map_set(&m, 7 * G + 5, FEW + 1, true);
    ck_assert_uint_eq(m.index.count[HT_FREE_SPARSE], 2);
    ck_assert_uint_eq(ht_free_index_next(&m.index, HT_FREE_SPARSE, 0), 2);
    ck_assert_uint_eq(ht_free_index_next(&m.index, HT_FREE_SPARSE, 3), 3);
    ck_assert_uint_eq(ht_free_index_next(&m.index, HT_FREE_SPARSE, 4), HT_NO_GROUP);
    ht_space_map_set(&m, 7 * G + 7, 1, false);
    ck_assert_uint_eq(ht_free_index_next(&m.index, HT_FREE_SPARSE, 4), 7);
    ht_space_map_set_closed(&m, 7, true);
    ck_assert_uint_eq(m.index.count[HT_FREE_SPARSE], 3);
    ht_space_map_set_closed(&m, 7, false);
    ht_space_map_note_freed(&m, 7 * G + 100, 1);
    unsigned n = ht_space_map_take_freed(&m, false, &from, 2 * G, run, G);
    ck_assert_uint_ge(n, 1);
    ck_assert_uint_eq(m.index.count[HT_FREE_SPARSE], 2);
    ht_space_map_verify(&m);
    for (unsigned i = 0; i < n; i++)
        ht_space_map_set(&m, run[i].block, run[i].blocks, false);
    ck_assert_uint_eq(m.index.count[HT_FREE_SPARSE], 3);
    ht_space_map_set(&m, 2 * G, G - 1, true);
    ht_space_map_set(&m, 3 * G, FEW, false);
    ck_assert_uint_eq(ht_free_index_next(&m.index, HT_FREE_SPARSE, 0), 7);
    ht_space_map_defer_index(&m, true);
    ht_space_map_set(&m, 5 * G + 1, 3, true);
    ht_space_map_defer_index(&m, false);
    ck_assert_uint_eq(ht_free_index_next(&m.index, HT_FREE_SPARSE, 0), 5);
    ht_space_map_verify(&m);
    ht_space_map_destroy(&m);
}

RUN_TESTS("space_map", .timeout_s = 120)
