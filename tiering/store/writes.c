/* SPDX-License-Identifier: Apache-2.0 */
/*
 * writes.c - dirty images go to new space, a few at once.
 *
 *   dirty --take space, start--> writing (shared: readers go on) --done--> clean, current reference
 *                                                                 --error-> dirty again, sticky error
 *
 * The image itself is what is written: the writer of the write holds the chunk shared, so nobody changes it. Of an image that others
 * change unseen (handout.c) it is a copy in a staging buffer.
 */
#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/store/store_priv.h"

enum {
    FLIGHT_BYTES_MAX = 16 << 20,
    PUSH_BYTES = 1 << 20, /* go to the device in one call, where neighbours become one request */
};

/* Make the image whole as far as it will be stored; returns the bytes to store. Lock and chunk held. */
static int complete_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t *out_bytes)
{
    struct ht_store *s = o->s;
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    const struct ht_ref *ref = ht_chunk_ref(c);
    if (ht_handed_stores(o)) /* anything may be there */
        im->data_hi = ht_chunk_len(o, index);
    if (im->valid_lo > 0 || (ref && ref->visible > im->valid_hi)) {
        int rc = ht_chunk_fill(o, c, index);
        if (rc)
            return rc;
    }
    uint32_t bytes = (uint32_t)ht_min_u64(im->data_hi, ht_chunk_len(o, index));
    uint32_t pad = (uint32_t)ht_round_up(bytes, HT_BLOCK_BYTES) - bytes;
    if (pad && !ht_handed_stores(o)) /* beyond what was written, or valid zeros already */
        memset(ht_arena_data(s->arena, c->slot) + bytes, 0, pad);
    *out_bytes = bytes;
    return 0;
}

/*
 * New space, while the reference that is current stays as it is: a publication that runs meanwhile names that one. A guaranteed object
 * has space for two copies only: then the unpublished one is given up for the whole image that replaces it.
 */
static int take_space(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t bytes, struct ht_ref *out)
{
    struct ht_place_wish wish = {.hint = ht_chunk_home(o->s, c)};
    int rc = ht_chunk_take_space(o, c, bytes, wish, out);
    if (rc != -ENOSPC || !o->extra->guarantee_blocks || !(c->flags & CH_CUR) || (c->flags & CH_SHARE))
        return rc;
    bool was = ht_chunk_unpublished(c);
    ht_chunk_drop_cur(o, c);
    ht_chunk_note_unpublished(o, c, index, was);
    return ht_chunk_take_space(o, c, bytes, wish, out);
}

/*
 * A buffer for a copy: nobody waits for one with buffers of his own. (What may be waited for with one is space, which comes with the log,
 * and that needs none.) Lock held, let go meanwhile.
 */
static void *take_copy(struct ht_writes *w, int near)
{
    void *buf;
    int rc;
    do {
        ht_store_unlock(w->s);
        rc = ht_staging_get(w->s->staging, HT_STAGING_FILL, 1, w->copies > 0, near, &buf);
        ht_store_lock(w->s);
        if (rc)
            ht_writes_finish(w);
    } while (rc);
    w->copies++;
    return buf;
}

static void put_copy(struct ht_writes *w, struct ht_write *j)
{
    if (!j->copy)
        return;
    ht_staging_put(w->s->staging, HT_STAGING_FILL, j->copy);
    j->copy = NULL;
    w->copies--;
}

/* What goes to the device. No lock held, the chunk is. */
static const void *bytes_to_write(struct ht_writes *w, const struct ht_write *j, uint32_t bytes)
{
    const uint8_t *data = ht_arena_data(w->s->arena, j->c->slot);
    if (!j->copy)
        return data;
    memcpy(j->copy, data, bytes);
    memset((uint8_t *)j->copy + bytes, 0, ht_round_up(bytes, HT_BLOCK_BYTES) - bytes);
    return j->copy;
}

bool ht_writes_full(const struct ht_writes *w)
{
    return w->count == HT_WRITES_MAX || w->flight_bytes >= FLIGHT_BYTES_MAX;
}

static void push(struct ht_writes *w)
{
    ht_ring_kick(w->ring);
    w->unpushed_bytes = 0;
}

