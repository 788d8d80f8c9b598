/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fill.c - bringing a chunk's bytes into its image.
 *
 * An image is valid in one interval, up to its own end at most. Writing next to it extends it; anything else first fills the
 * rest from the reference, so that sequential writers never read.
 */
#include <assert.h>

#include "tiering/store/store_priv.h"

#define PATIENCE_NS 100000000u
enum { ALONE = 8 };

bool ht_chunk_has_slot(struct ht_store *s, const struct ht_chunk *c, uint32_t reach)
{
    return c->slot != HT_SLOT_NONE && ht_arena_slot_bytes(s->arena, c->slot) >= reach;
}

static uint32_t ref_bytes(const struct ht_ref *r, bool there)
{
    return there ? (uint32_t)ht_max_u64(r->stored, r->visible) : 0;
}

uint32_t ht_chunk_image_bytes(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index, uint32_t reach)
{
    if (index)
        return ht_obj_bytes_per_chunk(o);
    uint64_t bytes = ht_max_u64(reach, ht_chunk_len(o, index));
    bytes = ht_max_u64(bytes, ref_bytes(&c->pub, c->flags & CH_PUB));
    return (uint32_t)ht_max_u64(bytes, ref_bytes(&c->cur, c->flags & CH_CUR));
}

/* A longer image takes the place of the one there is. While it is copied both are the chunk's, which is held. */
static void move_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t to)
{
    struct ht_store *s = o->s;
    uint32_t from = c->slot;
    const struct ht_image *im = ht_arena_image(s->arena, from);
    ht_arena_attach(s->arena, to, o, index, im->durable);
    ht_store_unlock(s);
    memcpy(ht_arena_data(s->arena, to) + im->valid_lo, ht_arena_data(s->arena, from) + im->valid_lo,
           im->valid_hi - im->valid_lo);
    ht_store_lock(s);
    if (im->dirty)
        s->dirty_bytes += ht_arena_slot_bytes(s->arena, to) - ht_arena_slot_bytes(s->arena, from);
    ht_arena_replace(s->arena, from, to);
    c->slot = to;
    ht_wake_for_slot(s, from);
}

/* All images are in use: somebody is about to let go. False: nobody did for some time. */
static bool wait_for_slot(struct ht_store *s, struct ht_chunk *c)
{
    s->slot_waiters++;
    int rc = ht_chunk_wait(s, c, &s->slot_cond, ht_now_ns() + PATIENCE_NS);
    s->slot_waiters--;
    return !rc;
}

/* An image that reaches so far, for a chunk that is held; where it should be, and the device and 1 that it will be written to. */
struct wish {
    struct ht_obj *o;
    struct ht_chunk *c;
    uint64_t index;
    uint32_t reach;
    int near;
    uint8_t home;
};

static uint32_t try_get(const struct wish *w, uint32_t tries)
{
    return ht_arena_get(w->o->s->arena, ht_chunk_image_bytes(w->o, w->c, w->index, w->reach), tries, w->near);
}

/* It has been, or can be without the arena, while the chunk was let go. */
static bool is_met(const struct wish *w)
{
    return ht_chunk_has_slot(w->o->s, w->c, w->reach) || (w->c->slot == HT_SLOT_NONE && w->o->extra->handed);
}

/* Clean some images, or wait until somebody lets one go. Lock and chunk held, let go meanwhile. */
static int make_room(const struct wish *w, uint32_t *out_slot)
{
    struct ht_store *s = w->o->s;
    ht_store_unlock(s);
    int n = ht_writeback_some(s, s->threads ? 1 : ALONE, HT_CLEAN_ANY,
                              HT_NEAR_ANY); /* the writeback thread does the rest */
    ht_store_lock(s);
    if (n)
        return n < 0 ? n : 0;
    /* What is being written will be clean soon: no reason yet to ask what stays. */
    *out_slot = try_get(w, s->writing ? HT_ARENA_ASK_ALL : HT_ARENA_FORCE);
    if (*out_slot == HT_SLOT_NONE)
        (void)wait_for_slot(s, w->c);
    return 0;
}

/*
 * An image for a chunk that found none. -EALREADY: it needs none any more. Whoever was woken for a whole slot and leaves some of it
 * has the next one woken.
 */
static int wait_for_room(const struct wish *w, uint32_t *out_slot)
{
    struct ht_obj *o = w->o;
    struct ht_store *s = o->s;
    uint32_t slot = HT_SLOT_NONE;
    bool comes = true;
    int rc = 0;
    s->room_waits++;
    while (!rc && slot == HT_SLOT_NONE) {
        /* Who waits for the next image that is being written goes on as fast as the device, without stopping for many at once. */
        bool wait = comes && s->writing;
        comes = !wait || wait_for_slot(s, w->c);
        rc = wait ? 0 : make_room(w, &slot);
        if (!rc && slot == HT_SLOT_NONE)
            rc = is_met(w) ? -EALREADY : 0;
        if (!rc && slot == HT_SLOT_NONE)
            slot = try_get(w, HT_ARENA_ASK_ALL);
    }
    if (rc || ht_arena_slot_bytes(s->arena, slot) < HT_CHUNK_BYTES)
        ht_wake_one_for_slot(s);
    if (!rc)
        *out_slot = slot;
    return rc;
}

