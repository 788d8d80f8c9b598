/* SPDX-License-Identifier: Apache-2.0 */
/*
 * record.c - the recorder: what reached a device, in the order it completed, in the
 * dm-log-writes format.
 *
 *   sector 0: super { le64 magic, version, entry count; le32 sector size }
 *   then per entry one sector { le64 sector, sectors, flags, length of text; text of a mark },
 *   followed by the data of a write.
 *
 * The format knows flushes as points between completed writes; ours run beside writes. Let W1
 * be complete when a flush is submitted and W2 complete while it runs. Both are volatile until it
 * ends; then W1 is durable and W2 is not. Neither "W1 W2 FLUSH" (claims W2) nor "W1 FLUSH W2" (hides
 * the states that have W2 without W1, which are the ones that find a missing wait) says that. So W2 is
 * logged when it completes, and the end of the flush is written as W1 again with FUA: durable from there
 * on. What was written over it since, and is still volatile, follows once more, so that a replay of
 * everything ends with the same bytes as the device.
 *
 * Several devices may share a recorder: one order of all that completed, each device at addresses of its own, one
 * behind the other. A flush covers one device, so while writes of another are volatile it is logged in the same way.
 *
 * `volatiles` lists the logged writes that no ended flush covers, in order of completion, with
 * the place of their data in the log. A device's record_lock guards its pointer to the recorder, the recorder's own lock,
 * below it, all else. Allocates: a device that is recorded is in a test.
 */
#include "tiering/io/io_priv.h"
#include "tiering/base/buf.h"
#include "tiering/base/log.h"

#include <hitrain/limits.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#define LOG_MAGIC 0x6a736677736872ull
#define LOG_VERSION 1u
#define SECTOR_BYTES 512u
#define HEAD_BYTES 32u
#define TEXT_BYTES_MAX (SECTOR_BYTES - HEAD_BYTES)

enum { FLAG_FLUSH = 1, FLAG_FUA = 2, FLAG_MARK = 8 };

struct span {
    const struct ht_dev *dev;
    uint64_t seq;        /* the device's writes_ended when it ended */
    uint64_t offset;     /* address in the log, as below */
    uint64_t log_offset; /* of its data */
    uint32_t len;
};

struct ht_recorder {
    int fd;
    int err; /* first failure; nothing is logged after it */
    uint64_t entry_count, end;
    struct span *volatiles;
    size_t volatile_count, volatile_cap;
    struct {
        struct ht_dev *dev;
        uint64_t first; /* address of its first byte */
    } member[HT_DEVICES_MAX];
    unsigned member_count; /* constant while anything is in flight */
    struct ht_mutex lock;
};

static void fail(struct ht_recorder *r, int err)
{
    if (r->err == 0)
        ht_error("recording of device writes stopped: %s", strerror(-err));
    r->err = r->err == 0 ? err : r->err;
}

static void write_at(struct ht_recorder *r, uint64_t at, const void *data, size_t len)
{
    const char *p = data;

    while (len > 0 && r->err == 0) {
        ssize_t n = pwrite(r->fd, p, len, (off_t)at);

        if (n < 0 && errno != EINTR)
            fail(r, -errno);
        if (n > 0) {
            p += n;
            at += (uint64_t)n;
            len -= (size_t)n;
        }
    }
}

static void write_super(struct ht_recorder *r)
{
    uint8_t sector[SECTOR_BYTES] = {0};

    ht_le64_store(sector, LOG_MAGIC);
    ht_le64_store(sector + 8, LOG_VERSION);
    ht_le64_store(sector + 16, r->entry_count);
    ht_le32_store(sector + 24, SECTOR_BYTES);
    write_at(r, 0, sector, sizeof(sector));
}

