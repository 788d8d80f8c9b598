/* SPDX-License-Identifier: Apache-2.0 */
/*
 * batch_pin.c - a few chunks held for one piece of work.
 *
 *   begin: chunks locked in (object, index) order; images filled or, while the protected set has room, made;
 *          the rest gets staging buffers, all at once; reads start
 *   wait:  reads done and verified
 *   end:   images dirty and free; staged chunks that changed start their write to new space
 *   finish: references installed, buffers and chunks free
 *
 * Content in the vault comes before any chunk is locked. If a chunk has such content that did not come, because it
 * changed meanwhile, all begins again.
 *
 * A chunk whose staged write fails has lost its current content: it is BAD until abort or overwrite.
 */

#include "tiering/base/probe.h"
#include "tiering/cache/staging.h"
#include "tiering/api/batch_pin.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/cold.h"
#include "tiering/data/data.h"
#include "tiering/engine/engine.h"
#include "tiering/store/store_priv.h"

enum { N = HT_BATCH_PIN_CHUNKS_MAX, ADMIT_TRIES = 64, FREE_SHARE = 8 };
static_assert(N <= (int)HT_STAGING_REQUEST_MAX, "the staging pool keeps enough for one");

struct part {
    struct ht_chunk_io io; /* reading, then writing; its chunk is NULL while the part holds none */
    void *staging;
    uint32_t bytes; /* of its image */
    bool stored, reading, writing, filled;
    struct ht_cold_want cold; /* its content from the vault */
    bool copied;              /* staged, from an image that is too short for it */
    int rc;
};

struct ht_batch_pin_work {
    int target_device; /* the device where all that changes should lie */
    int numa_index;    /* the first of its chunks that is stored, or will be on a known device */
    struct part part[N];
};

static bool before(const struct ht_batch_pin_chunk *a, const struct ht_batch_pin_chunk *b)
{
    return a->obj->oid != b->obj->oid ? a->obj->oid < b->obj->oid : a->index < b->index;
}

static void sort_order(const struct ht_batch_pin *l, unsigned order[N])
{
    for (unsigned i = 0; i < l->count; i++) {
        unsigned k = i;
        for (; k && before(&l->chunk[i], &l->chunk[order[k - 1]]); k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
}

/* The place for the chunk's memory: near its device if it is stored, else with the others. */
static int find_numa_index(const struct ht_store *s, struct ht_batch_pin_work *w, struct ht_chunk *c)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int numa_index = ht_chunk_numa_index(s, c);

    if (w->numa_index == HT_NUMA_INDEX_ANY)
        w->numa_index = numa_index;
    return numa_index == HT_NUMA_INDEX_ANY ? w->numa_index : numa_index;
}

/*
 * How many images the clock may try to evict for one of so many bytes; -1: makes no image, not even in a free place.
 */
static int admission(const struct ht_store *s, uint32_t bytes) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t all = (uint32_t)(ht_arena_bytes(s->arena) >> 20);

    if (ht_arena_has_protected_room(s->arena))
        return ADMIT_TRIES;
    bool small = bytes <= HT_SMALL_CHUNK_BYTES;
    return small && ht_arena_free_slots(s->arena) > all / FREE_SHARE + 1 ? 0 : -1;
}

/*
 * Content that is updated over and over becomes resident while the protected set has room, small images where places
 * are free; the rest streams through staging. So does content that has no room in the plan of a step.
 */
