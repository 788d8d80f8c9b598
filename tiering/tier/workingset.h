/* SPDX-License-Identifier: Apache-2.0 */
/*
 * workingset.h - which images are the working set, which the clock does not evict: the policy against passes over more
 * than fits.
 *
 * A cyclic scan larger than the arena, as training does it, defeats a cache that evicts the oldest image: each is
 * evicted just before it is needed. So an image that is loaded again after its eviction may stay, and the rest of the
 * pass goes through the remaining slots. A staying image leaves again when it was unused for longer than the usual
 * distance of a refault: then the work has changed.
 *
 *   evicted --refault--> working set --not used for twice the usual distance--> evicted by the clock
 *
 * Distances are counted in bytes that were loaded. Shadows of evicted images lie in a table of fixed size, where the
 * newer one wins a place. Not locked: the arena's user does.
 */
#pragma once

#include "tiering/base/base.h"

struct ht_workingset {
    struct ht_workingset_shadow *shadows;
    uint32_t mask;
    uint32_t all;            /* the size of everything */
    uint32_t came;           /* so far: the time here */
    uint64_t usual_distance; /* distance between uses of a refaulted image: running mean, times HT_WORKINGSET_WEIGHT */
};
#define HT_WORKINGSET_WEIGHT 64u
#define HT_WORKINGSET_SHADOWS 16u /* images for each slot */

/* For so many slots of that size. */
int ht_workingset_init(struct ht_workingset *p, uint32_t slots, uint32_t size) HT_MUST_CHECK;
void ht_workingset_destroy(struct ht_workingset *p);
/* Heap that the table takes. */
uint64_t ht_workingset_bytes(const struct ht_workingset *p);
/* An image of (owner, index) that was last used when came was used_at has been evicted. */
void ht_workingset_note_evicted(struct ht_workingset *p, const void *owner, uint64_t index, uint32_t used_at);
/* An image of that size is loaded. True: it is a refault; its shadow is gone. */
bool ht_workingset_is_refault(struct ht_workingset *p, const void *owner, uint64_t index, uint32_t size);
/* Was it unused for much longer than refaults usually take? */
bool ht_workingset_is_over(const struct ht_workingset *p, uint32_t used_at);
