/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev.c - the common part of all devices: properties, devices of memory, the check at the begin and the accounting at
 * the end of each request, and the state of a device: requests in flight and since when, failures in a row, how fast it
 * is.
 *
 * A device of memory has the rules of a real one, and no persistence. ram_lock makes each transfer whole in itself, as
 * a device does for its blocks. Which of two requests in flight comes first is up to the ring.
 *
 * Any thread. open.c opens a device; ring.c moves bytes.
 */
#include "tiering/base/activity.h"
#include "tiering/base/dump.h"
#include "tiering/base/probe.h"
#include "tiering/io/io_priv.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FAILING_WRITES = 3 /* failures in a row */, DUMP_REQUESTS_MAX = 32 };

struct ht_dev *ht_dev_alloc(const char *name)
{
    struct ht_dev *dev = calloc(1, sizeof(*dev));

    if (!dev)
        return NULL;
    dev->name = strdup(name);
    if (!dev->name) {
        free(dev);
        return NULL;
    }
    HT_UNSHARED(HT_LOCK_DEV_FLIGHT);
    dev->fd = dev->hold_fd = -1;
    dev->facts.numa_node = HT_NUMA_OFF;
    ht_mutex_init(&dev->ram_lock, HT_LOCK_DEV_RAM);
    ht_mutex_init(&dev->flush_lock, HT_LOCK_DEV_FLUSH);
    pthread_cond_init(&dev->flush_ended, NULL);
    ht_mutex_init(&dev->flight_lock, HT_LOCK_DEV_FLIGHT);
    ht_list_init(&dev->flight);
    ht_cond_init(&dev->gate_changed);
    return dev;
}

static void unlock_and_close(int fd)
{
    struct flock l = {.l_type = F_UNLCK, .l_whence = SEEK_SET};

    (void)fcntl(fd, F_OFD_SETLK, &l);
    close(fd);
}

void ht_dev_let_go(struct ht_dev *dev)
{
    /* nothing is in flight: even if another process still has the file open, the hold ends here */
    if (dev->fd >= 0 && !dev->block) {
        (void)flock(dev->fd, LOCK_UN);
        unlock_and_close(dev->fd);
    } else if (dev->fd >= 0) {
        close(dev->fd);
    }
    if (dev->hold_fd >= 0)
        close(dev->hold_fd);
    while (dev->below_count > 0)
        unlock_and_close(dev->below_fd[--dev->below_count]);
    dev->fd = dev->hold_fd = -1;
}

void ht_dev_close(struct ht_dev *dev)
{
    if (!dev)
        return;
    assert(atomic_load(&dev->in_flight) == 0);
    if (dev->observer)
        dev->observer->close(dev->observer);
    if (dev->ram)
        munmap(dev->ram, dev->size);
    ht_dev_let_go(dev);
    pthread_cond_destroy(&dev->gate_changed);
    ht_mutex_destroy(&dev->flight_lock);
    pthread_cond_destroy(&dev->flush_ended);
    ht_mutex_destroy(&dev->flush_lock);
    ht_mutex_destroy(&dev->ram_lock);
    free(dev->name);
    free(dev);
}

/* ------------------------------------------------------------------ memory */

int ht_dev_open_ram(uint64_t bytes, uint32_t lba, struct ht_dev **out_dev)
{
    if ((lba != 512 && lba != 4096) || bytes == 0 || bytes % lba != 0)
        return -EINVAL;
    struct ht_dev *dev = ht_dev_alloc("ram");
    if (!dev)
        return -ENOMEM;
    void *ram = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ram == MAP_FAILED) {
        ht_dev_close(dev);
        return -ENOMEM;
    }
    dev->ram = ram;
    dev->size = bytes;
    dev->facts.lba = lba;
    dev->facts.local = true;
    *out_dev = dev;
    return 0;
}

void *ht_dev_ram_data(struct ht_dev *dev)
{
    return dev->ram;
}

int ht_ram_perform(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;

    if (dev->observer)
        return dev->observer->perform(dev->observer, io);
    ht_mutex_lock(&dev->ram_lock);
    if (io->op == HT_IO_READ)
        memcpy(io->buf, dev->ram + io->offset, io->len);
    else if (io->op == HT_IO_WRITE)
        memcpy(dev->ram + io->offset, io->buf, io->len);
    ht_mutex_unlock(&dev->ram_lock);
    return 0;
}

/* -------------------------------------------------------------- properties */

uint64_t ht_dev_size(const struct ht_dev *dev)
{
    return dev->size;
}

const char *ht_dev_name(const struct ht_dev *dev)
{
    return dev->name;
}

