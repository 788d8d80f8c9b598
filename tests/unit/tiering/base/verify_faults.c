/* SPDX-License-Identifier: Apache-2.0 */
/* verify_faults.c - fault points that tests arm (tiering/base/fault.h). Any thread; `lock` guards the table. */
#include "tiering/base/fault.h"

#include "tiering/base/lock.h"

static const struct {
    const char *name;
    int error;
} kinds[] = {
#define ROW(id, name, error, what) {name, error},
    HT_FAULT_POINTS(ROW)
#undef ROW
};
static_assert(HT_ARRAY_SIZE(kinds) == HT_FAULT_COUNT, "one row each");

static struct ht_mutex lock = HT_MUTEX_INIT(HT_LOCK_FAULTS);
static struct {
    unsigned nth, passed; /* nth 0: not armed */
    bool repeat;
} points[HT_FAULT_COUNT] HT_GUARDED_BY_STATIC(lock);

const char *ht_fault_name(enum ht_fault_point point)
{
    return kinds[point].name;
}

static int pass(enum ht_fault_point point)
{
    int error = 0;

    ht_mutex_lock(&lock);
    if (points[point].nth > 0) {
        unsigned passed = ++points[point].passed;
        if (passed == points[point].nth || (points[point].repeat && passed > points[point].nth))
            error = -kinds[point].error;
    }
    ht_mutex_unlock(&lock);
    return error;
}

void ht_fault_arm(enum ht_fault_point point, unsigned nth, bool repeat)
{
    assert(nth > 0);
    ht_mutex_lock(&lock);
    atomic_store(&ht_fault_pass, pass);
    points[point].nth = nth;
    points[point].passed = 0;
    points[point].repeat = repeat;
    ht_mutex_unlock(&lock);
}

void ht_fault_disarm_all(void)
{
    ht_mutex_lock(&lock);
    for (unsigned i = 0; i < HT_FAULT_COUNT; i++)
        points[i].nth = 0;
    atomic_store(&ht_fault_pass, NULL);
    ht_mutex_unlock(&lock);
}

unsigned ht_fault_passed(enum ht_fault_point point)
{
    ht_mutex_lock(&lock);
    unsigned passed = points[point].passed;
    ht_mutex_unlock(&lock);
    return passed;
}
