/* SPDX-License-Identifier: Apache-2.0 */
/*
 * writeback.c - dirty images go to new space.
 *
 *   dirty --take space, start--> writing (shared: readers go on) --done--> clean, current reference
 *                                                                 --error-> dirty again, sticky error
 *
 * The image itself is what is written: the writer of the write holds the chunk shared, so nobody changes it. Of an image that others
 * change unseen (handout.c) it is a copy in a staging buffer. A few writes are in flight per caller (the window).
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/store/store_priv.h"

enum {
    WINDOW = 64,
    FLIGHT_BYTES_MAX = 16 << 20,
    PUSH_BYTES = 1 << 20, /* go to the device in one call, where neighbours become one request */
    BATCH = 16,
    FAILED_MAX = 16,
    TRIED_MAX = 256,
};

struct job {
    struct ht_obj *o;
    struct ht_chunk *c;
    uint64_t index;
    struct ht_ref ref;
    struct ht_xfer xfer;
    uint32_t bytes;
    void *copy; /* of what is written, or NULL */
    int rc;
};

struct window {
    struct ht_store *s;
    struct ht_ring *ring;
    struct job job[WINDOW];
    unsigned first, count; /* jobs in flight, oldest first */
    unsigned copies;       /* of them with one */
    uint64_t flight_bytes, unpushed_bytes;
    unsigned failed;
    int error; /* the first */
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

static void finish_job(struct window *w);

/*
 * A buffer for a copy: nobody waits for one with buffers of his own. (What may be waited for with one is space, which comes with the log,
 * and that needs none.) Lock held, let go meanwhile.
 */
static void *take_copy(struct window *w, int near)
{
    void *buf;
    int rc;
    do {
        ht_store_unlock(w->s);
        rc = ht_staging_get(w->s->staging, HT_STAGING_FILL, 1, w->copies > 0, near, &buf);
        ht_store_lock(w->s);
        if (rc)
            finish_job(w);
    } while (rc);
    w->copies++;
    return buf;
}

static void put_copy(struct window *w, struct job *j)
{
    if (!j->copy)
        return;
    ht_staging_put(w->s->staging, HT_STAGING_FILL, j->copy);
    j->copy = NULL;
    w->copies--;
}

/* What goes to the device. No lock held, the chunk is. */
static const void *bytes_to_write(struct window *w, const struct job *j, uint32_t bytes)
{
    const uint8_t *data = ht_arena_data(w->s->arena, j->c->slot);
    if (!j->copy)
        return data;
    memcpy(j->copy, data, bytes);
    memset((uint8_t *)j->copy + bytes, 0, ht_round_up(bytes, HT_BLOCK_BYTES) - bytes);
    return j->copy;
}

static bool is_full(const struct window *w)
{
    return w->count == WINDOW || w->flight_bytes >= FLIGHT_BYTES_MAX;
}

static void push(struct window *w)
{
    ht_ring_kick(w->ring);
    w->unpushed_bytes = 0;
}

/* Start writing one dirty chunk held exclusively. Lock held, let go meanwhile; the chunk is shared or free afterwards. */
static int start_job(struct window *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = w->s;
    uint32_t bytes;
    while (w->copies && !ht_arena_is_guest(s->arena, c->slot)) /* completing may ask for a buffer, too */
        finish_job(w);
    int rc = complete_image(o, c, index, &bytes);
    if (rc) {
        ht_chunk_unlock_exclusive(s, c);
        return rc;
    }
    if (bytes == 0) { /* truncated away meanwhile */
        if (ht_arena_is_guest(s->arena, c->slot))
            ht_handed_cut(o, c, index, 0);
        else
            ht_chunk_drop_image(o, c, index);
        ht_chunk_unlock_exclusive(s, c);
        return 0;
    }
    struct ht_ref ref;
    rc = take_space(o, c, index, bytes, &ref);
    if (rc) {
        ht_chunk_unlock_exclusive(s, c);
        return rc;
    }
    void *copy = ht_handed_stores(o) ? take_copy(w, ht_ref_near(s, &ref)) : NULL;
    struct job *j = &w->job[(w->first + w->count) % WINDOW];
    *j = (struct job){.o = o, .c = c, .index = index, .ref = ref, .bytes = bytes, .copy = copy};
    w->flight_bytes += bytes;
    ht_chunk_set_clean(o, c, index);
    c->writing = 1;
    ht_chunk_leaf(c)->writing++;
    ht_chunk_downgrade(s, c);
    w->count++;
    s->writing++;
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
static void job_failed(struct job *j, int rc)
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
    ht_chunk_set_dirty(o, j->c, j->index);
    /* Best effort: without a reservation the retry reports ENOSPC. */
    int again = ht_chunk_reserve(o, j->c, (uint32_t)ht_div_up(ht_chunk_len(o, j->index), HT_BLOCK_BYTES));
    ht_obj_set_error(o, again ? again : rc);
}

static void note_error(struct window *w, int rc)
{
    w->failed++;
    if (!w->error)
        w->error = rc;
}

/* Wait for the oldest job. Lock held, let go meanwhile. */
static void finish_job(struct window *w)
{
    struct ht_store *s = w->s;
    struct job *j = &w->job[w->first];
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
        note_error(w, rc);
    } else {
        ht_chunk_install(j->o, c, j->index, &j->ref);
        ht_obj_count_written(j->o, &j->ref);
        s->writebacks++;
    }
    c->writing = 0;
    ht_chunk_leaf(c)->writing--;
    ht_chunk_unlock_shared(s, c);
    w->first = (w->first + 1) % WINDOW;
    w->count--;
    w->flight_bytes -= j->bytes;
    s->writing--;
    j->o->writing--;
    ht_obj_untouch_if_idle(j->o);
    ht_obj_put_locked(j->o);
}

