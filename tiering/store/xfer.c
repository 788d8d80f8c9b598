/* SPDX-License-Identifier: Apache-2.0 */
/* xfer.c - moving stored chunks between memory and devices. No lock held. */
#include <stdlib.h>

#include "tiering/base/hash.h"
#include "tiering/base/event.h"
#include "tiering/base/fault.h"
#include "tiering/base/twin.h"
#include "tiering/store/store_priv.h"

struct ht_ring *ht_store_ring(struct ht_store *s)
{
    return ht_ring_mine(s->rings);
}

/* What is missing, or has not answered for long, is not asked: nobody shall wait for it. */
static bool all_answer(struct ht_xfer *x, const struct ht_store *s, const struct ht_ref *ref)
{
    for (unsigned i = 0; i < x->count; i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        if (s->health[e.device] < HT_HEALTH_NOT_ANSWERING)
            continue;
        x->count = 0;
        x->bad_dev = e.device + 1;
        x->bad_offset = e.block * HT_BLOCK_BYTES;
        x->bad_error = s->health[e.device] == HT_HEALTH_MISSING ? -ENODEV : -ETIMEDOUT;
        return false;
    }
    return true;
}

int ht_xfer_queue(struct ht_xfer *x, struct ht_store *s, struct ht_ring *ring, const struct ht_ref *ref, void *buf,
                  enum ht_io_op op)
{
    x->lost = ht_ref_lost(ref);
    x->count = x->lost ? 0 : ht_ref_extents(ref);
    x->ios = x->io_;
    x->bad_dev = 0;
    if (!all_answer(x, s, ref))
        return -EIO;
    if (x->count > HT_ARRAY_SIZE(x->io_)) {
        x->ios = malloc(x->count * sizeof(*x->ios));
        if (!x->ios) {
            x->count = 0;
            return -ENOMEM;
        }
    }
    uint8_t *p = buf;
    for (unsigned i = 0; i < x->count; i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        x->ios[i] = (struct ht_io){
            .op = op,
            .dev = s->dev[e.device],
            .offset = e.block * HT_BLOCK_BYTES,
            .buf = p,
            .len = e.blocks * HT_BLOCK_BYTES,
            .user = (void *)(uintptr_t)(e.device + 1),
        };
        p += x->ios[i].len;
        ht_ring_submit(ring, &x->ios[i]);
    }
    return 0;
}

int ht_xfer_start(struct ht_xfer *x, struct ht_store *s, struct ht_ring *ring, const struct ht_ref *ref, void *buf,
                  enum ht_io_op op)
{
    int rc = ht_xfer_queue(x, s, ring, ref, buf, op);
    if (!rc)
        ht_ring_offer(ring);
    return rc;
}

int ht_xfer_wait(struct ht_xfer *x, struct ht_ring *ring)
{
    int first = x->lost ? -EIO : 0;
    for (unsigned i = 0; i < x->count; i++) {
        int rc = ht_ring_wait(ring, &x->ios[i]);
        if (!rc)
            rc = ht_fault(x->ios[i].op == HT_IO_READ ? HT_FAULT_STORE_READ : HT_FAULT_STORE_WRITE);
        if (rc && !first) {
            first = -EIO;
            x->bad_error = rc;
            x->bad_dev = (unsigned)(uintptr_t)x->ios[i].user;
            x->bad_offset = x->ios[i].offset;
        }
    }
    if (x->count && x->ios != x->io_)
        free(x->ios);
    x->count = 0;
    return first;
}

/* Submitting and waiting is one system call. */
int ht_xfer_run(struct ht_xfer *x, struct ht_store *s, struct ht_ring *ring, const struct ht_ref *ref, void *buf,
                enum ht_io_op op)
{
    int rc = ht_xfer_queue(x, s, ring, ref, buf, op);
    return rc ? rc : ht_xfer_wait(x, ring);
}

uint64_t ht_store_checksum(const struct ht_store *s, const void *stored, size_t len)
{
    return ht_hash64(stored, len, s->sb.salt);
}

int ht_xfer_error(const struct ht_xfer *x, int error)
{
    return x->bad_dev ? x->bad_error : error;
}

const char *ht_device_name(const struct ht_store *s, unsigned device)
{
    return s->dev[device] ? ht_dev_name(s->dev[device]) : "a missing device";
}

void ht_read_failed(struct ht_obj *o, uint64_t index, const struct ht_xfer *x, int error)
{
    struct ht_store *s = o->s;
    error = ht_xfer_error(x, error);
    const char *device = x->bad_dev ? ht_device_name(s, x->bad_dev - 1) : NULL;
    struct ht_event_about about = {o->oid, device, device ? x->bad_offset : 0, error};
    if (x->lost)
        ht_event(HT_EVENT_READ_ERROR, &about, "chunk %llu of object %llu is marked lost: write it anew, or delete it",
                 (unsigned long long)index, (unsigned long long)o->oid);
    else
        ht_event(HT_EVENT_READ_ERROR, &about, "chunk %llu of object %llu cannot be read at byte %llu of %s: %s",
                 (unsigned long long)index, (unsigned long long)o->oid, (unsigned long long)about.offset,
                 device ? device : "any device", strerror(-error));
    ht_store_lock(s);
    s->read_errors++;
    ht_store_unlock(s);
}

int ht_ref_verify(struct ht_obj *o, uint64_t index, const struct ht_ref *ref, const void *buf)
{
    struct ht_store *s = o->s;
    if ((ht_store_checksum(s, buf, ref->stored) == ref->checksum && !ht_fault(HT_FAULT_STORE_CHECKSUM)) ||
        HT_TWIN("chunk-checksum"))
        return 0;
    struct ht_extent e = ht_ref_extent(ref, 0);
    struct ht_event_about about = {o->oid, ht_device_name(s, e.device), e.block * HT_BLOCK_BYTES, -EIO};
    ht_event(
        HT_EVENT_CHECKSUM, &about,
        "chunk %llu of object %llu at byte %llu of %s: its checksum is wrong; the read fails with EIO; run hitrain-fsck",
        (unsigned long long)index, (unsigned long long)o->oid, (unsigned long long)about.offset, about.device);
    ht_store_lock(s);
    s->checksum_errors++;
    ht_store_unlock(s);
    return -EIO;
}
