/* SPDX-License-Identifier: Apache-2.0 */
/* Where new blocks go, on tables. */
#include <check.h>
#include <stdlib.h>

#include "tests/support/suite.h"
#include "tiering/tier/placement.h"

enum { A = 1, B = 2, C = 4, NONE = -1 };

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
};

START_TEST(every_case)
{
    const struct case_ *c = &cases[_i];

    ck_assert_msg(ht_place_choose(c->device, 3, c->blocks, c->hint) == c->want, "%s", c->what);
}
END_TEST

START_TEST(equal_devices_fill_up_in_turn_and_unequal_ones_in_proportion)
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
END_TEST

int main(void)
{
    Suite *s = suite_create("placement");
    TCase *t = tcase_create("placement");

    tcase_add_loop_test(t, every_case, 0, (int)HT_ARRAY_SIZE(cases));
    tcase_add_test(t, equal_devices_fill_up_in_turn_and_unequal_ones_in_proportion);
    suite_add_tcase(s, t);
    return run_all(s);
}
