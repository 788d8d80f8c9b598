/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recompress_shared.h - inside engine/: raw content with several owners, in a round of compression.
 *
 *   the round's walk notes each owner --all was walked--> in order --> a place with all of its owners --> the next one
 *
 * The notes have a bound. A round that would need more looks at a part of the places only, and the next round begins
 * where it has ended. Places are in the order of their hashes here. So all owners of a place are in one part.
 *
 * One thread's.
 */
#ifndef HITRAIN_TIERING_ENGINE_RECOMPRESS_SHARED_H
#define HITRAIN_TIERING_ENGINE_RECOMPRESS_SHARED_H

#include "tiering/base/base.h"
#include "tiering/engine/owners.h"

/* Which places a round looks at: so many hashes (of 32 bits) from one on. 0 hashes: all. */
struct ht_recompress_part {
    uint32_t from;
    uint64_t hashes;
};

struct ht_recompress_shared {
    struct ht_owners owners;
    struct ht_recompress_part now;
    size_t most; /* notes */
    size_t at;   /* the next place, once all was walked */
};

void ht_recompress_shared_begin(struct ht_recompress_shared *x, struct ht_recompress_part now, size_t most);
void ht_recompress_shared_end(struct ht_recompress_shared *x); /* its memory */
/* Is there no room for an owner of the bytes at this place, unless places leave the round? */
bool ht_recompress_shared_is_full(const struct ht_recompress_shared *x, uint64_t place);
/* Places leave the round, with their notes, until it is not full. No lock is held: it looks through all notes. */
void ht_recompress_shared_make_room(struct ht_recompress_shared *x);
/* An owner of the bytes at a place, if the round looks at it. A place has at most half as many as `most`. -ENOMEM */
int ht_recompress_shared_note(struct ht_recompress_shared *x, uint64_t place, uint64_t oid,
                              uint64_t index) HT_MUST_CHECK;
/* The owners of the next place. NULL: there is none. The first call puts the notes in order. */
const struct ht_owner_found *ht_recompress_shared_next(struct ht_recompress_shared *x, size_t *out_n);
bool ht_recompress_shared_is_over(const struct ht_recompress_shared *x);
/* The next place has very many owners, or the notes have to be put in order first: that takes longer than a step. */
bool ht_recompress_shared_is_long(const struct ht_recompress_shared *x);
/* What the next round looks at. */
struct ht_recompress_part ht_recompress_shared_then(const struct ht_recompress_shared *x);

#endif
