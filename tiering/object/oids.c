/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oids.c - the numbers of all objects, in slices.
 *
 * The lock is held for some buckets of the table at a time, and the table may double between slices. So buckets are
 * visited in the order of their reversed numbers: what a bucket becomes when the table doubles are neighbours in that
 * order. An object that is there from the first slice to the last one is listed once, and others at most once.
 */
#include <stdlib.h>
#include <time.h>

#include "tiering/object/context.h"
#include "tiering/object/object.h"

enum { SLICE_BUCKETS = 1024, REST_NS_MAX = 1000000 };

/* The bucket after `bucket` in a table of so many; 0: it was the last one. size: a power of two. */
static size_t next_bucket(size_t bucket, size_t size)
{
    size_t bit = size >> 1;

    while (bucket & bit) {
        bucket ^= bit;
        bit >>= 1;
    }
    return bucket | bit;
}

static size_t chain_length(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    size_t n = 0;

    for (; o; o = o->next)
        n++;
    return n;
}

int ht_oid_scan_slice(struct ht_store *s, struct ht_oid_scan *scan)
{
    unsigned left = SLICE_BUCKETS;

    ht_store_lock(s);
    size_t size = s->objects.table_size, wanted = 0;
    scan->is_over = size == 0;
    while (!scan->is_over && left--) {
        const struct ht_obj *o = s->objects.table[scan->bucket];
        size_t n = chain_length(o);
        if (scan->count + n > scan->room) {
            wanted = scan->count + s->objects.count; /* enough for all that are there now */
            break;
        }
        for (; o; o = o->next)
            scan->oid[scan->count++] = o->oid;
        scan->bucket = next_bucket(scan->bucket, size);
        scan->is_over = scan->bucket == 0;
    }
    ht_store_unlock(s);
    if (!wanted)
        return 0;
    uint64_t *more = realloc(scan->oid, wanted * sizeof(*more));
    if (!more)
        return -ENOMEM;
    scan->oid = more;
    scan->room = wanted;
    return 0;
}

/* The mutex is not fair: threads that wait for it come first. */
static void rest(uint64_t held_ns)
{
    const struct timespec t = {.tv_nsec = (long)ht_min_u64(held_ns, REST_NS_MAX)};

    nanosleep(&t, NULL);
}

int ht_store_oids(struct ht_store *s, uint64_t **out_oids, size_t *out_count)
{
    struct ht_oid_scan scan = {.room = 1};
    int rc = 0;

    scan.oid = malloc(sizeof(*scan.oid)); /* never NULL, so that the caller frees an array in any case */
    if (!scan.oid)
        return -ENOMEM;
    while (!rc && !scan.is_over) {
        uint64_t began_ns = ht_now_ns();
        rc = ht_oid_scan_slice(s, &scan);
        if (!rc && !scan.is_over)
            rest(ht_now_ns() - began_ns);
    }
    if (rc) {
        free(scan.oid);
        return rc;
    }
    *out_oids = scan.oid;
    *out_count = scan.count;
    return 0;
}
