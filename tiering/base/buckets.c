/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/buckets.h"

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
