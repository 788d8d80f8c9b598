/* SPDX-License-Identifier: Apache-2.0 */
/* rewrite_reserve.c - space for one rewrite of an object between two publications: two copies, one stored already. */
#include "tiering/object/rewrite_reserve.h"
#include "tiering/base/activity.h"
#include "tiering/space/alloc.h"
#include "tiering/cache/arena.h"
#include "tiering/api/object.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/object/slice.h"

/*
 * Gives dirty images that the reserve does not cover any more a reservation of their own, first from *left. Images that
 * become dirty now get their own. slice: releases the lock in between; NULL: does not.
 */
static int reserve_uncovered(struct ht_obj *o, uint64_t *left, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    uint64_t index = 0;

    ht_chunk_for_each_busy(c, o, index)
    {
        const struct ht_ref *ref = ht_chunk_ref(c);
        struct ht_image *im = c->slot != HT_SLOT_NONE ? ht_arena_image(s->arena, c->slot) : NULL;
        bool covered = index << o->chunk_shift < ht_rewrite_reserve_bytes(o, o->extra->rewrite_reserve_blocks);
        if (!ht_chunk_leaf(c)->dirty)
            index = ht_leaf_last(index);
        if (im && im->dirty && !covered) {
            uint32_t need = (uint32_t)ht_div_up(ht_max_u64(im->data_hi, ref ? ref->visible : 0), HT_BLOCK_BYTES);
            need = need > im->reserved_blocks ? need - im->reserved_blocks : 0;
            uint64_t taken = ht_min_u64(need, *left);
            int rc = ht_alloc_reserve(s->alloc, need - taken);
            if (rc)
                return rc;
            *left -= taken;
            im->reserved_blocks += need;
        }
        if (slice)
            ht_slice_next(s, slice);
    }
    return 0;
}

/* Shared space does not come back when it is rewritten. */
static uint64_t blocks_to_reserve(const struct ht_obj *o, uint64_t blocks) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t stored = ht_obj_stored_blocks(o) - ht_obj_shared_blocks(o);

    return 2 * blocks > stored && blocks ? 2 * blocks - stored : 0;
}

/* Makes the reserve smaller. Ending one cannot fail: content without space says so later. */
static int shrink(struct ht_obj *o, uint64_t blocks, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj_extra *x = ht_obj_extra(o);
    uint64_t keeps = ht_min_u64(x->rewrite_reserve_left, blocks_to_reserve(o, blocks));
    uint64_t left = x->rewrite_reserve_left - keeps;

    x->rewrite_reserve_blocks = blocks;
    x->rewrite_reserve_left = keeps;
    int rc = reserve_uncovered(o, &left, slice);
    x->rewrite_reserve_left += left;
    return blocks ? rc : 0;
}

/* Blocks that are set aside serve first; *aside is how many there are, and then how many are left. */
static int reserve_from(struct ht_store *s, uint64_t blocks, uint64_t *aside) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t taken = ht_min_u64(blocks, *aside);
    int rc = ht_alloc_reserve(s->alloc, blocks - taken);

    if (rc)
        return rc;
    s->objects.aside_blocks -= taken;
    *aside -= taken;
    return 0;
}

static int set_reserve(struct ht_obj *o, uint64_t size, struct ht_slice *slice, uint64_t *aside)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    uint64_t blocks = ht_div_up(size, HT_BLOCK_BYTES); /* chunks are whole blocks */
    uint64_t was = o->extra->rewrite_reserve_blocks;
    int rc = size ? ht_obj_need_extra(o) : 0;

    if (!rc && blocks > was)
        rc = ht_chunk_promise_table(o, size);
    if (!rc && blocks < was)
        rc = shrink(o, blocks, slice);
    uint64_t want = blocks_to_reserve(o, blocks);
    if (!rc && want > o->extra->rewrite_reserve_left)
        rc = reserve_from(s, want - o->extra->rewrite_reserve_left, aside);
    else if (!rc)
        ht_alloc_unreserve(s->alloc, o->extra->rewrite_reserve_left - want);
    if (!ht_obj_has_extra(o))
        return rc;
    struct ht_obj_extra *x = ht_obj_extra(o);
    x->rewrite_reserve_blocks = rc ? was : blocks;
    /* More than before only if the object got smaller chunks meanwhile. */
    int promised = ht_chunk_promise_table(o, ht_rewrite_reserve_bytes(o, x->rewrite_reserve_blocks));
    if (rc)
        return rc;
    x->rewrite_reserve_left = want;
    x->shm_reserve = false; /* it is the caller's now */
    return promised;
}

int ht_obj_set_rewrite_reserve(struct ht_obj *o, uint64_t size, struct ht_slice *slice)
{
    uint64_t none = 0;

    return set_reserve(o, size, slice, &none);
}

int ht_obj_rewrite_reserve_aside(struct ht_obj *o, uint64_t size, uint64_t *bytes)
{
    uint64_t aside = *bytes / HT_BLOCK_BYTES;
    struct ht_slice slice = {0};

    ht_store_lock(o->s);
    int rc = set_reserve(o, size, &slice, &aside);
    ht_store_unlock(o->s);
    *bytes = aside * HT_BLOCK_BYTES;
    return rc;
}

int ht_obj_rewrite_reserve(struct ht_obj *o, uint64_t size)
{
    uint64_t none = 0;

    return ht_obj_rewrite_reserve_aside(o, size, &none);
}

uint64_t ht_obj_rewrite_bytes(struct ht_obj *o, uint64_t size)
{
    ht_store_lock(o->s);
    uint64_t blocks = blocks_to_reserve(o, ht_div_up(size, HT_BLOCK_BYTES));
    ht_store_unlock(o->s);
    return blocks * HT_BLOCK_BYTES;
}

void ht_obj_end_rewrite_reserve(struct ht_obj *o)
{
    if (!ht_obj_has_extra(o))
        return;
    struct ht_obj_extra *x = ht_obj_extra(o);
    ht_alloc_unreserve(o->s->alloc, x->rewrite_reserve_left);
    x->rewrite_reserve_left = x->rewrite_reserve_blocks = 0;
    (void)!ht_chunk_promise_table(o, 0); /* giving back cannot fail */
}

void ht_obj_refill_rewrite_reserve(struct ht_obj *o, uint32_t blocks)
{
    if (!o->extra->rewrite_reserve_blocks)
        return;
    uint64_t n = ht_min_u64(ht_rewrite_reserve_missing(o), blocks);
    if (n && ht_alloc_reserve(o->s->alloc, n) == 0)
        ht_obj_extra(o)->rewrite_reserve_left += n;
}

bool ht_obj_wait_for_reserve(struct ht_obj *o)
{
    struct ht_store *s = o->s;

    if (!o->extra->rewrite_reserve_blocks || !o->writing)
        return false;
    s->waits.reserve_waiters++;
    ht_activity_wait("space that a write in flight has borrowed; object", o->oid);
    ht_store_wait(s, &s->waits.settled, 0);
    ht_activity_go_on();
    s->waits.reserve_waiters--;
    return true;
}

void ht_obj_tell_reserve_waiters(struct ht_store *s)
{
    if (s->waits.reserve_waiters)
        pthread_cond_broadcast(&s->waits.settled);
}
