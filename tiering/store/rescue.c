/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rescue.c - what becomes of the writes that a failed flush covered.
 *
 * A flush that fails leaves the writes before it unknown, unless an earlier one covered them (flush.c), and the next one that succeeds says
 * nothing about them:
 *
 *   flush fails --> the device is closed: nothing is placed there any more, it is not asked to flush; unless it is the only one. Whose
 *                   flush it was does not matter, also that of the log or of a superblock: what cannot flush holds nothing new
 *               --> every current reference on it that is not covered: its bytes into an image, dirty, and the reference is given up
 *               --> what cannot be read is lost: BAD, the object's error
 *
 * Whoever publishes the object before it is written anew, and flushed, would publish what it had before. So a publication of what a writeback
 * wrote begins again when something was given up since (ht_tx_begin_round). References are given up with tx_lock held: what holds when a
 * transaction begins holds until its end.
 *
 * suspect: devices of which a flush has failed, not looked into yet; rescuing: their references are being gone through, by one thread at a
 * time, while a new failure makes them suspect again. A write that was under way meanwhile is noticed when it is installed
 * (ht_xfer_settle), a clone when its target gets the reference. Lock: store.lock.
 */
#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/store/store_priv.h"

/* ------------------------------------------------------------------ rescue */

static void lose(struct ht_obj *o, struct ht_chunk *c, uint64_t index, int error)
{
    struct ht_store *s = o->s;
    struct ht_extent e = ht_ref_extent(&c->cur, 0);
    struct ht_event_about about = {o->oid, ht_device_name(s, e.device), e.block * HT_BLOCK_BYTES, error};
    bool was = ht_chunk_unpublished(c);

    ht_event(
        HT_EVENT_WRITE_ERROR, &about,
        "new content of chunk %llu of object %llu was written to %s, which could not flush it, and cannot be read again: %s",
        (unsigned long long)index, (unsigned long long)o->oid, about.device, strerror(-error));
    s->write_errors++;
    ht_chunk_drop_image(o, c, index);
    ht_chunk_drop_cur(o, c);
    c->flags |= CH_BAD;
    ht_chunk_note_unpublished(o, c, index, was);
    ht_obj_set_error(o, -EIO);
    o->lost = o->scope->id != 0;
    o->meta_dirty = true; /* keeps it on the scope's list, for abort */
    ht_obj_touch(o);
}

static bool needs_rescue(const struct ht_store *s, const struct ht_chunk *c, uint32_t devices)
{
    return (c->flags & CH_CUR) && !(c->flags & CH_SHARE) && (ht_ref_unflushed(s, &c->cur) & devices);
}

/* Without a reservation the writeback of the image reports ENOSPC; its content stays in memory until there is space. */
static void reserve_if_possible(struct ht_obj *o, struct ht_chunk *c, uint32_t blocks)
{
    int rc = ht_chunk_reserve(o, c, blocks);

    (void)rc;
}

/* An image that has all that the current reference says, dirty: it stays until it was written anew. Chunk held. */
static int load(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t devices)
{
    struct ht_store *s = o->s;
    int rc = c->slot == HT_SLOT_NONE ? ht_chunk_get_slot(o, c, index, 0) : 0;

    if (!rc && needs_rescue(s, c, devices))
        rc = ht_chunk_fill(o, c, index);
    if (!rc && needs_rescue(s, c, devices)) {
        reserve_if_possible(o, c, ht_ref_blocks(&c->cur));
        ht_chunk_set_dirty(o, c, index);
    }
    return rc;
}

/* The image takes the reference's place, unless it was written anew meanwhile. Chunk held, in a transaction. */
static void give_up(struct ht_obj *o, struct ht_chunk *c, uint64_t index, int error)
{
    struct ht_store *s = o->s;
    uint32_t blocks = ht_ref_blocks(&c->cur);

    if (error) {
        lose(o, c, index, error);
    } else {
        ht_chunk_drop_cur(o, c);
        reserve_if_possible(o, c, blocks); /* a full store has had no space for it before */
        ht_chunk_note_unpublished(o, c, index, true);
    }
    s->given_up++;
}

/*
 * What the current reference says is to be written anew. False: it still is, as its image went away before the transaction. A truncation may
 * narrow the reference meanwhile, so it is recognized by its place and checksum; was may name a list of extents that is freed by now. A
 * reference that replaced it was written after the failure. Lock held, let go meanwhile.
 */
