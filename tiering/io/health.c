/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health.c - the state of a device: requests in flight and since when, failures in a row, how fast it is.
 *
 * Requests in flight are in a list, oldest first: begin appends, end removes from the middle. Any thread.
 */
#include "tiering/io/io_priv.h"
#include "tiering/base/activity.h"
#include "tiering/base/dump.h"
#include "tiering/base/probe.h"

#include <stdatomic.h>

#define FAILING_WRITES 3u /* failures in a row */

static enum ht_direction direction_of(const struct ht_io *io)
{
    return io->op == HT_IO_READ ? HT_DIRECTION_READ : HT_DIRECTION_WRITE;
}

/* Reads and writes alone. */
static void count_begin(struct ht_io *io) HT_REQUIRES(HT_LOCK_DEV_FLIGHT)
{
    struct ht_dev *dev = io->dev;

    ht_rate_begin(&dev->rate[direction_of(io)], io->began_ns_, io->len);
    if (io->large_)
        ht_rate_begin(&dev->large_rate[direction_of(io)], io->began_ns_, io->len);
    dev->class_bytes[io->io_class_] += io->len;
    if (io->io_class_ != HT_IO_URGENT)
        return;
    ht_gate_urgent_begin(&dev->urgent_requests, io->began_ns_);
    ht_gate_urgent_begin(&dev->urgent_waits, io->began_ns_);
}

static void count_end(struct ht_io *io, uint64_t now_ns, int result) HT_REQUIRES(HT_LOCK_DEV_FLIGHT)
{
    struct ht_dev *dev = io->dev;

    ht_rate_end(&dev->rate[direction_of(io)], now_ns, io->began_ns_, io->len, result == 0);
    if (io->large_)
        ht_rate_end(&dev->large_rate[direction_of(io)], now_ns, io->began_ns_, io->len, result == 0);
    dev->class_bytes[io->io_class_] -= io->len;
    dev->moved_bytes[io->io_class_] += result == 0 ? io->len : 0;
    if (io->io_class_ != HT_IO_URGENT)
        return;
    ht_gate_urgent_end(&dev->urgent_requests, now_ns);
    ht_gate_urgent_end(&dev->urgent_waits, now_ns);
}

void ht_flight_begin(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;

    atomic_fetch_add_explicit(&dev->in_flight, 1, memory_order_relaxed);
    io->newer_ = NULL;
    io->thread_ = ht_activity_thread();
    ht_mutex_lock(ht_dev_flight_lock(dev));
    io->began_ns_ = ht_now_ns();
    io->older_ = dev->newest;
    if (dev->newest)
        dev->newest->newer_ = io;
    else
        dev->oldest = io;
    dev->newest = io;
    if (io->rated_)
        count_begin(io);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    if (io->op == HT_IO_FLUSH)
        HT_PROBE2(flush_begin, dev->name, io);
}

static void take_out(struct ht_io *io, int result)
{
    struct ht_dev *dev = io->dev;

    ht_mutex_lock(ht_dev_flight_lock(dev));
    uint64_t now_ns = ht_now_ns();
    *(io->older_ ? &io->older_->newer_ : &dev->oldest) = io->newer_;
    *(io->newer_ ? &io->newer_->older_ : &dev->newest) = io->older_;
    if (io->rated_)
        count_end(io, now_ns, result);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
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
    take_out(io, result);
    if (io->op == HT_IO_FLUSH)
        HT_PROBE3(flush_end, dev->name, io, result);
    atomic_fetch_sub_explicit(&dev->in_flight, 1, memory_order_release);
}

uint64_t ht_dev_oldest_ns(struct ht_dev *dev)
{
    uint64_t age_ns = 0;

    ht_mutex_lock(ht_dev_flight_lock(dev));
    if (dev->oldest)
        age_ns = ht_max_u64(ht_now_ns() - dev->oldest->began_ns_, 1);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    return age_ns;
}

void ht_dev_rate(struct ht_dev *dev, enum ht_direction direction, struct ht_dev_rate *out)
{
    ht_mutex_lock(ht_dev_flight_lock(dev));
    ht_rate_get(&dev->rate[direction], ht_now_ns(), out);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
}

void ht_dev_large_totals(struct ht_dev *dev, enum ht_direction direction, struct ht_rate_totals *out)
{
    ht_mutex_lock(ht_dev_flight_lock(dev));
    ht_rate_totals(&dev->large_rate[direction], ht_now_ns(), out);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
}

bool ht_dev_is_loaded(struct ht_dev *dev)
{
    struct ht_dev_rate rate;
    uint64_t bytes = 0;

    ht_mutex_lock(ht_dev_flight_lock(dev));
    ht_rate_get(&dev->rate[HT_DIRECTION_WRITE], ht_now_ns(), &rate);
    for (unsigned c = 0; c < HT_IO_CLASSES; c++)
        bytes += dev->class_bytes[c];
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    double most = (double)rate.bytes_per_s * (double)HT_DEV_LOADED_NS * 1e-9;
    return (double)bytes > (rate.known ? most : (double)HT_GATE_UNKNOWN_BYTES);
}

enum { DUMP_REQUESTS_MAX = 32 };

static void dump_request(const struct ht_io *io, struct ht_dump *d)
{
    static const char *const words[] = {"read", "write", "flush", "discard"};

    ht_dump_put(d, "    %s", words[io->op]);
    if (io->op != HT_IO_FLUSH)
        ht_dump_put(d, " of %u bytes at %llu", io->len, (unsigned long long)io->offset);
    ht_dump_put(d, " for ");
    ht_dump_age(d, io->began_ns_);
    ht_dump_put(d, ", by ");
    ht_dump_thread(d, io->thread_);
    ht_dump_put(d, "\n");
}

void ht_dev_dump(struct ht_dev *dev, struct ht_dump *d)
{
    unsigned shown = 0, all = dev->in_flight;

    ht_dump_put(d, "  ");
    ht_dump_name(d, dev->name);
    ht_dump_put(d, ": %u request%s in flight\n", all, all == 1 ? "" : "s");
    if (!ht_dump_lock(d, ht_dev_flight_lock(dev), "requests in flight"))
        return;
    for (const struct ht_io *io = dev->oldest; io && shown < DUMP_REQUESTS_MAX; io = io->newer_, shown++)
        dump_request(io, d);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
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
