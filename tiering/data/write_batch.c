/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write_batch.c - dirty images go to new space, a few at once.
 *
 *   dirty --prepare, take space, start--> writing (shared: readers go on) --done--> clean, current reference
 *                                                                          --error-> dirty again, sticky error
 *
 * The image itself is written: writeback holds the chunk shared, so no thread changes it. Of a volatile object a copy
 * in a staging buffer is written, and of new content maybe a compressed frame (write_frame.c).
 */

#include "tiering/data/write_batch.h"
#include "tiering/cache/staging.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/data/data.h"
#include "tiering/data/data_priv.h"

enum {
    PUSH_BYTES = 1 << 20, /* go to the device in one call, so that neighbours become one request */
};

/* Must it be completed before it is written? */
static bool lacks_bytes(const struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = ht_arena_image(s->arena, c->slot);
    const struct ht_ref *ref = ht_chunk_ref(c);

    return im->valid_lo > 0 || (ref && ref->visible > im->valid_hi);
}

/* Completes the image as far as it will be stored; returns the bytes to store. Lock and chunk held. */
static int complete_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t *out_bytes)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    int rc = lacks_bytes(s, c) ? ht_chunk_fill(o, c, index, NULL) : 0;

    if (!rc)
        *out_bytes = (uint32_t)ht_min_u64(im->data_hi, ht_chunk_len(o, index));
    return rc;
}

/*
 * Gets a buffer for a copy: a thread with buffers of its own waits for none. (A thread with a buffer may wait for
 * space, which comes with the log, and that needs no buffer.) Releases the lock in between.
 */
static void *take_copy(struct ht_write_batch *w, int numa_index) HT_REQUIRES(HT_LOCK_STORE)
{
    void *buf;
    int rc;

    do {
        ht_store_unlock(w->s);
        rc = ht_staging_get(w->s->staging, HT_STAGING_FILL, 1, w->copies > 0, numa_index, &buf);
        ht_store_lock(w->s);
        if (rc)
            ht_write_batch_finish(w);
    } while (rc);
    w->copies++;
    return buf;
}

static void put_copy(struct ht_write_batch *w, struct ht_batch_write *j)
{
    if (!j->copy)
        return;
    ht_staging_put(w->s->staging, HT_STAGING_FILL, j->copy);
    j->copy = NULL;
    w->copies--;
}

/*
 * Prepares the bytes of the image; of a volatile object those of a copy, as programs may store anything in between.
 * Bytes after them in the image are zeros already, or were not written. Or a frame. Releases the lock in between.
 */
static void prepare(struct ht_write_batch *w, struct ht_batch_write *j, bool copied) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->s;
    bool frame = !copied && ht_write_frame_may(j->io.obj, j->io.chunk, j->bytes), vain = false;
    int numa_index = ht_chunk_numa_index(s, j->io.chunk);

    if (copied)
        j->copy = take_copy(w, numa_index);
    void *data = ht_arena_data(s->arena, j->io.chunk->slot);
    ht_store_unlock(s);
    if (copied)
        memcpy(j->copy, data, j->bytes);
    if (!frame || !ht_write_frame_prepare(w, j, data, numa_index, &vain)) {
        ht_chunk_write_prepare(&j->io, copied ? j->copy : data, j->bytes, HT_CODEC_RAW, j->bytes);
        j->io.ref.kept_raw = vain;
    }
    ht_store_lock(s);
    if (frame && ht_write_frames_asked(s))
        s->waits.wakes.recompress = s->waits.wakes.any = true;
}

bool ht_write_batch_full(const struct ht_write_batch *w)
{
    return w->count == HT_WRITE_BATCH_MAX || w->flight_bytes >= w->flight_bytes_max;
}

bool ht_write_batch_admit(struct ht_write_batch *w, int device)
{
    struct ht_store *s = w->s;
    uint32_t blocks = HT_CHUNK_BYTES / HT_BLOCK_BYTES;

    if (ht_io_class() == HT_IO_URGENT)
        return true;
    if (device < 0)
        device = ht_alloc_choose(s->alloc, blocks, (struct ht_alloc_hint){.device = -1});
    const struct ht_permit_request r = {
        .dev = device < 0 ? NULL : s->dev[device],
        .direction = HT_DIRECTION_WRITE,
        .good = w->good,
        .bytes = HT_CHUNK_BYTES,
    };
    enum ht_admission a = ht_admit(s, &w->spare, &r, w->count > 0);
    if (a == HT_ADMISSION_LATER)
        ht_write_batch_finish(w);
    return a == HT_ADMITTED;
}

