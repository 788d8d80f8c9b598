/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_points.c - each named fault point (tiering/base/fault.h) fires during the script of fault_scenario.h: in its
 * N-th passage for N = 1, 2, 4, ... until the script does not get there any more, once and from then on. A point that
 * is not reached fails the test.
 *
 * Points on the way through the kernel need a device that is a file. Without O_DIRECT the test omits them, and reports
 * that. HITRAIN_FAULT=name plays one point, and shows the daemon's messages.
 */

#include "tests/support/fault_scenario.h"
#include "tests/support/memory.h"
#include "tests/support/suite.h"
#include "tiering/base/fault.h"

/*
 * ONCE: passes by itself, and would be waited for without end. FILE_ONLY: on the way through the kernel. UNSEEN: no
 * call may fail for it. AFTER_LOSS: comes when the mount before has lost a copy of the log.
 */
enum { ONCE = 1, FILE_ONLY = 2, UNSEEN = 4, AFTER_LOSS = 8 };

static const unsigned traits[HT_FAULT_COUNT] = {
    [HT_FAULT_IO_DEFERRED] = UNSEEN,
    [HT_FAULT_IO_COOPERATIVE] = UNSEEN,
    [HT_FAULT_IO_FILES] = FILE_ONLY | UNSEEN,
    [HT_FAULT_IO_REGISTER] = FILE_ONLY | UNSEEN,
    [HT_FAULT_IO_CLONE] = FILE_ONLY | UNSEEN,
    [HT_FAULT_IO_COMMANDS] = UNSEEN,
    [HT_FAULT_IO_COMMAND_MEMORY] = FILE_ONLY | UNSEEN,
    [HT_FAULT_IO_SUBMIT] = FILE_ONLY | UNSEEN,
    [HT_FAULT_IO_REFUSED] = FILE_ONLY,
    [HT_FAULT_IO_WAIT] = FILE_ONLY | UNSEEN | ONCE,
    [HT_FAULT_IO_AGAIN] = FILE_ONLY | UNSEEN | ONCE,
    [HT_FAULT_IO_SHORT] = FILE_ONLY | UNSEEN,
    [HT_FAULT_IO_TORN] = FILE_ONLY,
    [HT_FAULT_IO_SILENT] = UNSEEN | ONCE,
    [HT_FAULT_JOURNAL_REFILL] = AFTER_LOSS,
    [HT_FAULT_CACHE_SLOT] = ONCE,
    [HT_FAULT_CACHE_STAGING] = UNSEEN,
};

static void lose_log_copy(struct fault_scenario *p)
{
    ht_fault_arm(HT_FAULT_JOURNAL_WRITE, 1, false);
    ck_assert_int_eq(harness_open(&p->k, 1), 0);
    (void)harness_close(&p->k, false);
    ht_fault_disarm_all();
}

static bool begin(struct fault_scenario *p, unsigned trait, unsigned devices)
{
    if (trait & FILE_ONLY)
        return fault_scenario_begin_file(p);
    fault_scenario_begin(p, devices);
    if (trait & AFTER_LOSS)
        lose_log_copy(p);
    return true;
}

/* Passages; those from nth on failed. */
static unsigned fault_scenario(enum ht_fault_point point, unsigned nth, bool repeat)
{
    static struct fault_scenario p;

    if (!begin(&p, traits[point], 1 + nth % 2))
        return 0;
    ht_fault_arm(point, nth, repeat);
    fault_scenario_run(&p, nth % 3);
    unsigned passed = ht_fault_passed(point);
    ht_fault_disarm_all();
    bool seen = p.failures && traits[point] & UNSEEN;
    const char *wrong = fault_scenario_check(&p);
    ck_assert_msg(!wrong && !seen, "passage %u of %s fails%s: %s", nth, ht_fault_name(point),
                  repeat ? " and all after it" : "", wrong ? wrong : "a call failed");
    return passed;
}

TEST_LOOP(each_point_fires_and_costs_no_more_than_it_must, HT_FAULT_COUNT)
{
    enum ht_fault_point point = (enum ht_fault_point)_i;
    unsigned fired = 0;

    if (getenv("HITRAIN_FAULT") && strcmp(getenv("HITRAIN_FAULT"), ht_fault_name(point)) != 0)
        return;
    struct fault_scenario p;
    if (traits[point] & FILE_ONLY && !fault_scenario_begin_file(&p)) {
        printf("%s: skipped: no O_DIRECT in this folder\n", ht_fault_name(point));
        return;
    }
    if (traits[point] & FILE_ONLY)
        harness_free(&p.k);
    memory_keep(point != HT_FAULT_PINNED);
    fault_scenario_learn();
    for (unsigned nth = 1; fault_scenario(point, nth, false) >= nth; nth *= 2) {
        fired++;
        if (!(traits[point] & ONCE))
            fired += fault_scenario(point, nth, true) >= nth;
    }
    ck_assert_msg(fired, "%s was never reached", ht_fault_name(point));
    printf("%s: fired in %u runs\n", ht_fault_name(point), fired);
}

int main(void)
{
    if (!getenv("HITRAIN_FAULT") && !freopen("/dev/null", "w", stderr))
        return 1;
    return run_tests("points", .timeout_s = 300);
}
