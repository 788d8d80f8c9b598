/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lease.c - a few chunks held for one piece of work.
 *
 *   begin: chunks locked in (object, index) order; images filled or, while the keep-set has room, made;
 *          the rest gets staging buffers, all at once; reads start
 *   wait:  reads done and verified
 *   end:   images dirty and free; staged chunks that changed start their write to new space
 *   finish: references installed, buffers and chunks free
 *
 * A chunk whose staged write fails has lost its current content: it is BAD until abort or overwrite.
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/store/store_priv.h"

enum { N = HT_LEASE_CHUNKS_MAX, ADMIT_TRIES = 64, FREE_SHARE = 8 };

struct part {
    struct ht_chunk *c;
    void *staging;
    struct ht_ref ref; /* being read, then being written */
    struct ht_xfer xfer;
    uint32_t bytes; /* of its image */
    bool stored, reading, writing, filled;
    bool copied; /* staged, from an image that is too short for it */
    int rc;
};

struct ht_lease_work {
    struct ht_lease_work *next;
    int home; /* the device where all that changes should lie */
    int near; /* the first of its chunks that is stored, or will be on a known device */
    struct part part[N];
};

static struct ht_lease_work *work_get(struct ht_store *s)
{
    struct ht_lease_work *w = s->lease_works;
    if (w)
        s->lease_works = w->next;
    else if ((w = malloc(sizeof(*w))) != NULL)
        s->lease_works_bytes += sizeof(*w);
    if (w)
        *w = (struct ht_lease_work){.near = HT_NEAR_ANY};
    return w;
}

static void work_put(struct ht_store *s, struct ht_lease_work *w)
{
    w->next = s->lease_works;
    s->lease_works = w;
}

void ht_lease_works_free(struct ht_store *s)
{
    while (s->lease_works) {
        struct ht_lease_work *w = s->lease_works;
        s->lease_works = w->next;
        free(w);
    }
}

static bool before(const struct ht_lease_chunk *a, const struct ht_lease_chunk *b)
{
    return a->obj->oid != b->obj->oid ? a->obj->oid < b->obj->oid : a->index < b->index;
}

