/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev.c - what all devices have in common: properties, counters, the check at the begin and
 * the accounting at the end of each request, and the hook that lets requests fail.
 *
 * Any thread. How a device is opened is in open.c, how bytes move in ring.c and ram.c.
 */
#include "tiering/io/io_priv.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

struct ht_dev *ht_dev_alloc(const char *name)
{
    struct ht_dev *dev = calloc(1, sizeof(*dev));

    if (dev == NULL)
        return NULL;
    dev->name = strdup(name);
    if (dev->name == NULL) {
        free(dev);
        return NULL;
    }
    dev->fd = dev->hold_fd = -1;
    dev->numa_node = HT_NUMA_OFF;
    ht_mutex_init(&dev->ram_lock, HT_LOCK_DEV_RAM);
    ht_mutex_init(&dev->flush_lock, HT_LOCK_DEV_FLUSH);
    pthread_cond_init(&dev->flush_ended, NULL);
    ht_mutex_init(&dev->flight_lock, HT_LOCK_DEV_FLIGHT);
    ht_mutex_init(&dev->fail_lock, HT_LOCK_DEV_FAIL);
    ht_mutex_init(&dev->record_lock, HT_LOCK_DEV_RECORD);
    return dev;
}

void ht_dev_close(struct ht_dev *dev)
{
    if (dev == NULL)
        return;
    assert(atomic_load(&dev->in_flight) == 0);
    ht_recorder_end(dev);
    ht_ram_cache_free(dev);
    if (dev->ram != NULL)
        munmap(dev->ram, dev->size);
    free(dev->ram_touched);
    if (dev->fd >= 0 && !dev->block)
        (void)flock(dev->fd, LOCK_UN); /* nothing is in flight: whatever still has the file open, the hold ends here */
    if (dev->fd >= 0)
        close(dev->fd);
    if (dev->hold_fd >= 0)
        close(dev->hold_fd);
    ht_mutex_destroy(&dev->record_lock);
    ht_mutex_destroy(&dev->fail_lock);
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

uint64_t ht_dev_next_data(const struct ht_dev *dev, uint64_t offset, uint64_t end)
{
    if (dev->ram != NULL || dev->block || dev->raw)
        return offset;
    off_t at = lseek(dev->fd, (off_t)offset, SEEK_DATA);
    if (at < 0)
        return errno == ENXIO ? end : offset; /* no more data in the file; or it cannot tell */
    return ht_min_u64((uint64_t)at, end);
}

bool ht_dev_needs_flush(const struct ht_dev *dev)
{
    /* covered first: it never exceeds an `ended` that is read later */
    uint64_t covered = atomic_load(&dev->writes_covered);

    return atomic_load(&dev->writes_ended) > covered;
}

uint64_t ht_dev_flush_failures(const struct ht_dev *dev)
{
    return atomic_load(&dev->flush_errors);
}

static void set_hook(struct ht_dev *dev, enum ht_io_op op, struct ht_fail_hook hook)
{
    bool armed = false;

    ht_mutex_lock(&dev->fail_lock);
    dev->fail[op] = hook;
    for (unsigned i = 0; i < HT_IO_OPS; i++)
        armed |= dev->fail[i].left > 0;
    atomic_store(&dev->fail_armed, armed);
    ht_mutex_unlock(&dev->fail_lock);
}

void ht_dev_fail(struct ht_dev *dev, enum ht_io_op op, unsigned nth, bool repeat)
{
    set_hook(dev, op, (struct ht_fail_hook){.left = nth, .repeat = repeat});
}

void ht_dev_stall_at(struct ht_dev *dev, enum ht_io_op op, unsigned nth)
{
    set_hook(dev, op, (struct ht_fail_hook){.left = nth, .stalls = true});
}

static bool fails_now(struct ht_dev *dev, enum ht_io_op op)
{
    struct ht_fail_hook *hook = &dev->fail[op];
    bool fires;

    if (!atomic_load_explicit(&dev->fail_armed, memory_order_relaxed))
        return false;
    ht_mutex_lock(&dev->fail_lock);
    fires = hook->left == 1;
    if (hook->left > 0 && !(fires && hook->repeat))
        hook->left--;
    if (fires && hook->stalls)
        dev->stalled = true;
    fires = fires && !hook->stalls;
    ht_mutex_unlock(&dev->fail_lock);
    return fires;
}

static int check_transfer(const struct ht_io *io)
{
    const struct ht_dev *dev = io->dev;
    uint32_t mask = dev->lba - 1;

    if (io->op != HT_IO_READ && dev->rdonly)
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
    int err;

    io->done = false;
    io->result = 0;
    io->moved_ = 0;
    io->pieces_ = 0;
    io->error_ = 0;
    io->next_ = NULL;
    ht_flight_begin(io);
    if (io->op == HT_IO_FLUSH) {
        io->len = 0;
        io->covers_ = atomic_load(&io->dev->writes_ended);
    } else {
        err = check_transfer(io);
        if (err != 0)
            return err;
    }
    return fails_now(io->dev, io->op) ? -EIO : 0;
}

static void end_write(struct ht_io *io, int result)
{
    struct ht_dev *dev = io->dev;

    /* A write that failed may have changed the medium, too. */
    if (atomic_load(&dev->recording))
        ht_record_write(io, result == 0 ? io->len : io->moved_);
    else
        atomic_fetch_add(&dev->writes_ended, 1);
}

static void end_flush(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;
    uint64_t covered = atomic_load(&dev->writes_covered);

    if (atomic_load(&dev->recording))
        ht_record_flush(io);
    while (covered < io->covers_ && !atomic_compare_exchange_weak(&dev->writes_covered, &covered, io->covers_))
        ;
}

static void count(struct ht_io *io, int result)
{
    struct ht_dev *dev = io->dev;
    _Atomic uint64_t *done[HT_IO_OPS] = {&dev->reads, &dev->writes, &dev->flushes, &dev->discards};
    _Atomic uint64_t *bytes[HT_IO_OPS] = {&dev->read_bytes, &dev->written_bytes, NULL, &dev->discarded_bytes};
    _Atomic uint64_t *failed[HT_IO_OPS] = {&dev->read_errors, &dev->write_errors, &dev->flush_errors,
                                           &dev->discard_errors};

    atomic_fetch_add_explicit(result == 0 ? done[io->op] : failed[io->op], 1, memory_order_relaxed);
    if (result == 0 && bytes[io->op] != NULL)
        atomic_fetch_add_explicit(bytes[io->op], io->len, memory_order_relaxed);
}

void ht_io_end(struct ht_io *io, int result, bool performed)
{
    if (performed && io->op == HT_IO_WRITE)
        end_write(io, result);
    if (performed && io->op == HT_IO_FLUSH && result == 0)
        end_flush(io);
    count(io, result);
    ht_flight_end(io, result);
    if (io->shared_)
        ht_flush_end(io);
    io->result = result;
    io->done = true;
}
