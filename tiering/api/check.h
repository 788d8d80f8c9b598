/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - queries of fsck about a store that nothing else changes: stored chunks, conflicts, and marks of lost
 * chunks.
 */
#pragma once

#include "tiering/base/base.h"

struct ht_store;
struct ht_extent;

/* The checksum of a stored chunk, as a reference carries it. Any thread. */
uint64_t ht_store_checksum(const struct ht_store *s, const void *stored, size_t len);
/* For fsck: walk published references in (oid, index) order, one call per chunk. Non-zero from fn ends the walk. */
struct ht_chunk_info {
    uint64_t oid, index;
    uint32_t chunk_bytes, stored_bytes, visible_bytes, generation;
    uint8_t codec;
    uint64_t checksum;
    unsigned extent_count;
    const struct ht_extent *extents;
};
/* A chunk marked lost has stored_bytes 0 and no extents. */
int ht_store_walk(struct ht_store *s, int (*fn)(void *ctx, const struct ht_chunk_info *info), void *ctx) HT_MUST_CHECK;

/*
 * For fsck: extents that two references name which are not owners of the very same, or that
 * lie outside the data area, found in replay.
 */
struct ht_ref_conflict {
    uint64_t oid, index;
    uint32_t device;
    uint64_t block;
    uint32_t blocks;
    /*
     * -EEXIST overlap, -ERANGE outside; with leave_out also -EFBIG larger than a chunk of its object, and -ENOENT an
     * object that no record described: its size was guessed
     */
    int error;
};

/*
 * For fsck: marks a published chunk lost. The space of its reference comes free at the next mount. Durable with the
 * next sync. -ENOENT: there is no such chunk; -EBUSY: there is something newer. WAITS.
 */
int ht_store_lose_chunk(struct ht_store *s, uint64_t oid, uint64_t index) HT_MUST_CHECK;
/*
 * Records of types that neither the store nor a registered client takes. A newer program wrote them, or a program with
 * more clients. Replay passes over them, and a mount for writing is refused: the next checkpoint would drop them.
 */
struct ht_unknown_records {
    uint64_t count;
    uint16_t type; /* of the first */
};
struct ht_unknown_records ht_store_unknown_records(const struct ht_store *s);
/* Copies up to cap conflicts; returns how many there are in all. */
size_t ht_store_conflicts(struct ht_store *s, struct ht_ref_conflict *out, size_t cap);