static void admit(struct ht_store *s, struct ht_batch_pin_chunk *lc, struct ht_chunk *c, int numa_index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = lc->obj;
    uint32_t bytes = ht_chunk_update_bytes(o, c, lc->index, 0);
    int tries = admission(s, bytes);
    enum ht_forecast_stay stay = ht_planner_stays(o, lc->index);

    if (tries != ADMIT_TRIES)
        ht_arena_give_back_old(s->arena);
    if (o->residency == HT_RESIDENCY_PINNED && ht_arena_has_pinned_room(s->arena))
        tries = ADMIT_TRIES;
    else if (stay == HT_FORECAST_LEAVES || o->residency == HT_RESIDENCY_COLD)
        tries = -1;
    bool passes = lc->passes && tries < 0;
    if (c->slot == HT_SLOT_NONE && (passes || tries >= 0)) {
        uint32_t slot = ht_arena_get(s->arena, bytes, passes ? ADMIT_TRIES : (uint32_t)tries, numa_index);
        if (slot == HT_SLOT_NONE)
            return;
        ht_chunk_attach_image(o, c, lc->index, slot);
    }
    if (c->slot == HT_SLOT_NONE || passes)
        return;
    if (ht_arena_lacks_waiting_room(s->arena) || stay == HT_FORECAST_LEAVES)
        ht_arena_unprotect(s->arena, c->slot);
    else
        ht_chunk_protect(o, c);
}

static enum ht_plan_use use_of(const struct ht_batch_pin_chunk *lc)
{
    if (lc->consumed)
        return HT_PLAN_CONSUME;
    return lc->mode == HT_BATCH_PIN_READ     ? HT_PLAN_READ
        : lc->mode == HT_BATCH_PIN_OVERWRITE ? HT_PLAN_OVERWRITE
                                             : HT_PLAN_UPDATE;
}

/* Locks one chunk and chooses the place for its bytes. */
static int take_chunk(struct ht_store *s, struct ht_batch_pin_work *w, struct ht_batch_pin_chunk *lc, struct part *p)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = lc->obj;
    struct ht_chunk *c = ht_chunk_make(o, lc->index);

    if (!c)
        return -ENOMEM;
    ht_chunk_lock_exclusive(o, c, lc->index);
    p->io.obj = o;
    p->io.chunk = c;
    p->io.index = lc->index;
    lc->len = ht_chunk_len(o, lc->index);
    lc->staged = false;
    if ((c->flags & HT_CH_BAD) && lc->mode != HT_BATCH_PIN_OVERWRITE)
        return -EIO;
    /* A copy: publishing moves references without the chunk's lock. */
    const struct ht_ref *ref = ht_chunk_ref(c);
    p->stored = ref != NULL;
    if (ref)
        p->io.ref = *ref;
    if (lc->mode != HT_BATCH_PIN_OVERWRITE && ht_chunk_is_away(s, c) &&
        !(p->cold.fetch && ht_ref_same_place(ht_cold_ref(&p->cold), ref) &&
          ref->visible <= ht_cold_ref(&p->cold)->visible))
        return -EREMOTE;
    if (p->cold.fetch && !(ref && ht_ref_same_place(ht_cold_ref(&p->cold), ref)))
        ht_cold_put(&p->cold); /* other content has come since the fetch began */
    if (ht_chunk_images(o, c)->mapped && (lc->mode != HT_BATCH_PIN_READ || ht_chunk_is_volatile(o, lc->index))) {
        int rc = ht_image_attach(o, c, lc->index, 0, false); /* so programs see the update, and it sees their stores */
        if (rc)
            return rc;
    }
    bool fresh = c->slot == HT_SLOT_NONE;
    int numa_index = find_numa_index(s, w, c);
    if (lc->mode != HT_BATCH_PIN_READ)
        admit(s, lc, c, numa_index);
    ht_planner_note(o, c, lc->index, use_of(lc), true);
    if (c->slot == HT_SLOT_NONE) {
        lc->staged = true;
        return 0;
    }
    int rc = 0;
    lc->data = ht_arena_data(s->arena, c->slot);
    ht_chunk_use_image(o, c);
    if (lc->waits)
        ht_arena_protect_waiting(s->arena, c->slot);
    if (!fresh && lc->mode != HT_BATCH_PIN_OVERWRITE)
        rc = ht_chunk_fill(o, c, lc->index, NULL);
    p->filled = !fresh;
    p->bytes = ht_arena_slot_bytes(s->arena, c->slot);
    /*
     * The object has grown. No thread waits for a longer image while it holds chunks: this one passes through a buffer
     * this time.
     */
    p->copied = lc->staged = p->bytes < lc->len;
    if (!rc && !lc->staged && lc->mode != HT_BATCH_PIN_READ)
        rc = ht_chunk_reserve(o, c, ht_blocks(lc->len));
    return rc;
}

