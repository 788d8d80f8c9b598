/* SPDX-License-Identifier: Apache-2.0 */
/* Where new blocks go, on tables. */

#include "tests/support/suite.h"
#include "tiering/tier/placement.h"

enum { A = 1, B = 2, C = 4, NONE = -1, WHOLE = HT_PLACE_WHOLE, SLACK = HT_PLACE_SLACK_BLOCKS };
/* Of 100 blocks; shares are sixths. */
#define CREDIT(free, sixths, blocks)                                                         \
    {                                                                                        \
        100, free, .share = WHOLE / 6 * (sixths), .credit = (int64_t)(blocks)*HT_PLACE_WHOLE \
    }
#define SHARE(free, sixths) CREDIT(free, sixths, 0)

static const struct case_ {
    const char *what;
    struct ht_place_device device[3];
    uint32_t blocks;
    struct ht_alloc_hint hint;
    int want;
} cases[] = {
    {"the first of equals", {{100, 50}, {100, 50}, {100, 50}}, 10, {-1}, 0},
    {"the largest free share", {{100, 50}, {100, 51}, {100, 50}}, 10, {-1}, 1},
    {"the share counts, not the number", {{100, 60}, {1000, 500}, {0}}, 10, {-1}, 0},
    {"shares of huge devices do not overflow", {{1ull << 48, 1ull << 47}, {1ull << 48, (1ull << 47) + 1}}, 10, {-1}, 1},
    {"enough in one comes first", {{100, 9}, {1000, 10}, {0}}, 10, {-1}, 1},
    {"pieces begin where most is", {{100, 9}, {1000, 8}, {0}}, 10, {-1}, 0},
    {"nothing anywhere", {{100, 0}, {100, 0}, {0}}, 1, {-1}, NONE},
    {"who wants to stay stays", {{100, 50}, {100, 26}, {100, 50}}, 10, {1}, 1},
    {"but not when it is unfair", {{100, 50}, {100, 24}, {100, 50}}, 10, {1}, 0},
    {"nor when there is no room", {{100, 50}, {100, 9}, {100, 12}}, 10, {1}, 0},
    {"a hint beyond the table is none", {{100, 50}, {100, 60}, {100, 50}}, 10, {3}, 1},
    {"not on what is not there", {{100, 90, .offline = true}, {100, 10}, {0}}, 10, {0}, 1},
    {"pieces neither", {{100, 90, .offline = true}, {100, 10}, {0}}, 20, {0}, 1},
    {"a failing device is the last resort", {{100, 90, .failing = true}, {100, 10}, {0}}, 10, {0}, 1},
    {"but one", {{100, 90, .failing = true}, {100, 9}, {0}}, 10, {-1}, 0},
    {"to be avoided is worse than failing", {{100, 90}, {100, 50, .failing = true}, {0}}, 10, {0, A}, 1},
    {"all avoided: as ever", {{100, 90}, {100, 95}, {0}}, 10, {-1, A | B | C}, 1},
    {"the largest share first", {SHARE(20, 1), SHARE(20, 3), SHARE(90, 2)}, 10, {-1}, 1},
    {"credit counts, too", {SHARE(20, 1), CREDIT(20, 3, -21), SHARE(90, 2)}, 10, {-1}, 2},
    {"equal ones: the first", {SHARE(20, 2), SHARE(90, 2), SHARE(20, 2)}, 10, {-1}, 0},
    {"without a share last", {SHARE(20, 6), {100, 90}, {100, 100}}, 10, {-1}, 0},
    {"though it has credit", {CREDIT(20, 6, -100), {100, 90, .credit = 1 << 30}, {100, 100}}, 10, {-1}, 0},
    {"but if there is no other room", {SHARE(9, 6), {100, 90}, {100, 100}}, 10, {-1}, 2},
    {"a share does not help a failing one", {{100, 90, .failing = true, .share = WHOLE}, {100, 10}, {0}}, 10, {-1}, 1},
    {"nor one to be avoided", {SHARE(50, 6), {100, 10}, {0}}, 10, {-1, A}, 1},
    {"content stays whatever the shares", {CREDIT(20, 1, -9999), SHARE(90, 5), {0}}, 10, {0}, 0},
    {"and where there is none", {SHARE(20, 1), SHARE(90, 5), {100, 20}}, 10, {2}, 2},
    {"within the slack it need not move", {CREDIT(20, 1, -SLACK), SHARE(90, 5), {0}}, 10, {0, 0, true}, 0},
    {"beyond that it does", {CREDIT(20, 1, -SLACK - 1), SHARE(90, 5), {0}}, 10, {0, 0, true}, 1},
    {"off a device without a share, too", {{100, 50}, SHARE(90, 6), {0}}, 10, {0, 0, true}, 1},
    {"and off a failing one", {{100, 50, .failing = true, .share = WHOLE}, {100, 50}, {0}}, 10, {0, 0, true}, 1},
    {"fast ones first", {{100, 90, .capacity = true}, {100, 10}, {0}}, 10, {-1}, 1},
    {"whatever the shares", {{100, 90, .share = WHOLE - 1, .capacity = true}, SHARE(10, 0), {0}}, 10, {-1}, 1},
    {"without room there: capacity", {{100, 90, .capacity = true}, {100, 9}, {0}}, 10, {-1}, 0},
    {"it does not stay there", {{100, 90, .capacity = true}, {100, 10}, {0}}, 10, {0}, 1},
    {"unless there is no room elsewhere", {{100, 90, .capacity = true}, {100, 9}, {0}}, 10, {0}, 0},
    {"capacity before a failing fast one", {{100, 90, .failing = true}, {100, 10, .capacity = true}, {0}}, 10, {-1}, 1},
    {"and before a failing one of its class",
     {{100, 90, .failing = true, .capacity = true}, {100, 10, .capacity = true}, {0}},
     10,
     {-1},
     1},
    {"one to be avoided is worse", {{100, 90, .capacity = true}, {100, 10, .failing = true}, {0}}, 10, {-1, A}, 1},
    {"pieces go where most is", {{100, 9, .capacity = true}, {100, 8}, {0}}, 10, {-1}, 0},
    {"all paths: by free shares", {{100, 90, .capacity = true}, {100, 10}, {0}}, 10, {-1, .all_paths = true}, 0},
    {"all paths: by shares",
     {{100, 20, .share = WHOLE / 4 * 3, .capacity = true}, {100, 90, .share = WHOLE / 4}, {0}},
     10,
     {-1, .all_paths = true},
     0},
    {"all paths: it stays", {{100, 90, .capacity = true}, {100, 90}, {0}}, 10, {0, .all_paths = true}, 0},
    {"all paths: not on a loaded one", {{100, 90, .capacity = true}, {100, 10}, {0}}, 10, {0, A, .all_paths = true}, 1},
    {"not without room", {CREDIT(20, 1, -SLACK - 1), SHARE(9, 5), {0}}, 10, {0, 0, true}, 0},
};

