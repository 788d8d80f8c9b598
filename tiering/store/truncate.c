/* SPDX-License-Identifier: Apache-2.0 */
/* truncate.c - truncation, punching, giving up scratch content, and finding data and holes. */
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/data/cold.h"
#include "tiering/data/chunk_io.h"
#include "tiering/shm/shm.h"
#include "tiering/store/store_priv.h"

/* -------------------------------------------------------------- truncate */

enum { TRIES_IN_SLICES = 3 };

/* The chunk keeps its first keep bytes; the rest reads as zeros. Needs no space. Lock and chunk held. */
static void cut_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t keep) HT_REQUIRES(HT_LOCK_STORE)
{
    o->version++;
    ht_obj_note_edit(o);
    ht_chunk_prealloc_drop(o, c, keep);
    ht_image_cut(o, c, index, keep);
    struct ht_ref *ref = ht_chunk_ref(c);
    if (keep == 0) {
        ht_chunk_install_hole(o, c, index);
        return;
    }
    if (!ref || ref->visible <= keep)
        return;
    struct ht_chunk_before was = ht_chunk_before(c);
    if (ref == &c->pub) {
        c->cur = c->pub;
        c->flags |= HT_CH_CUR | HT_CH_SHARE;
    }
    c->cur.visible = keep & HT_VISIBLE_MASK;
    c->generation++;
    ht_chunk_note_unpublished(o, c, index, was);
}

/* Cuts every chunk in [first, last) whole. Releases the lock in between. */
static void drop_chunks(struct ht_obj *o, uint64_t first, uint64_t last) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_slice slice = HT_SLICE_RESTING;
    uint64_t index = first;

    ht_chunk_for_each_from(c, o, index) {
        if (index >= last)
            break;
        if (ht_chunk_in_use(c)) {
            ht_chunk_lock_exclusive(o, c, index);
            cut_chunk(o, c, index, 0);
            ht_chunk_unlock_exclusive(o, c, index);
        }
        ht_slice_next(s, &slice);
        ht_obj_let_publish(o);
    }
}

/*
 * Is there nothing at or beyond size? slice: releases the lock in between; NULL: does not. It comes to a chunk that has
 * nothing only if that is a part of shared memory.
 */
static bool is_cut(struct ht_obj *o, uint64_t size, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t first = size >> o->chunk_shift, index = first;
    uint32_t keep = (uint32_t)(size & (ht_obj_bytes_per_chunk(o) - 1));

    ht_chunk_for_each_busy_from(c, o, index) {
        const struct ht_ref *ref = ht_chunk_ref(c);
        uint32_t end = ref ? ref->visible : 0;
        if (c->slot != HT_SLOT_NONE)
            end = (uint32_t)ht_max_u64(end, ht_arena_image(o->s->arena, c->slot)->data_hi);
        if (c->exclusive || end > (index == first ? keep : 0)) /* its holder may have begun with the old size */
            return false;
        if (slice)
            ht_slice_next(o->s, slice);
    }
    return true;
}

/* Is it cut at this moment? In slices, if no other thread takes a chunk there meanwhile. */
static bool is_cut_now(struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = {0};
    struct ht_chunk_watch watch;

    ht_chunk_watch_begin(&watch, o, size >> o->chunk_shift);
    bool cut = is_cut(o, size, &slice);
    ht_chunk_watch_end(&watch);
    return cut && !watch.taken;
}

static void cut_object(struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t keep = (uint32_t)(size & (ht_obj_bytes_per_chunk(o) - 1));
    uint64_t index = size >> o->chunk_shift;
    struct ht_chunk *c = keep ? ht_chunk_find(o, index) : NULL;

    if (c) {
        ht_chunk_lock_exclusive(o, c, index);
        cut_chunk(o, c, index, keep);
        ht_chunk_unlock_exclusive(o, c, index);
    }
    drop_chunks(o, index + (keep != 0), UINT64_MAX);
}

/* Releases the lock in between. */
static int truncate_locked(struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE)
{
    /* The size comes last. If it were published before the cuts, a later growth would show bytes beyond the end. */
    for (unsigned tries = 0; size < o->size; tries++) {
        cut_object(o, size);
        /* Threads that write behind the new end all the time could make this last: then it looks without a break. */
        if (tries < TRIES_IN_SLICES ? is_cut_now(o, size) : is_cut(o, size, NULL))
            break;
    }
    if (size == o->size)
        ht_obj_prealloc_drop(o, size, HT_FILE_BYTES_MAX);
    int rc = ht_shm_grow(o, size);
    if (!rc)
        ht_obj_set_size_locked(o, size);
    ht_shm_trim(o);
    return rc;
}

int ht_obj_truncate(struct ht_obj *o, uint64_t size)
{
    struct ht_scope *sc;

    if (size > HT_FILE_BYTES_MAX)
        return -EFBIG;
    int rc = ht_obj_lock_for_change(o, &sc);
    if (rc)
        return rc;
    rc = truncate_locked(o, size);
    ht_obj_unlock_after_change(o, sc);
    return rc;
}

