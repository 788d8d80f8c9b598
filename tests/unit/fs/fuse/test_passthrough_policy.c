/* SPDX-License-Identifier: Apache-2.0 */
/* Which opens hand a file out. */
#include <fcntl.h>

#include "fs/fuse/passthrough_priv.h"
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
    {{.asked = true, .bytes = 1}, true},
    {{.asked = true, .lent = true, .bytes = 1}, true},
    {{.asked = true, .lent = true, .bytes = 1, .direct = true}, false},
    {{.asked = true, .lent = true, .bytes = 1, .opens = 1}, false},
    {{.asked = true, .lent = true, .bytes = 1, .frozen = true}, false},
    {{.asked = true, .lent = true}, false},
    {{.parameter = true, .lent = true, .bytes = 1}, false},
    {{.parameter = true, .pinned = true, .lent = true, .bytes = 1}, false},
};

TEST(wanted)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++)
        ck_assert_int_eq(ht_passthrough_wanted(&cases[i].c), cases[i].wanted);
}

TEST(stores)
{
    ck_assert(ht_passthrough_may_store(O_RDWR | O_TRUNC));
    ck_assert(!ht_passthrough_may_store(O_WRONLY));
    ck_assert(!ht_passthrough_may_store(O_RDONLY | O_DIRECT));
}

TEST(size)
{
    ck_assert(!ht_passthrough_may_resize(true, 8, 7));
    ck_assert(!ht_passthrough_may_resize(true, 8, 0));
    ck_assert(ht_passthrough_may_resize(true, 8, 8));
    ck_assert(ht_passthrough_may_resize(true, 8, 9));
    ck_assert(ht_passthrough_may_resize(false, 8, 0));
}

RUN_TESTS("passthrough_policy")
