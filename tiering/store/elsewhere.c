/* SPDX-License-Identifier: Apache-2.0 */
/*
 * elsewhere.c - a write that failed goes to another place.
 *
 *   place fails --> another place of that device --fails--> other devices, one place each --none left--> the caller's error
 *
 * A place also fails when a flush of its device fails while the write is under way (ht_xfer_settle).
 *
 * A device that fails every write is not tried twice, nor one that does not answer. When one place took the bytes, those
 * that did not stay taken until the next mount (up to a share of the device, alloc.h); when none did, it is not the places' fault: they are free
 * again. PLACES_MAX bounds what one write may cost.
 */
#include "tiering/base/event.h"
#include "tiering/store/store_priv.h"

enum { PLACES_MAX = 5 };

struct search {
    struct ht_ref failed[PLACES_MAX];
    unsigned count;
    uint32_t avoid;
    int last; /* device of the last failure */
};

static void note_failure(struct ht_store *s, struct search *f, const struct ht_xfer *x, const struct ht_ref *ref)
{
    unsigned device = x->bad_dev ? x->bad_dev - 1 : ht_ref_extent(ref, 0).device;
    bool failing = ht_store_judge_device(s, device) >= HT_HEALTH_FAILING;

    if (failing || f->last == (int)device)
        f->avoid |= 1u << device;
    f->last = (int)device;
    f->failed[f->count++] = *ref;
}

static void tell(const struct ht_obj *o, uint64_t index, const struct ht_xfer *x)
{
    struct ht_store *s = o->s;
    struct ht_event_about about = {o->oid, ht_device_name(s, x->bad_dev - 1), x->bad_offset, x->bad_error};

    s->write_errors++;
    ht_event(HT_EVENT_WRITE_ERROR, &about,
             "chunk %llu of object %llu could not be written at byte %llu of %s: %s; it is written elsewhere",
             (unsigned long long)index, (unsigned long long)o->oid, (unsigned long long)about.offset, about.device,
             strerror(-about.error));
}

/* Space on a device that is not to be avoided. */
static int take_place(struct ht_obj *o, struct ht_chunk *c, uint32_t bytes, const struct search *f, struct ht_ref *out)
{
    struct ht_place_wish wish = {.hint = f->avoid >> f->last & 1 ? -1 : f->last, .avoid = f->avoid};
    int device = ht_alloc_choose(o->s->alloc, (uint32_t)ht_div_up(bytes, HT_BLOCK_BYTES), wish);

    if (device < 0 || f->avoid >> device & 1)
        return -ENOSPC;
    return ht_chunk_take_space(o, c, bytes, wish, out);
}

static void settle_places(struct ht_obj *o, struct search *f, bool found)
{
    struct ht_store *s = o->s;

    for (unsigned i = 0; i < f->count; i++) {
        struct ht_ref *ref = &f->failed[i];
        o->stored_blocks -= ht_ref_blocks(ref);
        for (unsigned k = 0; k < ht_ref_extents(ref); k++) {
            struct ht_extent e = ht_ref_extent(ref, k);
            if (!found || !ht_alloc_keep_bad(s->alloc, &e))
                ht_alloc_release(s->alloc, &e);
        }
        ht_ref_forget(ref);
    }
}

int ht_write_elsewhere(struct ht_obj *o, struct ht_chunk *c, uint64_t index, struct ht_ring *ring, const void *data,
                       struct ht_xfer *x, struct ht_ref *ref, int error)
{
    struct ht_store *s = o->s;
    struct search f = {.last = -1};
    uint32_t bytes = ref->stored;
    uint64_t checksum = ref->checksum;

    for (;;) {
        note_failure(s, &f, x, ref);
        if (error != -EIO || !x->bad_dev || f.count == PLACES_MAX || take_place(o, c, bytes, &f, ref))
            break;
        tell(o, index, x);
        ref->checksum = checksum;
        x->rescues = s->rescues;
        ht_store_unlock(s);
        error = ht_xfer_run(x, s, ring, ref, (void *)(uintptr_t)data, HT_IO_WRITE);
        ht_store_lock(s);
        if (!error)
            error = ht_xfer_settle(s, x, ref);
        if (!error)
            break;
    }
    if (error)
        memset(ref, 0, sizeof(*ref));
    settle_places(o, &f, !error);
    return error;
}
