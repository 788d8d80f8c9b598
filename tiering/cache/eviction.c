/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eviction.c - which image of the arena goes next: a clock with a second chance, which passes over two sets.
 *
 *   hand passes: protected ------------------------------> stays
 *                of the working set, used of late -------> stays
 *                used since the hand passed before ------> stays, counts as unused from now on
 *                its owner refuses (dirty or held) ------> stays
 *                any other image ------------------------> evicted; the working set remembers it
 *
 * The hand passes slots. One clock serves all NUMA nodes: an image goes because it is old, not because of its node.
 *
 * The owner protects images (ht_arena_protect). An image that is loaded again soon after its eviction joins the working
 * set (tier/workingset.h). A slot belongs to a set while one of its pieces does, and all of the slot counts: no other
 * image gets that slot. Dirty images outside both sets are in the way of the hand, so eviction.c also says when they
 * should be written.
 */
#include "tiering/cache/arena.h"
#include "tiering/cache/arena_priv.h"
#include "tiering/tier/workingset.h"

enum { GROWING_MAX = 16 }; /* images */

/* --------------------------------------------------------- the two sets */

/* Adds (1) or subtracts (-1) a slot from the protected ones or those of the working set. */
static void charge(struct ht_arena *a, const struct ht_slot *s, int sign)
{
    uint64_t bytes = (uint64_t)(sign * (int64_t)(1u << HT_SLOT_SHIFT));

    if (s->protected)
        a->protected_bytes += bytes;
    else if (s->workingset)
        a->workingset_bytes += bytes;
}

/* Counts one more (1) or less (-1) protected image of its slot, or one of the working set. */
static void note_held(struct ht_arena *a, uint32_t n, int protected, int workingset)
{
    struct ht_slot *s = &a->slot[n / HT_SLOT_SUBS];

    charge(a, s, -1);
    s->protected = (uint8_t)(s->protected + protected);
    s->workingset = (uint8_t)(s->workingset + workingset);
    charge(a, s, 1);
}

/* Adds (1) or subtracts (-1) this image's part of the dirty bytes that pass through. */
static void note_dirty(struct ht_arena *a, uint32_t n, int sign) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = ht_arena_image(a, n);
    uint64_t bytes = (uint64_t)(sign * (int64_t)ht_arena_slot_bytes(a, n));

    if (!ht_image_passes_dirty(im))
        return;
    a->passing_dirty_bytes += bytes;
    a->dirty_on[a->slot[n / HT_SLOT_SUBS].numa_index] += bytes;
    if (im->durable)
        a->durable_dirty_bytes += bytes;
}

static void leave_workingset(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!a->image[n].workingset)
        return;
    note_dirty(a, n, -1);
    a->image[n].workingset = false;
    note_dirty(a, n, 1);
    note_held(a, n, 0, -1);
}

static uint64_t workingset_bytes_max(const struct ht_arena *a)
{
    return ht_arena_protected_max(ht_arena_bytes(a));
}

/* Is there room in the protected set for the content of a slot? */
static bool has_share(const struct ht_arena *a, const struct ht_slot *s, uint64_t others)
{
    return s->protected || a->protected_bytes + others + (1u << HT_SLOT_SHIFT) <= workingset_bytes_max(a);
}

bool ht_arena_has_protected_room(const struct ht_arena *a)
{
    return a->protected_bytes + (1u << HT_SLOT_SHIFT) <= workingset_bytes_max(a);
}

bool ht_arena_may_protect(const struct ht_arena *a, uint32_t n)
{
    return !ht_arena_is_external(a, n) && has_share(a, &a->slot[n / HT_SLOT_SUBS], 0);
}

void ht_arena_protect(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_external(a, n) || a->image[n].protected)
        return;
    leave_workingset(a, n);
    note_dirty(a, n, -1);
    a->image[n].protected = true;
    note_dirty(a, n, 1);
    note_held(a, n, 1, 0);
}

void ht_arena_unprotect(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_external(a, n) || !a->image[n].protected)
        return;
    note_dirty(a, n, -1);
    a->image[n].protected = false;
    note_dirty(a, n, 1);
    note_held(a, n, -1, 0);
}

uint64_t ht_arena_protected_bytes(const struct ht_arena *a)
{
    return a->protected_bytes;
}

uint64_t ht_arena_workingset_bytes(const struct ht_arena *a)
{
    return a->workingset_bytes;
}

uint64_t ht_arena_moving_bytes(const struct ht_arena *a)
{
    uint64_t held = a->protected_bytes + a->workingset_bytes +
        a->passing_dirty_bytes; /* a dirty piece may be in a slot that is protected */

    return ht_arena_bytes(a) - ht_min_u64(held, ht_arena_bytes(a));
}

void ht_eviction_join_workingset(struct ht_arena *a, uint32_t n)
{
    const struct ht_slot *s = &a->slot[n / HT_SLOT_SUBS];

    if (!s->workingset && !has_share(a, s, a->workingset_bytes))
        return;
    a->image[n].workingset = true;
    note_held(a, n, 0, 1);
}

/* ------------------------------------------------------------ readahead */

static void readahead_no_more(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_image *im = ht_arena_image(a, n);

    a->readahead_bytes -= im->readahead ? ht_arena_slot_bytes(a, n) : 0;
    im->readahead = false;
}

