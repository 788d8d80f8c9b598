/* SPDX-License-Identifier: Apache-2.0 */
/* prealloc.h - space set aside for chunks before anything is written to them. The caller holds the store's lock. */
#ifndef HITRAIN_TIERING_OBJECT_PREALLOC_H
#define HITRAIN_TIERING_OBJECT_PREALLOC_H

#include "tiering/base/base.h"

struct ht_obj;
struct ht_chunk;

/* Gives back the preallocation except that for the first keep_bytes of the chunk. */
void ht_chunk_prealloc_drop(struct ht_obj *o, struct ht_chunk *c, uint32_t keep_bytes) HT_REQUIRES(HT_LOCK_STORE);
/* Gives back preallocations beyond size. Releases the lock in between. */
void ht_obj_prealloc_drop_behind(struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE);

#endif