const struct ht_dev_facts *ht_dev_facts(const struct ht_dev *dev)
{
    return &dev->facts;
}

void ht_dev_stop_writes(struct ht_dev *dev)
{
    atomic_store(&dev->stopped, true);
}

void ht_dev_counters(const struct ht_dev *dev, struct ht_dev_counters *out)
{
    *out = (struct ht_dev_counters){
        .reads = dev->done[HT_IO_READ],
        .writes = dev->done[HT_IO_WRITE],
        .flushes = dev->done[HT_IO_FLUSH],
        .discards = dev->done[HT_IO_DISCARD],
        .read_bytes = dev->bytes[HT_IO_READ],
        .written_bytes = dev->bytes[HT_IO_WRITE],
        .discarded_bytes = dev->bytes[HT_IO_DISCARD],
        .read_errors = dev->errors[HT_IO_READ],
        .write_errors = dev->errors[HT_IO_WRITE],
        .flush_errors = dev->errors[HT_IO_FLUSH],
        .discard_errors = dev->errors[HT_IO_DISCARD],
    };
}

struct ht_dev_counters ht_devs_totals(struct ht_dev *const dev[], unsigned count)
{
    struct ht_dev_counters all = {0}, one;

    for (unsigned i = 0; i < count; i++) {
        if (!dev[i])
            continue;
        ht_dev_counters(dev[i], &one);
        all.read_bytes += one.read_bytes;
        all.written_bytes += one.written_bytes;
        all.discarded_bytes += one.discarded_bytes;
        all.flushes += one.flushes;
    }
    return all;
}

uint64_t ht_dev_next_data(const struct ht_dev *dev, uint64_t offset, uint64_t end)
{
    if (dev->ram || dev->block || dev->raw)
        return offset;
    off_t at = lseek(dev->fd, (off_t)offset, SEEK_DATA);
    if (at < 0)
        return errno == ENXIO ? end : offset; /* no more data in the file; or the file system cannot know */
    return ht_min_u64((uint64_t)at, end);
}

bool ht_dev_needs_flush(const struct ht_dev *dev)
{
    /* covered first: it never exceeds a later value of `ended` */
    uint64_t covered = atomic_load(&dev->writes_covered);

    return atomic_load(&dev->writes_ended) > covered;
}

uint64_t ht_dev_flush_failures(const struct ht_dev *dev)
{
    return atomic_load(&dev->errors[HT_IO_FLUSH]);
}

/* ---------------------------------------------------------------- requests */

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
    dev->gate_stats.in_flight_bytes[io->io_class_] += io->len;
    if (io->io_class_ != HT_IO_URGENT)
        return;
    ht_gate_urgent_begin(&dev->gate_state.requests, io->began_ns_);
    ht_gate_urgent_begin(&dev->gate_state.waits, io->began_ns_);
}

static void count_end(struct ht_io *io, uint64_t now_ns, int result) HT_REQUIRES(HT_LOCK_DEV_FLIGHT)
{
    struct ht_dev *dev = io->dev;

    ht_rate_end(&dev->rate[direction_of(io)], now_ns, io->began_ns_, io->len, result == 0);
    if (io->large_)
        ht_rate_end(&dev->large_rate[direction_of(io)], now_ns, io->began_ns_, io->len, result == 0);
    dev->gate_stats.in_flight_bytes[io->io_class_] -= io->len;
    dev->gate_stats.moved_bytes[io->io_class_] += result == 0 ? io->len : 0;
    if (io->io_class_ != HT_IO_URGENT)
        return;
    ht_gate_urgent_end(&dev->gate_state.requests, now_ns);
    ht_gate_urgent_end(&dev->gate_state.waits, now_ns);
}

static void begin_flight(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;

    atomic_fetch_add_explicit(&dev->in_flight, 1, memory_order_relaxed);
    io->thread_ = ht_activity_thread();
    ht_mutex_lock(ht_dev_flight_lock(dev));
    io->began_ns_ = ht_now_ns();
    ht_list_add_tail(&dev->flight, &io->flight_);
    if (io->rated_)
        count_begin(io);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    if (io->op == HT_IO_FLUSH)
        HT_PROBE2(flush_begin, dev->name, io);
}

