/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health.c - how a device does: what is in flight and since when, failures in a row.
 *
 * Requests in flight hang in a list, oldest first: begin appends, end takes out of the middle. Any thread.
 */
#include "tiering/io/io_priv.h"

#include <stdatomic.h>

#define FAILING_WRITES 3u /* in a row */

void ht_flight_begin(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;

    atomic_fetch_add_explicit(&dev->in_flight, 1, memory_order_relaxed);
    io->newer_ = NULL;
    ht_mutex_lock(&dev->flight_lock);
    io->began_ns_ = ht_now_ns();
    io->older_ = dev->newest;
    if (dev->newest)
        dev->newest->newer_ = io;
    else
        dev->oldest = io;
    dev->newest = io;
    ht_mutex_unlock(&dev->flight_lock);
}

static void take_out(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;

    ht_mutex_lock(&dev->flight_lock);
    *(io->older_ ? &io->older_->newer_ : &dev->oldest) = io->newer_;
    *(io->newer_ ? &io->newer_->older_ : &dev->newest) = io->older_;
    ht_mutex_unlock(&dev->flight_lock);
}

void ht_flight_end(struct ht_io *io, int result)
{
    struct ht_dev *dev = io->dev;

    if (io->op == HT_IO_WRITE && result == 0)
        atomic_store_explicit(&dev->writes_failed_in_row, 0, memory_order_relaxed);
    else if (io->op == HT_IO_WRITE)
        atomic_fetch_add_explicit(&dev->writes_failed_in_row, 1, memory_order_relaxed);
    else if (io->op == HT_IO_FLUSH)
        atomic_store_explicit(&dev->flush_failed, result != 0, memory_order_relaxed);
    take_out(io);
    atomic_fetch_sub_explicit(&dev->in_flight, 1, memory_order_release);
}

uint64_t ht_dev_oldest_ns(struct ht_dev *dev)
{
    uint64_t age_ns = 0;

    ht_mutex_lock(&dev->flight_lock);
    if (dev->oldest)
        age_ns = ht_max_u64(ht_now_ns() - dev->oldest->began_ns_, 1);
    ht_mutex_unlock(&dev->flight_lock);
    return age_ns;
}

enum ht_health ht_dev_health(struct ht_dev *dev, uint64_t answer_ns_max)
{
    if (ht_dev_oldest_ns(dev) > answer_ns_max)
        return HT_HEALTH_NOT_ANSWERING;
    if (dev->writes_failed_in_row >= FAILING_WRITES || dev->flush_failed)
        return HT_HEALTH_FAILING;
    return dev->read_errors || dev->write_errors || dev->flush_errors ? HT_HEALTH_ERRORS : HT_HEALTH_OK;
}

const char *ht_health_word(enum ht_health health)
{
    static const char *const words[] = {"ok", "errors", "failing", "not-answering", "missing"};

    return words[health];
}
