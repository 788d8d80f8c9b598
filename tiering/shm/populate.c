/* SPDX-License-Identifier: Apache-2.0 */
/*
 * populate.c - reads an object's content into the shared memory that is about to be opened: several chunks in flight,
 * each read to its final place. No program outside has the memory yet, and inside a chunk is held until it is verified,
 * so that no reader sees unverified bytes.
 *
 * Holds chunks in ascending order, and waits for another one with none.
 */
#include "tiering/cache/arena.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/object/slice.h"
#include "tiering/data/read_batch.h"
#include "tiering/data/chunk_io.h"
#include "tiering/shm/shm.h"
#include "tiering/shm/shm_priv.h"

/* The chunk has nothing but a reference, and its blocks fit into the file. */
static bool may_read_here(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = ht_chunk_ref(c);

    return c->slot == HT_SLOT_NONE && ref && ht_ref_holds(ref) && !(c->flags & HT_CH_BAD) &&
        ref->stored <= ht_round_up(ht_chunk_len(o, index), HT_BLOCK_BYTES);
}

/* Chunk held exclusively. Releases the lock in between. */
static void start(struct ht_read_batch *all, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = ht_shm_populate(o, c, index); /* earlier requests are in flight at the same time */

    if (!rc)
        rc = ht_shm_attach(o, c, index);
    if (!rc) {
        ht_read_batch_start(all, o, c, index);
        return;
    }
    all->error = rc;
    ht_chunk_unlock_exclusive(o, c, index);
}

/*
 * Returns the chunk, if it is to be read, with no request in flight that would wait for this thread. Lock held;
 * releases it in between.
 */
static struct ht_chunk *make_way(struct ht_read_batch *all, struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    if (all->count == HT_READ_BATCH_MAX)
        ht_read_batch_finish(all);
    struct ht_chunk *c = ht_chunk_find(o, index);
    if (c && may_read_here(o, c, index) && (c->exclusive || c->shared)) {
        ht_read_batch_finish_all(all);
        c = ht_chunk_find(o, index);
    }
    return c && may_read_here(o, c, index) ? c : NULL;
}

int ht_shm_read_in(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct ht_read_batch all = {.s = s, .report = true};

    ht_store_unlock(s);
    all.ring = ht_store_ring(s);
    ht_store_lock(s);
    if (!all.ring)
        return -ENOMEM;
    struct ht_slice slice = {0};
    struct ht_chunk *c;
    uint64_t index = 0;
    ht_chunk_for_each_busy(c, o, index)
    {
        if (all.error || index << o->chunk_shift >= o->size)
            break;
        ht_slice_next(s, &slice);
        c = make_way(&all, o, index);
        if (!c)
            continue;
        ht_chunk_lock_exclusive(o, c, index);
        if (may_read_here(o, c, index))
            start(&all, o, c, index);
        else
            ht_chunk_unlock_exclusive(o, c, index);
    }
    ht_read_batch_finish_all(&all);
    return all.error;
}