/* Threads that need an image wait for it. */
static void note_coming(struct ht_store *s, struct ht_batch_write *j, const struct ht_image *im)
    HT_REQUIRES(HT_LOCK_STORE)
{
    j->workingset = im->workingset;
    j->makes_room = !im->protected && !im->workingset;
    s->flow.coming += j->makes_room;
    s->flow.coming_workingset += j->workingset;
}

static void note_came(struct ht_store *s, const struct ht_batch_write *j) HT_REQUIRES(HT_LOCK_STORE)
{
    s->flow.coming -= j->makes_room;
    s->flow.coming_workingset -= j->workingset;
}

/* As ht_write_batch_start, but after an error the caller still holds the chunk. */
static int start(struct ht_write_batch *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->s;
    bool copied = ht_obj_is_copied(o);
    uint32_t bytes;

    while (w->copies && lacks_bytes(s, c)) /* completing may need a buffer, too */
        ht_write_batch_finish(w);
    if (copied) /* programs may have stored anything */
        ht_arena_image(s->arena, c->slot)->data_hi = ht_chunk_len(o, index);
    int rc = complete_image(o, c, index, &bytes);
    if (rc)
        return rc;
    if (bytes == 0) { /* a truncation removed it in between */
        ht_image_cut(o, c, index, 0);
        ht_chunk_unlock_exclusive(o, c, index);
        return 0;
    }
    struct ht_batch_write *j = &w->job[w->order[w->count]];
    *j = (struct ht_batch_write){.io = {.obj = o, .chunk = c, .index = index}, .bytes = bytes};
    note_coming(s, j, ht_arena_image(s->arena, c->slot));
    prepare(w, j, copied);
    bytes = j->bytes;
    rc = ht_chunk_write_place(&j->io, ht_obj_hint(o, ht_chunk_target_device(s, c)));
    if (rc) {
        put_copy(w, j);
        note_came(s, j);
        return rc;
    }
    j->io.permit = ht_admission_take(&w->spare);
    ht_permit_settle(&j->io.permit, ht_ref_dev(s, &j->io.ref), bytes);
    w->flight_bytes += bytes;
    ht_chunk_set_clean(o, c, index);
    c->writing = 1;
    ht_chunk_leaf(c)->writing++;
    ht_chunk_downgrade(s, c);
    if (!w->count++)
        ht_list_add_tail(&s->data->writing, &w->link);
    s->flow.writing++;
    o->writing++;
    o->refs++;
    ht_chunk_write_start(&j->io, w->ring);
    w->unpushed_bytes += bytes;
    if (w->unpushed_bytes >= PUSH_BYTES) {
        ht_ring_kick(w->ring);
        w->unpushed_bytes = 0;
    }
    ht_store_lock(s);
    return 0;
}

/* Without space: may a write in flight give some back? A thread that waits for others has none itself. */
static bool wait_for_reserve(struct ht_write_batch *w, struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!w->count || !o->extra->rewrite_reserve_blocks)
        return ht_obj_wait_for_reserve(o);
    ht_write_batch_finish(w);
    return true;
}

int ht_write_batch_start(struct ht_write_batch *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    int rc;

    do
        rc = start(w, o, c, index);
    while (rc == -ENOSPC && wait_for_reserve(w, o));
    if (rc)
        ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

/* No place took the bytes: the image is dirty again. */
static void job_failed(struct ht_batch_write *j, bool early, int rc) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = j->io.obj;
    struct ht_chunk *c = j->io.chunk;

    ht_chunk_write_report(&j->io, rc, "it stays in memory and is tried again");
    /* Best effort: without a reservation the next try reports ENOSPC. */
    int again = ht_chunk_reserve(o, c, ht_blocks(ht_chunk_len(o, j->io.index)));
    ht_chunk_set_dirty(o, c, j->io.index);
    if (!early)
        ht_obj_set_error(o, again ? again : rc);
}

void ht_write_batch_note_error(struct ht_write_batch *w, int rc)
{
    w->failed++;
    if (!w->error)
        w->error = rc;
}

/* Its place is the last free one: start() may be preparing a job in the first. */
static void remove_job(struct ht_write_batch *w, unsigned k)
{
    uint8_t place = w->order[k];

    memmove(&w->order[k], &w->order[k + 1], (HT_WRITE_BATCH_MAX - 1 - k) * sizeof(w->order[0]));
    w->order[HT_WRITE_BATCH_MAX - 1] = place;
    w->count--;
}

/*
 * The oldest job that has been written. Devices complete requests in any order, and a slow one must not keep the images
 * of others. A job that no device took comes after all older ones: by then a device that was silent may answer, and
 * the job is tried again.
 */