int ht_obj_ungrow(struct ht_obj *o, uint64_t size, uint64_t end)
{
    struct ht_scope *sc;
    int rc = ht_obj_lock_for_change(o, &sc);

    if (rc)
        return rc;
    if (size < end && o->size == end)
        rc = truncate_locked(o, size);
    ht_obj_unlock_after_change(o, sc);
    return rc;
}

/* ----------------------------------------------------------------- punch */

static int zero_piece(struct ht_obj *o, uint64_t index, uint32_t a, uint32_t b) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c = ht_chunk_find(o, index);

    if (!c)
        return 0;
    ht_chunk_lock_exclusive(o, c, index);
    int rc = 0;
    if (c->slot != HT_SLOT_NONE || ht_chunk_ref(c)) {
        rc = ht_chunk_is_away(s, c) ? -EREMOTE : ht_image_attach(o, c, index, b, false);
        if (!rc)
            rc = ht_chunk_fill(o, c, index, NULL);
        if (!rc)
            rc = ht_chunk_reserve(o, c, ht_chunk_blocks_after_write(o, c, 0));
        if (!rc) {
            /* a rollback may have made the object smaller meanwhile */
            b = (uint32_t)ht_max_u64(ht_min_u64(b, ht_image_reach(o, c, index)), a);
            memset(ht_arena_data(s->arena, c->slot) + a, 0, b - a);
            ht_chunk_set_dirty(o, c, index);
            ht_obj_note_edit(o);
        } else {
            ht_chunk_drop_empty(o, c, index);
        }
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

/* Releases the lock in between. */
static int punch_locked(struct ht_obj *o, uint64_t off, uint64_t len) HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = ht_shm_complete(o);
    uint64_t end = len > o->size || off > o->size - len ? o->size : off + len;
    uint64_t behind = ht_max_u64(off, o->size),
             all = len > HT_FILE_BYTES_MAX - ht_min_u64(off, HT_FILE_BYTES_MAX) ? HT_FILE_BYTES_MAX : off + len;
    uint64_t bytes = ht_obj_bytes_per_chunk(o);

    while (off < end && !rc) {
        uint64_t index = off >> o->chunk_shift, start = index << o->chunk_shift;
        uint64_t stop = ht_min_u64(end, start + bytes);
        if (off == start && (stop == start + bytes || stop == o->size)) {
            if (stop < end) /* all whole chunks at once: there may be many */
                stop = end >> o->chunk_shift << o->chunk_shift;
            drop_chunks(o, index, (stop + bytes - 1) >> o->chunk_shift);
        } else {
            rc = zero_piece(o, index, (uint32_t)(off - start), (uint32_t)(stop - start));
        }
        off = stop;
    }
    if (!rc)
        ht_obj_prealloc_drop(o, behind, all);
    return rc;
}

int ht_obj_punch(struct ht_obj *o, uint64_t off, uint64_t len)
{
    struct ht_scope *sc;
    int rc;

    do {
        rc = ht_obj_lock_for_change(o, &sc);
        if (rc)
            return rc;
        rc = punch_locked(o, off, len);
        ht_obj_unlock_after_change(o, sc);
    } while (rc == -EREMOTE && !(rc = ht_cold_bring_ends(o, off, len)));
    return rc;
}

/* --------------------------------------------------------------- scratch */

void ht_obj_scratch_drop(struct ht_obj *o, uint64_t first, uint64_t count)
{
    struct ht_store *s = o->s;

    assert(o->obj_class == HT_CLASS_SCRATCH);
    ht_store_lock(s);
    uint64_t end = count > UINT64_MAX - first ? UINT64_MAX : first + count, index = first;
    struct ht_slice slice = {0};
    ht_chunk_for_each_from(c, o, index) {
        if (index >= end)
            break;
        if (ht_chunk_in_use(c)) {
            ht_chunk_lock_exclusive(o, c, index);
            ht_chunk_drop_image(o, c, index);
            ht_chunk_prealloc_drop(o, c, 0);
            ht_chunk_install_hole(o, c, index);
            ht_chunk_unlock_exclusive(o, c, index);
        }
        ht_slice_next(s, &slice);
    }
    ht_store_unlock(s);
}

/* ------------------------------------------------------------------ seek */

/* The first chunk at or after index with data. It passes chunks without content only if a thread holds them. */
static uint64_t seek_data(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    /* bounded: a busy chunk has content, or a thread holds it */
    ht_chunk_for_each_busy_from(c, o, index)
        if (ht_chunk_has_content(c))
            return index;
    return UINT64_MAX;
}

int64_t ht_obj_seek(struct ht_obj *o, uint64_t off, bool hole)
{
    struct ht_store *s = o->s;

    ht_store_lock(s);
    int64_t result = -ENXIO;
    uint64_t size = o->size, index = off >> o->chunk_shift;
    if (off < size && ht_obj_is_volatile(o)) { /* anything may be there */
        result = (int64_t)(hole ? size : off);
    } else if (off < size) {
        uint64_t found = hole ? ht_chunk_next_hole(o, index) : seek_data(o, index);
        uint64_t at = found == index ? off : found == UINT64_MAX ? UINT64_MAX : found << o->chunk_shift;
        if (at < size)
            result = (int64_t)at;
        else if (hole) /* the end is a hole */
            result = (int64_t)size;
    }
    ht_store_unlock(s);
    return result;
}
