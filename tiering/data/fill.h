/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fill.h - the bytes of images. The caller holds the lock, and the chunk exclusively; the calls may release the lock.
 */
#pragma once

#include "tiering/data/chunk_io.h"

/*
 * All of the image is valid afterwards. content: that of the chunk's newest reference, verified; NULL: it is read.
 * -EREMOTE: it lies in the vault (cold.h).
 */
int ht_chunk_fill(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const uint8_t *content)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;

/* -------------------------------------------------- several chunks at once */

/* A thread that has some waits for another chunk only after finishing them all. */
enum { HT_READ_BATCH_MAX = 32 };
struct ht_read_batch {
    struct ht_store *s;
    struct ht_ring *ring;
    bool report;            /* errors */
    int error;              /* the first */
    struct ht_permit spare; /* for the next one; it goes back with the last */
    unsigned first, count;
    struct ht_chunk_io job[HT_READ_BATCH_MAX]; /* in flight, oldest first */
};
/*
 * Reads into the new image of a chunk that is stored and held exclusively; the batch has a free place. Lock held;
 * releases it in between.
 */
void ht_read_batch_start(struct ht_read_batch *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE);
/*
 * Finishes the oldest: its chunk gets free, without an image if it cannot be read. Releases the lock in between.
 */
void ht_read_batch_finish(struct ht_read_batch *w) HT_REQUIRES(HT_LOCK_STORE);
void ht_read_batch_finish_all(struct ht_read_batch *w) HT_REQUIRES(HT_LOCK_STORE);
