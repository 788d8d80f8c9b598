/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flush.c - which flush covers a write, flushing the devices that content lies on, and giving up what a failed flush
 * voided.
 *
 * The store counts its flushes (flush_clock). A reference has the count of the moment when its write had ended. A flush
 * that begins later and succeeds covers it: covered[] has, for each device, the count with which the last such flush
 * began. References keep 8 bits of the count. So an old one may seem uncovered though it is not, and never the other
 * way.
 *
 * Only the devices of the content that is to be published are flushed, all at once: a device that does not answer
 * delays no other content. Usually that happens before the transaction (ht_flush_written). Content that is written
 * later and published all the same is flushed before the frame that names it (ht_flush_before_frame). When that fails
 * the log is closed: a transaction cannot be taken back.
 *
 * A flush that fails voids earlier writes that are not covered; a flush that succeeds afterwards proves nothing about
 * them. So covered[] stands still from the failure until the voided writes are given up (below). That of a
 * closed device stands still for good: a current reference there that seems uncovered is given up at the next check.
 * References in the log need no flush of their own. Lock: store.lock.
 */
#include "tiering/data/flush.h"
#include "tiering/base/event.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/data.h"

/* ------------------------------------------------------------------ coverage */

void ht_ref_stamp(const struct ht_store *s, struct ht_ref *ref)
{
    ref->clock = s->data->flush_clock & 0xff;
}

static bool is_covered(const struct ht_store *s, const struct ht_ref *ref, unsigned device) HT_REQUIRES(HT_LOCK_STORE)
{
    uint8_t age = (uint8_t)(s->data->flush_clock - ref->clock); /* at most the real one */

    return age > s->data->flush_clock - s->data->covered[device];
}

uint32_t ht_ref_unflushed(const struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t devices = ht_ref_devices(ref);

    for (unsigned i = 0; devices >> i; i++)
        if ((devices >> i & 1) && is_covered(s, ref, i))
            devices &= ~(1u << i);
    return devices;
}

struct unflushed {
    uint32_t devices;
    bool rest;
};

static void add_unflushed(struct ht_obj *o, struct ht_slice *slice, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    struct unflushed *u = ctx;

    if (o->obj_class == HT_CLASS_SCRATCH || o->deleted || (u->rest && o->extra->derived))
        return;
    ht_chunk_for_each_unpublished(c, o, index) {
        if (ht_chunk_has_place(c))
            u->devices |= ht_ref_unflushed(o->s, &c->cur);
        ht_slice_next(o->s, slice);
    }
}

uint32_t ht_unflushed_locked(struct ht_store *s, const struct ht_rounds *of)
{
    struct unflushed u = {.rest = of->rest};
    struct ht_slice slice = HT_SLICE_RESTING;

    if (of->obj)
        add_unflushed(of->obj, &slice, &u);
    else if (of->of_scope)
        ht_scope_visit_touched(s, of->scope, &slice, add_unflushed, &u);
    return u.devices;
}

/* ------------------------------------------------------------------ failures */

/* Has a flush of the device failed since the last check? */
static bool is_news(struct ht_store *s, unsigned device) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!s->dev[device] || (s->data->closed >> device & 1))
        return false;
    uint64_t failures = ht_dev_flush_failures(s->dev[device]);
    bool news = failures != s->data->flush_errors[device];
    s->data->flush_errors[device] = failures;
    return news;
}

bool ht_device_is_closed(const struct ht_store *s, unsigned device)
{
    return s->data->closed >> device & 1;
}

/* Has a flush failed whose voided writes are not given up yet? */
static bool flush_has_failed(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned i = 0; i < s->dev_count; i++)
        if (is_news(s, i))
            s->data->suspect |= 1u << i;
    return s->data->suspect || s->data->resolving;
}

bool ht_ref_endangered(struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t void_on = flush_has_failed(s) ? s->data->suspect | s->data->resolving : 0;

    return (ht_ref_unflushed(s, ref) & (void_on | s->data->closed)) != 0;
}