/* data: len bytes of a write, or NULL and the text of a mark. */
static void append(struct ht_recorder *r, uint64_t offset, const void *data, uint32_t len, unsigned flags,
                   const char *text)
{
    uint8_t sector[SECTOR_BYTES] = {0};
    size_t text_len = strlen(text);

    ht_le64_store(sector, offset / SECTOR_BYTES);
    ht_le64_store(sector + 8, len / SECTOR_BYTES);
    ht_le64_store(sector + 16, flags);
    ht_le64_store(sector + 24, text_len);
    memcpy(sector + HEAD_BYTES, text, text_len);
    write_at(r, r->end, sector, sizeof(sector));
    write_at(r, r->end + SECTOR_BYTES, data, len);
    r->end += SECTOR_BYTES + len;
    r->entry_count++;
    if (len == 0)
        write_super(r);
}

static void append_again(struct ht_recorder *r, const struct span *s, unsigned flags)
{
    void *copy = malloc(s->len);
    ssize_t n;

    if (copy == NULL) {
        fail(r, -ENOMEM);
        return;
    }
    do
        n = pread(r->fd, copy, s->len, (off_t)s->log_offset);
    while (n < 0 && errno == EINTR);
    if (n != (ssize_t)s->len)
        fail(r, n < 0 ? -errno : -EIO);
    else
        append(r, s->offset, copy, s->len, flags, "");
    free(copy);
}

static uint64_t address_of(const struct ht_recorder *r, const struct ht_dev *dev, uint64_t offset)
{
    unsigned i = 0;

    while (r->member[i].dev != dev)
        i++;
    return r->member[i].first + offset;
}

static void remember(struct ht_recorder *r, const struct ht_dev *dev, uint64_t seq, uint64_t offset, uint32_t len)
{
    if (r->volatile_count == r->volatile_cap) {
        size_t cap = r->volatile_cap > 0 ? 2 * r->volatile_cap : 64;
        struct span *bigger = reallocarray(r->volatiles, cap, sizeof(*bigger));

        if (bigger == NULL) {
            fail(r, -ENOMEM);
            return;
        }
        r->volatiles = bigger;
        r->volatile_cap = cap;
    }
    r->volatiles[r->volatile_count++] = (struct span){dev, seq, offset, r->end + SECTOR_BYTES, len};
}

void ht_record_write(struct ht_io *io, uint32_t bytes)
{
    struct ht_dev *dev = io->dev;
    struct ht_recorder *r;
    uint64_t seq;

    ht_mutex_lock(&dev->record_lock);
    seq = atomic_fetch_add(&dev->writes_ended, 1) + 1;
    r = dev->recorder;
    if (r != NULL && bytes > 0) {
        ht_mutex_lock(&r->lock);
        uint64_t at = address_of(r, dev, io->offset);
        remember(r, dev, seq, at, bytes);
        append(r, at, io->buf, bytes, 0, "");
        ht_mutex_unlock(&r->lock);
    }
    ht_mutex_unlock(&dev->record_lock);
}

static bool overlaps_any(const struct span *s, const struct span *others, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (s->offset < others[i].offset + others[i].len && others[i].offset < s->offset + s->len)
            return true;
    return false;
}

/* Of the volatile writes the first `covered` are durable now, the others are not. */
static void append_partial_flush(struct ht_recorder *r, size_t covered)
{
    for (size_t i = 0; i < covered; i++)
        append_again(r, &r->volatiles[i], FLAG_FUA);
    for (size_t i = covered; i < r->volatile_count; i++)
        if (overlaps_any(&r->volatiles[i], r->volatiles, covered))
            append_again(r, &r->volatiles[i], 0);
    write_super(r);
}

/* What this flush covered to the front, each part in its order. Returns how many that are. */
static size_t part_covered(struct ht_recorder *r, const struct ht_dev *dev, uint64_t covers)
{
    struct span *rest = reallocarray(NULL, r->volatile_count + 1, sizeof(*rest));
    size_t covered = 0, left = 0;

    if (rest == NULL) {
        fail(r, -ENOMEM);
        return 0;
    }
    for (size_t i = 0; i < r->volatile_count; i++) {
        const struct span *s = &r->volatiles[i];

        if (s->dev == dev && s->seq <= covers)
            r->volatiles[covered++] = *s;
        else
            rest[left++] = *s;
    }
    memcpy(r->volatiles + covered, rest, left * sizeof(*rest));
    free(rest);
    return covered;
}

