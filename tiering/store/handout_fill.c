/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout_fill.c - an object's content into the memory that is about to be handed out: several chunks in flight, each read to where it
 * stays. Nobody outside has the memory yet, and inside a chunk is held until it is verified, so that unverified bytes are seen by none.
 *
 * Holds chunks in ascending order, and waits for another one with none.
 */
#include "tiering/store/store_priv.h"

enum { DEPTH = 16 };

struct read {
    struct ht_chunk *c;
    uint64_t index;
    struct ht_ref ref;
    struct ht_xfer xfer;
    int rc;
};

struct reads {
    struct ht_obj *o;
    struct ht_ring *ring;
    struct read read[DEPTH];
    unsigned first, count; /* in flight, oldest first */
    int error;             /* the first */
};

static int check(struct ht_obj *o, struct read *r, uint8_t *data, uint32_t len)
{
    int rc = ht_ref_verify(o, r->index, &r->ref, data);
    uint32_t visible = (uint32_t)ht_min_u64(r->ref.visible, len);
    if (!rc)
        memset(data + visible, 0, ht_round_up(len, HT_BLOCK_BYTES) - visible);
    return rc;
}

/* The oldest. Lock held, let go meanwhile. */
static void finish(struct reads *all)
{
    struct ht_obj *o = all->o;
    struct ht_store *s = o->s;
    struct read *r = &all->read[all->first];
    struct ht_image *im = ht_arena_image(s->arena, r->c->slot);
    uint8_t *data = ht_arena_data(s->arena, r->c->slot);
    uint32_t len = ht_chunk_len(o, r->index);
    ht_store_unlock(s);
    int rc = r->rc ? r->rc : ht_xfer_wait(&r->xfer, all->ring);
    if (rc)
        ht_read_failed(o, r->index, &r->xfer, rc);
    else
        rc = check(o, r, data, len);
    ht_store_lock(s);
    if (!rc) {
        im->valid_hi = ht_obj_bytes_per_chunk(o);
        im->data_hi = (uint32_t)ht_min_u64(r->ref.visible, len);
        ht_obj_count_read(o, &r->ref);
    } else {
        ht_chunk_drop_image(o, r->c, r->index);
    }
    ht_chunk_unlock_exclusive(s, r->c);
    all->first = (all->first + 1) % DEPTH;
    all->count--;
    if (rc && !all->error)
        all->error = rc;
}

static void finish_all(struct reads *all)
{
    while (all->count)
        finish(all);
}

/* Nothing but a reference, whose blocks have room where the chunk's bytes are. */
static bool may_read_here(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    return c->slot == HT_SLOT_NONE && ref && !ht_ref_lost(ref) && !(c->flags & CH_BAD) &&
        ref->stored <= ht_round_up(ht_chunk_len(o, index), HT_BLOCK_BYTES);
}

/* Held exclusively. Lock held, let go meanwhile. */
static void start(struct reads *all, struct ht_chunk *c, uint64_t index)
{
    struct ht_obj *o = all->o;
    struct ht_store *s = o->s;
    int rc = ht_handed_populate(o, c, index); /* what was asked for before is being read meanwhile */
    if (!rc)
        rc = ht_handed_attach(o, c, index);
    if (rc) {
        all->error = rc;
        ht_chunk_unlock_exclusive(s, c);
        return;
    }
    struct read *r = &all->read[(all->first + all->count++) % DEPTH];
    *r = (struct read){
        .c = c, .index = index, .ref = *ht_chunk_ref(c)}; /* publishing moves references without the chunk's lock */
    uint8_t *data = ht_arena_data(s->arena, c->slot);
    ht_store_unlock(s);
    r->rc = ht_xfer_start(&r->xfer, s, all->ring, &r->ref, data, HT_IO_READ);
    ht_store_lock(s);
}

int ht_handed_read_in(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct reads all = {.o = o};
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
        if (all.count == DEPTH)
            finish(&all);
        if (!may_read_here(o, c, index))
            continue;
        if (c->exclusive || c->shared)
            finish_all(&all);
        ht_chunk_lock_exclusive(s, c);
        if (may_read_here(o, c, index))
            start(&all, c, index);
        else
            ht_chunk_unlock_exclusive(s, c);
    }
    finish_all(&all);
    return all.error;
}
