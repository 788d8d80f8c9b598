/* SPDX-License-Identifier: Apache-2.0 */
/* segment.c - the kernel request for a segment, and the meaning of its result. */
#include "tiering/io/segment.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

#include "tiering/base/fault.h"

/* ----------------------------------------------------------------- request */

/* For schedulers of the kernel that have classes; others take no notice. 0: that of the thread. */
static uint16_t priority_of(enum ht_io_class io_class)
{
    enum { BEST_EFFORT = 2, IDLE = 3, SHIFT = 13, LOWEST = 7 };
    static const uint16_t of[HT_IO_CLASSES] = {
        [HT_IO_PLANNED] = BEST_EFFORT << SHIFT | LOWEST, [HT_IO_BACKGROUND] = IDLE << SHIFT};

    return of[io_class];
}

static void prepare_transfer(const struct ht_registered *known, struct io_uring_sqe *sqe, const struct ht_segment *p)
{
    const struct ht_io *io = p->io;
    char *buf = (char *)io->buf + p->at;
    uint64_t offset = io->offset + p->at;
    int fixed = ht_uring_lookup(&known->memory, (uintptr_t)buf, p->len);

    if (io->op == HT_IO_READ && fixed >= 0)
        io_uring_prep_read_fixed(sqe, io->dev->fd, buf, p->len, offset, fixed);
    else if (io->op == HT_IO_READ)
        io_uring_prep_read(sqe, io->dev->fd, buf, p->len, offset);
    else if (fixed >= 0)
        io_uring_prep_write_fixed(sqe, io->dev->fd, buf, p->len, offset, fixed);
    else
        io_uring_prep_write(sqe, io->dev->fd, buf, p->len, offset);
    sqe->ioprio = priority_of(io->io_class_);
}

/* Names a registered device by its place: the kernel need not look up, hold and release the file. */
static void name_device(const struct ht_registered *known, struct io_uring_sqe *sqe, const struct ht_dev *dev)
{
    for (unsigned i = 0; i < known->file_count; i++) {
        if (known->file[i] != dev)
            continue;
        sqe->fd = (int)i;
        sqe->flags |= IOSQE_FIXED_FILE;
        return;
    }
}

static void prepare_command(const struct ht_registered *known, struct io_uring_sqe *sqe, struct ht_segment *p)
{
    bool moves = p->io->op == HT_IO_READ || p->io->op == HT_IO_WRITE;
    uintptr_t buf = (uintptr_t)p->io->buf + p->at;
    struct ht_raw_segment raw = {
        .at = p->at,
        .len = p->len,
        .registered =
            moves && !p->unregistered && !p->io->dev->unregistered ? ht_uring_lookup(&known->memory, buf, p->len) : -1,
        .range = p->range,
    };

    ht_raw_prepare(sqe, p->io, &raw);
}

void ht_segment_prepare(struct ht_segment *p, const struct ht_registered *known, struct io_uring_sqe *sqe)
{
    if (p->io->dev->raw)
        prepare_command(known, sqe, p);
    else if (p->io->op == HT_IO_DISCARD)
        io_uring_prep_fallocate(sqe, p->io->dev->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                (off_t)(p->io->offset + p->at), p->len);
    else if (p->io->op == HT_IO_FLUSH)
        io_uring_prep_fsync(sqe, p->io->dev->fd, IORING_FSYNC_DATASYNC);
    else
        prepare_transfer(known, sqe, p);
    name_device(known, sqe, p->io->dev);
}

/* ------------------------------------------------------------------ answer */

static uint32_t half_of(const struct ht_dev *dev, uint32_t bytes)
{
    uint32_t half = bytes / 2 / dev->lba * dev->lba;

    return half > 0 ? half : bytes;
}

/* The kernel reports a block device that went away, or shrank, as full; a thin volume may really be full. */
static int true_error(const struct ht_dev *dev, int err)
{
    uint64_t bytes;

    if (err != -ENOSPC || !dev->block || (ioctl(dev->fd, BLKGETSIZE64, &bytes) == 0 && bytes >= dev->size))
        return err;
    return -EIO;
}

/* How much of a transfer was moved, as far as tests allow it. */
static uint32_t moved_of(const struct ht_io *io, int res)
{
    uint32_t moved = (uint32_t)res;

    if (ht_fault(HT_FAULT_IO_SHORT) != 0)
        moved = half_of(io->dev, moved);
    if (ht_fault(HT_FAULT_IO_TORN) != 0 && moved > 0)
        moved--;
    return moved;
}

/* The result of a command, which only raw devices have, in the terms of other requests. */
static int command_result(struct ht_segment *p, int res)
{
    bool refused = ht_fault(HT_FAULT_IO_COMMAND_MEMORY) != 0;

    if (!p->io->dev->raw)
        return res;
    /*
     * Not every kernel takes every registered memory for a command: Linux 6.1 takes none that
     * it knows to be of large pages.
     */
    if ((res == -EINVAL || refused) && !p->unregistered) {
        p->unregistered = true;
        p->io->dev->unregistered = true;
        return -EINTR;
    }
    return ht_raw_result(res, p->len, &p->tries);
}

/*
 * A flush of a file is not repeated: fsync returns the error of a write once, whichever it is (EAGAIN, too), and the
 * next one would return 0. An NVMe command is: its status says that it may be.
 */
int ht_segment_complete(struct ht_segment *p, int res)
{
    const struct ht_dev *dev = p->io->dev;

    res = command_result(p, res);
    if (p->io->op == HT_IO_DISCARD && res == 0)
        res = (int)p->len;
    if (ht_fault(HT_FAULT_IO_AGAIN) != 0)
        res = -EAGAIN;
    if (p->io->op == HT_IO_FLUSH && !dev->raw && (res == -EINTR || res == -EAGAIN))
        res = -EIO;
    if (res == -EINTR)
        return 1;
    if (res == -EAGAIN)
        return res;
    if (p->io->op == HT_IO_FLUSH || res < 0)
        return res < 0 ? true_error(dev, res) : 0;
    uint32_t moved = moved_of(p->io, res);
    p->at += moved;
    p->len -= moved;
    if (p->len == 0)
        return 0;
    return moved == 0 || moved % dev->lba != 0 ? -EIO : 1; /* -EIO: the device became shorter than it was */
}
