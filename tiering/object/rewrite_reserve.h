/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewrite_reserve.h - space for one rewrite of an object between two publications. The caller holds the store's lock.
 */
#ifndef HITRAIN_TIERING_OBJECT_REWRITE_RESERVE_H
#define HITRAIN_TIERING_OBJECT_REWRITE_RESERVE_H

#include "tiering/base/base.h"
#include "tiering/object/object.h"

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
/*
 * Blocks of an object with a rewrite reserve go back into that reserve as soon as they are (or
 * will be) free. Of any object.
 */
void ht_obj_refill_rewrite_reserve(struct ht_obj *o, uint32_t blocks) HT_REQUIRES(HT_LOCK_STORE);
/* Ends the reserve of a deleted object. */
void ht_obj_end_rewrite_reserve(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);

#endif
