/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fill.c - bringing a chunk's bytes into its image.
 *
 * An image is valid in one interval. Writing next to it extends it; anything else first fills the
 * rest from the reference, so that sequential writers never read.
 */
#include <assert.h>

#include "tiering/store/store_priv.h"

#define PATIENCE_NS 100000000u
enum { ALONE = 8 };

/* All images are in use: somebody is about to let go. False: nobody did for some time. */
static bool wait_for_slot(struct ht_store *s, struct ht_chunk *c)
{
    s->slot_waiters++;
    ht_chunk_unlock_exclusive(s, c);
    int rc = ht_store_wait(s, &s->slot_cond, ht_now_ns() + PATIENCE_NS);
    s->slot_waiters--;
    ht_chunk_lock_exclusive(s, c);
    return !rc;
}

/* Clean some images, or wait until somebody lets one go. Lock and chunk held, let go meanwhile. */
static int make_room(struct ht_obj *o, struct ht_chunk *c, int near, uint32_t *out_slot)
{
    struct ht_store *s = o->s;
    ht_store_unlock(s);
    int n = ht_writeback_some(s, s->threads ? 1 : ALONE, HT_CLEAN_ANY,
                              HT_NEAR_ANY); /* the writeback thread does the rest */
    ht_store_lock(s);
    if (n)
        return n < 0 ? n : 0;
    /* What is being written will be clean soon: no reason yet to ask what stays. */
    uint32_t whom = s->writing ? HT_ARENA_ASK_ALL : HT_ARENA_FORCE;
    *out_slot = ht_arena_get(s->arena, ht_obj_bytes_per_chunk(o), whom, near);
    if (*out_slot == HT_SLOT_NONE)
        (void)wait_for_slot(s, c);
    return 0;
}

/*
 * An image for a chunk that found none. -EALREADY: it needs none any more. Whoever was woken for a whole slot and leaves some of it
 * has the next one woken.
 */
static int wait_for_room(struct ht_obj *o, struct ht_chunk *c, int near, uint32_t *out_slot)
{
    struct ht_store *s = o->s;
    uint32_t slot = HT_SLOT_NONE, bytes = ht_obj_bytes_per_chunk(o);
    bool comes = true;
    int rc = 0;
    s->room_waits++;
    while (!rc && slot == HT_SLOT_NONE) {
        /* Who waits for the next image that is being written goes on as fast as the device, without stopping for many at once. */
        bool wait = comes && s->writing;
        comes = !wait || wait_for_slot(s, c);
        rc = wait ? 0 : make_room(o, c, near, &slot);
        if (!rc && slot == HT_SLOT_NONE)
            rc = c->slot != HT_SLOT_NONE || o->extra->handed ? -EALREADY : 0;
        if (!rc && slot == HT_SLOT_NONE)
            slot = ht_arena_get(s->arena, bytes, HT_ARENA_ASK_ALL, near);
    }
    if (rc || bytes < HT_CHUNK_BYTES)
        ht_wake_one_for_slot(s);
    if (!rc)
        *out_slot = slot;
    return rc;
}

int ht_chunk_get_slot(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = o->s;
    assert(c->slot == HT_SLOT_NONE && c->exclusive);
    if (o->extra->handed)
        return ht_handed_attach(o, c, index);
    uint8_t home;
    int near = ht_chunk_near(o, c, &home);
    uint32_t slot = ht_arena_get(s->arena, ht_obj_bytes_per_chunk(o), HT_ARENA_ASK_ALL, near);
    int rc = slot == HT_SLOT_NONE ? wait_for_room(o, c, near, &slot) : 0;
    if (rc == -EALREADY)
        return c->slot == HT_SLOT_NONE ? ht_handed_attach(o, c, index) : 0;
    if (rc)
        return rc;
    ht_chunk_attach_image(o, c, index, slot);
    if (home)
        ht_arena_image(s->arena, slot)->home = home;
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
    uint32_t bytes = ht_obj_bytes_per_chunk(o), lo = im->valid_lo, hi = im->valid_hi;
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