/* The devices (bits) among these that took writes since their last flush. */
static uint32_t need_flush(const struct ht_store *s, uint32_t devices)
{
    uint32_t found = 0;

    for (unsigned i = 0; i < s->dev_count; i++)
        found |= (uint32_t)((devices >> i & 1) && s->dev[i] && ht_dev_needs_flush(s->dev[i])) << i;
    return found;
}

uint32_t ht_flush_needed_locked(const struct ht_store *s, uint32_t devices)
{
    return need_flush(s, devices) | (devices & s->data->closed);
}

void ht_note_published(struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t devices = ht_ref_unflushed(s, ref);

    if (!devices)
        return;
    (void)flush_has_failed(s);
    s->data->broken |= (devices & (s->data->suspect | s->data->resolving | s->data->closed)) != 0;
    s->data->published |= need_flush(s, devices);
}

/* ------------------------------------------------------------------- flushes */

static unsigned list_devices(const struct ht_store *s, uint32_t mask, struct ht_dev *out[], unsigned out_index[])
{
    unsigned count = 0;

    mask = need_flush(s, mask);
    for (unsigned i = 0; i < s->dev_count; i++) {
        if (!(mask >> i & 1))
            continue;
        out_index[count] = i;
        out[count++] = s->dev[i];
    }
    return count;
}

uint32_t ht_flush_devices(struct ht_store *s, uint32_t mask)
{
    struct ht_dev *dev[HT_DEVICES_MAX];
    unsigned index[HT_DEVICES_MAX], count;
    int result[HT_DEVICES_MAX];
    uint32_t failed = 0;

    if (!mask)
        return 0;
    ht_store_lock(s);
    uint64_t clock = ++s->data->flush_clock;
    failed = mask & s->data->closed;
    s->data->suspect |= failed; /* uncovered content on them is given up */
    mask &= ~s->data->closed;
    ht_store_unlock(s);
    count = HT_MUTANT("data-flush") ? 0 : list_devices(s, HT_MUTANT("second-flush") ? mask & 1 : mask, dev, index);
    struct ht_ring *ring = count ? ht_store_ring(s) : NULL;
    if (ring)
        ht_ring_flush(ring, dev, count, result);
    for (unsigned i = 0; i < count; i++)
        if (!ring || result[i])
            failed |= 1u << index[i];
    ht_store_lock(s);
    (void)flush_has_failed(s);
    failed |= mask & (s->data->suspect | s->data->resolving | s->data->closed);
    for (unsigned i = 0; i < s->dev_count; i++)
        if (mask & ~failed & 1u << i)
            s->data->covered[i] = ht_max_u64(s->data->covered[i], clock);
    ht_store_unlock(s);
    return failed;
}

int ht_flush_before_frame(void *ctx)
{
    struct ht_store *s = ctx;

    ht_store_lock(s);
    /* content published from here on may have been written after the flush began */
    s->data->flushing |= s->data->published;
    s->data->published = 0;
    uint32_t mask = s->data->flushing;
    ht_store_unlock(s);
    uint32_t failed = ht_flush_devices(s, mask);
    ht_store_lock(s);
    s->data->broken |= failed != 0;
    s->data->flushing = 0;
    bool broken = s->data->broken;
    ht_store_unlock(s);
    return broken ? -EIO : 0;
}

/* ------------------------------------------------------- failed flushes */

/*
 * Gives up the writes that a failed flush voided.
 *
 * A flush that fails leaves the writes before it unknown, unless an earlier one covered them:
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
 * (ht_ref_is_void), a clone when its target gets the reference.
 */

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
    s->counts.write_errors++;
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

/* Makes an image with all bytes of the current reference, dirty: it stays until it was written anew. Chunk held. */
static int load(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t devices) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    int rc = c->slot == HT_SLOT_NONE ? ht_image_attach(o, c, index, 0, false) : 0;

    if (!rc && needs_resolving(s, c, devices))
        rc = ht_chunk_fill(o, c, index, NULL);
    if (!rc && needs_resolving(s, c, devices)) {
        reserve_if_possible(o, c, ht_blocks(ht_ref_image_bytes(&c->cur)), ht_ref_blocks(&c->cur));
        ht_chunk_set_dirty(o, c, index);
    }
    return rc;
}