static void release_chunk(struct ht_store *s, struct ht_batch_pin_chunk *lc, struct part *p) HT_REQUIRES(HT_LOCK_STORE)
{
    if (p->staging)
        ht_staging_put(s->staging, HT_STAGING_UPDATE, p->staging);
    p->staging = NULL;
    if (!p->io.chunk)
        return;
    if (p->io.chunk->slot != HT_SLOT_NONE) {
        struct ht_image *im = ht_arena_image(s->arena, p->io.chunk->slot);
        if (im->valid_lo == im->valid_hi && !im->dirty)
            ht_chunk_drop_image(lc->obj, p->io.chunk, lc->index);
        else if (!im->dirty)
            ht_chunk_unreserve(lc->obj, p->io.chunk);
    }
    ht_chunk_unlock_exclusive(lc->obj, p->io.chunk, lc->index);
    p->io.chunk = NULL;
}

/* Buffers for all staged chunks, or none. No lock held. */
static int take_buffers(struct ht_batch_pin *l, struct ht_batch_pin_work *w)
{
    void *bufs[N];
    unsigned n = 0, k = 0;

    for (unsigned i = 0; i < l->count; i++)
        n += l->chunk[i].staged;
    if (!n)
        return 0;
    int rc = l->spare ? ht_staging_get_kept(l->store->staging, n, w->numa_index, bufs)
                      : ht_staging_get(l->store->staging, HT_STAGING_UPDATE, n, l->nowait, w->numa_index, bufs);
    for (unsigned i = 0; !rc && i < l->count; i++)
        if (l->chunk[i].staged)
            l->chunk[i].data = w->part[i].staging = bufs[k++];
    return rc;
}

/* Starts the necessary reads. The chunk is ours, so its reference cannot change. */
static int start_reads(struct ht_batch_pin *l, struct ht_batch_pin_work *w)
{
    int rc = 0;

    for (unsigned i = 0; !rc && i < l->count; i++) {
        struct ht_batch_pin_chunk *lc = &l->chunk[i];
        struct part *p = &w->part[i];
        if (p->copied && lc->mode != HT_BATCH_PIN_OVERWRITE) {
            /* The bytes of the image, and zeros after them. */
            memcpy(lc->data, ht_arena_data(l->store->arena, p->io.chunk->slot), p->bytes);
            memset(lc->data + p->bytes, 0, lc->len - p->bytes);
        }
        if (p->filled || lc->mode == HT_BATCH_PIN_OVERWRITE)
            continue;
        if (!p->stored) {
            memset(lc->data, 0, lc->staged ? lc->len : p->bytes);
            continue;
        }
        p->reading = true;
        if (p->cold.fetch) {
            memcpy(lc->data, ht_cold_bytes(&p->cold), p->io.ref.visible);
            continue;
        }
        ht_chunk_read_start(&p->io, l->ring_, lc->data);
        ht_ring_offer(l->ring_);
        rc = p->io.rc;
    }
    ht_ring_kick(l->ring_);
    return rc;
}

/* The first error. */
static int finish_reads(struct ht_batch_pin *l, struct ht_batch_pin_work *w)
{
    int first = 0;

    for (unsigned i = 0; i < l->count; i++) {
        struct part *p = &w->part[i];
        int rc = p->reading && !p->cold.fetch ? ht_chunk_read_finish(&p->io, l->ring_) : 0;
        if (rc && !first)
            first = rc;
    }
    return first;
}

