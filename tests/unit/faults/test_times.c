/* SPDX-License-Identifier: Apache-2.0 */
/* A commit that lacks memory for the times of many files is refused whole: the log goes on. */
#include "tests/support/wrap.h"
#include "tests/unit/fs/ns/fixture.h"

enum { FILES = 400 };

static void touch_all(void)
{
    char name[16];

    for (unsigned n = 0; n < FILES; n++) {
        snprintf(name, 16, "f%u", n);
        ht_ns_touch(w.ns, find(&w, ROOT, name), true);
    }
}

TEST(a_commit_without_memory_for_times_is_put_off)
{
    bool reached = true, refused = false;
    char name[16];

    wrap_pause(true);
    fixture_new(&w);
    for (unsigned n = 0; n < FILES; n++) {
        snprintf(name, 16, "f%u", n);
        make_file(&w, ROOT, name);
    }
    for (unsigned nth = 1; reached; nth++) {
        fixture_remount(&w); /* buffers are small again */
        touch_all();
        wrap_fail(WRAP_MEMORY, nth, true);
        wrap_pause(false);
        int rc = ht_store_commit(w.s);
        wrap_pause(true);
        reached = wrap_reached(WRAP_MEMORY);
        wrap_fail(WRAP_MEMORY, 0, false);
        ck_assert(rc == 0 || (rc == -ENOMEM && reached));
        refused |= rc == -ENOMEM;
        ck_assert(!ht_store_failed(w.s));
        OK(ht_store_commit(w.s));
    }
    ck_assert(refused);
    fixture_free(&w);
}

RUN_TESTS("times", .timeout_s = 300)