/* The image takes the reference's place, unless another thread wrote it anew. Chunk held, in a transaction. */
static void give_up(struct ht_obj *o, struct ht_chunk *c, uint64_t index, int error) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    uint32_t raw_blocks = ht_blocks(ht_ref_image_bytes(&c->cur)), blocks = ht_ref_blocks(&c->cur);
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
    bool held = ht_chunk_is_dirty(s, c);
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

static void resolve_object(struct ht_obj *o, struct ht_slice *slice, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    const uint32_t *devices = ctx;

    ht_chunk_for_each_unpublished(c, o, index) {
        if (needs_resolving(o->s, c, *devices))
            resolve_chunk(o, index, *devices);
        ht_slice_next(o->s, slice);
    }
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

/*
 * Scopes come and go. A new one has nothing that was written before the failure. Scope 0, into which content of others
 * may move meanwhile, is the last one. Releases the lock in between.
 */
static void resolve_scopes(struct ht_store *s, uint32_t devices) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = {0};

    for (struct ht_scope *sc = s->objects.scopes, *next; sc; sc = next) {
        ht_scope_hold(sc);
        ht_scope_visit_touched(s, sc->id, &slice, resolve_object, &devices);
        next = sc->next;
        ht_scope_let_go(s, sc);
    }
}

/* Releases the lock in between. */
static void resolve(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
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
    resolve_scopes(s, devices);
    s->data->resolving = 0;
    pthread_cond_broadcast(&s->waits.settled);
}

/* When a flush has failed: gives up the voided writes, or waits until another thread has done so. */
static void resolve_failures(struct ht_store *s)
{
    ht_store_lock(s);
    while (flush_has_failed(s)) {
        if (s->data->resolving)
            ht_store_wait(s, &s->waits.settled, 0);
        else
            resolve(s);
    }
    ht_store_unlock(s);
}

uint64_t ht_flush_error_passes(const struct ht_store *s)
{
    return s->data->flush_error_passes;
}

bool ht_ref_is_void(const struct ht_store *s, const struct ht_ref *ref, uint64_t flush_error_passes)
{
    return flush_error_passes != s->data->flush_error_passes && ht_ref_devices(ref) & s->data->unsafe;
}

/* ------------------------------------------------------------------- rounds */

/*
 * Rounds that write no content, as of a rename, do not meet the failed flush on the way: they give up its writes here.
 */
void ht_rounds_next(struct ht_store *s, struct ht_rounds *r)
{
    if (r->count)
        resolve_failures(s);
    r->given_up = s->data->given_up;
}

/* Was nothing given up since the round began? */
static bool round_holds(const struct ht_store *s, const struct ht_rounds *r)
{
    return s->data->given_up == r->given_up || HT_MUTANT("given-up-unseen");
}

/* -EAGAIN, or -EIO after too many rounds. */
static int round_failed(struct ht_rounds *r)
{
    return r->count++ < HT_ROUNDS_MAX ? -EAGAIN : -EIO;
}

/* Only rounds that are late because others go on writing are let pass in the end: these writes can still be flushed. */
int ht_round_check(struct ht_store *s, struct ht_rounds *r)
{
    uint32_t devices = ht_unflushed_locked(s, r); /* releases the lock in between */

    if (!round_holds(s, r) || flush_has_failed(s) || devices & s->data->closed)
        return round_failed(r);
    if (r->late == HT_ROUNDS_LATE_MAX || !need_flush(s, devices))
        return 0;
    r->late++;
    return -EAGAIN;
}

int ht_flush_written(struct ht_store *s, struct ht_rounds *r)
{
    uint32_t failed = ht_flush_devices(s, ht_store_locked(s, ht_unflushed_locked(s, r)));

    resolve_failures(s);
    return failed || !round_holds(s, r) ? round_failed(r) : 0;
}
