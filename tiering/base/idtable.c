/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/idtable.h"
#include "tiering/base/idhash.h"

enum { GROW_MAX = 2 };

static void put(struct ht_id_table *t, struct ht_id_link *link)
{
    void **head = ht_bucket_of_hash(&t->buckets, ht_id_hash(link->id));

    ht_chain_link(head, link, next);
}

/* By a bucket or two, until there is one for each entry. */
static void grow(struct ht_id_table *t)
{
    void **from;

    for (unsigned i = 0; i < GROW_MAX && t->count >= t->buckets.count; i++) {
        if (!ht_buckets_grow(&t->buckets, &from) || !from)
            return;
        struct ht_id_link *link = *from, *next;
        for (*from = NULL; link; link = next) {
            next = link->next;
            put(t, link);
        }
    }
}

struct ht_id_link *ht_id_find(const struct ht_id_table *t, uint64_t id)
{
    struct ht_id_link *link = t->buckets.count ? *ht_bucket_of_hash(&t->buckets, ht_id_hash(id)) : NULL;

    while (link && link->id != id)
        link = link->next;
    return link;
}

int ht_id_insert(struct ht_id_table *t, struct ht_id_link *link)
{
    grow(t);
    if (!t->buckets.count)
        return -ENOMEM;
    put(t, link);
    t->count++;
    return 0;
}

void ht_id_remove(struct ht_id_table *t, struct ht_id_link *link)
{
    void **head = ht_bucket_of_hash(&t->buckets, ht_id_hash(link->id));

    ht_chain_remove(head, link, next);
    t->count--;
}

void ht_id_table_free(struct ht_id_table *t)
{
    ht_buckets_free(&t->buckets);
    *t = (struct ht_id_table){0};
}