/* Where, and the device that it will be written to: an image that is there knows both. */
static void choose_place(struct wish *w)
{
    struct ht_arena *a = w->o->s->arena;
    if (w->c->slot == HT_SLOT_NONE) {
        w->near = ht_chunk_near(w->o, w->c, &w->home);
        return;
    }
    w->home = ht_arena_image(a, w->c->slot)->home;
    w->near = ht_arena_near(a, w->c->slot);
}

int ht_chunk_get_slot(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t reach)
{
    struct ht_store *s = o->s;
    struct wish w = {.o = o, .c = c, .index = index, .reach = reach};
    assert(c->exclusive);
    if (ht_chunk_has_slot(s, c, reach))
        return 0;
    if (c->slot == HT_SLOT_NONE && o->extra->handed)
        return ht_handed_attach(o, c, index);
    choose_place(&w);
    uint32_t slot = try_get(&w, HT_ARENA_ASK_ALL);
    int rc = slot == HT_SLOT_NONE ? wait_for_room(&w, &slot) : 0;
    if (rc == -EALREADY)
        return c->slot == HT_SLOT_NONE ? ht_handed_attach(o, c, index) : 0;
    if (rc)
        return rc;
    if (c->slot != HT_SLOT_NONE) {
        move_image(o, c, index, slot);
        return 0;
    }
    ht_chunk_attach_image(o, c, index, slot);
    if (w.home)
        ht_arena_image(s->arena, slot)->home = w.home;
    return 0;
}

/* Read a stored chunk into buf (whole blocks) and verify it. No lock held. */
static int read_ref(struct ht_obj *o, uint64_t index, const struct ht_ref *ref, void *buf)
{
    struct ht_ring *ring = ht_store_ring(o->s);
    if (!ring)
        return -ENOMEM;
    struct ht_xfer x;
    int rc = ht_xfer_run(&x, o->s, ring, ref, buf, HT_IO_READ);
    if (rc)
        ht_read_failed(o, index, &x, rc);
    return rc ? rc : ht_ref_verify(o, index, ref, buf);
}

static void copy_outside(uint8_t *dst, const uint8_t *src, uint32_t visible, uint32_t lo, uint32_t hi)
{
    uint32_t left = visible < lo ? visible : lo;
    memcpy(dst, src, left);
    if (visible > hi)
        memcpy(dst + hi, src + hi, visible - hi);
}

/* Read around the valid part [lo, hi) of an image, through a staging buffer. */
static int merge_ref(struct ht_obj *o, uint64_t index, const struct ht_ref *ref, uint8_t *data, uint32_t lo,
                     uint32_t hi)
{
    void *buf;
    int rc = ht_staging_get(o->s->staging, HT_STAGING_FILL, 1, false, ht_ref_near(o->s, ref), &buf);
    if (rc)
        return rc;
    rc = read_ref(o, index, ref, buf);
    if (!rc)
        copy_outside(data, buf, ref->visible, lo, hi);
    ht_staging_put(o->s->staging, HT_STAGING_FILL, buf);
    return rc;
}

static void zero_outside(uint8_t *data, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi)
{
    if (from < lo)
        memset(data + from, 0, (to < lo ? to : lo) - from);
    if (to > hi)
        memset(data + (from > hi ? from : hi), 0, to - (from > hi ? from : hi));
}

int ht_chunk_fill(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = o->s;
    assert(c->exclusive && c->slot != HT_SLOT_NONE);
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    uint32_t bytes = ht_arena_slot_bytes(s->arena, c->slot), lo = im->valid_lo, hi = im->valid_hi;
    if (lo == 0 && hi == bytes)
        return 0;
    if (c->flags & CH_BAD)
        return -EIO;
    const struct ht_ref *now = ht_chunk_ref(c);
    /* A copy: publishing moves references without the chunk's lock. The space stays ours while we hold the chunk. */
    struct ht_ref ref = now ? *now : (struct ht_ref){0};
    uint8_t *data = ht_arena_data(s->arena, c->slot);
    /* What is handed out has nothing behind the object's end, not even room for the rest of a stored block, and shows verified bytes only. */
    bool guest = ht_arena_is_guest(s->arena, c->slot);
    uint32_t end = guest ? ht_chunk_len(o, index) : bytes;
    assert(guest || ref.visible <= bytes);
    uint32_t visible = ref.visible = ht_min_u64(ref.visible, end) & HT_VISIBLE_MASK;
    bool needed = now && (lo == hi ? visible > 0 : lo > 0 || visible > hi);
    ht_store_unlock(s);
    int rc = 0;
    if (needed)
        rc = lo == hi && !guest ? read_ref(o, index, &ref, data) : merge_ref(o, index, &ref, data, lo, hi);
    if (!rc)
        zero_outside(data, visible, end, lo, hi);
    ht_store_lock(s);
    if (needed && !rc)
        ht_obj_count_read(o, &ref);
    if (!rc) {
        im->valid_lo = 0;
        im->valid_hi = bytes;
        im->data_hi = (uint32_t)ht_max_u64(im->data_hi, visible);
    }
    return rc;
}
