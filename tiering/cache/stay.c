/* SPDX-License-Identifier: Apache-2.0 */
/* stay.c - what has gone, and how long it takes to come back. */
#include <stdlib.h>

#include "tiering/cache/stay.h"

struct ht_stay_gone {
    uint32_t tag; /* 0: nothing */
    uint32_t used_at;
};

int ht_stay_init(struct ht_stay *p, uint32_t slots, uint32_t size)
{
    uint64_t places = 1;
    while (places < (uint64_t)slots * HT_STAY_REMEMBERED && places < 1u << 31)
        places <<= 1;
    *p = (struct ht_stay){.mask = (uint32_t)(places - 1), .all = slots * size};
    p->gone = calloc(places, sizeof(*p->gone));
    return p->gone ? 0 : -ENOMEM;
}

void ht_stay_destroy(struct ht_stay *p)
{
    free(p->gone);
}

uint64_t ht_stay_bytes(const struct ht_stay *p)
{
    return ((uint64_t)p->mask + 1) * sizeof(*p->gone);
}

/* Neighbours of one owner get neighbouring places, so that one owner's never collide before the table is full. */
static struct ht_stay_gone *place_of(struct ht_stay *p, const void *owner, uint64_t index, uint32_t *out_tag)
{
    uint64_t h = ((uintptr_t)owner >> 4) * 0x9e3779b97f4a7c15ull;
    *out_tag = (uint32_t)((h ^ index * 0xc2b2ae3d27d4eb4full) >> 32) | 1;
    return &p->gone[((h >> 32) + index) & p->mask];
}

void ht_stay_note_gone(struct ht_stay *p, const void *owner, uint64_t index, uint32_t used_at)
{
    uint32_t tag;
    struct ht_stay_gone *g = place_of(p, owner, index, &tag);
    *g = (struct ht_stay_gone){tag, used_at};
}

bool ht_stay_comes_back(struct ht_stay *p, const void *owner, uint64_t index, uint32_t size)
{
    uint32_t tag, now = p->came;
    p->came += size;
    struct ht_stay_gone *g = place_of(p, owner, index, &tag);
    if (g->tag != tag)
        return false;
    g->tag = 0;
    p->usual += now - g->used_at;
    p->usual -= p->usual / HT_STAY_WEIGHT;
    return true;
}

bool ht_stay_is_over(const struct ht_stay *p, uint32_t used_at)
{
    return p->came - used_at > 2 * p->usual / HT_STAY_WEIGHT + p->all;
}
