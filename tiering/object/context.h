/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.h - the common state of all rooms of the store, and the locks that guard it.
 *
 * One mutex (store.lock) guards everything below that names no other guard. I/O and copying happen without it, under
 * chunk locks:
 *
 *   shared     readers of an image or of its extents; writeback while its write is in flight
 *   exclusive  a thread that changes the image, fills it, or replaces references
 *
 * A thread holds at most one chunk lock at a time, with two exceptions. Batch pins take theirs in (oid, index) order.
 * Readahead and writeback keep the chunks whose I/O is in flight, and wait for no other chunk while they do.
 *
 * A thread that waits for a slot of the arena releases the chunk that needs it: a batch pin that has all slots may wait
 * for that chunk. So waiting for a slot ends.
 */
#ifndef HITRAIN_TIERING_OBJECT_CONTEXT_H
#define HITRAIN_TIERING_OBJECT_CONTEXT_H

#include <stdatomic.h>

#include "tiering/base/base.h"
#include "tiering/base/lock.h"
#include "tiering/space/alloc.h"
#include "tiering/space/super.h"
#include "tiering/tier/next_use.h"
#include "tiering/io/gate.h"
#include "tiering/api/store.h"
#include "tiering/object/deferred_free.h"
#include "tiering/object/numa.h"
#include "tiering/object/object.h"
#include "tiering/object/wake.h"

struct ht_journal;
struct ht_arena;
struct ht_staging;
struct ht_rings;
struct ht_data;      /* data/ */
struct ht_shm_state; /* shm/ */
struct ht_txn;       /* txn/ */
struct ht_engine;    /* engine/ */
struct ht_own;       /* store/ */

/* Set when the store is made: lower folders call these functions, higher ones implement them. */
struct ht_hooks {
    /* Cleans a few images. Returns how many, or the error if none could be cleaned. No lock held. */
    int (*make_room)(struct ht_store *s);
    const struct ht_image_ops *shm_images; /* image.h */
    /* For any object: frees its shared memory, which has no images left. Lock held. */
    void (*free_shm)(struct ht_obj *o);
    /* Any thread; the store's lock may be held. */
    void (*wake_engines)(struct ht_store *s, const struct ht_wakes *w);
};

/* Bytes in flight, and counts of events since the mount. */
struct ht_flow {
    uint64_t dirty_bytes;
    unsigned missing;           /* readers that wait for a device */
    unsigned coming;            /* images that writeback has begun to write, and that may go then */
    unsigned coming_workingset; /* the same of the working set, which go for readers only */
    unsigned writing;           /* images on their way to a device by writeback */
    uint64_t writing_blocks;    /* that they have */
    uint64_t hits, misses, evictions, writebacks, commits;
    uint64_t room_waits;                                   /* waits for the eviction of an image */
    uint64_t moved_bytes;                                  /* of updates, to another device than before */
    uint64_t scratch_written_bytes, scratch_dropped_bytes; /* of scratch objects: to devices; gone before that */
    uint64_t checksum_errors, read_errors, write_errors;
};

/* Fixed from the mount on, unless a lock is named. */
struct ht_store {
    struct ht_mutex lock; /* the store's lock */
    struct ht_store_opts opts;
    struct ht_dev *dev[HT_DEVICES_MAX]; /* NULL: missing */
    unsigned dev_count;
    struct ht_super_layout layout;
    struct ht_mutex super_lock;
    struct ht_super sb HT_GUARDED_BY(HT_LOCK_SUPER);
    struct ht_mutex tx_lock; /* held while a transaction is open */
    struct ht_journal *journal;
    struct ht_alloc *alloc HT_GUARDED_BY(HT_LOCK_STORE);
    struct ht_arena *arena;
    struct ht_staging *staging;
    struct ht_rings *rings;
    struct ht_gate gate;
    struct ht_hooks hooks;
    struct ht_numa numa;
    struct ht_objects objects HT_GUARDED_BY(HT_LOCK_STORE);
    struct ht_frees frees;
    struct ht_waits waits;
    struct ht_flow flow HT_GUARDED_BY(HT_LOCK_STORE);
    struct ht_next_uses next_uses HT_GUARDED_BY(HT_LOCK_STORE);
    _Atomic bool failed; /* the log cannot be written: read-only */
    /* Each folder has the type of its own. */
    struct ht_data *data;
    struct ht_shm_state *shm;
    struct ht_txn *txn;
    struct ht_engine *engine;
    struct ht_own *own; /* of store/ */
};

/* It takes no changes: it was opened read-only, or its log has failed. */
static inline bool ht_is_read_only(const struct ht_store *s)
{
    return s->opts.read_only || s->failed;
}

HT_MUTEX_OF(ht_super_mutex, struct ht_store, super_lock, HT_LOCK_SUPER)
HT_MUTEX_OF(ht_store_mutex, struct ht_store, lock, HT_LOCK_STORE)

static inline void ht_store_lock(struct ht_store *s) HT_ACQUIRE(HT_LOCK_STORE)
{
    ht_mutex_lock(ht_store_mutex(s));
}
static inline void ht_store_unlock(struct ht_store *s) HT_RELEASE(HT_LOCK_STORE)
{
    if (s->waits.wakes.any)
        ht_store_unlock_and_wake(s);
    else
        ht_mutex_unlock(ht_store_mutex(s));
}

#endif
