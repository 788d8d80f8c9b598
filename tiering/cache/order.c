/* SPDX-License-Identifier: Apache-2.0 */
/*
 * order.c - lists of slots, by number: rings in which each slot has its place once; and the order of eviction: clean
 * images whose next use is known, in lists by its place in time. What is needed last goes first.
 *
 * Places are a part of a step long, and their lists lie around a ring. The time moves on around it, too. A place that
 * the time has passed is the farthest one: an image that was not used as planned is the first to go.
 *
 *      now
 *       |  needed soon                  needed last
 *   ----v-------------------------------------> (round again)
 *
 * The images that were used last stay: their users may read them in several parts.
 */
#include "tiering/cache/arena_priv.h"

enum { MOMENT_PART = 16 }; /* of all slots */

/* ------------------------------------------------------------------- lists */

void ht_slot_list_add(struct ht_slot *slots, struct ht_slot_list *l, unsigned link, uint32_t i)
{
    struct ht_slot_link *at = &slots[i].link[link];

    if (!l->count++) {
        *at = (struct ht_slot_link){i, i};
        l->head = i;
        l->sub = 0;
        return;
    }
    struct ht_slot_link *head = &slots[l->head].link[link];
    *at = (struct ht_slot_link){head->prev, l->head};
    slots[head->prev].link[link].next = i;
    head->prev = i;
}

void ht_slot_list_push(struct ht_slot *slots, struct ht_slot_list *l, unsigned link, uint32_t i)
{
    ht_slot_list_add(slots, l, link, i);
    l->head = i;
    l->sub = 0;
}

void ht_slot_list_del(struct ht_slot *slots, struct ht_slot_list *l, unsigned link, uint32_t i)
{
    const struct ht_slot_link *at = &slots[i].link[link];

    slots[at->prev].link[link].next = at->next;
    slots[at->next].link[link].prev = at->prev;
    if (l->head == i) {
        l->head = at->next;
        l->sub = 0;
    }
    l->count--;
}

uint32_t ht_slot_list_rotate(const struct ht_slot *slots, struct ht_slot_list *l, unsigned link)
{
    uint32_t i = ht_slot_list_head(l);

    if (i != HT_SLOT_NONE)
        l->head = slots[i].link[link].next;
    l->sub = 0;
    return i;
}

struct ht_slot_list *ht_slot_image_list(struct ht_arena *a, uint32_t i, unsigned kind)
{
    bool by_node = kind == HT_IMAGE_DIRTY || kind == HT_IMAGE_SCRATCH;

    return &a->list[kind][by_node ? a->slot[i].numa_index : 0];
}

/* ------------------------------------------------------------------- order */

void ht_order_init(struct ht_order *o)
{
    for (unsigned k = 0; k < HT_ORDER_MOMENT; k++)
        o->used[k] = HT_SLOT_NONE;
}

static unsigned place_of(const struct ht_arena *a, uint32_t i)
{
    return a->image[i * HT_SLOT_SUBS].next_use;
}

void ht_order_add(struct ht_arena *a, uint32_t i)
{
    unsigned place = place_of(a, i);

    ht_slot_list_add(a->slot, &a->order.list[place], HT_IMAGE_PLANNED, i);
    a->order.slots++;
    a->order.places |= UINT64_C(1) << place;
}

void ht_order_del(struct ht_arena *a, uint32_t i)
{
    struct ht_slot_list *l = &a->order.list[place_of(a, i)];

    ht_slot_list_del(a->slot, l, HT_IMAGE_PLANNED, i);
    a->order.slots--;
    if (!l->count)
        a->order.places &= ~(UINT64_C(1) << place_of(a, i));
}

void ht_arena_order_begin(struct ht_arena *a, uint64_t now, bool hints)
{
    a->order.active = true;
    a->order.hints = hints;
    ht_arena_order_move(a, now);
}

void ht_arena_order_move(struct ht_arena *a, uint64_t now)
{
    a->order.now = now % HT_ORDER_PLACES;
}

void ht_arena_order_end(struct ht_arena *a)
{
    a->order.active = a->order.hints = false;
}

bool ht_arena_has_hint_room(const struct ht_arena *a)
{
    return a->order.slots < (a->slots - 2 * a->lent.count) / 2;
}

uint64_t ht_order_hint_bytes(const struct ht_arena *a)
{
    return a->order.hints ? (uint64_t)a->order.slots << HT_SLOT_SHIFT : 0;
}

bool ht_order_was_used_now(const struct ht_arena *a, uint32_t n)
{
    for (unsigned k = 0; k < HT_ORDER_MOMENT; k++)
        if (a->order.used[k] == n)
            return true;
    return false;
}

void ht_order_note_use(struct ht_arena *a, uint32_t n)
{
    uint64_t most = ht_max_u64(ht_min_u64(a->slots / MOMENT_PART, HT_ORDER_MOMENT), 1); /* small tiers remember fewer */

    if (ht_order_was_used_now(a, n))
        return;
    a->order.used[a->order.used_at] = n;
    a->order.used_at = (uint8_t)((a->order.used_at + 1u) % most);
}

/* ---------------------------------------------------------------- eviction */

uint64_t ht_order_ahead(const struct ht_arena *a)
{
    const struct ht_order *o = &a->order;

    return o->now ? o->places >> o->now | o->places << (HT_ORDER_PLACES - o->now) : o->places;
}

uint64_t ht_order_after(const struct ht_arena *a, uint64_t ahead, unsigned place)
{
    unsigned distance = (place + HT_ORDER_PLACES - a->order.now) % HT_ORDER_PLACES;

    return ahead & ~((UINT64_C(2) << distance) - 1);
}

uint32_t ht_order_next(struct ht_arena *a, uint64_t *ahead)
{
    struct ht_order *o = &a->order;

    if (!*ahead)
        return HT_SLOT_NONE;
    unsigned farthest = 63u - (unsigned)__builtin_clzll(*ahead);
    *ahead &= ~(UINT64_C(1) << farthest);
    return ht_slot_list_rotate(a->slot, &o->list[(o->now + farthest) % HT_ORDER_PLACES], HT_IMAGE_PLANNED);
}

uint32_t ht_order_first(const struct ht_arena *a)
{
    const struct ht_order *o = &a->order;

    return o->places ? o->list[__builtin_ctzll(o->places)].head : HT_SLOT_NONE;
}