/* Fetches content from the vault; no chunk is held. Releases the lock. */
static int fetch_cold(struct ht_batch_pin *l, struct ht_batch_pin_work *w) HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = 0;

    /* the thread may hold other chunks */
    for (unsigned i = 0; (l->nowait || l->here) && i < l->count; i++) {
        struct ht_chunk *c = ht_chunk_find(l->chunk[i].obj, l->chunk[i].index);
        if (c && l->chunk[i].mode != HT_BATCH_PIN_OVERWRITE && ht_chunk_is_away(l->store, c))
            return l->nowait ? -EAGAIN : -EREMOTE;
    }
    for (unsigned i = 0; !rc && i < l->count; i++)
        if (l->chunk[i].mode != HT_BATCH_PIN_OVERWRITE)
            rc = ht_cold_begin(l->chunk[i].obj, l->chunk[i].index, false, false, &w->part[i].cold);
    for (unsigned i = 0; i < 2 * l->count; i++) { /* those that others wait for come first */
        struct ht_cold_want *cold = &w->part[i % l->count].cold;
        int one = cold->fetch && cold->leads == (i < l->count) ? ht_cold_wait(cold) : 0;
        rc = rc ? rc : one;
    }
    return rc;
}

static void put_cold(struct ht_batch_pin *l, struct ht_batch_pin_work *w) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned i = 0; i < l->count; i++)
        ht_cold_put(&w->part[i].cold);
}

static int begin(struct ht_batch_pin *l)
{
    struct ht_store *s = l->store;
    unsigned order[N];

    assert(l->count >= 1 && l->count <= N);
    HT_PROBE2(batch_pin_begin, l, l->count);
    sort_order(l, order);
    l->ring_ = ht_store_ring(s);
    struct ht_batch_pin_work *w = calloc(1, sizeof(*w));
    int rc = w && l->ring_ ? 0 : -ENOMEM;
    if (w)
        w->numa_index = HT_NUMA_INDEX_ANY;
    ht_store_lock(s);
    if (!rc && s->objects.cold_blocks)
        rc = fetch_cold(l, w);
    for (unsigned k = 0; !rc && k < l->count; k++)
        rc = take_chunk(s, w, &l->chunk[order[k]], &w->part[order[k]]);
    ht_store_unlock(s);
    if (!rc)
        rc = take_buffers(l, w);
    if (!rc) {
        rc = start_reads(l, w);
        if (rc)
            (void)finish_reads(l, w);
    }
    l->priv_ = w;
    if (rc && w) {
        ht_store_lock(s);
        for (unsigned i = 0; i < l->count; i++)
            release_chunk(s, &l->chunk[i], &w->part[i]);
        put_cold(l, w);
        ht_store_unlock(s);
        free(w);
        l->priv_ = NULL;
    }
    if (rc)
        HT_PROBE2(batch_pin_end, l, rc);
    return rc;
}

int ht_batch_pin_begin(struct ht_batch_pin *l)
{
    int rc;

    do
        rc = begin(l);
    while (rc == -EREMOTE && !l->here);
    return rc;
}

/* Fills with zeros after the bytes that count. */
static void end_read(const struct ht_batch_pin_chunk *lc, const struct part *p)
{
    uint32_t visible = p->io.ref.visible, end = lc->staged ? lc->len : p->bytes;

    if (visible < end)
        memset(lc->data + visible, 0, end - visible);
}

