/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recorder.c - see recorder.h. Requests that reached a device, in the order of completion, in the dm-log-writes format.
 *
 *   sector 0: super { le64 magic, version, entry count; le32 sector size }
 *   then per entry one sector { le64 sector, sectors, flags, length of text; text of a mark },
 *   followed by the data of a write.
 *
 * The format knows flushes as points between completed writes; ours run beside writes. Let W1 be complete when a flush
 * is submitted and W2 complete while it runs. Both are volatile until it ends; then W1 is durable and W2 is not. "W1 W2
 * FLUSH" is wrong: it claims W2. "W1 FLUSH W2" is wrong, too: it hides the states that have W2 without W1, and these
 * are the ones that find a missing wait. So W2 is logged when it completes, and the end of the flush is written as W1
 * again with FUA: durable from there on. Later writes over it that are still volatile follow once more, so that a
 * replay of everything ends with the same bytes as the device.
 *
 * Several devices may share a recorder: one order of all completions, each device at addresses of its own, one after
 * the other. A flush covers one device, so while writes of another are volatile it is logged in the same way.
 *
 * `volatiles` lists the logged writes that no ended flush covers, in order of completion, with
 * the place of their data in the log. A device's record_lock guards its pointer to the recorder and its count of
 * writes, the recorder's own lock, below it, all else. A flush covers the writes that were counted when it began.
 */
#include <fcntl.h>
#include <hitrain/limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/support/dev_priv.h"
#include "tests/support/recorder.h"
#include "tiering/base/buf.h"
#include "tiering/base/log.h"

#define LOG_MAGIC 0x6a736677736872ull
#define LOG_VERSION 1u
#define SECTOR_BYTES 512u
#define HEAD_BYTES 32u
#define TEXT_BYTES_MAX (SECTOR_BYTES - HEAD_BYTES)

enum { FLAG_FLUSH = 1, FLAG_FUA = 2, FLAG_MARK = 8 };

struct span {
    const struct ht_dev *dev;
    uint64_t seq;        /* the device's count of writes */
    uint64_t offset;     /* address in the log, as below */
    uint64_t log_offset; /* length of its data */
    uint32_t len;
};

struct recorder {
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
    pthread_mutex_t lock;
};

static void fail(struct recorder *r, int err)
{
    if (r->err == 0)
        ht_error("recording of device writes stopped: %s", strerror(-err));
    r->err = r->err == 0 ? err : r->err;
}

static void write_at(struct recorder *r, uint64_t at, const void *data, size_t len)
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

static void write_super(struct recorder *r)
{
    uint8_t sector[SECTOR_BYTES] = {0};

    ht_le64_store(sector, LOG_MAGIC);
    ht_le64_store(sector + 8, LOG_VERSION);
    ht_le64_store(sector + 16, r->entry_count);
    ht_le32_store(sector + 24, SECTOR_BYTES);
    write_at(r, 0, sector, sizeof(sector));
}

