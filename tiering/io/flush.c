/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flush.c - flushes that callers share.
 *
 * One shared flush of a device is in flight at a time, so that its result means what it says:
 *
 *   none is in flight                               --> the caller begins one
 *   one is, and no write has ended since it began   --> the caller waits for its result
 *   one is, and a write has ended since             --> the caller waits for its end; one of those that wait begins the next, which
 *                                                       serves them all
 *
 * Block devices do the same below us, so that nobody waits longer for it. A flush that fails fails for all that wait, also for those that
 * wait for the next one: it has voided what they wrote.
 *
 * The thread that begins a flush waits for it on its own ring before it waits for anything else, so it always ends for the others.
 * Any thread.
 */
#include "tiering/io/io_priv.h"

#include <assert.h>
#include <hitrain/limits.h>
#include <stdatomic.h>

/* What a caller waits for: the end of the flush with this number, or a failure of any. */
struct want {
    uint64_t number, failures;
};

static struct want want_of(struct ht_dev *dev)
{
    struct want w;

    ht_mutex_lock(&dev->flush_lock);
    w.number = dev->flush_begun + 1;
    if (dev->flushing && dev->flush_covers == atomic_load(&dev->writes_ended))
        w.number--;
    w.failures = ht_dev_flush_failures(dev);
    ht_mutex_unlock(&dev->flush_lock);
    return w;
}

static bool is_over_locked(const struct ht_dev *dev, const struct want *w)
{
    return dev->flush_begun - dev->flushing >= w->number || ht_dev_flush_failures(dev) != w->failures;
}

/* True: the caller has begun one, and has to wait for it. */
static bool begin(struct ht_ring *ring, struct ht_dev *dev, const struct want *w, struct ht_io *io)
{
    bool begins;

    ht_mutex_lock(&dev->flush_lock);
    begins = !dev->flushing && !is_over_locked(dev, w);
    if (begins) {
        dev->flushing = true;
        dev->flush_begun++;
        dev->flush_covers = atomic_load(&dev->writes_ended);
    }
    ht_mutex_unlock(&dev->flush_lock);
    if (!begins)
        return false;
    *io = (struct ht_io){.op = HT_IO_FLUSH, .dev = dev, .shared_ = true};
    ht_ring_submit(ring, io);
    return true;
}

/* True: it is over. False: none is in flight. */
static bool wait_for_end(struct ht_dev *dev, const struct want *w)
{
    bool over;

    ht_mutex_lock(&dev->flush_lock);
    while (!(over = is_over_locked(dev, w)) && dev->flushing)
        ht_cond_wait(&dev->flush_ended, &dev->flush_lock);
    ht_mutex_unlock(&dev->flush_lock);
    return over;
}

void ht_flush_end(struct ht_dev *dev)
{
    ht_mutex_lock(&dev->flush_lock);
    dev->flushing = false;
    pthread_cond_broadcast(&dev->flush_ended);
    ht_mutex_unlock(&dev->flush_lock);
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