int ht_batch_pin_wait(struct ht_batch_pin *l)
{
    struct ht_store *s = l->store;
    struct ht_batch_pin_work *w = l->priv_;
    int rc = finish_reads(l, w);

    for (unsigned i = 0; !rc && i < l->count; i++)
        if (w->part[i].reading)
            end_read(&l->chunk[i], &w->part[i]);
    ht_store_lock(s);
    for (unsigned i = 0; !rc && i < l->count; i++) {
        struct ht_batch_pin_chunk *lc = &l->chunk[i];
        struct part *p = &w->part[i];
        if (p->filled && lc->mode != HT_BATCH_PIN_OVERWRITE)
            ht_obj_count_hit(lc->obj);
        if (p->reading) {
            ht_obj_count_miss(lc->obj);
            ht_obj_count_read(lc->obj, &p->io.ref);
            if (lc->consumed)
                s->own->passing.read_back_bytes += lc->len;
        }
        if (lc->staged || lc->mode == HT_BATCH_PIN_OVERWRITE || p->filled)
            continue;
        struct ht_image *im = ht_arena_image(s->arena, p->io.chunk->slot);
        im->valid_lo = 0;
        im->valid_hi = p->bytes;
        im->data_hi = p->stored ? p->io.ref.visible : 0;
    }
    for (unsigned i = 0; i < l->count; i++)
        w->part[i].reading = false;
    put_cold(l, w);
    ht_store_unlock(s);
    return rc;
}

/* Finishes a changed image. */
static void end_image(struct ht_batch_pin *l, struct ht_batch_pin_chunk *lc, struct part *p) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = l->store;
    const struct ht_batch_pin_work *w = l->priv_;
    struct ht_image *im = ht_arena_image(s->arena, p->io.chunk->slot);

    im->valid_lo = 0;
    if (im->valid_hi < lc->len)
        im->valid_hi = lc->len;
    im->data_hi = (uint32_t)ht_max_u64(im->data_hi, lc->len);
    im->target_device = (uint8_t)(w->target_device + 1);
    if (p->io.chunk->flags & HT_CH_BAD)
        ht_chunk_install_hole(lc->obj, p->io.chunk, lc->index);
    ht_chunk_set_dirty(lc->obj, p->io.chunk, lc->index);
    if (l->final)
        ht_chunk_set_final(lc->obj, p->io.chunk);
}

/*
 * A place for a staged chunk. No log space was reserved for its pieces when the batch pin began. So it is refused now
 * if the log has no room for them beside those of accepted content. Content with a rewrite reserve is checked when the
 * space is taken.
 */
static int take_place(struct ht_obj *o, struct part *p, int target_device) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    int rc = ht_chunk_reserve(o, p->io.chunk, 0);

    if (!rc)
        rc = ht_chunk_write_place(&p->io, ht_obj_hint(o, target_device));
    if (rc || o->obj_class == HT_CLASS_SCRATCH || o->extra->rewrite_reserve_blocks ||
        ht_ref_pieces_fit(s, &p->io.ref, 1))
        return rc;
    ht_chunk_write_cancel(&p->io);
    return -ENOSPC;
}

/* Starts writing a changed staged chunk. Releases the lock in between. */
static void end_staged(struct ht_batch_pin *l, struct ht_batch_pin_chunk *lc, struct part *p) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = l->store;
    const struct ht_batch_pin_work *w = l->priv_;

    ht_store_unlock(s);
    ht_chunk_write_prepare(&p->io, lc->data, lc->len, HT_CODEC_RAW, lc->len);
    ht_store_lock(s);
    if (p->copied)
        ht_chunk_drop_image(lc->obj, p->io.chunk, lc->index);
    struct ht_chunk_before was = ht_chunk_before(p->io.chunk);
    bool gone = p->io.chunk->flags & HT_CH_GONE;
    ht_chunk_drop_cur(lc->obj, p->io.chunk);
    if (gone)
        p->io.chunk->flags |= HT_CH_GONE;
    ht_chunk_note_unpublished(lc->obj, p->io.chunk, lc->index, was);
    const struct ht_ref prepared = p->io.ref;
    do {
        p->io.ref = prepared;
        p->rc = take_place(lc->obj, p, w->target_device);
    } while (p->rc == -ENOSPC && ht_obj_wait_for_reserve(lc->obj));
    p->writing = !p->rc;
    if (p->rc)
        return;
    ht_chunk_write_start(&p->io, l->ring_);
    ht_ring_offer(l->ring_);
    ht_store_lock(s);
}

