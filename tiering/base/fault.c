/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault.c - named fault points.
 *
 * The table is guarded by `lock`; `armed_count` lets a passage see without it that nothing is
 * armed, which is always so outside tests. Any thread.
 */
#include "tiering/base/fault.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>

#include "tiering/base/lock.h"

#define POINTS_MAX 32
#define POINT_NAME_BYTES 64

struct point {
    char name[POINT_NAME_BYTES];
    unsigned nth, passed;
    int error;
    bool repeat;
};

static struct ht_mutex lock = HT_MUTEX_INIT(HT_LOCK_FAULTS);
static struct point points[POINTS_MAX]; /* lock */
static _Atomic unsigned armed_count;    /* changed under lock */

static struct point *lookup_locked(const char *name)
{
    for (unsigned i = 0; i < atomic_load(&armed_count); i++)
        if (strcmp(points[i].name, name) == 0)
            return &points[i];
    return NULL;
}

void ht_fault_arm(const char *point, unsigned nth, int error, bool repeat)
{
    struct point *p;
    bool found;

    assert(nth > 0 && error < 0 && strlen(point) < POINT_NAME_BYTES);
    ht_mutex_lock(&lock);
    p = lookup_locked(point);
    found = p != NULL;
    if (!found) {
        assert(armed_count < POINTS_MAX);
        p = &points[armed_count];
        snprintf(p->name, sizeof(p->name), "%s", point);
    }
    p->nth = nth;
    p->passed = 0;
    p->error = error;
    p->repeat = repeat;
    if (!found)
        atomic_fetch_add(&armed_count, 1);
    ht_mutex_unlock(&lock);
}

void ht_fault_disarm_all(void)
{
    ht_mutex_lock(&lock);
    atomic_store(&armed_count, 0);
    ht_mutex_unlock(&lock);
}

int ht_fault(const char *point)
{
    struct point *p;
    int error = 0;

    if (atomic_load_explicit(&armed_count, memory_order_relaxed) == 0)
        return 0;
    ht_mutex_lock(&lock);
    p = lookup_locked(point);
    if (p != NULL) {
        p->passed++;
        if (p->passed == p->nth || (p->repeat && p->passed > p->nth))
            error = p->error;
    }
    ht_mutex_unlock(&lock);
    return error;
}

unsigned ht_fault_passed(const char *point)
{
    struct point *p;
    unsigned passed;

    ht_mutex_lock(&lock);
    p = lookup_locked(point);
    passed = p != NULL ? p->passed : 0;
    ht_mutex_unlock(&lock);
    return passed;
}
