/* SPDX-License-Identifier: Apache-2.0 */
/* dedup.h - stored bytes that are the same are stored once. */
#ifndef HITRAIN_TIERING_API_DEDUP_H
#define HITRAIN_TIERING_API_DEDUP_H

#include "tiering/base/base.h"

struct ht_store;

struct ht_dedup_stats {
    uint64_t passes;         /* over all content */
    uint64_t compared_bytes; /* of chunks whose checksum said that they may be the same, or zeros */
    uint64_t shared_bytes;   /* space that sharing has freed */
    uint64_t hole_bytes;     /* space that zeros had */
    uint64_t different;      /* chunks that were not the same */
    uint64_t skipped;        /* that changed, were in use or could not be read: the next pass looks again */
    uint64_t memory_bytes;   /* present heap */
    uint64_t left_bytes;     /* waiting to be compared */
};
void ht_store_dedup_stats(struct ht_store *s, struct ht_dedup_stats *out);
/*
 * One pass over all content in this thread, at full speed and whatever the options say, also over content that has
 * changed just now. The next sync makes it durable. WAITS. -EROFS, -ENOMEM
 */
int ht_store_dedup(struct ht_store *s) HT_MUST_CHECK;
/*
 * Objects that the mount has found, and whose owner reserves their rewrites, have their reserves: the first pass begins
 * now. Without this call it begins two commit periods after the mount.
 */
void ht_store_reserves_complete(struct ht_store *s);

#endif