/* data: len bytes of a write, or NULL and the text of a mark. */
static void append(struct recorder *r, uint64_t offset, const void *data, uint32_t len, unsigned flags,
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

static void append_again(struct recorder *r, const struct span *s, unsigned flags)
{
    void *copy = malloc(s->len);
    ssize_t n;

    if (!copy) {
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

static void remember(struct recorder *r, const struct ht_dev *dev, uint64_t seq, uint64_t offset, uint32_t len)
{
    if (r->volatile_count == r->volatile_cap) {
        size_t cap = r->volatile_cap > 0 ? 2 * r->volatile_cap : 64;
        struct span *bigger = reallocarray(r->volatiles, cap, sizeof(*bigger));
        if (!bigger) {
            fail(r, -ENOMEM);
            return;
        }
        r->volatiles = bigger;
        r->volatile_cap = cap;
    }
    r->volatiles[r->volatile_count++] = (struct span){dev, seq, offset, r->end + SECTOR_BYTES, len};
}

void recorder_put_discard(struct dev *d, const struct ht_io *io)
{
    struct ht_io write = *io;

    write.buf = malloc(io->len);
    if (!write.buf)
        abort();
    memset(write.buf, DISCARDED_BYTE, io->len);
    recorder_put_write(d, &write, io->len);
    free(write.buf);
}

void recorder_put_write(struct dev *d, const struct ht_io *io, uint32_t bytes)
{
    pthread_mutex_lock(&d->record_lock);
    struct recorder *r = d->recorder;
    if (r && bytes > 0) {
        pthread_mutex_lock(&r->lock);
        unsigned i = 0;
        while (r->member[i].dev != d->dev)
            i++;
        uint64_t at = r->member[i].first + io->offset;
        remember(r, d->dev, ++d->writes, at, bytes);
        append(r, at, io->buf, bytes, 0, "");
        pthread_mutex_unlock(&r->lock);
    }
    pthread_mutex_unlock(&d->record_lock);
}

void recorder_note_flush(struct dev *d, struct ht_io *io)
{
    pthread_mutex_lock(&d->record_lock);
    io->seen_ = d->writes;
    pthread_mutex_unlock(&d->record_lock);
}

static bool overlaps_any(const struct span *s, const struct span *others, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (s->offset < others[i].offset + others[i].len && others[i].offset < s->offset + s->len)
            return true;
    return false;
}

/* The first `covered` volatile writes are durable now, the others are not. */
static void append_partial_flush(struct recorder *r, size_t covered)
{
    for (size_t i = 0; i < covered; i++)
        append_again(r, &r->volatiles[i], FLAG_FUA);
    for (size_t i = covered; i < r->volatile_count; i++)
        if (overlaps_any(&r->volatiles[i], r->volatiles, covered))
            append_again(r, &r->volatiles[i], 0);
    write_super(r);
}

/* Moves the writes that this flush covered to the front, each part in its order. Returns their number. */
static size_t part_covered(struct recorder *r, const struct ht_dev *dev, uint64_t covers)
{
    struct span *rest = reallocarray(NULL, r->volatile_count + 1, sizeof(*rest));
    size_t covered = 0, left = 0;

    if (!rest) {
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

void recorder_put_flush(struct dev *d, const struct ht_io *io)
{
    pthread_mutex_lock(&d->record_lock);
    struct recorder *r = d->recorder;
    if (r) {
        pthread_mutex_lock(&r->lock);
        size_t covered = part_covered(r, io->dev, io->seen_);
        if (covered == r->volatile_count)
            append(r, 0, NULL, 0, FLAG_FLUSH, "");
        else
            append_partial_flush(r, covered);
        r->volatile_count -= covered;
        memmove(r->volatiles, r->volatiles + covered, r->volatile_count * sizeof(*r->volatiles));
        pthread_mutex_unlock(&r->lock);
    }
    pthread_mutex_unlock(&d->record_lock);
}

/* Needs no lock: nothing is in flight on the device. */
static int attach(struct recorder *r, struct ht_dev *dev)
{
    struct dev *d = dev_of(dev);
    uint64_t first = 0;
    int rc = 0;

    if (r->member_count == HT_DEVICES_MAX)
        return -ENOSPC;
    if (r->member_count > 0)
        first = r->member[r->member_count - 1].first + ht_dev_size(r->member[r->member_count - 1].dev);
    r->member[r->member_count].dev = dev;
    r->member[r->member_count].first = first;
    pthread_mutex_lock(&d->record_lock);
    if (d->recorder)
        rc = -EBUSY;
    if (rc == 0) {
        d->recorder = r;
        d->recording = true;
        r->member_count++;
    }
    pthread_mutex_unlock(&d->record_lock);
    return rc;
}

static void free_recorder(struct recorder *r)
{
    pthread_mutex_destroy(&r->lock);
    free(r->volatiles);
    free(r);
}

int recorder_start(struct ht_dev *dev, const char *path)
{
    struct recorder *r = calloc(1, sizeof(*r));
    int rc = 0;

    if (!r)
        return -ENOMEM;
    pthread_mutex_init(&r->lock, NULL);
    r->fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (r->fd < 0) {
        rc = -errno;
        free_recorder(r);
        return rc;
    }
    r->end = SECTOR_BYTES;
    write_super(r);
    rc = r->err;
    if (rc == 0)
        rc = attach(r, dev);
    if (rc != 0) {
        close(r->fd);
        free_recorder(r);
    }
    return rc;
}

int recorder_join(struct ht_dev *dev, struct ht_dev *recorded)
{
    struct recorder *r = dev_of(recorded)->recorder;

    return r ? attach(r, dev) : -ENOENT;
}

int recorder_mark(struct ht_dev *dev, const char *text)
{
    struct dev *d = dev_of(dev);
    int rc = -ENOENT;

    if (strlen(text) > TEXT_BYTES_MAX)
        return -EINVAL;
    pthread_mutex_lock(&d->record_lock);
    struct recorder *r = d->recorder;
    if (r) {
        pthread_mutex_lock(&r->lock);
        append(r, 0, NULL, 0, FLAG_MARK, text);
        rc = r->err;
        pthread_mutex_unlock(&r->lock);
    }
    pthread_mutex_unlock(&d->record_lock);
    return rc;
}

static int stop(struct dev *d)
{
    pthread_mutex_lock(&d->record_lock);
    struct recorder *r = d->recorder;
    pthread_mutex_unlock(&d->record_lock);
    if (!r)
        return -ENOENT;
    for (unsigned i = 0; i < r->member_count; i++) {
        struct dev *member = dev_of(r->member[i].dev);
        pthread_mutex_lock(&member->record_lock);
        member->recorder = NULL;
        member->recording = false;
        pthread_mutex_unlock(&member->record_lock);
    }
    write_super(r);
    int rc = r->err;
    if (close(r->fd) != 0 && rc == 0)
        rc = -errno;
    free_recorder(r);
    return rc;
}

int recorder_stop(struct ht_dev *dev)
{
    return stop(dev_of(dev));
}

void recorder_end(struct dev *d)
{
    (void)stop(d); /* what went wrong was logged when it did */
}
