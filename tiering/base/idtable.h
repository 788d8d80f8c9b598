/* SPDX-License-Identifier: Apache-2.0 */
/*
 * idtable.h - things found by their number: a hash table of links that live in them.
 *
 * Grows by a bucket at a time and never shrinks; one that cannot grow has longer chains and is still correct. Zeros are
 * an empty table. No lock: the owner's.
 */
#pragma once

#include "tiering/base/buckets.h"

struct ht_id_link {
    uint64_t id;
    struct ht_id_link *next;
};

struct ht_id_table {
    struct ht_buckets buckets;
    size_t count;
};

/* The link with this id, or NULL. */
struct ht_id_link *ht_id_find(const struct ht_id_table *t, uint64_t id);
/* No link in the table has its id. -ENOMEM: not even a first table can be had. */
int ht_id_insert(struct ht_id_table *t, struct ht_id_link *link) HT_MUST_CHECK;
/* It is in the table. */
void ht_id_remove(struct ht_id_table *t, struct ht_id_link *link);
/* Heap of the table, without its entries. */
static inline uint64_t ht_id_table_bytes(const struct ht_id_table *t)
{
    return ht_buckets_bytes(&t->buckets);
}
/* The entries remain the caller's. */
void ht_id_table_free(struct ht_id_table *t);
