/* SPDX-License-Identifier: Apache-2.0 */
/* verify.c - asserts that slots, pieces, lists and sums of the arena agree (tiering/base/verify.h). */

#include "tiering/cache/arena_priv.h"

static uint16_t mask_of(uint32_t first, uint32_t subs)
{
    return (uint16_t)(((1u << subs) - 1) << first);
}

static void check_image(const struct ht_arena *a, uint32_t n, struct ht_arena_sums *sums) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = &a->image[n];
    uint32_t bytes = ht_arena_slot_bytes(a, n);
    unsigned place = a->slot[n / HT_SLOT_SUBS].numa_index;

    assert(im->valid_lo <= im->valid_hi && im->valid_hi <= bytes && im->data_hi <= bytes);
    assert(!im->protected || !im->workingset);
    assert(im->protected || (!im->waiting && !im->pinned));
    assert(!im->waiting || !im->pinned);
    assert(im->dirty || !im->final);
    sums->used_bytes += bytes;
    sums->used_on[place] += bytes;
    sums->readahead_bytes += im->readahead ? bytes : 0;
    sums->waiting_bytes += im->waiting ? bytes : 0;
    sums->pinned_bytes += im->pinned ? bytes : 0;
    if (!ht_image_passes_dirty(im))
        return;
    sums->passing_dirty_bytes += bytes;
    sums->dirty_on[place] += bytes;
    sums->durable_dirty_bytes += im->durable ? bytes : 0;
}

/* Is the slot between its neighbours? Then it is on some list, and the number of all such slots shows on which. */
static void check_link(const struct ht_arena *a, uint32_t i, unsigned link)
{
    const struct ht_slot_link *l = &a->slot[i].link[link];

    assert(l->prev < a->slots && l->next < a->slots);
    assert(a->slot[l->prev].link[link].next == i && a->slot[l->next].link[link].prev == i);
}

/* Each image of a slot in use: the slot's counts and, of a split one, its mask of sub-slots. */
static void check_used_slot(const struct ht_arena *a, uint32_t i, struct ht_arena_sums *sums) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_slot *s = &a->slot[i];
    uint8_t images[HT_IMAGE_KINDS] = {0};
    uint16_t used = s->state == HT_SLOT_WHOLE ? mask_of(0, HT_SLOT_SUBS) : s->used;
    uint32_t step, finals = 0;

    assert(used);
    for (uint32_t k = 0; k < HT_SLOT_SUBS; k += step) {
        const struct ht_image *im = &a->image[i * HT_SLOT_SUBS + k];
        bool there = used & (1u << k);
        step = there ? im->subs : 1;
        assert(there || !im->owner);
        if (!there)
            continue;
        assert(step && k + step <= HT_SLOT_SUBS && (step == HT_SLOT_SUBS) == (s->state == HT_SLOT_WHOLE));
        assert((used & mask_of(k, step)) == mask_of(k, step));
        check_image(a, i * HT_SLOT_SUBS + k, sums);
        images[ht_image_kind(im)]++;
        finals += im->final;
    }
    assert(memcmp(s->images, images, sizeof(images)) == 0 && s->finals == finals);
    if (finals)
        check_link(a, i, HT_LIST_FINAL);
    for (unsigned kind = 0; kind < HT_IMAGE_LISTS; kind++)
        if (images[kind])
            check_link(a, i, kind);
    assert(s->room == (s->state == HT_SLOT_SPLIT ? ht_slot_room(used) : 0));
    if (s->room)
        check_link(a, i, HT_LIST_ROOM);
    sums->protected_bytes += images[HT_IMAGE_PROTECTED] ? 1u << HT_SLOT_SHIFT : 0;
    sums->workingset_bytes += !images[HT_IMAGE_PROTECTED] && images[HT_IMAGE_WORKINGSET] ? 1u << HT_SLOT_SHIFT : 0;
}

static void check_list(const struct ht_arena *a, const struct ht_slot_list *l, unsigned link)
{
    uint32_t i = ht_slot_list_head(l), n = l->count;

    assert((i == HT_SLOT_NONE) == !n);
    for (; n; n--, i = a->slot[i].link[link].next)
        assert(i < a->slots && (n == l->count || i != l->head));
    assert(i == ht_slot_list_head(l));
}

