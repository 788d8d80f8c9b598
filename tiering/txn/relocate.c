/* SPDX-License-Identifier: Apache-2.0 */
/*
 * relocate.c - gives published bytes another place: nothing but the place changes.
 *
 *   place, write, flush -> transaction: the chunk's record with the new place -> the old place becomes a deferred free
 *
 * One chunk alone, also below a model root in the middle of a step: its published content stays the same, so the step
 * stays atomic. The reservation for the object's next rewrite is not touched.
 *
 * The chunk is not held while the thread waits for the transaction: an abort inside one waits for chunks. So when the
 * transaction is open everything is checked again, and any change of the chunk in between wins. A truncation in between
 * keeps the place but shows fewer bytes: then the new place shows as few.
 */
#include <limits.h>
#include <stdlib.h>
#include <time.h>

#include "tiering/base/mutant.h"
#include "tiering/tier/placement.h"
#include "tiering/api/tx.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/deferred_free.h"
#include "tiering/object/object.h"
#include "tiering/object/record_bytes.h"
#include "tiering/object/ref.h"
#include "tiering/object/space.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/flush.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

enum { TRIES = 50, PAUSE_NS = 2000000 };

static void give_back(struct ht_store *s, struct ht_ref *ref)
{
    ht_store_lock(s);
    ht_free_ref_now(s, ref);
    ht_store_unlock(s);
}

/* Durable before a chunk has it: a later failed flush finds it covered. */
static int flush_out(struct ht_chunk_io *io)
{
    struct ht_store *s = io->obj->s;

    ht_store_lock(s);
    uint32_t devices = ht_ref_unflushed(s, &io->ref);
    ht_store_unlock(s);
    uint32_t failed = ht_flush_devices(s, devices);
    ht_store_lock(s);
    int rc = failed || ht_ref_is_void(s, &io->ref, io->xfer.flush_error_passes) ? -EIO : 0;
    if (rc)
        ht_chunk_write_cancel(io);
    ht_store_unlock(s);
    return rc;
}

int ht_txn_write_copy(struct ht_chunk_io *io, struct ht_ring *ring, unsigned extents_max, struct ht_alloc_hint hint)
{
    struct ht_store *s = io->obj->s;

    ht_store_lock(s);
    int rc = ht_chunk_write_place(io, hint);
    if (!rc && ht_ref_extents(&io->ref) > extents_max) { /* it would read slower, and the log may lack room */
        ht_chunk_write_cancel(io);
        rc = -ENOSPC;
    }
    if (rc) {
        ht_store_unlock(s);
        return rc;
    }
    ht_chunk_write_start(io, ring);
    ht_chunk_write_wait(io, ring);
    ht_store_lock(s);
    rc = ht_chunk_write_finish(io, ring);
    ht_store_unlock(s);
    return rc;
}

int ht_relocate_begin(struct ht_obj *o, struct ht_ring *ring, void *bytes, uint32_t len, struct ht_ref *out)
{
    struct ht_chunk_io io = {.obj = o};

    ht_chunk_write_prepare(&io, bytes, len);
    int rc = ht_txn_write_copy(&io, ring, UINT_MAX, HT_ALLOC_HINT_NONE);
    if (!rc)
        rc = flush_out(&io);
    if (!rc)
        *out = io.ref;
    return rc;
}

/*
 * 0: done, the chunk has *ref, which is empty here. -EAGAIN: another thread holds it; -ESTALE: it is not there any
 * more. In a transaction, lock held.
 */
static int swap(struct ht_obj *o, uint64_t index, const struct ht_ref *was, struct ht_ref *ref, struct ht_tx *tx)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c = ht_chunk_find(o, index);

    if (o->dead || !o->published || !c || (c->flags & (HT_CH_PUB | HT_CH_CUR | HT_CH_GONE)) != HT_CH_PUB ||
        !ht_ref_same_place(&c->pub, was) || c->pub.visible > ref->visible)
        return -ESTALE;
    if (c->exclusive || c->shared)
        return -EAGAIN;
    if (ht_ref_extents(ref) > ht_ref_extents(&c->pub) && !ht_ref_pieces_fit(o->s, ref))
        return -ENOSPC; /* of the log */
    c->generation++;
    if (!HT_MUTANT("cut-undone"))
        ref->visible = c->pub.visible; /* fewer, if a truncation was published after the bytes had been copied */
    ht_record_chunk(&tx->records, o, index, c, ref);
    o->stored_blocks += ht_ref_blocks(ref);
    ht_ref_log_reserve_pieces(o->s, ref);
    ht_tx_free_ref(o, &c->pub);
    c->pub = *ref;
    ht_note_published(o->s, &c->pub);
    memset(ref, 0, sizeof(*ref));
    return 0;
}

static int try_swap(struct ht_obj *o, uint64_t index, const struct ht_ref *was, struct ht_ref *ref, uint64_t *out_lsn)
{
    struct ht_store *s = o->s;
    struct ht_tx *tx;
    int rc = ht_tx_begin(s, HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES + ht_ref_extra_bytes(ref), &tx);

    if (rc)
        return rc;
    ht_store_lock(s);
    rc = swap(o, index, was, ref, tx);
    ht_store_unlock(s);
    int committed = ht_tx_commit(tx, out_lsn);
    return rc ? rc : committed;
}

static int publish(struct ht_obj *o, uint64_t index, const struct ht_ref *was, struct ht_ref *ref, uint64_t *out_lsn)
{
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    int rc;

    for (unsigned i = 0; (rc = try_swap(o, index, was, ref, out_lsn)) == -EAGAIN && i < TRIES; i++)
        nanosleep(&pause, NULL);
    if (ht_ref_holds(ref))
        give_back(o->s, ref);
    return rc;
}

int ht_relocate_end(struct ht_obj *o, uint64_t index, const struct ht_ref *was, struct ht_ref *ref)
{
    uint64_t lsn = 0;
    int rc = publish(o, index, was, ref, &lsn);

    return rc ? rc : ht_store_sync(o->s, lsn);
}
