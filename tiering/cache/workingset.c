/* SPDX-License-Identifier: Apache-2.0 */
/*
 * workingset.c - which images are the working set, which the clock does not evict: the policy against passes over more
 * than fits. Shadows of evicted images, and the distance of refaults.
 *
 * A cyclic scan larger than the arena, as training does it, defeats a cache that evicts the oldest image: each is
 * evicted just before it is needed. So an image that is loaded again after its eviction may stay, and the rest of the
 * pass goes through the remaining slots. A staying image leaves again when it was unused for longer than the usual
 * distance of a refault: then the work has changed.
 *
 *   evicted --refault--> working set --not used for twice the usual distance--> evicted by the clock
 *
 * Distances are counted in bytes that were loaded. Shadows of evicted images lie in a table of fixed size, where the
 * newer one wins a place.
 */
#include "tiering/cache/arena_priv.h"

enum { WEIGHT = 64, SHADOWS = 16 /* images for each slot */ };

struct ht_workingset_shadow {
    uint32_t tag; /* 0: nothing */
    uint32_t used_at;
};

int ht_workingset_init(struct ht_workingset *p, uint32_t slots)
{
    uint64_t places = 1;

    while (places < (uint64_t)slots * SHADOWS && places < 1u << 31)
        places <<= 1;
    *p = (struct ht_workingset){.mask = (uint32_t)(places - 1), .all = slots * HT_SLOT_SUBS};
    p->shadows = calloc(places, sizeof(*p->shadows));
    return p->shadows ? 0 : -ENOMEM;
}

void ht_workingset_destroy(struct ht_workingset *p)
{
    free(p->shadows);
}

uint64_t ht_workingset_bytes(const struct ht_workingset *p)
{
    return ((uint64_t)p->mask + 1) * sizeof(*p->shadows);
}

/* Neighbours of one owner get neighbouring places, so that one owner's never collide before the table is full. */
static struct ht_workingset_shadow *place_of(struct ht_workingset *p, const void *owner, uint64_t index,
                                             uint32_t *out_tag)
{
    uint64_t h = ((uintptr_t)owner >> 4) * 0x9e3779b97f4a7c15ull;

    *out_tag = (uint32_t)((h ^ index * 0xc2b2ae3d27d4eb4full) >> 32) | 1;
    return &p->shadows[((h >> 32) + index) & p->mask];
}

void ht_workingset_note_evicted(struct ht_workingset *p, const void *owner, uint64_t index, uint32_t used_at)
{
    uint32_t tag;
    struct ht_workingset_shadow *g = place_of(p, owner, index, &tag);

    *g = (struct ht_workingset_shadow){tag, used_at};
}

bool ht_workingset_is_refault(struct ht_workingset *p, const void *owner, uint64_t index, uint32_t size)
{
    uint32_t tag, now = p->came;

    p->came += size;
    struct ht_workingset_shadow *g = place_of(p, owner, index, &tag);
    if (g->tag != tag)
        return false;
    g->tag = 0;
    p->usual_distance += now - g->used_at;
    p->usual_distance -= p->usual_distance / WEIGHT;
    return true;
}

bool ht_workingset_is_over(const struct ht_workingset *p, uint32_t used_at)
{
    return p->came - used_at > 2 * p->usual_distance / WEIGHT + p->all;
}
