/* SPDX-License-Identifier: Apache-2.0 */
/* slot_list.c - lists of slots, by number: rings in which each slot has its place once. */
#include "tiering/cache/arena_priv.h"

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
    if (!--l->count)
        l->head = HT_SLOT_NONE;
}

uint32_t ht_slot_list_rotate(const struct ht_slot *slots, struct ht_slot_list *l, unsigned link)
{
    uint32_t i = l->head;

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
