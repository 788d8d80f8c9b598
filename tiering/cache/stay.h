/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stay.h - which images stay although the clock would let them go: the policy against passes over more than fits.
 *
 * Whoever goes over more than the arena holds, in the same order again and again, as training does, finds nothing of it in a cache that
 * lets the oldest go: each is asked to go just before it is needed. So what comes back after it had gone may stay, and the rest of
 * the pass goes through what is left. What stays leaves again when it was not used for longer than what comes back usually takes:
 * then the work is another one.
 *
 *   gone --comes back--> stays --not used for twice the usual distance--> goes when it is asked
 *
 * Distances are counted in what came, by size. What has gone is remembered in a table of fixed size, where the newer one wins a place.
 * Not locked: the arena's user does.
 */
#ifndef HITRAIN_TIERING_CACHE_STAY_H
#define HITRAIN_TIERING_CACHE_STAY_H

#include "tiering/base/base.h"

struct ht_stay {
    struct ht_stay_gone *gone;
    uint32_t mask;
    uint32_t all;   /* the size of everything */
    uint32_t came;  /* so far: the time here */
    uint64_t usual; /* distance between uses of what came back: running mean, times HT_STAY_WEIGHT */
};
#define HT_STAY_WEIGHT 64u
#define HT_STAY_REMEMBERED 16u /* images for each slot */

/* Of so many slots, each of which is of that size. */
int ht_stay_init(struct ht_stay *p, uint32_t slots, uint32_t size) HT_CHECK;
void ht_stay_destroy(struct ht_stay *p);
/* Heap that it takes. */
uint64_t ht_stay_bytes(const struct ht_stay *p);
/* An image of (owner, index) that was last used when came was used_at has been let go. */
void ht_stay_note_gone(struct ht_stay *p, const void *owner, uint64_t index, uint32_t used_at);
/* One of that size comes. True: it has been here before, and is remembered no more. */
bool ht_stay_comes_back(struct ht_stay *p, const void *owner, uint64_t index, uint32_t size);
/* Is it longer ago than what comes back takes? */
bool ht_stay_is_over(const struct ht_stay *p, uint32_t used_at);

#endif
