/* SPDX-License-Identifier: Apache-2.0 */
/* idtable.c - see idtable.h. */
#include "tiering/base/idtable.h"
#include "tiering/base/idhash.h"

#include <stdlib.h>

enum { SIZE_START = 64 };

static struct ht_id_link **slot_of(const struct ht_id_table *t, uint64_t id)
{
    return &t->slot[ht_id_hash(id) & (t->size - 1)];
}

static void put(struct ht_id_table *t, struct ht_id_link *link)
{
    struct ht_id_link **head = slot_of(t, link->id);

    link->next = *head;
    *head = link;
}

static void grow(struct ht_id_table *t)
{
    struct ht_id_table old = *t;
    size_t size = old.size ? old.size * 2 : SIZE_START;
    struct ht_id_link **slot = calloc(size, sizeof(*slot));

    if (!slot)
        return;
    t->slot = slot;
    t->size = size;
    for (size_t i = 0; i < old.size; i++)
        for (struct ht_id_link *link = old.slot[i], *next; link; link = next) {
            next = link->next;
            put(t, link);
        }
    free(old.slot);
}

struct ht_id_link *ht_id_find(const struct ht_id_table *t, uint64_t id)
{
    struct ht_id_link *link = t->size ? *slot_of(t, id) : NULL;

    while (link && link->id != id)
        link = link->next;
    return link;
}

int ht_id_insert(struct ht_id_table *t, struct ht_id_link *link)
{
    if (t->count >= t->size)
        grow(t);
    if (!t->size)
        return -ENOMEM;
    put(t, link);
    t->count++;
    return 0;
}

void ht_id_remove(struct ht_id_table *t, struct ht_id_link *link)
{
    struct ht_id_link **at = slot_of(t, link->id);

    while (*at != link)
        at = &(*at)->next;
    *at = link->next;
    t->count--;
}

void ht_id_table_free(struct ht_id_table *t)
{
    free(t->slot);
    *t = (struct ht_id_table){0};
}
