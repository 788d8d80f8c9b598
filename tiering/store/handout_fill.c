/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout_fill.c - an object's content into the memory that is about to be handed out: several chunks in flight, each read to where it
 * stays. Nobody outside has the memory yet, and inside a chunk is held until it is verified, so that unverified bytes are seen by none.
 *
 * Holds chunks in ascending order, and waits for another one with none.
 */
#include "tiering/store/store_priv.h"

/* Nothing but a reference, whose blocks have room where the chunk's bytes are. */
static bool may_read_here(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    return c->slot == HT_SLOT_NONE && ref && !ht_ref_lost(ref) && !(c->flags & CH_BAD) &&
        ref->stored <= ht_round_up(ht_chunk_len(o, index), HT_BLOCK_BYTES);
}

/* Held exclusively. Lock held, let go meanwhile. */
static void start(struct ht_fills *all, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    int rc = ht_handed_populate(o, c, index); /* what was asked for before is being read meanwhile */
    if (!rc)
        rc = ht_handed_attach(o, c, index);
    if (!rc) {
        ht_fills_start(all, o, c, index);
        return;
    }
    all->error = rc;
    ht_chunk_unlock_exclusive(o, c, index);
}

/* The chunk, if it is to be read, with nothing in flight that would wait for us meanwhile. Lock held, let go meanwhile. */
static struct ht_chunk *make_way(struct ht_fills *all, struct ht_obj *o, uint64_t index)
{
    if (all->count == HT_FILLS_MAX)
        ht_fills_finish(all);
    struct ht_chunk *c = ht_chunk_find(o, index);
    if (c && may_read_here(o, c, index) && (c->exclusive || c->shared)) {
        ht_fills_finish_all(all);
        c = ht_chunk_find(o, index);
    }
    return c && may_read_here(o, c, index) ? c : NULL;
}

int ht_handed_read_in(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct ht_fills all = {.s = s, .tell = true};
    ht_store_unlock(s);
    all.ring = ht_store_ring(s);
    ht_store_lock(s);
    if (!all.ring)
        return -ENOMEM;
    struct ht_chunk *c;
    uint64_t index = 0;
    ht_chunk_for_each_from(c, o, index)
    {
        if (all.error || index << o->chunk_shift >= o->size)
            break;
        c = make_way(&all, o, index);
        if (!c)
            continue;
        ht_chunk_lock_exclusive(s, c);
        if (may_read_here(o, c, index))
            start(&all, o, c, index);
        else
            ht_chunk_unlock_exclusive(o, c, index);
    }
    ht_fills_finish_all(&all);
    return all.error;
}
