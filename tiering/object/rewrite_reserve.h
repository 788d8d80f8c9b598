/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewrite_reserve.h - space for one rewrite of an object between two publications. The caller holds the store's lock.
 */
#ifndef HITRAIN_TIERING_OBJECT_REWRITE_RESERVE_H
#define HITRAIN_TIERING_OBJECT_REWRITE_RESERVE_H

#include "tiering/base/base.h"
#include "tiering/object/object.h"

struct ht_slice;

/* Bytes from the start that a reserve of so many blocks covers: scratch content has one copy only. */
static inline uint64_t ht_rewrite_reserve_bytes(const struct ht_obj *o, uint64_t blocks)
{
    return blocks * HT_BLOCK_BYTES << (o->obj_class == HT_CLASS_SCRATCH);
}

/*
 * The blocks that a rewrite reserve lacks for two copies, one stored already: shared blocks are not counted, they do
 * not come back.
 */
static inline uint64_t ht_rewrite_reserve_missing(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_obj_extra *x = o->extra;
    uint64_t have = ht_obj_stored_blocks(o) - x->shared_blocks + x->rewrite_reserve_left;

    return 2 * x->rewrite_reserve_blocks > have ? 2 * x->rewrite_reserve_blocks - have : 0;
}
/* As ht_obj_rewrite_reserve, for a caller with the lock. slice: releases it in between; NULL: does not. */
int ht_obj_set_rewrite_reserve(struct ht_obj *o, uint64_t size, struct ht_slice *slice)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Blocks of an object with a rewrite reserve go back into that reserve as soon as they are (or
 * will be) free. Of any object.
 */
void ht_obj_refill_rewrite_reserve(struct ht_obj *o, uint32_t blocks) HT_REQUIRES(HT_LOCK_STORE);
/*
 * A chunk that is written twice between two publications takes space of the reserve while its first copy is still
 * stored. Other chunks get that space back when the write has ended. Waits for a write of this object to end; false:
 * there is none. The caller has no write of the object in flight. Releases the lock in between.
 */
bool ht_obj_wait_for_reserve(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/* A write of an object has ended. */
void ht_obj_tell_reserve_waiters(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* Ends the reserve of a deleted object. */
void ht_obj_end_rewrite_reserve(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);

#endif