static unsigned wait_for_job(struct ht_write_batch *w) HT_EXCLUDES(HT_LOCK_STORE)
{
    for (;;) {
        unsigned fewest = UINT_MAX;
        for (unsigned k = 0; k < w->count; k++) {
            const struct ht_chunk_io *io = &w->job[w->order[k]].io;
            if (k && io->rc)
                continue;
            unsigned left = ht_chunk_write_pieces_left(io);
            if (!left)
                return k;
            fewest = left < fewest ? left : fewest;
        }
        ht_ring_wait_some(w->ring, fewest); /* no job ends with fewer */
    }
}

void ht_write_batch_finish(struct ht_write_batch *w)
{
    struct ht_store *s = w->s;

    ht_store_unlock(s);
    unsigned k = wait_for_job(w);
    struct ht_batch_write *j = &w->job[w->order[k]];
    struct ht_obj *o = j->io.obj;
    struct ht_chunk *c = j->io.chunk;

    ht_chunk_write_wait(&j->io, w->ring);
    ht_store_lock(s);
    int rc = ht_chunk_write_finish(&j->io, w->ring);
    ht_permit_put(&j->io.permit);
    put_copy(w, j);
    if (rc) {
        job_failed(j, w->early, rc);
        ht_write_batch_note_error(w, rc);
    } else {
        s->counts.writebacks++;
    }
    c->writing = 0;
    ht_chunk_leaf(c)->writing--;
    ht_chunk_unlock_shared(o, c, j->io.index);
    w->flight_bytes -= j->bytes;
    remove_job(w, k);
    if (!w->count)
        ht_list_del(&w->link);
    note_came(s, j);
    s->flow.writing--;
    o->writing--;
    ht_obj_tell_reserve_waiters(s);
    ht_obj_untouch_if_idle(o);
    ht_obj_put_locked(o);
}

struct ht_write_batch *ht_write_batch_open(struct ht_store *s)
{
    struct ht_write_batch *w = calloc(1, sizeof(*w));

    if (!w)
        return NULL;
    w->s = s;
    for (unsigned k = 0; k < HT_WRITE_BATCH_MAX; k++)
        w->order[k] = (uint8_t)k;
    w->good = HT_GATE_MEMORY;
    w->flight_bytes_max = HT_WRITE_BATCH_FLIGHT_MAX;
    w->ring = ht_store_ring(s);
    if (!w->ring) {
        free(w);
        return NULL;
    }
    return w;
}

int ht_write_batch_close(struct ht_write_batch *w)
{
    while (w->count)
        ht_write_batch_finish(w);
    ht_permit_put(&w->spare);
    int rc = w->error;
    free(w);
    return rc;
}

/* ---------------------------------------------------------------- ranges */

static bool is_to_be_written(const struct ht_write_batch *w, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return c && (c->writing || ht_chunk_is_dirty(w->s, c));
}

/*
 * Writes back one chunk if it is still dirty, waiting for its lock. A chunk that this thread itself is writing would
 * never get free: finish first. Finishing releases the store's lock, so the chunk is looked up again.
 */
static void write_chunk(struct ht_write_batch *w, struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->s;
    struct ht_chunk *c = ht_chunk_find(o, index);

    while (is_to_be_written(w, c)) {
        if (ht_write_batch_full(w) || (w->count && (c->exclusive || c->shared)))
            ht_write_batch_finish(w);
        else if (ht_write_batch_admit(w, ht_chunk_target_device(s, c)))
            break;
        c = ht_chunk_find(o, index);
    }
    if (!is_to_be_written(w, c))
        return;
    ht_chunk_lock_exclusive(o, c, index);
    if (!ht_chunk_is_dirty(s, c)) {
        ht_chunk_unlock_exclusive(o, c, index);
        return;
    }
    int rc = ht_write_batch_start(w, o, c, index);
    if (rc)
        ht_write_batch_note_error(w, rc);
}

/*
 * Chunks [first, last). A chunk that cannot be written holds up no other: every chunk is tried. A write that another
 * thread has in flight counts as dirty until it is done.
 */
void ht_write_batch_range(struct ht_write_batch *w, struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_slice slice = {0};
    uint64_t index = first;

    ht_chunk_for_each_from(c, o, index) {
        const struct ht_leaf_head *leaf = ht_chunk_leaf(c);
        if (index >= last || (!o->dirty && !o->writing))
            break;
        if (!leaf->dirty && !leaf->writing)
            index = ht_leaf_last(index);
        else if (is_to_be_written(w, c))
            write_chunk(w, o, index);
        ht_slice_next(o->s, &slice);
    }
}

void ht_obj_clean(struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_store *s = o->s;
    struct ht_write_batch *w = ht_write_batch_open(s);

    if (!w)
        return;
    ht_store_lock(s);
    ht_write_batch_range(w, o, first, last);
    (void)ht_write_batch_close(w);
    ht_store_unlock(s);
}
