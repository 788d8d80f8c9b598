/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flush.c - which flush covers a write, and flushing the devices that content lies on.
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
 * them. So covered[] stands still from the failure until the voided writes are given up (flush_error.c). That of a
 * closed device stands still for good: a current reference there that seems uncovered is given up at the next check.
 * References in the log need no flush of their own. Lock: store.lock.
 */
#include "tiering/data/flush.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/chunk_io.h"

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
        if (slice)
            ht_slice_next(o->s, slice);
    }
}

uint32_t ht_obj_unflushed_locked(struct ht_obj *o)
{
    struct unflushed u = {0};
    struct ht_slice slice = HT_SLICE_RESTING;

    add_unflushed(o, &slice, &u);
    return u.devices;
}

uint32_t ht_scope_unflushed_locked(struct ht_store *s, uint64_t scope, bool rest)
{
    struct unflushed u = {.rest = rest};
    struct ht_slice slice = HT_SLICE_RESTING;

    ht_scope_visit_touched(s, scope, &slice, add_unflushed, &u);
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

bool ht_flush_has_failed(struct ht_store *s)
{
    for (unsigned i = 0; i < s->dev_count; i++)
        if (is_news(s, i))
            s->data->suspect |= 1u << i;
    return s->data->suspect || s->data->resolving;
}

bool ht_ref_endangered(struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t void_on = ht_flush_has_failed(s) ? s->data->suspect | s->data->resolving : 0;

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
    (void)ht_flush_has_failed(s);
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
    (void)ht_flush_has_failed(s);
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

/* ------------------------------------------------------------------- rounds */

/*
 * Rounds that write no content, as of a rename, do not meet the failed flush on the way: they give up its writes here.
 */
void ht_rounds_next(struct ht_store *s, struct ht_rounds *r)
{
    int rc = r->count ? ht_flush_error_resolve(s) : 0;

    (void)rc; /* the next check finds the failure again */
    r->given_up = s->data->given_up;
}

bool ht_round_holds(const struct ht_store *s, const struct ht_rounds *r)
{
    return s->data->given_up == r->given_up || HT_MUTANT("given-up-unseen");
}

static uint32_t unflushed_of(struct ht_store *s, const struct ht_rounds *r) HT_REQUIRES(HT_LOCK_STORE)
{
    if (r->obj)
        return ht_obj_unflushed_locked(r->obj);
    return r->of_scope ? ht_scope_unflushed_locked(s, r->scope, r->rest) : 0;
}

/* Only rounds that are late because others go on writing are let pass in the end: these writes can still be flushed. */
int ht_round_check(struct ht_store *s, struct ht_rounds *r)
{
    uint32_t devices = unflushed_of(s, r); /* releases the lock in between */

    if (!ht_round_holds(s, r) || ht_flush_has_failed(s) || devices & s->data->closed)
        return ht_round_failed(r);
    if (r->late == HT_ROUNDS_LATE_MAX || !need_flush(s, devices))
        return 0;
    r->late++;
    return -EAGAIN;
}

int ht_round_failed(struct ht_rounds *r)
{
    return r->count++ < HT_ROUNDS_MAX ? -EAGAIN : -EIO;
}
