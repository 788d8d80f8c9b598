/* SPDX-License-Identifier: Apache-2.0 */
/* kept_base.h - kept steps as streams: reading one, its digest, and the one that a stream builds on. */
#ifndef HITRAIN_MOUNT_HELPERS_COPY_KEPT_BASE_H
#define HITRAIN_MOUNT_HELPERS_COPY_KEPT_BASE_H

#include "mount-helpers/common/progress.h"
#include "mount-helpers/ctl/kept.h"
#include "mount-helpers/stream/stream.h"
#include "mount-helpers/stream/tree.h"

/* The digest that the store has computed, without a look at the content. -ENODATA: not yet. */
int ht_kept_stored_digest(int dir, struct ht_hash128 *out) HT_MUST_CHECK;
/* A kept step that is read whole, which verifies every checksum of the store. */
struct ht_kept_reading {
    const char *name, *done;             /* of the step; what the progress says */
    const struct ht_stream_shard *shard; /* that the stream is for; NULL: the whole step */
    int base_dir;                        /* -1: a whole step */
    struct ht_stream_base base;
    int (*put)(void *ctx, const void *data, size_t len); /* takes the stream; NULL: for its digest alone */
    void *ctx;
    struct ht_progress progress; /* after success the caller ends it */
    uint64_t entries, bytes;     /* out, as the digest */
    struct ht_hash128 digest;
    struct ht_moved moved; /* of a stream for a rank */
};
/* 0, or -errno with why or without one. */
int ht_kept_read(struct ht_kept_reading *q, int dir, char why[HT_TREE_WHY_MAX]) HT_MUST_CHECK;
/*
 * The digest of a kept step: the one that the store has computed, or the step is read for it until stopped() returns
 * true (NULL: never). 0, or -errno with a message printed.
 */
int ht_kept_digest(const char *root, const char *name, int dir, bool (*stopped)(void),
                   struct ht_hash128 *out) HT_MUST_CHECK;
/* The kept step of root that a stream builds on: a descriptor, or -errno with a message printed. */
int ht_kept_find_base(const char *root, const struct ht_stream_base *base, bool (*stopped)(void)) HT_MUST_CHECK;

#endif
