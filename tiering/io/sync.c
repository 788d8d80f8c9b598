/* SPDX-License-Identifier: Apache-2.0 */
/* sync.c - requests that are waited for at once: on a ring, and reads, writes and flushes on the thread's own ring. */
#include "tiering/io/io_priv.h"
#include "tiering/io/rings.h"

#include <hitrain/limits.h>

#define PARTS_AT_ONCE 8u
#define PART_BYTES_MAX (1u << 20)
#define DISCARD_BYTES_MAX (1u << 30) /* of one request */

static unsigned pieces_left(const struct ht_io *ios, unsigned count)
{
    unsigned n = 0;

    for (unsigned i = 0; i < count; i++)
        n += ht_io_pieces_left(&ios[i]);
    return n;
}

int ht_ring_run(struct ht_ring *ring, struct ht_io *ios, unsigned count)
{
    int result = 0;

    for (unsigned i = 0; i < count; i++)
        ht_ring_submit(ring, &ios[i]);
    for (unsigned i = 0; i < count; i++) {
        while (!ios[i].done)
            ht_ring_wait_some(ring, pieces_left(ios + i, count - i));
        if (result == 0)
            result = ios[i].result;
    }
    return result;
}

/* Transfers parts of PART_BYTES_MAX, as many at a time as the ring is deep. */
static int transfer(struct ht_ring *ring, struct ht_dev *dev, enum ht_io_op op, uint64_t offset, char *buf, size_t len)
{
    struct ht_io ios[PARTS_AT_ONCE];
    int rc = 0;

    while (len > 0 && rc == 0) {
        unsigned n = 0;
        for (; n < PARTS_AT_ONCE && len > 0; n++) {
            uint32_t part = (uint32_t)ht_min_u64(len, PART_BYTES_MAX);
            ios[n] = (struct ht_io){.op = op, .dev = dev, .offset = offset, .buf = buf, .len = part};
            offset += part;
            buf += part;
            len -= part;
        }
        rc = ht_ring_run(ring, ios, n);
    }
    return rc;
}

/* Transfers through aligned memory. */
static int transfer_bounced(struct ht_ring *ring, struct ht_dev *dev, enum ht_io_op op, uint64_t offset, char *buf,
                            size_t len)
{
    void *bounce = aligned_alloc(HT_BLOCK_BYTES, PART_BYTES_MAX);
    int rc = !bounce ? -ENOMEM : 0;

    while (len > 0 && rc == 0) {
        uint32_t part = (uint32_t)ht_min_u64(len, PART_BYTES_MAX);
        if (op == HT_IO_WRITE)
            memcpy(bounce, buf, part);
        rc = transfer(ring, dev, op, offset, bounce, part);
        if (op == HT_IO_READ && rc == 0)
            memcpy(buf, bounce, part);
        offset += part;
        buf += part;
        len -= part;
    }
    free(bounce);
    return rc;
}

static int transfer_any(struct ht_dev *dev, enum ht_io_op op, uint64_t offset, char *buf, size_t len)
{
    /* Checks the whole range: nothing is moved if only the tail would be refused. */
    if (((offset | len) & (dev->facts.lba - 1)) != 0 || len == 0 || offset > ht_dev_size(dev) ||
        len > ht_dev_size(dev) - offset)
        return -EINVAL;
    struct ht_ring *ring = ht_ring_mine(NULL);
    if (!ring)
        return -errno;
    if (((uintptr_t)buf & (dev->facts.lba - 1)) != 0)
        return transfer_bounced(ring, dev, op, offset, buf, len);
    return transfer(ring, dev, op, offset, buf, len);
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
    struct ht_ring *ring = ht_ring_mine(NULL);
    int result;

    if (!ring)
        return -errno;
    ht_ring_flush(ring, &dev, 1, &result);
    return result;
}

int ht_dev_flush_since(struct ht_dev *dev, uint64_t failures)
{
    int rc = ht_dev_flush(dev);

    return rc == 0 && ht_dev_flush_failures(dev) != failures ? -EIO : rc;
}

int ht_dev_discard(struct ht_dev *dev, uint64_t offset, uint64_t len)
{
    struct ht_ring *ring = ht_ring_mine(NULL);
    int rc = ring ? 0 : -errno;

    while (len > 0 && rc == 0) {
        struct ht_io io = {
            .op = HT_IO_DISCARD, .dev = dev, .offset = offset, .len = (uint32_t)ht_min_u64(len, DISCARD_BYTES_MAX)};
        rc = ht_ring_run(ring, &io, 1);
        offset += io.len;
        len -= io.len;
    }
    return rc;
}
