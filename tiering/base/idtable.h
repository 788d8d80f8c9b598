/* SPDX-License-Identifier: Apache-2.0 */
/*
 * idtable.h - things found by their number: a hash table of links that live in them; the hash of such numbers, and the
 * buckets of this and other hash tables.
 *
 * A table that doubles at once moves all its entries, while others wait for its lock. Here a table grows by one bucket,
 * which takes entries of one other. Of 2^k buckets or more, and less than twice as many, the entry with hash h is in
 * bucket h mod 2^(k+1), or in h mod 2^k while there is no such bucket yet. Buckets never move: a new segment has as
 * many as all segments before it.
 *
 * A bucket is the head of a chain. Of buckets alone the chains and their entries are the owner's. Zeros are an empty
 * table. It never shrinks. No lock: the owner's.
 */
#pragma once

#include "tiering/base/list.h"

/* -------------------------------------------------------------------- hash */

/*
 * The hash of numbers that an image or a client chooses: numbers of objects, inodes and places come from devices. With
 * a fixed hash an image can choose numbers that all share one bucket, so that mounting it takes quadratic time. So each
 * process draws the parameters of the hash at random before main.
 *
 * No order may follow from the hash that a user sees or that a repair depends on.
 */

/* Constant from before main on, except for ht_id_hash_fix. multiplier: odd. */
struct ht_id_hash_seed {
    uint64_t mask, multiplier[2];
};
extern struct ht_id_hash_seed ht_id_hash_seed;

/*
 * Two different numbers never have the same hash. Take its low bits.
 *
 * The drawn multipliers make the hash unknown to an image. Some pairs spread numbers in a row badly. So a constant
 * multiplier follows them: the second one of Stafford's "Mix13" (the finalizer of SplitMix64).
 */
static inline uint64_t ht_id_hash(uint64_t id)
{
    uint64_t h = (id ^ ht_id_hash_seed.mask) * ht_id_hash_seed.multiplier[0];

    h = (h ^ h >> 32) * ht_id_hash_seed.multiplier[1];
    h = (h ^ h >> 29) * 0x94d049bb133111ebull;
    return h ^ h >> 32;
}

/* For tests that are to run alike each time: the same parameters in each process. Before there is any table. */
void ht_id_hash_fix(void);
/* Other ones. Also before there is any table. */
void ht_id_hash_draw(void);

/* ----------------------------------------------------------------- buckets */

enum { HT_BUCKETS_SHIFT = 6, HT_BUCKETS_START = 1 << HT_BUCKETS_SHIFT, HT_BUCKET_SEGMENTS = 32 };

struct ht_buckets {
    void **segment[HT_BUCKET_SEGMENTS];
    size_t count; /* of buckets; 0, or HT_BUCKETS_START and more */
    size_t mask;  /* one less than the power of two that is count, or the next above it */
};

/* The head of the chain in a bucket below count. */
static inline void **ht_bucket_at(const struct ht_buckets *t, size_t bucket)
{
    if (bucket < HT_BUCKETS_START)
        return &t->segment[0][bucket];
    unsigned k = 63 - (unsigned)__builtin_clzll(bucket);
    return &t->segment[k - HT_BUCKETS_SHIFT + 1][bucket - (UINT64_C(1) << k)];
}

/* The bucket of a hash. The table has some. */
static inline size_t ht_bucket_of(const struct ht_buckets *t, uint64_t hash)
{
    size_t bucket = hash & t->mask;

    return bucket < t->count ? bucket : bucket & t->mask >> 1;
}

static inline void **ht_bucket_of_hash(const struct ht_buckets *t, uint64_t hash)
{
    return ht_bucket_at(t, ht_bucket_of(t, hash));
}

/*
 * One more bucket. *out_from: the head of the chain whose entries the owner divides between this bucket and the new
 * one, by their hashes; NULL: these are the first buckets. False: no memory, and the table stays as it is.
 */
bool ht_buckets_grow(struct ht_buckets *t, void ***out_from) HT_MUST_CHECK;
/*
 * The bucket after this one in an order that growth does not disturb; 0: it was the last. A walk that begins with
 * bucket 0 meets each entry once that is there from its begin to its end, though the table grows meanwhile.
 */
size_t ht_buckets_next(const struct ht_buckets *t, size_t bucket);
/* Heap of the table, without its entries. */
uint64_t ht_buckets_bytes(const struct ht_buckets *t);
/* The entries remain the owner's. */
void ht_buckets_free(struct ht_buckets *t);

/* ------------------------------------------------------------------- table */

struct ht_id_link {
    uint64_t id;
    struct ht_id_link *next;
};

/* One that cannot grow has longer chains, and is still correct. */
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