static void end_flight(struct ht_io *io, int result)
{
    struct ht_dev *dev = io->dev;

    if (io->op == HT_IO_WRITE && result == 0)
        atomic_store_explicit(&dev->writes_failed_in_row, 0, memory_order_relaxed);
    else if (io->op == HT_IO_WRITE)
        atomic_fetch_add_explicit(&dev->writes_failed_in_row, 1, memory_order_relaxed);
    else if (io->op == HT_IO_FLUSH)
        atomic_store_explicit(&dev->flush_failed, result != 0, memory_order_relaxed);
    ht_mutex_lock(ht_dev_flight_lock(dev));
    ht_list_del(&io->flight_);
    if (io->rated_)
        count_end(io, ht_now_ns(), result);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    if (io->op == HT_IO_FLUSH)
        HT_PROBE3(flush_end, dev->name, io, result);
    atomic_fetch_sub_explicit(&dev->in_flight, 1, memory_order_release);
}

static int check_transfer(const struct ht_io *io)
{
    const struct ht_dev *dev = io->dev;
    uint32_t mask = dev->facts.lba - 1;

    if (io->op != HT_IO_READ && (dev->facts.rdonly || atomic_load(&dev->stopped)))
        return -EROFS;
    if (io->op == HT_IO_DISCARD && dev->raw && dev->discard_max == 0)
        return -EOPNOTSUPP;
    if (io->len == 0 || ((io->len | io->offset | (uintptr_t)io->buf) & mask) != 0)
        return -EINVAL;
    if (io->offset > dev->size || io->len > dev->size - io->offset)
        return -EINVAL;
    return 0;
}

int ht_io_begin(struct ht_io *io)
{
    struct ht_observer *o = io->dev->observer;
    int rc = io->op == HT_IO_FLUSH ? 0 : check_transfer(io);

    io->done = false;
    io->result = 0;
    io->moved_ = 0;
    io->pieces_ = 0;
    io->error_ = 0;
    io->next_ = NULL;
    io->io_class_ = ht_io_class();
    io->rated_ = rc == 0 && (io->op == HT_IO_READ || io->op == HT_IO_WRITE);
    io->large_ = io->rated_ && io->len >= HT_RATE_LARGE_BYTES;
    begin_flight(io);
    if (io->op == HT_IO_FLUSH)
        io->len = 0;
    return rc == 0 && o ? o->begin(o, io) : rc;
}

static void count(const struct ht_io *io, int result)
{
    struct ht_dev *dev = io->dev;

    atomic_fetch_add_explicit(result == 0 ? &dev->done[io->op] : &dev->errors[io->op], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&dev->bytes[io->op], result == 0 ? io->len : 0, memory_order_relaxed);
}

void ht_io_end(struct ht_io *io, int result, bool performed)
{
    struct ht_observer *o = io->dev->observer;

    if (performed && o)
        o->end(o, io, result, result == 0 ? io->len : io->moved_);
    if (performed && io->op == HT_IO_WRITE) /* one that failed may have changed the medium, too */
        atomic_fetch_add(&io->dev->writes_ended, 1);
    count(io, result);
    end_flight(io, result);
    if (io->shared_)
        ht_flush_end(io);
    io->result = result;
    io->done = true;
}

/* ------------------------------------------------------------------- state */

uint64_t ht_dev_oldest_ns(struct ht_dev *dev)
{
    uint64_t age_ns = 0;

    ht_mutex_lock(ht_dev_flight_lock(dev));
    if (!ht_list_empty(&dev->flight))
        age_ns = ht_max_u64(ht_now_ns() - ht_list_entry(dev->flight.next, struct ht_io, flight_)->began_ns_, 1);
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
        bytes += dev->gate_stats.in_flight_bytes[c];
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    double most = (double)rate.bytes_per_s * (double)HT_DEV_LOADED_NS * 1e-9;
    return (double)bytes > (rate.known ? most : (double)HT_GATE_UNKNOWN_BYTES);
}

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
    ht_list_for_each_entry(io, &dev->flight, const struct ht_io, flight_) {
        if (shown++ == DUMP_REQUESTS_MAX)
            break;
        dump_request(io, d);
    }
    ht_mutex_unlock(ht_dev_flight_lock(dev));
}

enum ht_health ht_dev_health(struct ht_dev *dev, uint64_t answer_ns_max)
{
    if (ht_dev_oldest_ns(dev) > answer_ns_max)
        return HT_HEALTH_NOT_ANSWERING;
    if (dev->writes_failed_in_row >= FAILING_WRITES || dev->flush_failed)
        return HT_HEALTH_FAILING;
    return dev->errors[HT_IO_READ] || dev->errors[HT_IO_WRITE] || dev->errors[HT_IO_FLUSH] ? HT_HEALTH_ERRORS
                                                                                           : HT_HEALTH_OK;
}

const char *ht_health_word(enum ht_health health)
{
    static const char *const words[] = {"ok", "errors", "failing", "not-answering", "missing"};

    return words[health];
}
