/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write_batch.h - dirty images that are being written. A thread that has some waits for another chunk only after
 * finishing them all.
 */
#pragma once

#include "tiering/base/list.h"
#include "tiering/data/chunk_io.h"

enum { HT_WRITE_BATCH_MAX = 64, HT_WRITE_BATCH_FLIGHT_MAX = 16 << 20 };
struct ht_batch_write {
    struct ht_chunk_io io;
    uint32_t bytes;  /* that are stored, once it is prepared */
    void *copy;      /* a copy of the image, or a frame; NULL: the image itself is written */
    bool makes_room; /* the image may go once it is clean */
    bool workingset; /* it may go then if a reader finds no other */
};

struct ht_write_batch {
    struct ht_list link; /* while some are in flight */
    struct ht_store *s;
    struct ht_ring *ring;
    struct ht_batch_write job[HT_WRITE_BATCH_MAX];
    uint8_t order[HT_WRITE_BATCH_MAX]; /* places of jobs: those in flight, oldest first, then free ones */
    unsigned count;                    /* in flight */
    unsigned copies;                   /* jobs with a copy */
    uint64_t flight_bytes, unpushed_bytes;
    uint64_t flight_bytes_max; /* the opener may lower it */
    struct ht_permit spare;    /* for the next one; closing gives it back */
    enum ht_gate_good good;    /* that the writes bring */
    bool early;                /* a failure is none of the object's: whoever publishes it writes the image again */
    unsigned failed;
    int error; /* the first */
};
/* NULL: no memory, or no ring. */
struct ht_write_batch *ht_write_batch_open(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);
/* Waits for all. Returns the first error. Releases the lock in between. */
int ht_write_batch_close(struct ht_write_batch *w) HT_REQUIRES(HT_LOCK_STORE);
/* Must one be finished before another one is started? */
bool ht_write_batch_full(const struct ht_write_batch *w);
/*
 * Before the next chunk is taken: waits until the thread's class may write. device: where the chunk goes, or -1. False:
 * the call has finished some, or released the lock in between, and the caller asks again.
 */
bool ht_write_batch_admit(struct ht_write_batch *w, int device) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* A dirty chunk, held exclusively, which is shared or free afterwards. Releases the lock in between. */
int ht_write_batch_start(struct ht_write_batch *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Finishes the oldest one that a device has written, or the first that it writes. Releases the lock in between. */
void ht_write_batch_finish(struct ht_write_batch *w) HT_REQUIRES(HT_LOCK_STORE);
/* One was not written. */
void ht_write_batch_note_error(struct ht_write_batch *w, int rc);

/* ---------------------------------------------------------------- ranges */

/*
 * Starts a write of each dirty image of chunks [first, last). The caller holds the lock; the call releases it at times.
 */
void ht_write_batch_range(struct ht_write_batch *w, struct ht_obj *o, uint64_t first, uint64_t last)
    HT_REQUIRES(HT_LOCK_STORE);
/* Writes back chunks [first, last) as far as it can be done; errors stay with the object. */
void ht_obj_clean(struct ht_obj *o, uint64_t first, uint64_t last) HT_EXCLUDES(HT_LOCK_STORE);
