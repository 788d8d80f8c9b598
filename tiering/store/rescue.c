/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rescue.c - flushes of data, and what becomes of the writes that a failed flush covered.
 *
 * A flush that fails leaves the writes before it unknown, and the next one that succeeds says nothing about them. So whoever
 * publishes flushes before (ht_flush_written), while the references are current and no record names them:
 *
 *   flush fails --> the device is closed: nothing is placed there any more, it is not asked to flush; unless it is the only one
 *               --> every current reference on it: its bytes into an image, dirty, and the reference is given up: whoever publishes the
 *                   object before they are written anew, and flushed, publishes what it had before
 *               --> what cannot be read is lost: BAD, the object's error
 *
 * The log's own flush (ht_flush_before_frame) comes again before each frame. It fails for good when something that was published, and
 * had not been flushed then, is on a device that fails: what is in a transaction cannot be taken back.
 *
 * suspect: devices of which a flush has failed and whose current references were not gone through yet; a write that was under
 * way when they were is noticed when it is installed (ht_xfer_settle). Lock: store.lock.
 */
#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/base/twin.h"
#include "tiering/store/store_priv.h"

enum { ROUNDS_MAX = 2 };

static bool lies_on(const struct ht_ref *ref, uint32_t devices)
{
    for (unsigned i = 0; i < ht_ref_extents(ref) && !ht_ref_lost(ref); i++)
        if (devices >> ht_ref_extent(ref, i).device & 1)
            return true;
    return false;
}

/* ----------------------------------------------------------------- flushes */

/* What fails is counted by the device, whoever asked: the log, too. No lock held. */
static void flush_all(struct ht_store *s)
{
    uint32_t closed = s->closed;
    unsigned count = HT_TWIN("data-flush") ? 0 : HT_TWIN("second-flush") ? 1 : s->dev_count;

    for (unsigned i = 0; i < count; i++) {
        int counted = s->dev[i] && !(closed >> i & 1) && ht_dev_needs_flush(s->dev[i]) ? ht_dev_flush(s->dev[i]) : 0;
        (void)counted;
    }
}

/* Has a flush of it failed that was not looked into? */
static bool is_news(struct ht_store *s, unsigned device)
{
    struct ht_dev_counters c;

    if (!s->dev[device] || (s->closed >> device & 1))
        return false;
    ht_dev_counters(s->dev[device], &c);
    bool news = c.flush_errors != s->flush_errors[device];
    s->flush_errors[device] = c.flush_errors;
    return news;
}

static void look_for_news(struct ht_store *s)
{
    for (unsigned i = 0; i < s->dev_count; i++)
        if (is_news(s, i))
            s->suspect |= 1u << i;
}

void ht_note_published(struct ht_store *s, const struct ht_ref *ref)
{
    for (unsigned i = 0; i < ht_ref_extents(ref) && !ht_ref_lost(ref); i++) {
        unsigned device = ht_ref_extent(ref, i).device;
        if (is_news(s, device))
            s->suspect |= 1u << device;
        if (s->dev[device] && ht_dev_needs_flush(s->dev[device]))
            s->published |= 1u << device;
    }
    if (lies_on(ref, s->suspect))
        s->broken = true;
}

int ht_flush_before_frame(void *ctx)
{
    struct ht_store *s = ctx;

    ht_store_lock(s);
    s->flushing |= s->published; /* what is published from here on may be written after the flush began */
    s->published = 0;
    ht_store_unlock(s);
    flush_all(s);
    ht_store_lock(s);
    look_for_news(s);
    s->broken |= (s->suspect & s->flushing) != 0;
    s->flushing = 0;
    bool broken = s->broken;
    ht_store_unlock(s);
    return broken ? -EIO : 0;
}

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

static bool needs_rescue(const struct ht_chunk *c, uint32_t devices)
{
    return (c->flags & CH_CUR) && !(c->flags & CH_SHARE) && lies_on(&c->cur, devices);
}

/* The image has all that the current reference says, and takes its place. */
static void give_up_cur(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    ht_chunk_set_dirty(o, c, index);
    ht_chunk_drop_cur(o, c);
    ht_chunk_note_unpublished(o, c, index, true);
}

/* What the current reference says is to be written anew. Lock held, let go meanwhile. */
static void rescue_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t devices)
{
    struct ht_store *s = o->s;
    int rc = 0;

    ht_chunk_lock_exclusive(s, c);
    if (needs_rescue(c, devices) && c->slot == HT_SLOT_NONE)
        rc = ht_chunk_get_slot(o, c, index, 0);
    if (needs_rescue(c, devices)) {
        if (!rc)
            rc = ht_chunk_fill(o, c, index);
        if (!rc)
            rc = ht_chunk_reserve(o, c, ht_ref_blocks(&c->cur));
        if (rc)
            lose(o, c, index, rc);
        else
            give_up_cur(o, c, index);
    }
    ht_chunk_drop_empty(o, c, index);
    ht_chunk_unlock_exclusive(o, c, index);
}

static void rescue_object(struct ht_obj *o, uint32_t devices)
{
    struct ht_chunk *c;
    uint64_t index = 0;

    if (o->obj_class == HT_CLASS_SCRATCH)
        return;
    ht_chunk_for_each_from(c, o, index) if (needs_rescue(c, devices)) rescue_chunk(o, c, index, devices);
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
    for (unsigned i = 0; i < s->dev_count; i++)
        if ((devices >> i & 1) && !(s->closed >> i & 1))
            close_device(s, i);
    for (struct ht_scope *sc = s->scopes; !rc && sc; sc = sc->next)
        rc = rescue_scope(s, sc->id, devices);
    if (!rc)
        s->suspect &= ~devices;
    return rc;
}

int ht_flush_written(struct ht_store *s, struct ht_rounds *r)
{
    int rc = 0;

    flush_all(s);
    ht_store_lock(s);
    look_for_news(s);
    if (s->suspect)
        rc = rescue(s);
    if (!rc && s->rescues != r->rescues)
        rc = r->count++ < ROUNDS_MAX ? -EAGAIN : -EIO;
    r->rescues = s->rescues;
    ht_store_unlock(s);
    return rc;
}

int ht_xfer_settle(struct ht_store *s, struct ht_xfer *x, const struct ht_ref *ref)
{
    if (x->rescues == s->rescues || !lies_on(ref, s->unsafe))
        return 0;
    x->bad_dev = ht_ref_extent(ref, 0).device + 1;
    x->bad_offset = ht_ref_extent(ref, 0).block * HT_BLOCK_BYTES;
    x->bad_error = -EIO;
    return -EIO;
}
