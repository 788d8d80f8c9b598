/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dedup_index.h - where content with a checksum was seen first: a hash table of 16 bytes an entry. Pure.
 *
 * The table never grows. If it has too little room for all content it takes one of several parts of the checksums: all
 * content with one of these, and none with another. So duplicates of each other are in the same part, and as many
 * passes as there are parts see all content.
 */
#ifndef HITRAIN_TIERING_ENGINE_DEDUP_INDEX_H
#define HITRAIN_TIERING_ENGINE_DEDUP_INDEX_H

#include <assert.h>

#include "tiering/base/base.h"

struct ht_dedup_entry {
    uint64_t checksum;
    uint32_t object; /* any number but 0; 0: the entry is free */
    uint32_t chunk;
};
static_assert(sizeof(struct ht_dedup_entry) == 16, "memory per chunk is bounded");

struct ht_dedup_index {
    struct ht_dedup_entry *entry;
    size_t size, count; /* size: a power of two */
    unsigned part, parts;
};

/* For so many chunks. part: any number; it is taken modulo the number of parts. -ENOMEM */
int ht_dedup_index_init(struct ht_dedup_index *x, uint64_t chunks, uint64_t bytes_max, unsigned part) HT_MUST_CHECK;
void ht_dedup_index_free(struct ht_dedup_index *x);
uint64_t ht_dedup_index_bytes(const struct ht_dedup_index *x);
/*
 * The entry of a checksum, or a free one for it, which the caller fills and counts (ht_dedup_index_add). NULL: the
 * checksum is in another part, or there is no room for it.
 */
struct ht_dedup_entry *ht_dedup_index_find(struct ht_dedup_index *x, uint64_t checksum);
void ht_dedup_index_add(struct ht_dedup_index *x, struct ht_dedup_entry *e, const struct ht_dedup_entry *value);

#endif