void ht_arena_mark_readahead(struct ht_arena *a, uint32_t n)
{
    a->image[n].readahead = true;
    a->readahead_chunks++;
    a->readahead_bytes += ht_arena_slot_bytes(a, n);
}

uint64_t ht_arena_readahead_bytes(const struct ht_arena *a)
{
    return a->readahead_bytes;
}

void ht_arena_readahead_stats(const struct ht_arena *a, uint64_t *out_chunks, uint64_t *out_hits, uint64_t *out_wasted)
{
    *out_chunks = a->readahead_chunks;
    *out_hits = a->readahead_hits;
    *out_wasted = a->readahead_wasted;
}

/* ------------------------------------------------------------ the clock */

void ht_arena_use(struct ht_arena *a, uint32_t n)
{
    struct ht_image *im = ht_arena_image(a, n);

    im->referenced = true;
    im->used_at = a->workingset.came;
    a->readahead_hits += im->readahead;
    readahead_no_more(a, n);
}

/* If an object has many images, those in pieces are a stream of small ones: their shadows would crowd out others. */
static bool may_come_back(const struct ht_arena *a, uint32_t n, uint64_t index)
{
    return a->image[n].subs == HT_SLOT_SUBS || index == 0;
}

void ht_eviction_note_attached(struct ht_arena *a, uint32_t n)
{
    struct ht_image *im = &a->image[n];

    if (!may_come_back(a, n, im->index))
        return;
    if (ht_workingset_is_refault(&a->workingset, im->owner, im->index, im->subs))
        ht_eviction_join_workingset(a, n);
    im->used_at = a->workingset.came;
}

void ht_eviction_forget(struct ht_arena *a, uint32_t n)
{
    ht_arena_unprotect(a, n);
    leave_workingset(a, n);
    a->readahead_wasted += a->image[n].readahead;
    readahead_no_more(a, n);
}

/* The protected set takes its room from the working set. */
static bool may_stay_in_workingset(const struct ht_arena *a, const struct ht_image *im)
{
    return !a->forced && a->protected_bytes + a->workingset_bytes <= workingset_bytes_max(a) &&
        !ht_workingset_is_over(&a->workingset, im->used_at);
}

/* Evicts one image, if the hand has passed it before without a use since, and its owner agrees. */
static bool try_evict(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_image *im = &a->image[n];

    if (im->protected || (im->workingset && may_stay_in_workingset(a, im)))
        return false;
    leave_workingset(a, n);
    if (im->referenced) {
        im->referenced = false;
        return false;
    }
    if (!a->evict(a->ctx, n))
        return false;
    if (may_come_back(a, n, im->index))
        ht_workingset_note_evicted(&a->workingset, im->owner, im->index, im->used_at);
    ht_arena_put(a, n);
    return true;
}

/* Tries to evict images of a slot until there is room for a piece; for HT_SLOT_SUBS, every image. */
static void ask_slot(struct ht_arena *a, uint32_t i, uint32_t subs) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slot *s = &a->slot[i];
    uint32_t first;

    if (s->state == HT_SLOT_WHOLE)
        try_evict(a, i * HT_SLOT_SUBS);
    for (uint32_t k = 0, step; k < HT_SLOT_SUBS && s->state == HT_SLOT_SPLIT && !ht_slot_has_room(a, i, subs, &first);
         k += step) {
        bool there = s->used & (1u << k);
        step = there ? a->image[i * HT_SLOT_SUBS + k].subs : 1;
        if (there)
            try_evict(a, i * HT_SLOT_SUBS + k);
    }
}

uint32_t ht_eviction_pass(struct ht_arena *a, uint32_t subs)
{
    uint32_t i = a->hand;

    a->hand = (a->hand + 1) % a->slots;
    ask_slot(a, i, subs);
    return i;
}

/* --------------------------------------------------------- dirty images */

void ht_arena_set_dirty(struct ht_arena *a, uint32_t n, bool dirty)
{
    note_dirty(a, n, -1);
    ht_arena_image(a, n)->dirty = dirty;
    note_dirty(a, n, 1);
}

bool ht_arena_under_pressure(const struct ht_arena *a)
{
    uint64_t moving = ht_arena_bytes(a) - a->protected_bytes;

    if (a->durable_dirty_bytes > moving / 2)
        return true;
    return a->short_for && a->passing_dirty_bytes > (moving - a->workingset_bytes) / 2;
}

/* The image was made just now, and is not written completely: a writer is still filling it. */
static bool is_growing(const struct ht_arena *a, uint32_t n)
{
    const struct ht_image *im = &a->image[n];

    return a->slot[n / HT_SLOT_SUBS].state == HT_SLOT_WHOLE && im->valid_hi - im->valid_lo < 1u << HT_SLOT_SHIFT &&
        a->workingset.came - im->used_at < HT_SLOT_SUBS * ht_max_u64(ht_min_u64(a->slots / 8, GROWING_MAX), 1);
}

bool ht_arena_presses(struct ht_arena *a, uint32_t n, bool growing)
{
    const struct ht_image *im = ht_arena_image(a, n);

    return ht_image_passes_dirty(im) && (im->durable || a->short_for) && (growing || !is_growing(a, n));
}