TEST_LOOP(every_case, HT_ARRAY_SIZE(cases))
{
    const struct case_ *c = &cases[_i];

    ck_assert_msg(ht_place_choose(c->device, 3, c->blocks, c->hint) == c->want, "%s", c->what);
}

TEST(equal_devices_fill_up_in_turn_and_unequal_ones_in_proportion)
{
    struct ht_place_device d[2] = {{1000, 1000}, {3000, 3000}};

    for (unsigned i = 0; i < 3600; i++) {
        int at = ht_place_choose(d, 2, 1, HT_ALLOC_HINT_NONE);
        ck_assert_int_ge(at, 0);
        d[at].free_blocks--;
        uint64_t taken[2] = {1000 - d[0].free_blocks, 3000 - d[1].free_blocks};
        ck_assert_uint_le(taken[0] * 3, taken[1] + 3);
        ck_assert_uint_le(taken[1], taken[0] * 3 + 3);
    }
}

/* Places so many pieces; the number that each device gets. */
static void place(struct ht_place_device d[3], unsigned pieces, uint32_t blocks, unsigned out_got[3])
{
    memset(out_got, 0, 3 * sizeof(out_got[0]));
    for (unsigned i = 0; i < pieces; i++) {
        int at = ht_place_choose(d, 3, blocks, HT_ALLOC_HINT_NONE);
        ck_assert_int_ge(at, 0);
        ht_place_charge(d, 3, blocks, HT_ALLOC_HINT_NONE, at);
        d[at].free_blocks -= blocks;
        out_got[at]++;
    }
}

static struct ht_place_device with_share(double share)
{
    return (struct ht_place_device){1 << 30, 1 << 30, .share = (uint32_t)(share * WHOLE)};
}

