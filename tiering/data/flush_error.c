/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flush_error.c - gives up the writes that a failed flush voided.
 *
 * A flush that fails leaves the writes before it unknown, unless an earlier one covered them (flush.c), and the next
 * one that succeeds proves nothing about them:
 *
 *   flush fails --> the device is closed: nothing is placed there any more, and no flush is sent; unless it is the only
 *                   device. It does not matter whose flush it was, that of content, of the log
 *                   or of a superblock: a device that cannot flush holds nothing new
 *               --> every current reference on it that is not covered: its bytes go into an
 *                   image, dirty, and the reference is given up
 *               --> bytes that cannot be read are lost: BAD, the object's error
 *
 * A publication of the object before it is written anew, and flushed, would publish the former content. So a
 * publication begins again when something was given up since its writeback (ht_tx_begin_round). References are given up
 * with tx_lock held: a check at the beginning of a transaction holds until its end.
 *
 * suspect: devices with a failed flush that is not handled yet. resolving: one thread goes through their references,
 * while a new failure makes them suspect again. A write that was in flight at that time is noticed when it is installed
 * (ht_xfer_validate), a clone when its target gets the reference. Lock: store.lock.
 */

#include "tiering/base/event.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/fill.h"
#include "tiering/data/flush.h"
#include "tiering/data/xfer.h"

/* ---------------------------------------------------------------- resolve */

static void lose(struct ht_obj *o, struct ht_chunk *c, uint64_t index, int error) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_extent e = ht_ref_extent(&c->cur, 0);
    struct ht_event_about about = {o->oid, ht_device_name(s, e.device), e.block * HT_BLOCK_BYTES, error};
    struct ht_chunk_before was = ht_chunk_before(c);

    ht_event(
        HT_EVENT_WRITE_ERROR, &about,
        "new content of chunk %llu of object %llu was written to %s, which could not flush it, and cannot be read again: %s",
        (unsigned long long)index, (unsigned long long)o->oid, about.device, strerror(-error));
    s->flow.write_errors++;
    ht_chunk_drop_image(o, c, index);
    ht_chunk_drop_cur(o, c);
    c->flags |= HT_CH_BAD;
    ht_chunk_note_unpublished(o, c, index, was);
    ht_obj_set_error(o, -EIO);
    o->lost = o->scope->id != 0;
    ht_obj_touch_meta(o); /* keeps it on the scope's list, for abort */
}

static bool needs_resolving(const struct ht_store *s, const struct ht_chunk *c, uint32_t devices)
    HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_chunk_has_place(c) && (ht_ref_unflushed(s, &c->cur) & devices);
}

/*
 * For the image of what the reference holds. A frame's content may be written as it is, so it needs more than the
 * frame has; if there is not so much, as much as that. Without a reservation the writeback of the image reports
 * ENOSPC; its content stays in memory until there is space.
 */
static void reserve_if_possible(struct ht_obj *o, struct ht_chunk *c, uint32_t raw_blocks, uint32_t blocks)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = ht_chunk_reserve(o, c, raw_blocks);

    if (rc)
        rc = ht_chunk_reserve(o, c, blocks);
    (void)rc;
}

static uint32_t raw_blocks_of(const struct ht_ref *r)
{
    return (uint32_t)ht_div_up(ht_ref_image_bytes(r), HT_BLOCK_BYTES);
}

/* Makes an image with all bytes of the current reference, dirty: it stays until it was written anew. Chunk held. */
static int load(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t devices) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    int rc = c->slot == HT_SLOT_NONE ? ht_image_attach(o, c, index, 0, false) : 0;

    if (!rc && needs_resolving(s, c, devices))
        rc = ht_chunk_fill(o, c, index, NULL);
    if (!rc && needs_resolving(s, c, devices)) {
        reserve_if_possible(o, c, raw_blocks_of(&c->cur), ht_ref_blocks(&c->cur));
        ht_chunk_set_dirty(o, c, index);
    }
    return rc;
}

/* The image takes the reference's place, unless another thread wrote it anew. Chunk held, in a transaction. */
static void give_up(struct ht_obj *o, struct ht_chunk *c, uint64_t index, int error) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    uint32_t raw_blocks = raw_blocks_of(&c->cur), blocks = ht_ref_blocks(&c->cur);
    struct ht_chunk_before was = ht_chunk_before(c);

    if (error) {
        lose(o, c, index, error);
    } else {
        ht_chunk_drop_cur(o, c);
        reserve_if_possible(o, c, raw_blocks, blocks); /* a full store has had no space for it before */
        ht_chunk_note_unpublished(o, c, index, was);
    }
    s->data->given_up++;
}

/*
 * Gives up the current reference, so that its bytes are written anew. False: not done, as its image went away before
 * the transaction. A truncation may narrow the reference in between, so it is recognized by its place and checksum; was
 * may name a list of extents that is freed by now. A reference that replaced it was written after the failure. Lock
 * held; releases it in between.
 */
