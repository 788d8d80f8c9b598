/* SPDX-License-Identifier: Apache-2.0 */
/* test_processors.c - the kernel says for how long processors were idle. */
#include <check.h>
#include <sched.h>
#include <time.h>

#include "tests/support/suite.h"
#include "tiering/sys/processors.h"

enum { SLACK_MS = 1000 }; /* the kernel's figure may go back a little */

/* No more than these processors together, however busy the machine is. */
START_TEST(idle_time_is_that_of_processors)
{
    const struct timespec pause = {.tv_nsec = 50000000};
    struct ht_processors p;
    uint64_t before_ms, after_ms, began_ns = ht_now_ns();

    ht_processors_of_thread(&p);
    ck_assert_int_eq(ht_processors_idle_ms(&p, &before_ms), 0);
    nanosleep(&pause, NULL);
    ck_assert_int_eq(ht_processors_idle_ms(&p, &after_ms), 0);
    ck_assert_uint_gt(before_ms, 0);
    ck_assert_uint_ge(after_ms + SLACK_MS, before_ms);
    uint64_t most_ms = ((ht_now_ns() - began_ns) / 1000000 + 100) * ht_processors_count(&p);
    ck_assert_uint_le(after_ms, before_ms + most_ms);
}
END_TEST

/* Each thread has its own; together they have as much idle time as all of them. */
START_TEST(a_thread_counts_those_that_it_may_run_on)
{
    struct ht_processors all, one;
    uint64_t before_ms, ms, after_ms, sum_ms = 0;
    unsigned count = 0;
    cpu_set_t may, set;

    ck_assert_int_eq(sched_getaffinity(0, sizeof(may), &may), 0);
    ht_processors_of_thread(&all);
    ck_assert_uint_eq(ht_processors_count(&all), (unsigned)CPU_COUNT(&may));
    ck_assert_int_eq(ht_processors_idle_ms(&all, &before_ms), 0);
    for (unsigned cpu = 0; cpu < HT_PROCESSORS_MAX; cpu++) {
        if (!CPU_ISSET(cpu, &may))
            continue;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        ck_assert_int_eq(sched_setaffinity(0, sizeof(set), &set), 0);
        ht_processors_of_thread(&one);
        ck_assert_uint_eq(ht_processors_count(&one), 1);
        ck_assert_int_eq(ht_processors_idle_ms(&one, &ms), 0);
        sum_ms += ms;
        count++;
    }
    ck_assert_int_eq(sched_setaffinity(0, sizeof(may), &may), 0);
    ck_assert_int_eq(ht_processors_idle_ms(&all, &after_ms), 0);
    ck_assert_uint_ge(sum_ms + count * SLACK_MS, before_ms);
    ck_assert_uint_le(sum_ms, after_ms + count * SLACK_MS);
}
END_TEST

int main(void)
{
    TCase *tc = tcase_create("processors");
    Suite *suite = suite_create("sys");

    tcase_add_test(tc, idle_time_is_that_of_processors);
    tcase_add_test(tc, a_thread_counts_those_that_it_may_run_on);
    suite_add_tcase(suite, tc);
    return run_all(suite);
}
