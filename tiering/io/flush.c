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
 * A flush that fails may void writes that another one covers. So it fails for all threads that wait then.
 *
 * A success counts only when all flushes have ended that were in flight beside it, older and newer ones. A file system
 * or a driver may keep written bytes in the page cache of a file. When it cannot write them, one fsync of the open file
 * returns the error, and others that run at that time may return 0 (Linux, lib/errseq.c). Loop devices, nbd servers and
 * NVMe targets often lie on such files, so the rule is the same for all devices.
 *
 * The thread that begins a flush waits for it on its own ring before it waits for anything else, so it always ends for
 * the others. Any thread.
 */
#include "tiering/io/io_priv.h"
#include "tiering/base/activity.h"
#include "tiering/base/mutant.h"

#include <hitrain/limits.h>
#include <stdatomic.h>

/* A caller waits until all flushes up to this number have ended, or any has failed. */
struct want {
    uint64_t number;
    uint64_t failures; /* of the device, when the caller came or the flush that it joined began */
    uint64_t covers;   /* writes that had ended then */
    bool ended;        /* the caller's flush; number is now that of the last one that began before its end */
};

static struct want want_of(struct ht_dev *dev)
{
    struct want w = {.ended = false};

    ht_mutex_lock(ht_dev_flush_lock(dev));
    w.number = dev->flush_begun + 1;
    w.failures = ht_dev_flush_failures(dev);
    w.covers = atomic_load(&dev->writes_ended);
    if (dev->flush_ends[dev->flush_begun % HT_FLUSHES] && dev->flush_covers == w.covers) {
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

/* Is the caller's flush over? Also notes that it has ended. */
static bool check_end_locked(const struct ht_dev *dev, struct want *w) HT_REQUIRES(HT_LOCK_DEV_FLUSH)
{
    uint64_t oldest = oldest_locked(dev);

    if (ht_dev_flush_failures(dev) != w->failures)
        return true;
    if (!w->ended && oldest > w->number) {
        w->ended = true;
        if (!HT_MUTANT("flush-beside"))
            w->number = dev->flush_begun;
    }
    return oldest > w->number;
}

/* Is the caller's flush not in flight yet, and is there room for it? */
static bool may_begin_locked(const struct ht_dev *dev, const struct want *w) HT_REQUIRES(HT_LOCK_DEV_FLUSH)
{
    return dev->flush_begun < w->number && dev->flush_begun + 1 - oldest_locked(dev) < HT_FLUSHES;
}

/* True: the caller has begun a flush, and must wait for it. */
static bool begin(struct ht_ring *ring, struct ht_dev *dev, struct want *w, struct ht_io *io)
{
    uint64_t number = 0;

    ht_mutex_lock(ht_dev_flush_lock(dev));
    if (may_begin_locked(dev, w) && !check_end_locked(dev, w)) {
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
static bool wait_for_end(struct ht_dev *dev, struct want *w)
{
    bool over;

    ht_mutex_lock(ht_dev_flush_lock(dev));
    ht_activity_wait("a flush that another thread began", 0);
    while (!(over = check_end_locked(dev, w)) && !may_begin_locked(dev, w))
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

/* Writes that had ended before a flush that counts are on the medium. */
static void cover(struct ht_dev *dev, uint64_t covers)
{
    uint64_t covered = atomic_load(&dev->writes_covered);

    while (covered < covers && !atomic_compare_exchange_weak(&dev->writes_covered, &covered, covers))
        ;
}

/* Waits for a flush that another thread began, or begins the caller's. 0 or -EIO. */
static int finish(struct ht_ring *ring, struct ht_dev *dev, struct want *w, struct ht_io *io)
{
    while (!wait_for_end(dev, w))
        if (begin(ring, dev, w, io))
            (void)ht_ring_wait(ring, io);
    if (ht_dev_flush_failures(dev) != w->failures)
        return -EIO;
    cover(dev, w->covers);
    return 0;
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
    for (unsigned i = 0; i < count; i++)
        out_results[i] = finish(ring, devs[i], &want[i], &io[i]);
}
