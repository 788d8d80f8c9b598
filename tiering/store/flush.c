/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flush.c - which flush covers what was written, and flushing the devices that something lies on.
 *
 * The store counts its flushes (flush_clock). A reference has the count of the moment when its write had ended. A flush that begins later and
 * succeeds covers it: covered[] has, for each device, the count with which the last such flush began. References keep 8 bits of the
 * count. So an old one may seem not to be covered though it is, and never the other way.
 *
 * Only those devices are flushed that what is to be published lies on, all at once: one that does not answer delays nobody else. Usually that
 * is before the transaction (ht_flush_written). What is written later and published all the same is flushed before the frame that
 * names it (ht_flush_before_frame). When that fails the log is closed: what is in a transaction cannot be taken back.
 *
 * A flush that fails voids what was written before it and is not covered; a flush that succeeds afterwards says nothing about that. So
 * covered[] stands still from the failure until what it voided is given up (rescue.c). Lock: store.lock.
 */
#include "tiering/base/twin.h"
#include "tiering/store/store_priv.h"

/* ------------------------------------------------------------------ coverage */

void ht_ref_stamp(const struct ht_store *s, struct ht_ref *ref)
{
    ref->clock = s->flush_clock & 0xff;
}

static bool is_covered(const struct ht_store *s, const struct ht_ref *ref, unsigned device)
{
    uint8_t age = (uint8_t)(s->flush_clock - ref->clock); /* at most what it is */

    return age > s->flush_clock - s->covered[device];
}

uint32_t ht_ref_unflushed(const struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t devices = 0;

    for (unsigned i = 0; i < ht_ref_extents(ref) && !ht_ref_lost(ref); i++) {
        unsigned device = ht_ref_extent(ref, i).device;
        if (!is_covered(s, ref, device))
            devices |= 1u << device;
    }
    return devices;
}

uint32_t ht_obj_unflushed_locked(struct ht_obj *o)
{
    struct ht_chunk *c;
    uint64_t index = 0;
    uint32_t devices = 0;

    if (o->obj_class == HT_CLASS_SCRATCH || o->deleted)
        return 0;
    ht_chunk_for_each_from(c, o, index)
    {
        if (!o->unpublished)
            break;
        if (!ht_chunk_leaf(c)->unpublished)
            index = ht_leaf_last(index);
        else if (c->flags & CH_CUR)
            devices |= ht_ref_unflushed(o->s, &c->cur);
    }
    return devices;
}

uint32_t ht_scope_unflushed_locked(struct ht_store *s, uint64_t scope)
{
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    uint32_t devices = 0;

    if (sc)
        ht_list_for_each(p, &sc->touched)
            devices |= ht_obj_unflushed_locked(ht_list_entry(p, struct ht_obj, touched));
    return devices;
}

/* ------------------------------------------------------------------ failures */

/* Has a flush of it failed that was not looked into? */
static bool is_news(struct ht_store *s, unsigned device)
{
    if (!s->dev[device] || (s->closed >> device & 1))
        return false;
    uint64_t failures = ht_dev_flush_failures(s->dev[device]);
    bool news = failures != s->flush_errors[device];
    s->flush_errors[device] = failures;
    return news;
}

bool ht_flush_has_failed(struct ht_store *s)
{
    for (unsigned i = 0; i < s->dev_count; i++)
        if (is_news(s, i))
            s->suspect |= 1u << i;
    return s->suspect || s->rescuing;
}

bool ht_ref_endangered(struct ht_store *s, const struct ht_ref *ref)
{
    return ht_flush_has_failed(s) && (ht_ref_unflushed(s, ref) & (s->suspect | s->rescuing));
}

void ht_note_published(struct ht_store *s, const struct ht_ref *ref)
{
    uint32_t devices = ht_ref_unflushed(s, ref);

    if (!devices)
        return;
    (void)ht_flush_has_failed(s);
    s->broken |= (devices & (s->suspect | s->rescuing | s->closed)) != 0;
    for (unsigned i = 0; i < s->dev_count; i++)
        if ((devices >> i & 1) && s->dev[i] && ht_dev_needs_flush(s->dev[i]))
            s->published |= 1u << i;
}

/* ------------------------------------------------------------------- flushes */

static unsigned list_devices(const struct ht_store *s, uint32_t mask, struct ht_dev *out[], unsigned out_index[])
{
    unsigned count = 0;

    for (unsigned i = 0; i < s->dev_count; i++) {
        if (!(mask >> i & 1) || !s->dev[i] || !ht_dev_needs_flush(s->dev[i]))
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
    uint64_t clock = ++s->flush_clock;
    failed = mask & s->closed;
    mask &= ~s->closed;
    ht_store_unlock(s);
    count = HT_TWIN("data-flush") ? 0 : list_devices(s, HT_TWIN("second-flush") ? mask & 1 : mask, dev, index);
    struct ht_ring *ring = count ? ht_store_ring(s) : NULL;
    if (ring)
        ht_ring_flush(ring, dev, count, result);
    for (unsigned i = 0; i < count; i++)
        if (!ring || result[i])
            failed |= 1u << index[i];
    ht_store_lock(s);
    (void)ht_flush_has_failed(s);
    failed |= mask & (s->suspect | s->rescuing | s->closed);
    for (unsigned i = 0; i < s->dev_count; i++)
        if (mask & ~failed & 1u << i)
            s->covered[i] = ht_max_u64(s->covered[i], clock);
    ht_store_unlock(s);
    return failed;
}

int ht_flush_before_frame(void *ctx)
{
    struct ht_store *s = ctx;

    ht_store_lock(s);
    s->flushing |= s->published; /* what is published from here on may be written after the flush began */
    s->published = 0;
    uint32_t mask = s->flushing;
    ht_store_unlock(s);
    uint32_t failed = ht_flush_devices(s, mask);
    ht_store_lock(s);
    s->broken |= failed != 0;
    s->flushing = 0;
    bool broken = s->broken;
    ht_store_unlock(s);
    return broken ? -EIO : 0;
}

int ht_flush_written(struct ht_store *s, uint32_t devices, struct ht_rounds *r)
{
    uint32_t failed = ht_flush_devices(s, devices);
    int rc = ht_rescue(s);

    return !rc && (failed || !ht_round_holds(s, r)) ? ht_round_failed(r) : rc;
}

/* ------------------------------------------------------------------- rounds */

void ht_rounds_next(struct ht_store *s, struct ht_rounds *r)
{
    r->given_up = s->given_up;
}

bool ht_round_holds(const struct ht_store *s, const struct ht_rounds *r)
{
    return s->given_up == r->given_up || HT_TWIN("given-up-unseen");
}

int ht_round_failed(struct ht_rounds *r)
{
    return r->count++ < HT_ROUNDS_MAX ? -EAGAIN : -EIO;
}
