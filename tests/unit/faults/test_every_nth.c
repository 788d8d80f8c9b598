/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_every_nth.c - the script of fault_scenario.h again and again: the N-th read, write, flush, allocation or thread
 * fails, once or from then on, for N = 1, 2, 3, ... until the script does not get there any more; requests also on
 * either device of a store of two.
 *
 * HITRAIN_LONG=1 takes every N; else those beyond the first ones are a sample. HITRAIN_FAULT=N looks at one only, and
 * shows messages; HITRAIN_FAULT_KIND=K, too: the row of kinds[], 2 * row, and 1 more for all after it.
 */

#include "tests/support/fault_scenario.h"
#include "tests/support/memory.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tests/support/wrap.h"

enum { REQUESTS = 3 }; /* kinds of a device; after them: */
enum { MEMORY = REQUESTS, THREAD };

static const struct kind {
    const char *name;
    int what; /* enum ht_io_op, MEMORY, THREAD */
    unsigned devices, victim;
} kinds[] = {
    {"read", HT_IO_READ, 1, 0},
    {"write", HT_IO_WRITE, 1, 0},
    {"flush", HT_IO_FLUSH, 1, 0},
    {"allocation", MEMORY, 1, 0},
    {"thread", THREAD, 1, 0},
    {"read of the first of two devices", HT_IO_READ, 2, 0},
    {"write of the first of two devices", HT_IO_WRITE, 2, 0},
    {"flush of the first of two devices", HT_IO_FLUSH, 2, 0},
    {"read of the second of two devices", HT_IO_READ, 2, 1},
    {"write of the second of two devices", HT_IO_WRITE, 2, 1},
    {"flush of the second of two devices", HT_IO_FLUSH, 2, 1},
};

static void arm(struct fault_scenario *p, const struct kind *kind, unsigned nth, bool repeat)
{
    if (kind->what < REQUESTS)
        dev_fail(p->k.dev[kind->victim], (enum ht_io_op)kind->what, nth, repeat);
    else
        wrap_fail(kind->what == MEMORY ? WRAP_MEMORY : WRAP_THREAD, nth, repeat);
}

static bool reached(const struct fault_scenario *p, const struct kind *kind)
{
    struct ht_dev_counters n;

    if (kind->what >= REQUESTS)
        return wrap_reached(kind->what == MEMORY ? WRAP_MEMORY : WRAP_THREAD);
    ht_dev_counters(p->k.dev[kind->victim], &n);
    return kind->what == HT_IO_READ ? n.read_errors : kind->what == HT_IO_WRITE ? n.write_errors : n.flush_errors;
}

/* False: the script ended before the N-th. */
static bool fault_scenario(const struct kind *kind, unsigned nth, bool repeat)
{
    static struct fault_scenario p;

    fault_scenario_begin(&p, kind->devices);
    arm(&p, kind, nth, repeat);
    fault_scenario_run(&p, nth % 3);
    bool was = reached(&p, kind);
    arm(&p, kind, 0, false);
    const char *wrong = fault_scenario_check(&p);
    ck_assert_msg(!wrong, "%s %u fails%s: %s", kind->name, nth, repeat ? " and all after it" : "", wrong);
    return was;
}

#ifdef __SANITIZE_ADDRESS__
enum { ALL = 10, STRIDE = 4 }; /* leaks and strays show in every run */
#else
enum { ALL = 40, STRIDE = 3 };
#endif

TEST_LOOP(every_nth_may_fail, 2 * HT_ARRAY_SIZE(kinds))
{
    const struct kind *kind = &kinds[_i / 2];
    bool repeat = _i % 2;
    unsigned nth = (unsigned)setting("HITRAIN_FAULT", 0), ran = 0;

    if (nth && (unsigned)_i != setting("HITRAIN_FAULT_KIND", (uint64_t)_i))
        return;
    memory_keep(kind->what < REQUESTS);
    fault_scenario_learn();
    if (nth) {
        (void)fault_scenario(kind, nth, repeat);
        return;
    }
    unsigned all = kind->devices > 1 ? 1 : ALL;
    for (nth = 1; fault_scenario(kind, nth, repeat); nth += nth < all || getenv("HITRAIN_LONG") ? 1 : STRIDE)
        ran++;
    ck_assert_uint_gt(ran, kind->what == THREAD ? 1 : 5);
    printf("%u of %u: %s fails%s\n", ran, nth - 1, kind->name, repeat ? " and all after it" : "");
}

int main(void)
{
    /* the daemon logs each failure, thousands of times */
    if (!getenv("HITRAIN_FAULT") && !freopen("/dev/null", "w", stderr))
        return 1;
    return run_tests("every n-th", .timeout_s = getenv("HITRAIN_LONG") ? 3600 : 300);
}