static void sort_order(const struct ht_lease *l, unsigned order[N])
{
    for (unsigned i = 0; i < l->count; i++) {
        unsigned k = i;
        for (; k && before(&l->chunk[i], &l->chunk[order[k - 1]]); k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
}

/* Where memory for the chunk should be: near where it is stored, else with the others. Lock held. */
static int find_near(const struct ht_store *s, struct ht_lease_work *w, struct ht_chunk *c)
{
    int near = ht_chunk_near_now(s, c);
    if (w->near == HT_NEAR_ANY)
        w->near = near;
    return near == HT_NEAR_ANY ? w->near : near;
}

/* How many images may be asked to go for one of so many bytes; -1: none may come, not even to a free place. */
static int admission(const struct ht_store *s, uint32_t bytes)
{
    uint32_t all = (uint32_t)(ht_arena_bytes(s->arena) >> 20);
    if (ht_arena_can_keep(s->arena))
        return ADMIT_TRIES;
    bool small = bytes <= HT_SMALL_CHUNK_BYTES;
    return small && ht_arena_free_slots(s->arena) > all / FREE_SHARE + 1 ? 0 : -1;
}

/*
 * What is updated over and over becomes resident while the keep-set has room, small images where places are free; the rest streams
 * through staging. Lock held.
 */
static void admit(struct ht_store *s, struct ht_lease_chunk *lc, struct ht_chunk *c, int near)
{
    struct ht_obj *o = lc->obj;
    uint32_t bytes = ht_chunk_image_bytes(o, c, lc->index, 0);
    int tries = admission(s, bytes);
    if (c->slot == HT_SLOT_NONE && tries >= 0) {
        uint32_t slot = ht_arena_get(s->arena, bytes, (uint32_t)tries, near);
        if (slot == HT_SLOT_NONE)
            return;
        ht_chunk_attach_image(o, c, lc->index, slot);
    }
    if (c->slot != HT_SLOT_NONE)
        ht_chunk_keep(o, c);
}

/* Lock one chunk and decide where its bytes will be. Lock held. */
static int take_chunk(struct ht_store *s, struct ht_lease_work *w, struct ht_lease_chunk *lc, struct part *p)
{
    struct ht_obj *o = lc->obj;
    struct ht_chunk *c = ht_chunk_make(o, lc->index);
    if (!c)
        return -ENOMEM;
    ht_chunk_lock_exclusive(s, c);
    p->c = c;
    lc->len = ht_chunk_len(o, lc->index);
    lc->staged = false;
    if ((c->flags & CH_BAD) && lc->mode != HT_LEASE_OVERWRITE)
        return -EIO;
    /* A copy: publishing moves references without the chunk's lock. */
    const struct ht_ref *ref = ht_chunk_ref(c);
    p->stored = ref != NULL;
    if (ref)
        p->ref = *ref;
    if (o->extra->handed && c->slot == HT_SLOT_NONE && (lc->mode != HT_LEASE_READ || ht_handed_hides(o, lc->index))) {
        int rc = ht_handed_attach(o, c, lc->index); /* where others see the update, and we see what they stored */
        if (rc)
            return rc;
    }
    bool fresh = c->slot == HT_SLOT_NONE;
    int near = find_near(s, w, c);
    if (lc->mode != HT_LEASE_READ)
        admit(s, lc, c, near);
    if (c->slot == HT_SLOT_NONE) {
        lc->staged = true;
        return 0;
    }
    int rc = 0;
    lc->data = ht_arena_data(s->arena, c->slot);
    ht_arena_use(s->arena, c->slot);
    if (!fresh && lc->mode != HT_LEASE_OVERWRITE)
        rc = ht_chunk_fill(o, c, lc->index);
    p->filled = !fresh;
    p->bytes = ht_arena_slot_bytes(s->arena, c->slot);
    /* The object has grown. Nobody waits for a longer image with chunks of his own: it passes through a buffer this time. */
    p->copied = lc->staged = p->bytes < lc->len;
    if (!rc && !lc->staged && lc->mode != HT_LEASE_READ)
        rc = ht_chunk_reserve(o, c, (uint32_t)ht_div_up(lc->len, HT_BLOCK_BYTES));
    return rc;
}

static void release_chunk(struct ht_store *s, struct ht_lease_chunk *lc, struct part *p)
{
    if (p->staging)
        ht_staging_put(s->staging, HT_STAGING_UPDATE, p->staging);
    p->staging = NULL;
    if (!p->c)
        return;
    if (p->c->slot != HT_SLOT_NONE) {
        struct ht_image *im = ht_arena_image(s->arena, p->c->slot);
        if (im->valid_lo == im->valid_hi && !im->dirty)
            ht_chunk_drop_image(lc->obj, p->c, lc->index);
        else if (!im->dirty)
            ht_chunk_unreserve(lc->obj, p->c);
    }
    ht_chunk_settle_claim(lc->obj, p->c);
    ht_chunk_unlock_exclusive(lc->obj, p->c, lc->index);
    p->c = NULL;
}

/* Buffers for all staged chunks, or none. No lock held. */
static int take_buffers(struct ht_lease *l, struct ht_lease_work *w)
{
    void *bufs[N];
    unsigned n = 0, k = 0;
    for (unsigned i = 0; i < l->count; i++)
        n += l->chunk[i].staged;
    if (!n)
        return 0;
    int rc = ht_staging_get(l->store->staging, HT_STAGING_UPDATE, n, l->nowait, w->near, bufs);
    for (unsigned i = 0; !rc && i < l->count; i++)
        if (l->chunk[i].staged)
            l->chunk[i].data = w->part[i].staging = bufs[k++];
    return rc;
}

/* What the image has, and zeros behind it. */
static void copy_image(const struct ht_lease *l, const struct ht_lease_chunk *lc, const struct part *p)
{
    memcpy(lc->data, ht_arena_data(l->store->arena, p->c->slot), p->bytes);
    memset(lc->data + p->bytes, 0, lc->len - p->bytes);
}

/* Start reading what must be read. The chunk is ours, so its reference cannot change. */
static int start_reads(struct ht_lease *l, struct ht_lease_work *w)
{
    int rc = 0;
    for (unsigned i = 0; !rc && i < l->count; i++) {
        struct ht_lease_chunk *lc = &l->chunk[i];
        struct part *p = &w->part[i];
        if (p->copied && lc->mode != HT_LEASE_OVERWRITE)
            copy_image(l, lc, p);
        if (p->filled || lc->mode == HT_LEASE_OVERWRITE)
            continue;
        if (!p->stored) {
            memset(lc->data, 0, lc->staged ? lc->len : p->bytes);
            continue;
        }
        rc = ht_xfer_start(&p->xfer, l->store, l->ring_, &p->ref, lc->data, HT_IO_READ);
        p->reading = !rc;
    }
    ht_ring_kick(l->ring_);
    return rc;
}

static int wait_reads(struct ht_lease *l, struct ht_lease_work *w)
{
    int first = 0;
    for (unsigned i = 0; i < l->count; i++) {
        struct part *p = &w->part[i];
        int rc = p->reading ? ht_xfer_wait(&p->xfer, l->ring_) : 0;
        if (rc)
            ht_read_failed(l->chunk[i].obj, l->chunk[i].index, &p->xfer, rc);
        if (rc && !first)
            first = rc;
    }
    return first;
}

int ht_lease_begin(struct ht_lease *l)
{
    struct ht_store *s = l->store;
    unsigned order[N];
    assert(l->count >= 1 && l->count <= N);
    sort_order(l, order);
    l->ring_ = ht_store_ring(s);
    ht_store_lock(s);
    struct ht_lease_work *w = work_get(s);
    int rc = w && l->ring_ ? 0 : -ENOMEM;
    for (unsigned k = 0; !rc && k < l->count; k++)
        rc = take_chunk(s, w, &l->chunk[order[k]], &w->part[order[k]]);
    ht_store_unlock(s);
    if (!rc)
        rc = take_buffers(l, w);
    if (!rc) {
        rc = start_reads(l, w);
        if (rc)
            (void)wait_reads(l, w);
    }
    l->priv_ = w;
    if (rc && w) {
        ht_store_lock(s);
        for (unsigned i = 0; i < l->count; i++)
            release_chunk(s, &l->chunk[i], &w->part[i]);
        work_put(s, w);
        ht_store_unlock(s);
        l->priv_ = NULL;
    }
    return rc;
}

static int check_part(struct ht_lease_chunk *lc, struct part *p)
{
    int rc = ht_ref_verify(lc->obj, lc->index, &p->ref, lc->data);
    uint32_t end = lc->staged ? lc->len : p->bytes;
    if (!rc && p->ref.visible < end)
        memset(lc->data + p->ref.visible, 0, end - p->ref.visible);
    return rc;
}

int ht_lease_wait(struct ht_lease *l)
{
    struct ht_store *s = l->store;
    struct ht_lease_work *w = l->priv_;
    int rc = wait_reads(l, w);
    for (unsigned i = 0; !rc && i < l->count; i++)
        if (w->part[i].reading)
            rc = check_part(&l->chunk[i], &w->part[i]);
    ht_store_lock(s);
    for (unsigned i = 0; !rc && i < l->count; i++) {
        struct ht_lease_chunk *lc = &l->chunk[i];
        struct part *p = &w->part[i];
        if (p->filled && lc->mode != HT_LEASE_OVERWRITE) {
            ht_obj_count_hit(lc->obj);
        }
        if (p->reading) {
            ht_obj_count_miss(lc->obj);
            ht_obj_count_read(lc->obj, &p->ref);
        }
        if (lc->staged || lc->mode == HT_LEASE_OVERWRITE || p->filled)
            continue;
        struct ht_image *im = ht_arena_image(s->arena, p->c->slot);
        im->valid_lo = 0;
        im->valid_hi = p->bytes;
        im->data_hi = p->stored ? p->ref.visible : 0;
    }
    for (unsigned i = 0; i < l->count; i++)
        w->part[i].reading = false;
    ht_store_unlock(s);
    return rc;
}

/* A changed image. Lock held. */
static void end_image(struct ht_lease *l, struct ht_lease_chunk *lc, struct part *p)
{
    struct ht_store *s = l->store;
    const struct ht_lease_work *w = l->priv_;
    struct ht_image *im = ht_arena_image(s->arena, p->c->slot);
    im->valid_lo = 0;
    if (im->valid_hi < lc->len)
        im->valid_hi = lc->len;
    im->data_hi = (uint32_t)ht_max_u64(im->data_hi, lc->len);
    im->home = (uint8_t)(w->home + 1);
    if (p->c->flags & CH_BAD)
        ht_chunk_install_hole(lc->obj, p->c, lc->index);
    ht_chunk_set_dirty(lc->obj, p->c, lc->index);
}

/* Start writing a changed staged chunk. Lock held, let go meanwhile. */
static void end_staged(struct ht_lease *l, struct ht_lease_chunk *lc, struct part *p)
{
    struct ht_store *s = l->store;
    const struct ht_lease_work *w = l->priv_;
    uint32_t len = lc->len;
    if (p->copied)
        ht_chunk_drop_image(lc->obj, p->c, lc->index);
    bool was = ht_chunk_unpublished(p->c), gone = p->c->flags & CH_GONE;
    ht_chunk_drop_cur(lc->obj, p->c);
    if (gone)
        p->c->flags |= CH_GONE;
    ht_chunk_note_unpublished(lc->obj, p->c, lc->index, was);
    p->rc = ht_chunk_reserve(lc->obj, p->c, 0);
    if (!p->rc)
        p->rc = ht_chunk_take_space(lc->obj, p->c, len, (struct ht_place_wish){.hint = w->home}, &p->ref);
    p->writing = !p->rc;
    if (p->rc)
        return;
    p->xfer.rescues = s->rescues;
    s->writing_blocks += ht_ref_blocks(&p->ref);
    ht_store_unlock(s);
    memset(lc->data + len, 0, ht_round_up(len, HT_BLOCK_BYTES) - len);
    p->ref.checksum = ht_store_checksum(s, lc->data, len);
    p->rc = ht_xfer_start(&p->xfer, s, l->ring_, &p->ref, lc->data, HT_IO_WRITE);
    ht_store_lock(s);
}

/*
 * What belongs together stays together: on the device of the first chunk that is stored, or the one that the first image is meant for, or
 * where there is room for all. Lock held.
 */
static int find_home(const struct ht_lease *l, const struct ht_lease_work *w)
{
    struct ht_place_wish wish = HT_PLACE_ANY;
    uint32_t blocks = 0;
    for (unsigned i = 0; i < l->count; i++) {
        if (w->part[i].stored && l->chunk[i].mode != HT_LEASE_READ)
            return (int)ht_ref_extent(&w->part[i].ref, 0).device;
        if (wish.hint < 0)
            wish.hint = ht_chunk_home(l->store, w->part[i].c);
        blocks += (uint32_t)ht_div_up(l->chunk[i].len, HT_BLOCK_BYTES);
    }
    return ht_alloc_choose(l->store->alloc, blocks, wish);
}

void ht_lease_end(struct ht_lease *l, uint32_t dirty)
{
    struct ht_store *s = l->store;
    struct ht_lease_work *w = l->priv_;
    ht_store_lock(s);
    w->home = dirty ? find_home(l, w) : -1;
    for (unsigned i = 0; i < l->count; i++) {
        struct ht_lease_chunk *lc = &l->chunk[i];
        struct part *p = &w->part[i];
        bool changed = dirty >> i & 1;
        assert(!changed || lc->mode != HT_LEASE_READ);
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

static void install_or_lose(struct ht_lease *l, struct ht_lease_chunk *lc, struct part *p)
{
    struct ht_obj *o = lc->obj;
    struct ht_store *s = l->store;
    if (p->writing)
        s->writing_blocks -= ht_ref_blocks(&p->ref);
    if (!p->rc)
        p->rc = ht_xfer_settle(s, &p->xfer, &p->ref);
    if (p->rc && p->writing)
        p->rc = ht_write_elsewhere(o, p->c, lc->index, l->ring_, lc->data, &p->xfer, &p->ref, p->rc);
    if (!p->rc) {
        ht_chunk_install(o, p->c, lc->index, &p->ref);
        o->version++;
        ht_obj_count_written(o, &p->ref);
        return;
    }
    const char *device = p->xfer.bad_dev ? ht_device_name(s, p->xfer.bad_dev - 1) : NULL;
    struct ht_event_about about = {o->oid, device, device ? p->xfer.bad_offset : 0, ht_xfer_error(&p->xfer, p->rc)};
    ht_event(
        HT_EVENT_WRITE_ERROR, &about,
        "new content of chunk %llu of object %llu could not be written to %s: %s; abort returns to the last commit",
        (unsigned long long)lc->index, (unsigned long long)o->oid, device ? device : "any device",
        strerror(-about.error));
    s->write_errors++;
    p->c->flags |= CH_BAD;
    ht_obj_set_error(o, p->rc);
    o->lost = true;
    o->meta_dirty = true; /* keeps it on the scope's list, for abort */
    ht_obj_touch(o);
}

int ht_lease_finish(struct ht_lease *l)
{
    struct ht_store *s = l->store;
    struct ht_lease_work *w = l->priv_;
    int first = 0;
    for (unsigned i = 0; i < l->count; i++)
        if (w->part[i].c && w->part[i].writing && !w->part[i].rc)
            w->part[i].rc = ht_xfer_wait(&w->part[i].xfer, l->ring_);
    ht_store_lock(s);
    for (unsigned i = 0; i < l->count; i++) {
        struct part *p = &w->part[i];
        if (!p->c)
            continue;
        install_or_lose(l, &l->chunk[i], p);
        if (p->rc && !first)
            first = p->rc;
        release_chunk(s, &l->chunk[i], p);
    }
    work_put(s, w);
    ht_store_unlock(s);
    l->priv_ = NULL;
    return first;
}