static void record_flush_locked(struct ht_recorder *r, const struct ht_io *io)
{
    size_t covered = part_covered(r, io->dev, io->covers_);

    if (covered == r->volatile_count)
        append(r, 0, NULL, 0, FLAG_FLUSH, "");
    else
        append_partial_flush(r, covered);
    r->volatile_count -= covered;
    memmove(r->volatiles, r->volatiles + covered, r->volatile_count * sizeof(*r->volatiles));
}

void ht_record_flush(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;
    struct ht_recorder *r;

    ht_mutex_lock(&dev->record_lock);
    r = dev->recorder;
    if (r != NULL) {
        ht_mutex_lock(&r->lock);
        record_flush_locked(r, io);
        ht_mutex_unlock(&r->lock);
    }
    ht_mutex_unlock(&dev->record_lock);
}

/* Guarded by nothing: nothing is in flight on the device. */
static int attach(struct ht_recorder *r, struct ht_dev *dev)
{
    uint64_t first = 0;
    int err = 0;

    if (r->member_count == HT_DEVICES_MAX)
        return -ENOSPC;
    if (r->member_count > 0)
        first = r->member[r->member_count - 1].first + ht_dev_size(r->member[r->member_count - 1].dev);
    r->member[r->member_count].dev = dev;
    r->member[r->member_count].first = first;
    ht_mutex_lock(&dev->record_lock);
    if (dev->recorder != NULL)
        err = -EBUSY;
    if (err == 0) {
        dev->recorder = r;
        atomic_store(&dev->recording, true);
        r->member_count++;
    }
    ht_mutex_unlock(&dev->record_lock);
    return err;
}

static void free_recorder(struct ht_recorder *r)
{
    ht_mutex_destroy(&r->lock);
    free(r->volatiles);
    free(r);
}

int ht_recorder_start(struct ht_dev *dev, const char *path)
{
    struct ht_recorder *r = calloc(1, sizeof(*r));
    int err = 0;

    if (r == NULL)
        return -ENOMEM;
    ht_mutex_init(&r->lock, HT_LOCK_RECORDER);
    r->fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (r->fd < 0) {
        err = -errno;
        free_recorder(r);
        return err;
    }
    r->end = SECTOR_BYTES;
    write_super(r);
    err = r->err;
    if (err == 0)
        err = attach(r, dev);
    if (err != 0) {
        close(r->fd);
        free_recorder(r);
    }
    return err;
}

int ht_recorder_join(struct ht_dev *dev, struct ht_dev *recorded)
{
    return recorded->recorder != NULL ? attach(recorded->recorder, dev) : -ENOENT;
}

int ht_recorder_mark(struct ht_dev *dev, const char *text)
{
    struct ht_recorder *r;
    int err = -ENOENT;

    if (strlen(text) > TEXT_BYTES_MAX)
        return -EINVAL;
    ht_mutex_lock(&dev->record_lock);
    r = dev->recorder;
    if (r != NULL) {
        ht_mutex_lock(&r->lock);
        append(r, 0, NULL, 0, FLAG_MARK, text);
        err = r->err;
        ht_mutex_unlock(&r->lock);
    }
    ht_mutex_unlock(&dev->record_lock);
    return err;
}

int ht_recorder_stop(struct ht_dev *dev)
{
    struct ht_recorder *r;
    int err;

    ht_mutex_lock(&dev->record_lock);
    r = dev->recorder;
    ht_mutex_unlock(&dev->record_lock);
    if (r == NULL)
        return -ENOENT;
    for (unsigned i = 0; i < r->member_count; i++) {
        struct ht_dev *member = r->member[i].dev;

        ht_mutex_lock(&member->record_lock);
        member->recorder = NULL;
        atomic_store(&member->recording, false);
        ht_mutex_unlock(&member->record_lock);
    }
    write_super(r);
    err = r->err;
    if (close(r->fd) != 0 && err == 0)
        err = -errno;
    free_recorder(r);
    return err;
}

void ht_recorder_end(struct ht_dev *dev)
{
    int err = ht_recorder_stop(dev);

    (void)err;
}
