/* SPDX-License-Identifier: Apache-2.0 */
/* xfer.c - requests for the extents of a reference. No lock held. */

#include "tiering/data/xfer.h"
#include "tiering/base/fault.h"
#include "tiering/object/context.h"
#include "tiering/data/data_priv.h"

/* A device that is missing, or has not answered for long, gets no request: no thread should wait for it. */
static bool all_answer(struct ht_xfer *x, const struct ht_store *s, const struct ht_ref *ref)
{
    for (unsigned i = 0; i < x->count; i++) {
        struct ht_extent e = ht_ref_extent(ref, i);
        if (s->data->health[e.device] < HT_HEALTH_NOT_ANSWERING)
            continue;
        x->count = 0;
        x->bad_dev = e.device + 1;
        x->bad_offset = e.block * HT_BLOCK_BYTES;
        x->bad_error = s->data->health[e.device] == HT_HEALTH_MISSING ? -ENODEV : -ETIMEDOUT;
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
    if (!x->lost && ht_ref_is_cold(ref)) { /* no request for a device: data/cold.c fetches it */
        x->count = 0;
        return -EIO;
    }
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

unsigned ht_xfer_pieces_left(const struct ht_xfer *x)
{
    unsigned n = 0;

    for (unsigned i = 0; i < x->count; i++)
        n += ht_io_pieces_left(&x->ios[i]);
    return n;
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

void ht_xfer_blame(struct ht_xfer *x, const struct ht_ref *ref, int error)
{
    struct ht_extent e = ht_ref_extent(ref, 0);

    x->bad_dev = e.device + 1;
    x->bad_offset = e.block * HT_BLOCK_BYTES;
    x->bad_error = error;
}

const char *ht_device_name(const struct ht_store *s, unsigned device)
{
    return device == HT_DEVICE_VAULT ? "the vault" : s->dev[device] ? ht_dev_name(s->dev[device]) : "a missing device";
}