/* The lists are rings of as many slots as belong to them: so no slot is on a wrong one. */
static void check_lists(struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t images[HT_IMAGE_LISTS][HT_NODES_MAX] = {0}, planned[HT_ORDER_PLACES] = {0},
             room[HT_NODES_MAX][HT_PIECE_LENGTHS] = {0};
    uint32_t unused[HT_NODES_MAX] = {0}, final[HT_NODES_MAX] = {0}, free_slots = 0, lent = 0;

    for (uint32_t i = 0; i < a->slots; i++) {
        const struct ht_slot *s = &a->slot[i];
        unused[s->numa_index] += s->state == HT_SLOT_FREE;
        lent += s->state == HT_SLOT_LENT;
        assert(s->state != HT_SLOT_LENT || a->slot[i ^ 1].state == HT_SLOT_LENT);
        for (unsigned kind = 0; kind < HT_IMAGE_KINDS; kind++)
            assert((s->state != HT_SLOT_FREE && s->state != HT_SLOT_LENT) || !s->images[kind]);
        assert((s->state != HT_SLOT_FREE && s->state != HT_SLOT_LENT) || !s->finals);
        final[s->numa_index] += s->finals > 0;
        if (s->state == HT_SLOT_SPLIT && s->room)
            room[s->numa_index][s->room - 1]++;
        for (unsigned kind = 0; kind < HT_IMAGE_PLANNED && s->state != HT_SLOT_FREE; kind++)
            images[kind][ht_slot_image_list(a, i, kind) - a->list[kind]] += s->images[kind] > 0;
        if (s->state != HT_SLOT_FREE && s->images[HT_IMAGE_PLANNED])
            planned[a->image[i * HT_SLOT_SUBS].next_use]++;
    }
    uint32_t slots = 0;
    for (unsigned p = 0; p < HT_ORDER_PLACES; slots += planned[p++]) {
        check_list(a, &a->order.list[p], HT_IMAGE_PLANNED);
        assert(a->order.list[p].count == planned[p] && (a->order.places >> p & 1) == (planned[p] > 0));
    }
    assert(a->order.slots == slots);
    for (unsigned p = 0; p < HT_NODES_MAX; p++) {
        check_list(a, &a->final[p], HT_LIST_FINAL);
        assert(a->final[p].count == final[p]);
        check_list(a, &a->free[p], HT_LIST_ROOM);
        assert(a->free[p].count == unused[p]);
        free_slots += unused[p];
        for (unsigned k = 0; k < HT_PIECE_LENGTHS; k++) {
            check_list(a, &a->room[p][k], HT_LIST_ROOM);
            assert(a->room[p][k].count == room[p][k]);
        }
        for (unsigned kind = 0; kind < HT_IMAGE_LISTS; kind++) {
            check_list(a, &a->list[kind][p], kind);
            assert(a->list[kind][p].count == images[kind][p]);
        }
    }
    assert(a->free_slots == free_slots);
    check_list(a, &a->lent, HT_LIST_ROOM);
    assert(lent == 2 * a->lent.count);
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

void ht_arena_verify(struct ht_arena *a)
{
    struct ht_arena_sums sums = {.readahead_chunks = a->sums.readahead_chunks,
                                 .readahead_hits = a->sums.readahead_hits,
                                 .readahead_wasted = a->sums.readahead_wasted};

    for (uint32_t i = 0; i < a->slots; i++)
        if (a->slot[i].state != HT_SLOT_FREE && a->slot[i].state != HT_SLOT_LENT)
            check_used_slot(a, i, &sums);
    check_lists(a);
    check_externals(a);
    assert(a->protected_max <= ht_arena_protected_max(ht_arena_bytes(a)));
    assert(sums.pinned_bytes <= ht_arena_pinned_max(ht_arena_bytes(a)));
    assert(memcmp(&a->sums, &sums, sizeof(sums)) == 0);
}

uint32_t ht_arena_next_used(struct ht_arena *a, uint32_t *hand)
{
    uint32_t total = a->slots * HT_SLOT_SUBS;

    for (uint32_t k = 0; k < total; k++) {
        uint32_t n = *hand % total;
        const struct ht_slot *s = &a->slot[n / HT_SLOT_SUBS];
        *hand = s->state == HT_SLOT_SPLIT ? (n + 1) % total : (n / HT_SLOT_SUBS + 1) * HT_SLOT_SUBS % total;
        if (a->image[n].owner && s->state != HT_SLOT_FREE)
            return n;
    }
    return HT_SLOT_NONE;
}
