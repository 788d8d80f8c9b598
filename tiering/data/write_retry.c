/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write_retry.c - a write that failed goes to another place.
 *
 *   place fails --> another place of that device --fails--> other devices, one place each
 *                                                             --none left--> the caller's error
 *
 * A place also fails when a flush of its device fails while the write is in flight (ht_xfer_validate).
 *
 * A device that fails every write is not tried twice, nor one that does not answer. When one place took the bytes, the
 * failed places stay taken until the next mount (up to a share of the device, alloc.h); when none did, it is not the
 * places' fault: they are free again. PLACES_MAX bounds what one write may cost.
 */
#include "tiering/data/write_retry.h"
#include "tiering/tier/placement.h"
#include "tiering/io/dev.h"
#include "tiering/space/alloc.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/object/space.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/health.h"
#include "tiering/data/xfer.h"

enum { PLACES_MAX = 5 };

struct search {
    struct ht_ref failed[PLACES_MAX];
    unsigned count;
    uint32_t avoid;
    int last; /* device of the last failure */
};

static void note_failure(struct ht_store *s, struct search *f, const struct ht_chunk_io *io) HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned device = io->xfer.bad_dev ? io->xfer.bad_dev - 1 : ht_ref_extent(&io->ref, 0).device;
    bool failing = ht_store_check_device(s, device) >= HT_HEALTH_FAILING;

    if (failing || f->last == (int)device)
        f->avoid |= 1u << device;
    f->last = (int)device;
    f->failed[f->count++] = io->ref;
}

/* Takes space on a device that is not to be avoided; all else that io->ref says stays. */
static int take_place(struct ht_chunk_io *io, const struct search *f) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_alloc_hint hint = {.device = f->avoid >> f->last & 1 ? -1 : f->last, .avoid = f->avoid};
    int device = ht_alloc_choose(io->obj->s->alloc, ht_ref_blocks(&io->ref), hint);

    if (device < 0 || f->avoid >> device & 1)
        return -ENOSPC;
    return ht_chunk_take_space_again(io->obj, io->chunk, hint, &io->ref);
}

static void release_places(struct ht_obj *o, struct search *f, bool found) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    for (unsigned i = 0; i < f->count; i++) {
        struct ht_ref *ref = &f->failed[i];
        uint32_t blocks = ht_ref_blocks(ref);
        o->stored_blocks -= blocks;
        for (unsigned k = 0; k < ht_ref_extents(ref); k++) {
            struct ht_extent e = ht_ref_extent(ref, k);
            if (!found || !ht_alloc_keep_bad(s->alloc, &e))
                ht_alloc_release(s->alloc, &e);
        }
        ht_obj_refill_rewrite_reserve(o, blocks);
        ht_ref_forget(ref);
    }
}

/* Writes to the taken place. Lock held, released in between. */
static int write_there(struct ht_chunk_io *io, struct ht_ring *ring) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = io->obj->s;

    io->xfer.flush_error_passes = s->data->flush_error_passes;
    ht_store_unlock(s);
    int rc = ht_xfer_run(&io->xfer, s, ring, &io->ref, io->data, HT_IO_WRITE);
    ht_store_lock(s);
    return rc ? rc : ht_xfer_validate(s, &io->xfer, &io->ref);
}

int ht_write_retry(struct ht_chunk_io *io, struct ht_ring *ring)
{
    struct search f = {.last = -1};
    int rc = io->rc;

    while (rc) {
        note_failure(io->obj->s, &f, io);
        if (rc != -EIO || !io->xfer.bad_dev || f.count == PLACES_MAX || take_place(io, &f))
            break;
        ht_chunk_write_report(io, rc, "it is written elsewhere");
        rc = write_there(io, ring);
    }
    if (rc)
        memset(&io->ref, 0, sizeof(io->ref));
    release_places(io->obj, &f, !rc);
    return rc;
}
