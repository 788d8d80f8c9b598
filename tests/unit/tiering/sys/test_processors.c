/* SPDX-License-Identifier: Apache-2.0 */
/* test_processors.c - the kernel says for how long processors were idle. */
#include <check.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/suite.h"
#include "tiering/sys/processors.h"

/* No more than all processors together, however busy the machine is. */
START_TEST(idle_time_is_that_of_processors)
{
    const struct timespec pause = {.tv_nsec = 50000000};
    uint64_t before_ms, after_ms, began_ns = ht_now_ns();

    ck_assert_int_eq(ht_processors_idle_ms(&before_ms), 0);
    nanosleep(&pause, NULL);
    ck_assert_int_eq(ht_processors_idle_ms(&after_ms), 0);
    ck_assert_uint_gt(before_ms, 0);
    ck_assert_uint_ge(after_ms + 1000, before_ms); /* the kernel's figure may go back a little */
    uint64_t most_ms = ((ht_now_ns() - began_ns) / 1000000 + 100) * (uint64_t)sysconf(_SC_NPROCESSORS_CONF);
    ck_assert_uint_le(after_ms, before_ms + most_ms);
}
END_TEST

int main(void)
{
    TCase *tc = tcase_create("processors");
    Suite *suite = suite_create("sys");

    tcase_add_test(tc, idle_time_is_that_of_processors);
    suite_add_tcase(suite, tc);
    return run_all(suite);
}
