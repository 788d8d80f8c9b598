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
 * `volatiles` lists the logged writes that no ended flush covers, in order of completion, with
 * the place of their data in the log. All of it is guarded by the device's record_lock. Allocates: a
 * device that is recorded is in a test.
 */
#include "tiering/io/io_priv.h"
#include "tiering/base/buf.h"
#include "tiering/base/log.h"

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
    uint64_t seq; /* the device's writes_ended when it ended */
    uint64_t offset;
    uint64_t log_offset; /* of its data */
    uint32_t len;
};

struct ht_recorder {
    int fd;
    int err; /* first failure; nothing is logged after it */
    uint64_t entry_count, end;
    struct span *volatiles;
    size_t volatile_count, volatile_cap;
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

static void remember(struct ht_recorder *r, uint64_t seq, uint64_t offset, uint32_t len)
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
    r->volatiles[r->volatile_count++] = (struct span){seq, offset, r->end + SECTOR_BYTES, len};
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
        remember(r, seq, io->offset, bytes);
        append(r, io->offset, io->buf, bytes, 0, "");
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

void ht_record_flush(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;
    struct ht_recorder *r;
    size_t covered = 0;

    ht_mutex_lock(&dev->record_lock);
    r = dev->recorder;
    if (r == NULL)
        goto out;
    while (covered < r->volatile_count && r->volatiles[covered].seq <= io->covers_)
        covered++;
    if (covered == r->volatile_count)
        append(r, 0, NULL, 0, FLAG_FLUSH, "");
    else
        append_partial_flush(r, covered);
    r->volatile_count -= covered;
    memmove(r->volatiles, r->volatiles + covered, r->volatile_count * sizeof(*r->volatiles));
out:
    ht_mutex_unlock(&dev->record_lock);
}

int ht_recorder_start(struct ht_dev *dev, const char *path)
{
    struct ht_recorder *r = calloc(1, sizeof(*r));
    int err = 0;

    if (r == NULL)
        return -ENOMEM;
    r->fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (r->fd < 0) {
        err = -errno;
        free(r);
        return err;
    }
    r->end = SECTOR_BYTES;
    write_super(r);
    err = r->err;
    ht_mutex_lock(&dev->record_lock);
    if (err == 0 && dev->recorder != NULL)
        err = -EBUSY;
    if (err == 0) {
        dev->recorder = r;
        atomic_store(&dev->recording, true);
    }
    ht_mutex_unlock(&dev->record_lock);
    if (err != 0) {
        close(r->fd);
        free(r);
    }
    return err;
}

int ht_recorder_mark(struct ht_dev *dev, const char *text)
{
    int err = -ENOENT;

    if (strlen(text) > TEXT_BYTES_MAX)
        return -EINVAL;
    ht_mutex_lock(&dev->record_lock);
    if (dev->recorder != NULL) {
        append(dev->recorder, 0, NULL, 0, FLAG_MARK, text);
        err = dev->recorder->err;
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
    dev->recorder = NULL;
    atomic_store(&dev->recording, false);
    ht_mutex_unlock(&dev->record_lock);
    if (r == NULL)
        return -ENOENT;
    write_super(r);
    err = r->err;
    if (close(r->fd) != 0 && err == 0)
        err = -errno;
    free(r->volatiles);
    free(r);
    return err;
}

void ht_recorder_end(struct ht_dev *dev)
{
    int err = ht_recorder_stop(dev);

    (void)err;
}
