/* SPDX-License-Identifier: Apache-2.0 */
/*
 * space.h - space of chunks: reserved, taken and given back; and space for one rewrite of an object between two
 * publications. The caller holds the store's lock.
 */
#pragma once

#include "tiering/object/object.h"
#include "tiering/tier/placement.h"

/* Reserves space and log bytes so that an image of need blocks can be written back. -ENOSPC */
int ht_chunk_reserve(struct ht_obj *o, struct ht_chunk *c, uint32_t need_blocks)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_chunk_unreserve(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* Blocks of a reservation, also new ones, become preallocated ones of the chunk. */
void ht_chunk_prealloc_return(struct ht_obj *o, struct ht_chunk *c, uint32_t blocks) HT_REQUIRES(HT_LOCK_STORE);
/* Gives back the preallocation except that for the first keep_bytes of the chunk. */
void ht_chunk_prealloc_drop(struct ht_obj *o, struct ht_chunk *c, uint32_t keep_bytes) HT_REQUIRES(HT_LOCK_STORE);
/*
 * The hint for content of the object, which stays on this device, if it is not -1. A slow device with enough in flight
 * is avoided.
 */
struct ht_alloc_hint ht_obj_hint(const struct ht_obj *o, int device) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Allocates space for ref->stored bytes, consuming the reservation of the chunk (or the object's rewrite reserve). Lock
 * held; may release it to make the log durable. Sets ref->place, and nothing else of ref. writing: another place for
 * bytes that are in writing_blocks already.
 */
int ht_chunk_take_space(struct ht_obj *o, struct ht_chunk *c, struct ht_alloc_hint hint, bool writing,
                        struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The same for a place that no chunk has yet: uses no reservation, and does not wait for deferred frees. -ENOSPC */
int ht_ref_take_space(struct ht_store *s, struct ht_alloc_hint hint, struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Releases an unpublished current reference's space; the chunk has none then (flags CUR, SHARE, GONE cleared). */
void ht_chunk_drop_cur(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* Releases the published reference of an object that is gone for good. */
void ht_chunk_drop_pub(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Gives back the log reserve of an empty chunk. While a thread holds the chunk it stays: the last unlock gives it back.
 */
void ht_chunk_drop_log_reserve(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* The object has one reference less: adjusts its counts and its log reserve. */
void ht_obj_forget_stored(struct ht_obj *o, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* A record in the open transaction ends the reference: it is free once that is durable. */
void ht_tx_free_ref(struct ht_obj *o, struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/*
 * May so many other chunks have this reference, too: does the log have room for its pieces, beside those of accepted
 * content?
 */
bool ht_ref_pieces_fit(struct ht_store *s, const struct ht_ref *ref, unsigned owners) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Reserves log bytes for the pieces of a reference, by force: the bytes are stored already.
 * ht_obj_forget_stored gives them back.
 */
void ht_ref_log_reserve_pieces(struct ht_store *s, const struct ht_ref *ref);

/* ------------------------------------------------------ rewrite reserves */

/*
 * Bytes from the start that a reserve of so many blocks covers: scratch content has one copy only. Of each chunk only
 * the blocks that are used count.
 */
static inline uint64_t ht_rewrite_reserve_bytes(const struct ht_obj *o, uint64_t blocks) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t used = ht_blocks(ht_obj_used_bytes(o));

    blocks <<= o->obj_class == HT_CLASS_SCRATCH;
    return (blocks / used << o->chunk_shift) + blocks % used * HT_BLOCK_BYTES;
}
/* The other way: blocks for that many bytes from the start. */
static inline uint64_t ht_rewrite_reserve_blocks(const struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t used = ht_obj_used_bytes(o), rest = size & (ht_obj_bytes_per_chunk(o) - 1);

    return (size >> o->chunk_shift) * ht_div_up(used, HT_BLOCK_BYTES) +
        ht_div_up(ht_min_u64(rest, used), HT_BLOCK_BYTES);
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
