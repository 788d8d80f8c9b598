/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flush.c - flushes that callers share.
 *
 * Up to HT_FLUSHES shared flushes of a device are in flight at a time. Their numbers grow as they begin:
 *
 *   no write has ended since the last one began  --> the caller takes its result
 *   there is room for one more                   --> the caller begins it
 *   else                                         --> the caller waits; one waiter begins the next, which serves all
 *
 * A flush counts as ended when the older ones have ended, too. One that fails fails for all threads that wait then,
 * also for those that wait for another flush: it may have voided their writes.
 *
 * The thread that begins a flush waits for it on its own ring before it waits for anything else, so it always ends for
 * the others. Any thread.
 */
#include "tiering/io/io_priv.h"
#include "tiering/base/activity.h"

#include <assert.h>
#include <hitrain/limits.h>
#include <stdatomic.h>

/* A caller waits for one of these: the end of the flush with this number, or a failure of any. */
struct want {
    uint64_t number, failures;
};

static struct want want_of(struct ht_dev *dev)
{
    struct want w;

    ht_mutex_lock(ht_dev_flush_lock(dev));
    w.number = dev->flush_begun + 1;
    w.failures = ht_dev_flush_failures(dev);
    if (dev->flush_ends[dev->flush_begun % HT_FLUSHES] && dev->flush_covers == atomic_load(&dev->writes_ended)) {
        w.number--;
        w.failures = dev->flush_failures_then; /* it may have failed already */
    }
    ht_mutex_unlock(ht_dev_flush_lock(dev));
    return w;
}

/* The oldest flush in flight, or the next one. */
static uint64_t oldest_locked(const struct ht_dev *dev) HT_REQUIRES(HT_LOCK_DEV_FLUSH)
{
    uint64_t oldest = dev->flush_begun + 1;

    for (unsigned i = 0; i < HT_FLUSHES; i++)
        if (dev->flush_ends[i] && dev->flush_ends[i] < oldest)
            oldest = dev->flush_ends[i];
    return oldest;
}

static bool is_over_locked(const struct ht_dev *dev, const struct want *w) HT_REQUIRES(HT_LOCK_DEV_FLUSH)
{
    return oldest_locked(dev) > w->number || ht_dev_flush_failures(dev) != w->failures;
}

/* Is the caller's flush not in flight yet, and is there room for it? */
static bool may_begin_locked(const struct ht_dev *dev, const struct want *w) HT_REQUIRES(HT_LOCK_DEV_FLUSH)
{
    return dev->flush_begun < w->number && dev->flush_begun + 1 - oldest_locked(dev) < HT_FLUSHES;
}

/* True: the caller has begun a flush, and must wait for it. */
static bool begin(struct ht_ring *ring, struct ht_dev *dev, const struct want *w, struct ht_io *io)
{
    uint64_t number = 0;

    ht_mutex_lock(ht_dev_flush_lock(dev));
    if (may_begin_locked(dev, w) && !is_over_locked(dev, w)) {
        number = ++dev->flush_begun;
        dev->flush_ends[number % HT_FLUSHES] = number;
        dev->flush_covers = atomic_load(&dev->writes_ended);
        dev->flush_failures_then = ht_dev_flush_failures(dev);
    }
    ht_mutex_unlock(ht_dev_flush_lock(dev));
    if (number == 0)
        return false;
    *io = (struct ht_io){.op = HT_IO_FLUSH, .dev = dev, .shared_ = number};
    ht_ring_submit(ring, io);
    return true;
}

/* True: it is over. False: the caller may begin it. */
static bool wait_for_end(struct ht_dev *dev, const struct want *w)
{
    bool over;

    ht_mutex_lock(ht_dev_flush_lock(dev));
    ht_activity_wait("a flush that another thread began", 0);
    while (!(over = is_over_locked(dev, w)) && !may_begin_locked(dev, w))
        ht_cond_wait(&dev->flush_ended, ht_dev_flush_lock(dev));
    ht_activity_go_on();
    ht_mutex_unlock(ht_dev_flush_lock(dev));
    return over;
}

void ht_flush_end(const struct ht_io *io)
{
    struct ht_dev *dev = io->dev;

    ht_mutex_lock(ht_dev_flush_lock(dev));
    dev->flush_ends[io->shared_ % HT_FLUSHES] = 0;
    pthread_cond_broadcast(&dev->flush_ended);
    ht_mutex_unlock(ht_dev_flush_lock(dev));
}

void ht_ring_flush(struct ht_ring *ring, struct ht_dev *const devs[], unsigned count, int out_results[])
{
    struct want want[HT_DEVICES_MAX];
    struct ht_io io[HT_DEVICES_MAX];

    assert(count <= HT_DEVICES_MAX);
    for (unsigned i = 0; i < count; i++) {
        want[i] = want_of(devs[i]);
        io[i].done = !begin(ring, devs[i], &want[i], &io[i]);
    }
    for (unsigned i = 0; i < count; i++)
        if (!io[i].done)
            (void)ht_ring_wait(ring, &io[i]);
    for (unsigned i = 0; i < count; i++) {
        while (!wait_for_end(devs[i], &want[i]))
            if (begin(ring, devs[i], &want[i], &io[i]))
                (void)ht_ring_wait(ring, &io[i]);
        out_results[i] = ht_dev_flush_failures(devs[i]) != want[i].failures ? -EIO : 0;
    }
}
