/* SPDX-License-Identifier: Apache-2.0 */
/* A pass that takes long says so, and which one it is; a short one says nothing. */
#include <poll.h>

#include "mount-helpers/fsck/fsck.h"
#include "tests/support/dev.h"
#include "tests/support/suite.h"

enum { FOREVER_MS = 3600 * 1000, WAIT_MS_MAX = 60 * 1000 };

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
    struct ht_dev *dev;
    struct ht_pass_watch w;
    char text[4096] = "";
    static uint8_t block[8192];

    ck_assert_int_eq(dev_open_ram(1 << 20, 4096, &dev), 0);
    ck_assert_int_eq(ht_dev_read(dev, 0, block, sizeof(block)), 0);
    redirect();
    ht_pass_watch_begin(&w, true, 5, "names", &dev, 1);
    ck_assert(said_something(WAIT_MS_MAX));
    ht_pass_watch_end(&w);
    ck_assert_int_gt(read(from_stderr, text, sizeof(text) - 1), 0);
    ck_assert_msg(strncmp(text, "names: 0 s, 8 KiB read\n", 23) == 0, "%s", text);
    ht_dev_close(dev);
}

TEST(a_short_one_and_one_that_nobody_asked_for_are_not)
{
    struct ht_pass_watch w;

    redirect();
    ht_pass_watch_begin(&w, true, FOREVER_MS, "names", NULL, 0);
    ht_pass_watch_clear(&w);
    ht_pass_watch_end(&w);
    ht_pass_watch_begin(&w, false, 0, "names", NULL, 0);
    ht_pass_watch_end(&w);
    ck_assert(!said_something(0));
}

RUN_TESTS("progress")