static bool try_rescue(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t devices)
{
    struct ht_store *s = o->s;

    ht_chunk_lock_exclusive(s, c);
    int rc = needs_rescue(s, c, devices) ? load(o, c, index, devices) : 0;
    struct ht_ref was = c->cur;
    ht_chunk_drop_empty(o, c, index);
    bool needed = needs_rescue(s, c, devices);
    ht_chunk_leaf(c)->users += needed;
    ht_chunk_unlock_exclusive(o, c, index);
    if (!needed)
        return true;
    ht_store_unlock(s); /* nobody waits for a transaction with a chunk, but for a chunk in one */
    ht_mutex_lock(&s->tx_lock);
    ht_store_lock(s);
    ht_chunk_lock_exclusive(s, c);
    ht_chunk_leaf(c)->users--;
    bool same = needs_rescue(s, c, devices) && c->cur.place == was.place && c->cur.checksum == was.checksum;
    bool held = c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->dirty;
    bool settled = !same || rc || held;
    if (same && settled)
        give_up(o, c, index, rc);
    ht_chunk_unlock_exclusive(o, c, index);
    ht_mutex_unlock(&s->tx_lock);
    return settled;
}

static void rescue_chunk(struct ht_obj *o, uint64_t index, uint32_t devices)
{
    struct ht_chunk *c;

    do
        c = ht_chunk_find(o, index); /* the table may have changed */
    while (c && !try_rescue(o, c, index, devices));
}

static void rescue_object(struct ht_obj *o, uint32_t devices)
{
    struct ht_chunk *c;
    uint64_t index = 0;

    if (o->obj_class == HT_CLASS_SCRATCH)
        return;
    ht_chunk_for_each_from(c, o, index) if (needs_rescue(o->s, c, devices)) rescue_chunk(o, index, devices);
}

static int rescue_scope(struct ht_store *s, uint64_t id, uint32_t devices)
{
    struct ht_obj **objs;
    size_t count;
    int rc = ht_scope_collect(s, id, &objs, &count);

    for (size_t i = 0; !rc && i < count; i++) {
        rescue_object(objs[i], devices);
        ht_obj_put_locked(objs[i]);
    }
    if (!rc)
        free(objs);
    return rc;
}

static uint64_t countable_limbo(const struct ht_store *s)
{
    const struct ht_limbo_queue *queues[] = {&s->limbo, &s->tx.frees};
    uint64_t blocks = 0;

    for (unsigned k = 0; k < HT_ARRAY_SIZE(queues); k++)
        for (size_t i = 0; i < queues[k]->count; i++)
            blocks += ht_ref_countable(s, &queues[k]->items[(queues[k]->head + i) % queues[k]->cap].ref);
    return blocks;
}

/* Nothing goes there any more, as long as another one is left. Lock held. */
static void close_device(struct ht_store *s, unsigned device)
{
    unsigned open = 0;

    for (unsigned i = 0; i < s->dev_count; i++)
        open += i != device && s->dev[i] && !(s->closed >> i & 1);
    if (!open)
        return;
    uint64_t before = countable_limbo(s);
    ht_alloc_set_offline(s->alloc, device);
    ht_alloc_limbo_sub(s->alloc, before - countable_limbo(s));
    s->closed |= 1u << device;
    struct ht_event_about about = {.device = ht_device_name(s, device), .error = -EIO};
    ht_event(HT_EVENT_DEVICE_FAILING, &about,
             "%s cannot flush what was written to it: nothing is written there any more in this mount, and what was is "
             "written elsewhere; replace it",
             about.device);
}

/* Lock held, let go meanwhile. */
static int rescue(struct ht_store *s)
{
    uint32_t devices = s->suspect;
    int rc = 0;

    s->broken |= ((s->published | s->flushing) & devices) != 0;
    s->rescues++;
    s->unsafe |= devices;
    s->suspect = 0;
    s->rescuing = devices;
    for (unsigned i = 0; i < s->dev_count; i++)
        if ((devices >> i & 1) && !(s->closed >> i & 1))
            close_device(s, i);
    for (struct ht_scope *sc = s->scopes; !rc && sc; sc = sc->next)
        rc = rescue_scope(s, sc->id, devices);
    s->rescuing = 0;
    if (rc)
        s->suspect |= devices;
    pthread_cond_broadcast(&s->settled);
    return rc;
}

int ht_rescue(struct ht_store *s)
{
    int rc = 0;

    ht_store_lock(s);
    while (!rc && ht_flush_has_failed(s)) {
        if (s->rescuing)
            ht_store_wait(s, &s->settled, 0);
        else
            rc = rescue(s);
    }
    ht_store_unlock(s);
    return rc;
}

bool ht_ref_is_void(const struct ht_store *s, const struct ht_ref *ref, uint64_t rescues)
{
    if (rescues == s->rescues)
        return false;
    for (unsigned i = 0; i < ht_ref_extents(ref) && !ht_ref_lost(ref); i++)
        if (s->unsafe >> ht_ref_extent(ref, i).device & 1)
            return true;
    return false;
}

int ht_xfer_settle(struct ht_store *s, struct ht_xfer *x, struct ht_ref *ref)
{
    ht_ref_stamp(s, ref);
    if (!ht_ref_is_void(s, ref, x->rescues))
        return 0;
    x->bad_dev = ht_ref_extent(ref, 0).device + 1;
    x->bad_offset = ht_ref_extent(ref, 0).block * HT_BLOCK_BYTES;
    x->bad_error = -EIO;
    return -EIO;
}
