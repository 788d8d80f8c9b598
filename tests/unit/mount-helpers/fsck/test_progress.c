/* SPDX-License-Identifier: Apache-2.0 */
/* A pass that takes long says so, and which one it is; a short one says nothing. */
#include <poll.h>

#include "mount-helpers/fsck/fsck.h"
#include "tests/support/dev.h"
#include "tests/support/suite.h"

enum { FOREVER_MS = 3600 * 1000, WAIT_MS_MAX = 60 * 1000 };

static struct ht_fsck f;
static int from_stderr;

static void redirect(void)
{
    int ends[2];

    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    close(ends[1]);
    from_stderr = ends[0];
}

static bool said_something(int wait_ms)
{
    struct pollfd p = {.fd = from_stderr, .events = POLLIN};

    return poll(&p, 1, wait_ms) == 1;
}

TEST(a_long_pass_is_told)
{
    char text[4096] = "";
    static uint8_t block[8192];

    ck_assert_int_eq(dev_open_ram(1 << 20, 4096, &f.devs[0]), 0);
    ck_assert_int_eq(ht_dev_read(f.devs[0], 0, block, sizeof(block)), 0);
    redirect();
    f.dev_count = 1;
    f.opt.progress = true;
    ht_fsck_watch_begin(&f, "names", 5);
    ck_assert(said_something(WAIT_MS_MAX));
    ht_fsck_watch_end(&f);
    ck_assert_int_gt(read(from_stderr, text, sizeof(text) - 1), 0);
    ck_assert_msg(strncmp(text, "names: 0 s, 8 KiB read\n", 23) == 0, "%s", text);
    ht_dev_close(f.devs[0]);
}

TEST(a_short_one_and_one_that_nobody_asked_for_are_not)
{
    redirect();
    f.opt.progress = true;
    ht_fsck_watch_begin(&f, "names", FOREVER_MS);
    ht_fsck_watch_clear(&f);
    ht_fsck_watch_end(&f);
    f.opt.progress = false;
    ht_fsck_watch_begin(&f, "names", 0);
    ht_fsck_watch_end(&f);
    ck_assert(!said_something(0));
}

RUN_TESTS("progress")
