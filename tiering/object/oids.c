/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oids.c - the numbers of all objects, in slices.
 *
 * The lock is held for some buckets of the table at a time, and the table may grow between slices. An object that is
 * there from the first slice to the last one is listed once (ht_buckets_next), and others at most once.
 */
#include <stdlib.h>
#include <time.h>

#include "tiering/object/context.h"
#include "tiering/object/object.h"

enum { SLICE_BUCKETS = 1024, REST_NS_MAX = 1000000 };

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
    const struct ht_buckets *t = &s->objects.table;
    size_t wanted = 0;
    scan->is_over = t->count == 0;
    while (!scan->is_over && left--) {
        const struct ht_obj *o = *ht_bucket_at(t, scan->bucket);
        size_t n = chain_length(o);
        if (scan->count + n > scan->room) {
            wanted = scan->count + s->objects.count; /* enough for all that are there now */
            break;
        }
        for (; o; o = o->next)
            scan->oid[scan->count++] = o->oid;
        scan->bucket = ht_buckets_next(t, scan->bucket);
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
