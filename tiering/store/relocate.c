/* SPDX-License-Identifier: Apache-2.0 */
/*
 * relocate.c - giving published bytes another place: nothing but the place changes.
 *
 *   reserve, allocate -> write, flush -> transaction: the chunk's record with the new place -> what was there goes to limbo
 *
 * One chunk alone, also below a model root in the middle of a step: its published content stays the same, so the step's
 * atomicity does. What the object was promised for its next rewrite is not touched.
 *
 * The chunk is not held while it waits for the transaction: an abort inside one waits for chunks. So when the transaction is open
 * everything is looked at again, and whoever changed the chunk meanwhile was first. A truncation in between keeps the place but shows
 * fewer bytes: then the new place shows as few.
 */
#include <stdlib.h>
#include <time.h>

#include "tiering/base/twin.h"
#include "tiering/store/store_priv.h"

enum { TRIES = 50, PAUSE_NS = 2000000 };

static int take_space(struct ht_store *s, uint32_t blocks, struct ht_ref *ref, uint64_t *out_rescues)
{
    struct ht_extent e[HT_FRAGS_MAX];
    ht_store_lock(s);
    int rc = ht_alloc_reserve(s->alloc, blocks), n = 0;
    if (!rc) {
        n = ht_alloc_take(s->alloc, blocks, HT_PLACE_ANY, e);
        if (n < 0) { /* what is in limbo only is not waited for */
            ht_alloc_unreserve(s->alloc, blocks);
            rc = -ENOSPC;
        }
    }
    if (!rc) {
        rc = ht_ref_set(ref, e, (unsigned)n);
        for (int i = 0; rc && i < n; i++)
            ht_alloc_release(s->alloc, &e[i]);
    }
    *out_rescues = s->rescues;
    ht_store_unlock(s);
    return rc;
}

static void give_back(struct ht_store *s, struct ht_ref *ref)
{
    ht_store_lock(s);
    ht_free_ref_now(s, ref);
    ht_store_unlock(s);
}

static int write_out(struct ht_store *s, struct ht_ring *ring, const struct ht_ref *ref, void *bytes)
{
    struct ht_xfer x;
    memset((uint8_t *)bytes + ref->stored, 0, ht_round_up(ref->stored, HT_BLOCK_BYTES) - ref->stored);
    return ht_xfer_run(&x, s, ring, ref, bytes, HT_IO_WRITE);
}

/* Durable before a chunk has it: a flush that fails later finds it covered. */
static int flush_out(struct ht_store *s, struct ht_ref *ref, uint64_t rescues)
{
    ht_store_lock(s);
    ht_ref_stamp(s, ref);
    uint32_t devices = ht_ref_unflushed(s, ref);
    ht_store_unlock(s);
    uint32_t failed = ht_flush_devices(s, devices);
    ht_store_lock(s);
    bool is_void = ht_ref_is_void(s, ref, rescues);
    ht_store_unlock(s);
    return failed || is_void ? -EIO : 0;
}

int ht_relocate_begin(struct ht_store *s, struct ht_ring *ring, void *bytes, uint32_t len, struct ht_ref *out)
{
    struct ht_ref ref = {.stored = len, .visible = len & HT_VISIBLE_MASK};
    uint64_t rescues;
    int rc = take_space(s, ht_ref_blocks(&ref), &ref, &rescues);
    if (rc)
        return rc;
    ref.checksum = ht_store_checksum(s, bytes, len);
    rc = write_out(s, ring, &ref, bytes);
    if (!rc)
        rc = flush_out(s, &ref, rescues);
    if (rc) {
        give_back(s, &ref);
        return rc;
    }
    *out = ref;
    return 0;
}

/* 0: done, *ref is the chunk's and empty here. -EAGAIN: somebody holds it; -ESTALE: it is not there any more. In a transaction, lock held. */
static int swap(struct ht_obj *o, uint64_t index, const struct ht_ref *was, struct ht_ref *ref, struct ht_tx *tx)
{
    struct ht_chunk *c = ht_chunk_find(o, index);
    if (o->dead || !o->published || !c || (c->flags & (CH_PUB | CH_CUR | CH_GONE)) != CH_PUB ||
        !ht_ref_same_place(&c->pub, was) || c->pub.visible > ref->visible)
        return -ESTALE;
    if (c->exclusive || c->shared)
        return -EAGAIN;
    c->generation++;
    if (!HT_TWIN("cut-undone"))
        ref->visible = c->pub.visible; /* fewer, where a truncation was published after the bytes had been copied */
    ht_record_chunk(&tx->records, o, index, c, ref);
    o->stored_blocks += ht_ref_blocks(ref);
    if (ht_ref_extents(ref) > 1)
        ht_store_claim_force(o->s, ht_ref_extra_bytes(ref));
    ht_tx_free_ref(tx, o, &c->pub);
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

int ht_relocate_end(struct ht_obj *o, uint64_t index, const struct ht_ref *was, struct ht_ref *ref)
{
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    uint64_t lsn = 0;
    int rc;
    for (unsigned i = 0; (rc = try_swap(o, index, was, ref, &lsn)) == -EAGAIN && i < TRIES; i++)
        nanosleep(&pause, NULL);
    if (ref->stored)
        give_back(o->s, ref);
    return rc ? rc : ht_store_sync(o->s, lsn);
}