static bool try_resolve(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t devices)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    ht_chunk_lock_exclusive(o, c, index);
    int rc = needs_resolving(s, c, devices) ? load(o, c, index, devices) : 0;
    struct ht_ref was = c->cur;
    ht_chunk_drop_empty(o, c, index);
    bool needed = needs_resolving(s, c, devices);
    ht_chunk_leaf(c)->users += needed;
    ht_chunk_unlock_exclusive(o, c, index);
    if (!needed)
        return true;
    ht_store_unlock(s); /* no thread waits for a transaction with a chunk held, but threads in one wait for chunks */
    ht_mutex_lock(&s->tx_lock);
    ht_store_lock(s);
    ht_chunk_lock_exclusive(o, c, index);
    ht_chunk_leaf(c)->users--;
    bool same = needs_resolving(s, c, devices) && c->cur.place == was.place && c->cur.checksum == was.checksum;
    bool held = c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->dirty;
    bool settled = !same || rc || held;
    if (same && settled)
        give_up(o, c, index, rc);
    ht_chunk_unlock_exclusive(o, c, index);
    ht_mutex_unlock(&s->tx_lock);
    return settled;
}

static void resolve_chunk(struct ht_obj *o, uint64_t index, uint32_t devices) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;

    do
        c = ht_chunk_find(o, index); /* the table may have changed */
    while (c && !try_resolve(o, c, index, devices));
}

static void resolve_object(struct ht_obj *o, uint32_t devices) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = {0};

    if (o->obj_class == HT_CLASS_SCRATCH)
        return;
    ht_chunk_for_each_unpublished(c, o, index) {
        if (needs_resolving(o->s, c, devices))
            resolve_chunk(o, index, devices);
        ht_slice_next(o->s, &slice);
    }
}

static int resolve_scope(struct ht_store *s, uint64_t id, uint32_t devices) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj **objs;
    size_t count;
    int rc = ht_scope_collect(s, id, &objs, &count);

    for (size_t i = 0; !rc && i < count; i++) {
        resolve_object(objs[i], devices);
        ht_obj_put_locked(objs[i]);
    }
    if (!rc)
        free(objs);
    return rc;
}

/* Closes the devices to new content, as long as another one is left. */
static void close_device(struct ht_store *s, unsigned device) HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned open = 0;

    for (unsigned i = 0; i < s->dev_count; i++)
        open += i != device && s->dev[i] && !(s->data->closed >> i & 1);
    if (!open)
        return;
    ht_alloc_set_offline(s->alloc, device);
    s->data->closed |= 1u << device;
    struct ht_event_about about = {.device = ht_device_name(s, device), .error = -EIO};
    ht_event(HT_EVENT_DEVICE_FAILING, &about,
             "%s failed a flush: this mount writes nothing more there, and rewrites elsewhere everything that was not "
             "flushed; replace it",
             about.device);
}

/* Scopes come and go. A new one has nothing that was written before the failure. */
static int resolve_scopes(struct ht_store *s, uint32_t devices) HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = 0;

    for (struct ht_scope *sc = s->objects.scopes, *next; !rc && sc; sc = next) {
        ht_scope_hold(sc);
        rc = resolve_scope(s, sc->id, devices);
        next = sc->next;
        ht_scope_let_go(s, sc);
    }
    return rc;
}

/* Releases the lock in between. */
static int resolve(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t devices = s->data->suspect;

    s->data->broken |= ((s->data->published | s->data->flushing) & devices) != 0;
    s->data->flush_error_passes++;
    s->data->unsafe |= devices;
    s->data->suspect = 0;
    s->data->resolving = devices;
    for (unsigned i = 0; i < s->dev_count; i++)
        if ((devices >> i & 1) && !(s->data->closed >> i & 1))
            close_device(s, i);
    int rc = resolve_scopes(s, devices);
    s->data->resolving = 0;
    if (rc)
        s->data->suspect |= devices;
    pthread_cond_broadcast(&s->waits.settled);
    return rc;
}

int ht_flush_error_resolve(struct ht_store *s)
{
    int rc = 0;

    ht_store_lock(s);
    while (!rc && ht_flush_has_failed(s)) {
        if (s->data->resolving)
            ht_store_wait(s, &s->waits.settled, 0);
        else
            rc = resolve(s);
    }
    ht_store_unlock(s);
    return rc;
}

int ht_flush_written(struct ht_store *s, uint32_t devices, struct ht_rounds *r)
{
    uint32_t failed = ht_flush_devices(s, devices);
    int rc = ht_flush_error_resolve(s);

    return !rc && (failed || !ht_round_holds(s, r)) ? ht_round_failed(r) : rc;
}

uint64_t ht_flush_error_passes(const struct ht_store *s)
{
    return s->data->flush_error_passes;
}

bool ht_ref_is_void(const struct ht_store *s, const struct ht_ref *ref, uint64_t flush_error_passes)
{
    return flush_error_passes != s->data->flush_error_passes && ht_ref_devices(ref) & s->data->unsafe;
}

int ht_xfer_validate(struct ht_store *s, struct ht_xfer *x, struct ht_ref *ref)
{
    ht_ref_stamp(s, ref);
    if (!ht_ref_is_void(s, ref, x->flush_error_passes))
        return 0;
    ht_xfer_blame(x, ref, -EIO);
    return -EIO;
}