/* The device that a chunk is meant for, or is stored on; -1: on none. */
static int find_home(const struct ht_store *s, const struct part *p) HT_REQUIRES(HT_LOCK_STORE)
{
    int target_device = ht_chunk_target_device(s, p->io.chunk);

    return target_device >= 0 || !p->stored ? target_device : ht_ref_home(&p->io.ref);
}

/*
 * Content that belongs together stays together: on the device of the first chunk, or where there is room for all.
 * All of it is written anew, so it may just as well move to a device that has less than its share.
 */
static int find_target_device(const struct ht_batch_pin *l, const struct ht_batch_pin_work *w, uint32_t dirty)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = l->store;
    struct ht_alloc_hint hint = ht_obj_hint(l->chunk[0].obj, -1);
    uint32_t blocks = 0;

    hint.movable = true;

    for (unsigned i = 0; i < l->count; i++) {
        if (!(dirty >> i & 1))
            continue;
        blocks += ht_blocks(l->chunk[i].len);
        if (hint.device < 0)
            hint.device = find_home(s, &w->part[i]);
    }
    ht_shares_update(s);
    int chosen = ht_alloc_assign(s->alloc, blocks, hint);
    for (unsigned i = 0; i < l->count; i++) {
        int home = dirty >> i & 1 ? find_home(s, &w->part[i]) : chosen;
        if (home >= 0 && home != chosen)
            s->counts.moved_bytes += (uint64_t)ht_blocks(l->chunk[i].len) * HT_BLOCK_BYTES;
    }
    return chosen;
}

void ht_batch_pin_end(struct ht_batch_pin *l, uint32_t dirty)
{
    struct ht_store *s = l->store;
    struct ht_batch_pin_work *w = l->priv_;

    ht_store_lock(s);
    w->target_device = dirty ? find_target_device(l, w, dirty) : -1;
    for (unsigned i = 0; i < l->count; i++) {
        struct ht_batch_pin_chunk *lc = &l->chunk[i];
        struct part *p = &w->part[i];
        bool changed = dirty >> i & 1;
        assert(!changed || lc->mode != HT_BATCH_PIN_READ);
        if (changed && lc->staged && lc->len) {
            end_staged(l, lc, p);
            continue;
        }
        if (changed && !lc->staged)
            end_image(l, lc, p);
        release_chunk(s, lc, p);
    }
    ht_store_unlock(s);
    ht_ring_kick(l->ring_);
}

/* The new content of a staged chunk is in its place, or lost. Releases the lock in between. */
static void install_or_lose(struct ht_batch_pin *l, struct ht_batch_pin_chunk *lc, struct part *p)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = lc->obj;

    if (p->writing)
        p->rc = ht_chunk_write_finish(&p->io, l->ring_);
    if (!p->rc) {
        o->version++;
        return;
    }
    ht_chunk_write_report(&p->io, p->rc, "abort returns to the last commit");
    p->io.chunk->flags |= HT_CH_BAD;
    ht_obj_set_error(o, p->rc);
    o->lost = true;
    ht_obj_touch_meta(o); /* keeps it on the scope's list, for abort */
}

int ht_batch_pin_finish(struct ht_batch_pin *l)
{
    struct ht_store *s = l->store;
    struct ht_batch_pin_work *w = l->priv_;
    int first = 0;

    for (unsigned i = 0; i < l->count; i++)
        if (w->part[i].io.chunk && w->part[i].writing)
            ht_chunk_write_wait(&w->part[i].io, l->ring_);
    ht_store_lock(s);
    for (unsigned i = 0; i < l->count; i++) {
        struct part *p = &w->part[i];
        if (!p->io.chunk)
            continue;
        install_or_lose(l, &l->chunk[i], p);
        if (p->rc && !first)
            first = p->rc;
        release_chunk(s, &l->chunk[i], p);
    }
    ht_store_unlock(s);
    free(w);
    l->priv_ = NULL;
    HT_PROBE2(batch_pin_end, l, first);
    return first;
}
