/* SPDX-License-Identifier: Apache-2.0 */
/* dedup_index.c - see dedup_index.h. */
#include "tiering/engine/dedup_index.h"

#include <stdlib.h>

#include "tiering/base/idhash.h"

enum { SIZE_MIN = 64 };

/* Three quarters of the entries at most are taken, so that searches stay short. */
static uint64_t room(size_t size)
{
    return size / 4 * 3;
}

int ht_dedup_index_init(struct ht_dedup_index *x, uint64_t chunks, uint64_t bytes_max, unsigned part)
{
    size_t size = SIZE_MIN;

    while (room(size) < chunks && 2 * size * sizeof(struct ht_dedup_entry) <= bytes_max)
        size *= 2;
    struct ht_dedup_entry *entry = calloc(size, sizeof(*entry));
    if (!entry)
        return -ENOMEM;
    unsigned parts = (unsigned)ht_max_u64(ht_div_up(chunks, room(size)), 1);
    *x = (struct ht_dedup_index){.entry = entry, .size = size, .part = part % parts, .parts = parts};
    return 0;
}

void ht_dedup_index_free(struct ht_dedup_index *x)
{
    free(x->entry);
    *x = (struct ht_dedup_index){0};
}

uint64_t ht_dedup_index_bytes(const struct ht_dedup_index *x)
{
    return x->size * sizeof(*x->entry);
}

struct ht_dedup_entry *ht_dedup_index_find(struct ht_dedup_index *x, uint64_t checksum)
{
    uint64_t hash = ht_id_hash(checksum);

    if (x->parts > 1 && (hash >> 32) % x->parts != x->part)
        return NULL;
    size_t i = hash & (x->size - 1);
    while (x->entry[i].object && x->entry[i].checksum != checksum)
        i = (i + 1) & (x->size - 1);
    return x->entry[i].object || x->count < room(x->size) ? &x->entry[i] : NULL;
}

void ht_dedup_index_add(struct ht_dedup_index *x, struct ht_dedup_entry *e, const struct ht_dedup_entry *value)
{
    x->count += !e->object;
    *e = *value;
}