int ht_writes_start(struct ht_writes *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = w->s;
    uint32_t bytes;
    while (w->copies && !ht_arena_is_guest(s->arena, c->slot)) /* completing may ask for a buffer, too */
        ht_writes_finish(w);
    int rc = complete_image(o, c, index, &bytes);
    if (rc) {
        ht_chunk_unlock_exclusive(o, c, index);
        return rc;
    }
    if (bytes == 0) { /* truncated away meanwhile */
        if (ht_arena_is_guest(s->arena, c->slot))
            ht_handed_cut(o, c, index, 0);
        else
            ht_chunk_drop_image(o, c, index);
        ht_chunk_unlock_exclusive(o, c, index);
        return 0;
    }
    struct ht_ref ref;
    rc = take_space(o, c, index, bytes, &ref);
    if (rc) {
        ht_chunk_unlock_exclusive(o, c, index);
        return rc;
    }
    uint64_t rescues = s->rescues;
    void *copy = ht_handed_stores(o) ? take_copy(w, ht_ref_near(s, &ref)) : NULL;
    struct ht_write *j = &w->job[(w->first + w->count) % HT_WRITES_MAX];
    *j = (struct ht_write){.o = o, .c = c, .index = index, .ref = ref, .bytes = bytes, .copy = copy};
    j->xfer.rescues = rescues;
    w->flight_bytes += bytes;
    ht_chunk_set_clean(o, c, index);
    c->writing = 1;
    ht_chunk_leaf(c)->writing++;
    ht_chunk_downgrade(s, c);
    w->count++;
    s->writing++;
    s->writing_blocks += ht_ref_blocks(&ref);
    o->writing++;
    o->refs++;
    ht_store_unlock(s);
    const void *data = bytes_to_write(w, j, bytes);
    j->ref.checksum = ht_store_checksum(s, data, bytes);
    j->rc = ht_xfer_queue(&j->xfer, s, w->ring, &j->ref, (void *)(uintptr_t)data, HT_IO_WRITE);
    w->unpushed_bytes += bytes;
    if (w->unpushed_bytes >= PUSH_BYTES)
        push(w);
    ht_store_lock(s);
    return 0;
}

/* No place took it: the image is dirty again. */
static void job_failed(struct ht_write *j, int rc)
{
    struct ht_obj *o = j->o;
    struct ht_store *s = o->s;
    s->write_errors++;
    struct ht_event_about about = {o->oid, "any device", 0, ht_xfer_error(&j->xfer, rc)};
    if (j->xfer.bad_dev) {
        about.device = ht_device_name(s, j->xfer.bad_dev - 1);
        about.offset = j->xfer.bad_offset;
    }
    ht_event(
        HT_EVENT_WRITE_ERROR, &about,
        "chunk %llu of object %llu could not be written at byte %llu of %s: %s; it stays in memory and is tried again",
        (unsigned long long)j->index, (unsigned long long)o->oid, (unsigned long long)about.offset, about.device,
        strerror(-about.error));
    /* Best effort: without a reservation the retry reports ENOSPC. Neither the job nor the image counts beside what is reserved for it. */
    uint64_t blocks = ht_div_up(j->bytes, HT_BLOCK_BYTES);
    s->writing_blocks -= blocks;
    int again = ht_chunk_reserve(o, j->c, (uint32_t)ht_div_up(ht_chunk_len(o, j->index), HT_BLOCK_BYTES));
    s->writing_blocks += blocks;
    ht_chunk_set_dirty(o, j->c, j->index);
    ht_obj_set_error(o, again ? again : rc);
}

void ht_writes_note_error(struct ht_writes *w, int rc)
{
    w->failed++;
    if (!w->error)
        w->error = rc;
}

void ht_writes_finish(struct ht_writes *w)
{
    struct ht_store *s = w->s;
    struct ht_write *j = &w->job[w->first];
    ht_store_unlock(s);
    int rc = ht_xfer_wait(&j->xfer, w->ring);
    if (j->rc)
        rc = j->rc;
    ht_store_lock(s);
    struct ht_chunk *c = j->c;
    if (!rc)
        rc = ht_xfer_settle(s, &j->xfer, &j->ref);
    const void *data = j->copy ? j->copy : ht_arena_data(s->arena, c->slot);
    if (rc)
        rc = ht_write_elsewhere(j->o, c, j->index, w->ring, data, &j->xfer, &j->ref, rc);
    put_copy(w, j);
    if (rc) {
        job_failed(j, rc);
        ht_writes_note_error(w, rc);
    } else {
        ht_chunk_install(j->o, c, j->index, &j->ref);
        ht_obj_count_written(j->o, &j->ref);
        s->writebacks++;
    }
    c->writing = 0;
    ht_chunk_leaf(c)->writing--;
    ht_chunk_unlock_shared(j->o, c, j->index);
    w->first = (w->first + 1) % HT_WRITES_MAX;
    w->count--;
    w->flight_bytes -= j->bytes;
    s->writing--;
    s->writing_blocks -= ht_div_up(j->bytes, HT_BLOCK_BYTES);
    j->o->writing--;
    ht_obj_untouch_if_idle(j->o);
    ht_obj_put_locked(j->o);
}

struct ht_writes *ht_writes_open(struct ht_store *s)
{
    struct ht_writes *w = calloc(1, sizeof(*w));
    if (!w)
        return NULL;
    w->s = s;
    w->ring = ht_store_ring(s);
    if (!w->ring) {
        free(w);
        return NULL;
    }
    return w;
}

int ht_writes_close(struct ht_writes *w)
{
    while (w->count)
        ht_writes_finish(w);
    int rc = w->error;
    free(w);
    return rc;
}
