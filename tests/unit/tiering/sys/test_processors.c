/* SPDX-License-Identifier: Apache-2.0 */
/* test_processors.c - the kernel says for how long processors were idle, and how many a process may use. */
#include <sched.h>
#include <time.h>

#include "tests/support/group.h"
#include "tests/support/suite.h"
#include "tiering/sys/processors.h"

enum { SLACK_MS = 1000 }; /* the kernel's figure may go back a little */

/* No more than these processors together, however busy the machine is. */
TEST(idle_time_is_that_of_processors)
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

/* Each thread has its own; together they have as much idle time as all of them. */
TEST(a_thread_counts_those_that_it_may_run_on)
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

static uint64_t own_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Nothing is left after work, and all after rest. */
TEST(a_quota_of_the_group_counts)
{
    enum { PERCENT = 40, WORK_NS = 100000000 };
    const struct timespec rest = {.tv_nsec = 100000000};
    struct ht_cpu_quota q;
    struct group g;
    cpu_set_t may;

    ck_assert_int_eq(sched_getaffinity(0, sizeof(may), &may), 0);
    ht_quota_find(&q);
    bool free_before = ht_quota_percent(&q) == HT_QUOTA_NONE;
    ck_assert_uint_ge(ht_processors_usable(), 1);
    if (free_before) {
        ck_assert_uint_eq(ht_processors_usable(), (unsigned)CPU_COUNT(&may));
        ck_assert_uint_eq(ht_quota_left_percent(&q, 1), HT_QUOTA_NONE);
    }
    if (!group_enter("cpu", "cpu.cfs_quota_us", "40000", "cpu.max", "40000 100000", &g))
        return;
    ht_quota_find(&q);
    ck_assert_uint_eq(ht_quota_percent(&q), PERCENT);
    ck_assert_uint_eq(ht_processors_usable(), 1);
    (void)ht_quota_left_percent(&q, 1);
    uint64_t began_ns = ht_now_ns();
    for (uint64_t until = own_ns() + WORK_NS; own_ns() < until;)
        continue;
    uint64_t left =
        ht_quota_left_percent(&q, ht_min_u64(ht_now_ns() - began_ns, WORK_NS)); /* as if it was not throttled */
    ck_assert_uint_eq(left, 0);
    began_ns = ht_now_ns();
    nanosleep(&rest, NULL);
    left = ht_quota_left_percent(&q, ht_now_ns() - began_ns);
    ck_assert_uint_gt(left, PERCENT / 2);
    ck_assert_uint_le(left, PERCENT);
    ck_assert(group_write(g.dir, g.v2 ? "cpu.max" : "cpu.cfs_quota_us", g.v2 ? "150000 100000" : "150000"));
    ck_assert_uint_eq(ht_quota_percent(&q), 150);
    ck_assert_uint_eq(ht_processors_usable(), ht_min_u64((unsigned)CPU_COUNT(&may), 2));
    group_leave(&g);
}

RUN_TESTS("sys")
