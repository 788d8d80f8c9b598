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

/*
 * Gives dirty images that a rewrite reserve of so many blocks does not cover a reservation of their own, first from the
 * old reserve.
 */
static int reserve_uncovered(struct ht_obj *o, uint64_t blocks) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    uint64_t index = 0;

    if (!o->extra->rewrite_reserve_blocks)
        return 0;
    ht_chunk_for_each_from(c, o, index)
    {
        if (!ht_chunk_leaf(c)->dirty) {
            index = ht_leaf_last(index);
            continue;
        }
        const struct ht_ref *ref = ht_chunk_ref(c);
        struct ht_image *im = c->slot != HT_SLOT_NONE ? ht_arena_image(s->arena, c->slot) : NULL;
        if (!im || !im->dirty || index << o->chunk_shift < ht_rewrite_reserve_bytes(o, blocks))
            continue;
        uint32_t need = (uint32_t)ht_div_up(ht_max_u64(im->data_hi, ref ? ref->visible : 0), HT_BLOCK_BYTES);
        need = need > im->reserved_blocks ? need - im->reserved_blocks : 0;
        uint64_t left = ht_min_u64(need, o->extra->rewrite_reserve_left);
        int rc = ht_alloc_reserve(s->alloc, need - left);
        if (rc)
            return rc;
        ht_obj_extra(o)->rewrite_reserve_left -= left;
        im->reserved_blocks += need;
    }
    return 0;
}

int ht_obj_set_rewrite_reserve(struct ht_obj *o, uint64_t size)
{
    struct ht_store *s = o->s;
    uint64_t tail = size & (ht_obj_bytes_per_chunk(o) - 1);
    uint64_t blocks = (size - tail) / HT_BLOCK_BYTES + ht_div_up(tail, HT_BLOCK_BYTES);
    uint64_t stored =
        ht_obj_stored_blocks(o) - ht_obj_shared_blocks(o); /* shared space does not come back when it is rewritten */
    uint64_t want = 2 * blocks > stored ? 2 * blocks - stored : 0;

    if (size == 0)
        want = 0;
    int rc = size ? ht_obj_need_extra(o) : 0;
    if (!rc)
        rc = reserve_uncovered(o, blocks);
    if (size == 0) /* ending one cannot fail; content without space reports it when it is written back */
        rc = 0;
    if (!rc && want > o->extra->rewrite_reserve_left)
        rc = ht_alloc_reserve(s->alloc, want - o->extra->rewrite_reserve_left);
    else if (!rc)
        ht_alloc_unreserve(s->alloc, o->extra->rewrite_reserve_left - want);
    if (!rc && ht_obj_has_extra(o)) {
        struct ht_obj_extra *x = ht_obj_extra(o);
        x->rewrite_reserve_left = want;
        x->rewrite_reserve_blocks = blocks;
        x->shm_reserve = false; /* it is the caller's now */
    }
    return rc;
}

int ht_obj_rewrite_reserve(struct ht_obj *o, uint64_t size)
{
    ht_store_lock(o->s);
    int rc = ht_obj_set_rewrite_reserve(o, size);
    ht_store_unlock(o->s);
    return rc;
}

void ht_obj_end_rewrite_reserve(struct ht_obj *o)
{
    if (!ht_obj_has_extra(o))
        return;
    struct ht_obj_extra *x = ht_obj_extra(o);
    ht_alloc_unreserve(o->s->alloc, x->rewrite_reserve_left);
    x->rewrite_reserve_left = x->rewrite_reserve_blocks = 0;
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
