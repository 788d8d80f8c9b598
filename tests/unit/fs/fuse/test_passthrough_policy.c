/* SPDX-License-Identifier: Apache-2.0 */
/* Which opens hand a file out. */
#include <check.h>
#include <fcntl.h>
#include <stdlib.h>

#include "fs/fuse/passthrough_policy.h"
#include "tests/support/suite.h"
#include "tiering/base/base.h"

static const struct {
    struct ht_passthrough_case c;
    bool wanted;
} cases[] = {
    {{.parameter = true, .bytes = 1}, true},
    {{.pinned = true, .bytes = 1}, true},
    {{.parameter = true, .pinned = true, .bytes = 1ull << 40}, true},
    {{.bytes = 1}, false},
    {{.parameter = true}, false},
    {{.pinned = true, .bytes = 1, .direct = true}, false},
    {{.parameter = true, .bytes = 1, .opens = 1}, false},
    {{.pinned = true, .bytes = 1, .opens = 3}, false},
};

START_TEST(wanted)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++)
        ck_assert_int_eq(ht_passthrough_wanted(&cases[i].c), cases[i].wanted);
}
END_TEST

START_TEST(stores)
{
    ck_assert(ht_passthrough_may_store(O_RDWR | O_TRUNC));
    ck_assert(!ht_passthrough_may_store(O_WRONLY));
    ck_assert(!ht_passthrough_may_store(O_RDONLY | O_DIRECT));
}
END_TEST

START_TEST(size)
{
    ck_assert(!ht_passthrough_may_resize(true, 8, 7));
    ck_assert(!ht_passthrough_may_resize(true, 8, 0));
    ck_assert(ht_passthrough_may_resize(true, 8, 8));
    ck_assert(ht_passthrough_may_resize(true, 8, 9));
    ck_assert(ht_passthrough_may_resize(false, 8, 0));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("passthrough_policy");
    TCase *tc = tcase_create("policy");

    tcase_add_test(tc, wanted);
    tcase_add_test(tc, stores);
    tcase_add_test(tc, size);
    suite_add_tcase(suite, tc);
    return run_all(suite);
}
