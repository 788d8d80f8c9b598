/* SPDX-License-Identifier: Apache-2.0 */
/* verify.c - asserts that slots, pieces, free lists and sums of the arena agree (tiering/base/verify.h). */
#include <assert.h>

#include "tiering/cache/arena_priv.h"

static uint16_t mask_of(uint32_t first, uint32_t subs)
{
    return (uint16_t)(((1u << subs) - 1) << first);
}

struct sums {
    uint64_t used_bytes, protected_bytes, workingset_bytes, passing_dirty_bytes, durable_dirty_bytes, readahead_bytes;
    uint64_t used_on[HT_NODES_MAX], dirty_on[HT_NODES_MAX];
    uint32_t free_slots, split_free;
};

static void check_image(const struct ht_arena *a, uint32_t n, struct sums *sums) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = &a->image[n];
    uint32_t bytes = ht_arena_slot_bytes(a, n);
    unsigned place = a->slot[n / HT_SLOT_SUBS].numa_index;

    assert(im->valid_lo <= im->valid_hi && im->valid_hi <= bytes && im->data_hi <= bytes);
    assert(!im->protected || !im->workingset);
    sums->used_bytes += bytes;
    sums->used_on[place] += bytes;
    sums->readahead_bytes += im->readahead ? bytes : 0;
    if (!ht_image_passes_dirty(im))
        return;
    sums->passing_dirty_bytes += bytes;
    sums->dirty_on[place] += bytes;
    sums->durable_dirty_bytes += im->durable ? bytes : 0;
}

/* Each image of a slot in use: the slot's counts and, of a split one, its mask of sub-slots. */
static void check_used_slot(const struct ht_arena *a, uint32_t i, struct sums *sums) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_slot *s = &a->slot[i];
    uint32_t protected = 0, workingset = 0, step;
    uint16_t used = s->state == HT_SLOT_WHOLE ? mask_of(0, HT_SLOT_SUBS) : s->used;

    assert(used);
    for (uint32_t k = 0; k < HT_SLOT_SUBS; k += step) {
        const struct ht_image *im = &a->image[i * HT_SLOT_SUBS + k];
        bool there = used & (1u << k);
        step = there ? im->subs : 1;
        assert(there || !im->owner);
        if (!there)
            continue;
        assert(step && k % step == 0 && (step == HT_SLOT_SUBS) == (s->state == HT_SLOT_WHOLE));
        assert((used & mask_of(k, step)) == mask_of(k, step));
        check_image(a, i * HT_SLOT_SUBS + k, sums);
        protected += im->protected;
        workingset += im->workingset;
    }
    assert(s->protected == protected && s->workingset == workingset);
    sums->protected_bytes += protected ? 1u << HT_SLOT_SHIFT : 0;
    sums->workingset_bytes += !protected && workingset ? 1u << HT_SLOT_SHIFT : 0;
    sums->split_free += s->state == HT_SLOT_SPLIT ? HT_SLOT_SUBS - (uint32_t)__builtin_popcount(used) : 0;
}

static void check_free_slots(const struct ht_arena *a, struct sums *sums) HT_REQUIRES(HT_LOCK_STORE)
{
    for (unsigned p = 0; p < ht_pinned_parts(&a->memory); p++) {
        uint32_t count = 0;
        for (uint32_t i = a->free_head[p]; i != HT_SLOT_NONE; i = a->slot[i].next, count++)
            assert(count < a->slots && a->slot[i].state == HT_SLOT_FREE && a->slot[i].numa_index == p);
        assert(count == a->free_on[p]);
        sums->free_slots += count;
    }
}

static void check_externals(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t count = 0;

    for (uint32_t i = a->externals ? a->external_head : HT_SLOT_NONE; i != HT_SLOT_NONE;
         i = a->external[i].next, count++)
        assert(count < a->externals && !a->external[i].data);
    for (uint32_t i = 0; i < a->externals; i++)
        if (a->external[i].data) {
            const struct ht_image *im = &a->external_image[i];
            assert(im->protected && im->valid_lo <= im->valid_hi && im->valid_hi <= 1u << HT_SLOT_SHIFT);
            count++;
        }
    assert(count == a->externals);
}

void ht_arena_verify(const struct ht_arena *a)
{
    struct sums sums = {0};
    uint32_t free_slots = 0;

    for (uint32_t i = 0; i < a->slots; i++) {
        free_slots += a->slot[i].state == HT_SLOT_FREE;
        if (a->slot[i].state != HT_SLOT_FREE)
            check_used_slot(a, i, &sums);
    }
    check_free_slots(a, &sums);
    check_externals(a);
    assert(a->free_slots == free_slots && free_slots == sums.free_slots);
    assert(a->split_free == sums.split_free);
    assert(a->used_bytes == sums.used_bytes);
    assert(a->protected_bytes == sums.protected_bytes && a->workingset_bytes == sums.workingset_bytes);
    assert(a->passing_dirty_bytes == sums.passing_dirty_bytes);
    assert(a->durable_dirty_bytes == sums.durable_dirty_bytes);
    assert(a->readahead_bytes == sums.readahead_bytes);
    assert(memcmp(a->used_on, sums.used_on, sizeof(a->used_on)) == 0);
    assert(memcmp(a->dirty_on, sums.dirty_on, sizeof(a->dirty_on)) == 0);
}
