/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev.c - the common part of all devices: properties, counters, the check at the begin and the accounting at the end of
 * each request.
 *
 * Any thread. open.c opens a device; ring.c and ram.c move bytes.
 */
#include "tiering/io/gate.h"
#include "tiering/io/io_priv.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

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
    dev->fd = dev->hold_fd = -1;
    dev->numa_node = HT_NUMA_OFF;
    ht_mutex_init(&dev->ram_lock, HT_LOCK_DEV_RAM);
    ht_mutex_init(&dev->flush_lock, HT_LOCK_DEV_FLUSH);
    pthread_cond_init(&dev->flush_ended, NULL);
    ht_mutex_init(&dev->flight_lock, HT_LOCK_DEV_FLIGHT);
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

uint64_t ht_dev_size(const struct ht_dev *dev)
{
    return dev->size;
}

uint32_t ht_dev_lba(const struct ht_dev *dev)
{
    return dev->lba;
}

bool ht_dev_rdonly(const struct ht_dev *dev)
{
    return dev->rdonly;
}

const char *ht_dev_name(const struct ht_dev *dev)
{
    return dev->name;
}

int ht_dev_numa_node(const struct ht_dev *dev)
{
    return dev->numa_node;
}

bool ht_dev_is_local(const struct ht_dev *dev)
{
    return dev->local;
}

bool ht_dev_is_reserved(const struct ht_dev *dev)
{
    return dev->reserved;
}

uint64_t ht_dev_place(const struct ht_dev *dev)
{
    return dev->place;
}

void ht_dev_stop_writes(struct ht_dev *dev)
{
    atomic_store(&dev->stopped, true);
}

void ht_dev_counters(const struct ht_dev *dev, struct ht_dev_counters *out)
{
    *out = (struct ht_dev_counters){
        .reads = atomic_load(&dev->reads),
        .writes = atomic_load(&dev->writes),
        .flushes = atomic_load(&dev->flushes),
        .read_bytes = atomic_load(&dev->read_bytes),
        .written_bytes = atomic_load(&dev->written_bytes),
        .discards = atomic_load(&dev->discards),
        .discarded_bytes = atomic_load(&dev->discarded_bytes),
        .discard_errors = atomic_load(&dev->discard_errors),
        .read_errors = atomic_load(&dev->read_errors),
        .write_errors = atomic_load(&dev->write_errors),
        .flush_errors = atomic_load(&dev->flush_errors),
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
    return atomic_load(&dev->flush_errors);
}

static int check_transfer(const struct ht_io *io)
{
    const struct ht_dev *dev = io->dev;
    uint32_t mask = dev->lba - 1;

    if (io->op != HT_IO_READ && (dev->rdonly || atomic_load(&dev->stopped)))
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
    ht_flight_begin(io);
    if (io->op == HT_IO_FLUSH)
        io->len = 0;
    return rc == 0 && o ? o->begin(o, io) : rc;
}

static void count(struct ht_io *io, int result)
{
    struct ht_dev *dev = io->dev;
    _Atomic uint64_t *done[HT_IO_OPS] = {&dev->reads, &dev->writes, &dev->flushes, &dev->discards};
    _Atomic uint64_t *bytes[HT_IO_OPS] = {&dev->read_bytes, &dev->written_bytes, NULL, &dev->discarded_bytes};
    _Atomic uint64_t *failed[HT_IO_OPS] = {&dev->read_errors, &dev->write_errors, &dev->flush_errors,
                                           &dev->discard_errors};

    atomic_fetch_add_explicit(result == 0 ? done[io->op] : failed[io->op], 1, memory_order_relaxed);
    if (result == 0 && bytes[io->op])
        atomic_fetch_add_explicit(bytes[io->op], io->len, memory_order_relaxed);
}

void ht_io_end(struct ht_io *io, int result, bool performed)
{
    struct ht_observer *o = io->dev->observer;

    if (performed && o)
        o->end(o, io, result, result == 0 ? io->len : io->moved_);
    if (performed && io->op == HT_IO_WRITE) /* one that failed may have changed the medium, too */
        atomic_fetch_add(&io->dev->writes_ended, 1);
    count(io, result);
    ht_flight_end(io, result);
    if (io->shared_)
        ht_flush_end(io);
    io->result = result;
    io->done = true;
}
