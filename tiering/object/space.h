/* SPDX-License-Identifier: Apache-2.0 */
/* space.h - space of chunks: reserved, taken and given back. The caller holds the store's lock. */
#ifndef HITRAIN_TIERING_OBJECT_SPACE_H
#define HITRAIN_TIERING_OBJECT_SPACE_H

#include "tiering/base/base.h"
#include "tiering/object/ref.h"
#include "tiering/tier/placement.h"

struct ht_store;
struct ht_obj;
struct ht_chunk;

/* Reserves space and log bytes so that an image of need blocks can be written back. -ENOSPC */
int ht_chunk_reserve(struct ht_obj *o, struct ht_chunk *c, uint32_t need_blocks)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_chunk_unreserve(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* Up to need preallocated blocks of the chunk become the caller's reservation; the reverse, also with new blocks. */
uint32_t ht_chunk_prealloc_use(struct ht_obj *o, struct ht_chunk *c, uint32_t need) HT_REQUIRES(HT_LOCK_STORE);
void ht_chunk_prealloc_return(struct ht_obj *o, struct ht_chunk *c, uint32_t blocks) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Allocates space for ref->stored bytes, consuming the reservation of the chunk (or the object's rewrite reserve). Lock
 * held; may release it to make the log durable. Sets ref->place, and nothing else of ref.
 */
int ht_chunk_take_space(struct ht_obj *o, struct ht_chunk *c, struct ht_alloc_hint hint, struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The same for bytes that are in writing_blocks already: another place for them. */
int ht_chunk_take_space_again(struct ht_obj *o, struct ht_chunk *c, struct ht_alloc_hint hint, struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
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

#endif
