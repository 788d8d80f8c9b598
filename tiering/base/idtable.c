/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/idtable.h"

#include "tiering/base/lock.h"

enum { GROW_MAX = 2 };

/* -------------------------------------------------------------------- hash */

struct ht_id_hash_seed ht_id_hash_seed;

static bool fixed;

void ht_id_hash_fix(void)
{
    fixed = true;
    ht_id_hash_seed = (struct ht_id_hash_seed){0, {0x9e3779b97f4a7c15ull, 0xff51afd7ed558ccdull}};
}

void ht_id_hash_draw(void)
{
    uint64_t words[3];

    if (ht_random(words, sizeof(words)) != 0) /* no such call: where the kernel put us, and when */
        for (unsigned i = 0; i < HT_ARRAY_SIZE(words); i++)
            words[i] = (ht_now_ns() + i + (uintptr_t)&words) * 0x9e3779b97f4a7c15ull;
    ht_id_hash_seed = (struct ht_id_hash_seed){words[0], {words[1] | 1, words[2] | 1}};
}

__attribute__((constructor)) static void draw_before_main(void)
{
    if (!fixed)
        ht_id_hash_draw();
}

/* ----------------------------------------------------------------- buckets */

static size_t segment_buckets(unsigned segment)
{
    return segment ? (size_t)HT_BUCKETS_START << (segment - 1) : HT_BUCKETS_START;
}

static bool begin(struct ht_buckets *t)
{
    t->segment[0] = calloc(HT_BUCKETS_START, sizeof(void *));
    if (!t->segment[0])
        return false;
    t->count = HT_BUCKETS_START;
    t->mask = HT_BUCKETS_START - 1;
    return true;
}

/* Is there memory for the bucket after the last one? */
static bool have_segment(struct ht_buckets *t)
{
    unsigned segment = 64 - HT_BUCKETS_SHIFT - (unsigned)__builtin_clzll(t->count);

    if (segment == HT_BUCKET_SEGMENTS)
        return false;
    if (!t->segment[segment])
        t->segment[segment] = malloc(segment_buckets(segment) * sizeof(void *));
    return t->segment[segment];
}

bool ht_buckets_grow(struct ht_buckets *t, void ***out_from)
{
    *out_from = NULL;
    if (!t->count)
        return begin(t);
    if (!have_segment(t))
        return false;
    size_t bucket = t->count++;
    if (bucket > t->mask)
        t->mask = 2 * t->mask + 1;
    *ht_bucket_at(t, bucket) = NULL;
    *out_from = ht_bucket_at(t, bucket & t->mask >> 1);
    return true;
}

/* The order is that of numbers with their bits reversed: what growth makes of one bucket are neighbours in it. */
size_t ht_buckets_next(const struct ht_buckets *t, size_t bucket)
{
    size_t half = t->mask / 2 + 1, bit = bucket < half && bucket + half >= t->count ? half >> 1 : half;

    while (bucket & bit) {
        bucket ^= bit;
        bit >>= 1;
    }
    return bucket | bit;
}

uint64_t ht_buckets_bytes(const struct ht_buckets *t)
{
    uint64_t bytes = 0;

    for (unsigned i = 0; i < HT_BUCKET_SEGMENTS && t->segment[i]; i++)
        bytes += segment_buckets(i) * sizeof(void *);
    return bytes;
}

void ht_buckets_free(struct ht_buckets *t)
{
    for (unsigned i = 0; i < HT_BUCKET_SEGMENTS; i++)
        free(t->segment[i]);
    *t = (struct ht_buckets){0};
}

/* ------------------------------------------------------------------- table */

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
            ht_lock_step();
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