static struct window *window_open(struct ht_store *s)
{
    struct window *w = calloc(1, sizeof(*w));
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

static int window_close(struct window *w)
{
    while (w->count)
        finish_job(w);
    int rc = w->error;
    free(w);
    return rc;
}

static bool dirty(struct ht_store *s, const struct ht_chunk *c)
{
    return c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->dirty;
}

/* Write back one chunk if it is still dirty, waiting for its lock. A chunk of our own window would never get free: finish first. */
static void write_chunk(struct window *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = w->s;
    while (is_full(w))
        finish_job(w);
    if (!dirty(s, c) && !c->writing)
        return;
    while (w->count && (c->exclusive || c->shared))
        finish_job(w);
    ht_chunk_lock_exclusive(s, c);
    if (!dirty(s, c)) {
        ht_chunk_unlock_exclusive(s, c);
        return;
    }
    int rc = start_job(w, o, c, index);
    if (rc)
        note_error(w, rc);
}

/*
 * Chunks [first, last). What cannot be written holds up nothing else: every chunk is tried. A write that somebody else
 * has in flight counts as dirty until it is done.
 */
static void write_range(struct window *w, struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_chunk *c;
    uint64_t index = first;
    ht_chunk_for_each_from(c, o, index)
    {
        const struct ht_leaf_head *leaf = ht_chunk_leaf(c);
        if (index >= last || (!o->dirty && !o->writing))
            break;
        if (!leaf->dirty && !leaf->writing)
            index = ht_leaf_last(index);
        else if (c->writing || dirty(w->s, c))
            write_chunk(w, o, c, index);
    }
}

static void write_object(struct window *w, struct ht_obj *o)
{
    write_range(w, o, 0, UINT64_MAX);
}

void ht_obj_clean(struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_store *s = o->s;
    struct window *w = window_open(s);
    if (!w)
        return;
    ht_store_lock(s);
    write_range(w, o, first, last);
    (void)window_close(w);
    ht_store_unlock(s);
}

int ht_obj_writeback(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    if (o->obj_class == HT_CLASS_SCRATCH) /* goes to a device only when memory is short */
        return 0;
    int found = ht_obj_find_changes(o);
    struct window *w = window_open(s);
    if (!w)
        return -ENOMEM;
    ht_store_lock(s);
    write_object(w, o);
    int rc = window_close(w);
    if (!rc)
        rc = o->error ? o->error : found;
    if (!o->lost)
        o->error = 0;
    ht_store_unlock(s);
    return rc;
}

int ht_obj_writeback_flushed(struct ht_obj *o)
{
    struct ht_rounds r = {.rescues = o->s->rescues};
    int rc;
    do {
        rc = ht_obj_writeback(o);
        if (!rc)
            rc = ht_flush_written(o->s, &r);
    } while (rc == -EAGAIN);
    return rc;
}

static int write_scope(struct ht_store *s, uint64_t scope)
{
    struct window *w = window_open(s);
    if (!w)
        return -ENOMEM;
    struct ht_obj **objs;
    size_t count;
    ht_store_lock(s);
    int rc = ht_scope_collect(s, scope, &objs, &count);
    for (size_t i = 0; !rc && i < count; i++)
        if (!scope || !w->error) /* a model root is published as a whole or not at all */
            write_object(w, objs[i]);
    int wrc = window_close(w);
    for (size_t i = 0; !rc && i < count; i++) {
        /* A commit of a root reports what failed since the last one. Outside, fsync and close of the file do. */
        if (scope && objs[i]->error && !wrc)
            wrc = objs[i]->error;
        if (scope && !objs[i]->lost)
            objs[i]->error = 0;
        ht_obj_put_locked(objs[i]);
    }
    ht_store_unlock(s);
    if (!rc)
        free(objs);
    return rc ? rc : wrc;
}

int ht_scope_writeback(struct ht_store *s, uint64_t scope)
{
    int found = ht_handed_find_changes(s, scope), rc = ht_scope_write(s, scope);
    return found ? found : rc;
}

int ht_scope_write(struct ht_store *s, uint64_t scope)
{
    struct ht_rounds r = {.rescues = s->rescues};
    int rc, flushed;
    do {
        rc = write_scope(s, scope);
        flushed = ht_flush_written(s, &r);
    } while (!rc && flushed == -EAGAIN);
    return rc ? rc : flushed;
}

/* Shall it look for one more? */
static bool goes_on(const struct window *w, unsigned tried, unsigned most, enum ht_clean whom)
{
    if (w->failed >= FAILED_MAX)
        return false;
    return tried - w->failed < most || (whom && tried < TRIED_MAX && ht_arena_under_pressure(w->s->arena));
}

static bool is_asked(struct ht_store *s, uint32_t slot, enum ht_clean whom)
{
    if (whom == HT_CLEAN_ANY)
        return ht_image_passes_dirty(ht_arena_image(s->arena, slot));
    return ht_arena_presses(s->arena, slot, whom == HT_CLEAN_GROWING);
}

int ht_writeback_some(struct ht_store *s, unsigned most, enum ht_clean whom, int near)
{
    struct window *w = window_open(s);
    if (!w)
        return -ENOMEM;
    ht_store_lock(s);
    uint32_t *hand = &s->writeback_hand[near == HT_NEAR_ANY ? 0 : near];
    uint64_t in_vain_max = ht_arena_bytes(s->arena) >> 16;
    unsigned tried = 0;
    int rc = 0;
    for (uint64_t in_vain = 0; goes_on(w, tried, most, whom) && in_vain <= in_vain_max; in_vain++) {
        while (is_full(w)) /* now: it lets go of the lock */
            finish_job(w);
        uint32_t slot = ht_arena_next_used(s->arena, hand);
        if (slot == HT_SLOT_NONE)
            break;
        if (near != HT_NEAR_ANY && ht_arena_near(s->arena, slot) != near)
            continue;
        struct ht_image *im = ht_arena_image(s->arena, slot);
        struct ht_obj *o = im->owner;
        struct ht_chunk *c = ht_chunk_find(o, im->index);
        if (!is_asked(s, slot, whom) || !ht_chunk_trylock_exclusive(c))
            continue;
        o->refs++; /* of a scratch object or a dead one nobody else may have any */
        rc = start_job(w, o, c, im->index);
        ht_obj_put_locked(o);
        tried++;
        in_vain = 0;
        if (rc)
            note_error(w, rc);
    }
    /* Whether something was cleaned is what the caller wants to know: an error of another's chunk is that one's. */
    while (w->count)
        finish_job(w);
    unsigned cleaned = tried - w->failed;
    rc = window_close(w);
    ht_store_unlock(s);
    return cleaned || !rc ? (int)cleaned : rc;
}

int ht_writeback_now(struct ht_store *s)
{
    return ht_writeback_some(s, BATCH, HT_CLEAN_ANY, HT_NEAR_ANY);
}

bool ht_store_evict_image(void *ctx, uint32_t slot)
{
    struct ht_store *s = ctx;
    struct ht_image *im = ht_arena_image(s->arena, slot);
    struct ht_obj *o = im->owner;
    struct ht_chunk *c = ht_chunk_find(o, im->index);
    if (im->dirty || c->exclusive || c->shared)
        return false;
    ht_alloc_unreserve(s->alloc, im->reserved_blocks);
    im->reserved_blocks = 0;
    c->slot = HT_SLOT_NONE;
    o->resident--;
    s->evictions++;
    return true;
}
