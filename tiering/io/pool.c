/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.c - reads, writes and flushes for code without a ring of its own.
 *
 * Helpers are made when all are busy, up to HELPERS_MAX, and kept for the life of the process;
 * each serves one caller at a time. `lock` guards the list; nothing is taken under it. A forked
 * child must not touch its parent's rings (the queues are shared memory), so helpers carry the
 * process that made them and strangers are discarded.
 */
#include "tiering/io/io_priv.h"

#include <stdlib.h>
#include <unistd.h>

#define HELPERS_MAX 16u
#define HELPER_DEPTH 8u
#define PART_BYTES_MAX (1u << 20)
#define BUFFER_ALIGN 4096u

struct helper {
    struct helper *next;
    struct ht_ring *ring;
    void *bounce; /* PART_BYTES_MAX, made at first need */
    pid_t owner;
};

static struct ht_mutex lock = HT_MUTEX_INIT(HT_LOCK_IO_POOL);
static pthread_cond_t given_back = PTHREAD_COND_INITIALIZER;
static struct helper *idle;   /* lock */
static unsigned helper_count; /* lock: idle ones and those in use */
static pid_t counted_in;      /* lock: the process that helper_count is about */

static void helper_free(struct helper *h)
{
    ht_ring_free(h->ring);
    free(h->bounce);
    free(h);
}

static int helper_new(struct helper **out)
{
    struct helper *h = calloc(1, sizeof(*h));
    int err;

    if (h == NULL)
        return -ENOMEM;
    err = ht_ring_new(HELPER_DEPTH, &h->ring);
    if (err != 0) {
        free(h);
        return err;
    }
    h->owner = getpid();
    *out = h;
    return 0;
}

static void forget_parents_helpers_locked(void)
{
    if (counted_in == getpid())
        return;
    while (idle != NULL) {
        struct helper *h = idle;

        idle = h->next;
        helper_free(h);
    }
    helper_count = 0;
    counted_in = getpid();
}

static int helper_get(struct helper **out)
{
    struct helper *h;
    int err;

    ht_mutex_lock(&lock);
    forget_parents_helpers_locked();
    while (idle == NULL && helper_count >= HELPERS_MAX)
        ht_cond_wait(&given_back, &lock);
    h = idle;
    if (h != NULL)
        idle = h->next;
    else
        helper_count++;
    ht_mutex_unlock(&lock);
    if (h != NULL) {
        *out = h;
        return 0;
    }
    err = helper_new(out);
    if (err != 0) {
        ht_mutex_lock(&lock);
        helper_count--;
        pthread_cond_signal(&given_back);
        ht_mutex_unlock(&lock);
    }
    return err;
}

static void helper_put(struct helper *h)
{
    ht_mutex_lock(&lock);
    h->next = idle;
    idle = h;
    pthread_cond_signal(&given_back);
    ht_mutex_unlock(&lock);
}

/* In parts of PART_BYTES_MAX, as many at a time as the ring is deep. */
static int transfer(struct ht_ring *ring, struct ht_dev *dev, enum ht_io_op op, uint64_t offset, char *buf, size_t len)
{
    struct ht_io ios[HELPER_DEPTH];
    int err = 0;

    while (len > 0 && err == 0) {
        unsigned n = 0;

        for (; n < HELPER_DEPTH && len > 0; n++) {
            uint32_t part = (uint32_t)ht_min_u64(len, PART_BYTES_MAX);

            ios[n] = (struct ht_io){.op = op, .dev = dev, .offset = offset, .buf = buf, .len = part};
            offset += part;
            buf += part;
            len -= part;
        }
        err = ht_ring_run(ring, ios, n);
    }
    return err;
}

static int transfer_bounced(struct helper *h, struct ht_dev *dev, enum ht_io_op op, uint64_t offset, char *buf,
                            size_t len)
{
    int err = 0;

    if (h->bounce == NULL && posix_memalign(&h->bounce, BUFFER_ALIGN, PART_BYTES_MAX) != 0) {
        h->bounce = NULL;
        return -ENOMEM;
    }
    while (len > 0 && err == 0) {
        uint32_t part = (uint32_t)ht_min_u64(len, PART_BYTES_MAX);

        if (op == HT_IO_WRITE)
            memcpy(h->bounce, buf, part);
        err = transfer(h->ring, dev, op, offset, h->bounce, part);
        if (op == HT_IO_READ && err == 0)
            memcpy(buf, h->bounce, part);
        offset += part;
        buf += part;
        len -= part;
    }
    return err;
}

static int transfer_any(struct ht_dev *dev, enum ht_io_op op, uint64_t offset, char *buf, size_t len)
{
    struct helper *h;
    int err;

    /* Also so that nothing is moved when only the tail would be refused. */
    if (((offset | len) & (ht_dev_lba(dev) - 1)) != 0 || len == 0 || offset > ht_dev_size(dev) ||
        len > ht_dev_size(dev) - offset)
        return -EINVAL;
    err = helper_get(&h);
    if (err != 0)
        return err;
    if (((uintptr_t)buf & (ht_dev_lba(dev) - 1)) != 0)
        err = transfer_bounced(h, dev, op, offset, buf, len);
    else
        err = transfer(h->ring, dev, op, offset, buf, len);
    helper_put(h);
    return err;
}

int ht_dev_read(struct ht_dev *dev, uint64_t offset, void *buf, size_t len)
{
    return transfer_any(dev, HT_IO_READ, offset, buf, len);
}

int ht_dev_write(struct ht_dev *dev, uint64_t offset, const void *buf, size_t len)
{
    /* A write only reads its buffer; requests have one pointer for both directions. */
    return transfer_any(dev, HT_IO_WRITE, offset, (char *)(uintptr_t)buf, len);
}

int ht_dev_flush(struct ht_dev *dev)
{
    struct ht_io io = {.op = HT_IO_FLUSH, .dev = dev};
    struct helper *h;
    int err = helper_get(&h);

    if (err != 0)
        return err;
    err = ht_ring_run(h->ring, &io, 1);
    helper_put(h);
    return err;
}