TEST(every_few_pieces_are_in_proportion_to_the_shares)
{
    struct ht_place_device d[3] = {with_share(.625), with_share(.25), with_share(.125)};
    unsigned got[3];

    for (unsigned i = 0; i < 100; i++) {
        place(d, 8, 256, got);
        ck_assert_msg(got[0] == 5 && got[1] == 2 && got[2] == 1, "%u: %u %u %u", i, got[0], got[1], got[2]);
    }
}

TEST(the_class_capacity_takes_no_part_until_the_others_are_full)
{
    struct ht_place_device d[3] = {with_share(.5), with_share(.25), with_share(.25)};
    unsigned got[3];

    d[0].capacity = true;
    place(d, 1000, 256, got);
    ck_assert_msg(got[0] == 0 && got[1] == 500 && got[2] == 500, "%u %u %u", got[0], got[1], got[2]);
    ck_assert_int_eq(d[0].credit, 0);
    d[1].free_blocks = d[2].free_blocks = 255;
    place(d, 10, 256, got);
    ck_assert_uint_eq(got[0], 10);
    d[1].free_blocks = d[2].free_blocks = 1 << 30;
    place(d, 8, 256, got);
    ck_assert_msg(got[0] == 0 && got[1] == 4 && got[2] == 4, "%u %u %u", got[0], got[1], got[2]);
}

TEST(who_was_full_does_not_get_everything_afterwards)
{
    struct ht_place_device d[3] = {with_share(.5), with_share(.25), with_share(.25)};
    unsigned got[3];

    d[0].free_blocks = 0;
    place(d, 1000, 256, got);
    ck_assert(got[0] == 0 && got[1] == 500 && got[2] == 500);
    d[0].free_blocks = 1 << 30;
    place(d, 8, 256, got);
    ck_assert_msg(got[0] == 4 && got[1] == 2 && got[2] == 2, "%u %u %u", got[0], got[1], got[2]);
}

TEST(who_fails_gets_nothing_and_the_others_keep_their_proportion)
{
    struct ht_place_device d[3] = {with_share(.5), with_share(.375), with_share(.125)};
    unsigned got[3];

    d[0].failing = true;
    place(d, 400, 256, got);
    ck_assert_msg(got[0] == 0 && got[1] == 300 && got[2] == 100, "%u %u %u", got[0], got[1], got[2]);
}

/* A step rewrites all ranges in the same order. Returns how many moved. */
static unsigned step(struct ht_place_device d[3], uint8_t device[], unsigned ranges, unsigned out_on[3])
{
    unsigned moved = 0;

    memset(out_on, 0, 3 * sizeof(out_on[0]));
    for (unsigned i = 0; i < ranges; i++) {
        struct ht_alloc_hint hint = {.device = device[i], .movable = true};
        int at = ht_place_choose(d, 3, 768, hint);
        ht_place_charge(d, 3, 768, hint, at);
        moved += at != device[i];
        device[i] = (uint8_t)at;
        out_on[at]++;
    }
    return moved;
}

TEST(rewritten_ranges_lie_by_shares_after_one_step_and_then_stay)
{
    enum { RANGES = 4000, WINDOW = 40 };
    struct ht_place_device d[3] = {with_share(.75), with_share(.25), with_share(0)};
    static uint8_t device[RANGES]; /* all on the first */
    unsigned on[3], moved = step(d, device, RANGES, on);

    ck_assert_msg(on[0] > 2980 && on[0] < 3020 && on[1] + on[0] == RANGES, "%u %u %u", on[0], on[1], on[2]);
    ck_assert_uint_eq(moved, on[1]);
    for (unsigned i = 0; i + WINDOW <= RANGES; i += WINDOW) {
        unsigned here = 0;
        for (unsigned k = 0; k < WINDOW; k++)
            here += device[i + k] == 1;
        ck_assert_msg(i == 0 || (here >= WINDOW / 4 - 2 && here <= WINDOW / 4 + 2), "ranges from %u: %u", i, here);
    }
    for (unsigned n = 0; n < 50; n++)
        ck_assert_uint_le(step(d, device, RANGES, on), 4);
    d[0].share = WHOLE / 4;
    d[1].share = WHOLE - WHOLE / 4;
    moved = step(d, device, RANGES, on);
    ck_assert_msg(on[0] > 980 && on[0] < 1020, "%u %u", on[0], on[1]);
    ck_assert_uint_le(moved, 2020); /* none moves in vain */
    for (unsigned n = 0; n < 50; n++)
        ck_assert_uint_le(step(d, device, RANGES, on), 4);
}

RUN_TESTS("placement")
