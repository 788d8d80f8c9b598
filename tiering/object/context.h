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
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "tiering/base/lock.h"
#include "tiering/base/slice.h"
#include "tiering/space/alloc.h"
#include "tiering/space/super.h"
#include "tiering/tier/next_use.h"
#include "tiering/io/gate.h"
#include "tiering/api/stats.h"
#include "tiering/api/store.h"
#include "tiering/object/owners.h"
#include "tiering/object/object.h"

struct ht_staging;
struct ht_rings;
struct ht_data;      /* data/ */
struct ht_shm_state; /* shm/ */
struct ht_txn;       /* txn/ */
struct ht_engine;    /* engine/ */
struct ht_own;       /* store/ */

/* ----------------------------------------------------- waiting and waking */

struct ht_wakes {        /* context.c: threads to wake when the lock has been released */
    uint64_t chunks;     /* as bits: places in ht_waits.chunk */
    unsigned slots;      /* how many threads that wait for an image */
    unsigned slots_read; /* of these, so many that want to read */
    bool all_slots;
    bool settled;              /* those that wait for room of a publication */
    bool writeback, readahead; /* engines: the tier is under pressure; a reader is pending */
    bool cleaning;             /* engine: an image is final */
    bool planner;              /* engine: a plan may be made, or ends */
    bool discard, compact;     /* engines: space became free; compaction could gain some */
    bool cold;                 /* engine: content from the vault is to become images */
    bool recompress;           /* engine: writers could compress if the superblocks said so */
    bool any;
};

enum { HT_COND_COUNT = 64 };
#define HT_PATIENCE_NS UINT64_C(100000000)

/* Threads wait with the store's lock for these. */
struct ht_waits {
    pthread_cond_t chunk[HT_COND_COUNT]; /* chunk locks, by address */
    pthread_cond_t slot;                 /* an image may be evictable now */
    pthread_cond_t slot_read;            /* the same, for threads that want one to read: they come first */
    /*
     * A transaction was appended and its frees are deferred; a discard ended; an abort ended, or may begin; a write
     * ended that may have borrowed from a rewrite reserve; a publication in slices has room for changes.
     */
    pthread_cond_t settled;
    unsigned reserve_waiters HT_GUARDED_BY(HT_LOCK_STORE); /* for such a write */
    unsigned slot_waiters HT_GUARDED_BY(HT_LOCK_STORE);    /* of both kinds */
    unsigned slot_readers HT_GUARDED_BY(HT_LOCK_STORE);
    unsigned slot_piece_readers HT_GUARDED_BY(HT_LOCK_STORE); /* of these, for images smaller than a slot */
    uint64_t patience_ns HT_GUARDED_BY(HT_LOCK_STORE);        /* for which a writer leaves what comes free to readers */
    struct ht_wakes wakes HT_GUARDED_BY(HT_LOCK_STORE);
    bool discard_noted HT_GUARDED_BY(HT_LOCK_STORE); /* its engine was woken, and has not looked yet */
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        bool compact_sleeps;         /* its engine found nothing to do, and is woken when that changes */
        bool compact_freed;          /* space became free since its last pass began */
        uint64_t compact_seen_lsn;   /* one more than the log had when its last pass began; 0: there was none */
        uint64_t compact_groups_min; /* so many sparse groups are worth a pass */
    };
    _Atomic bool stopping;  /* the background ends; no lock */
    _Atomic bool trim_ends; /* ht_store_trim_cancel was called; no lock */
};

/*
 * Memory that is given back without the store's lock. The last free() of many megabytes returns these to the system.
 * That takes milliseconds for the tables of a million chunks. So the memory of tables is collected, and the thread that
 * ends a slice or a transaction frees it when it has let the lock go.
 */
enum { HT_TRASH_PIECES_MAX = 2048 }; /* more are freed at once: a megabyte of tables, or 32 of a pool's blocks */

struct ht_trash {
    void *first; /* of malloc; each begins with the address of the next one */
    unsigned pieces;
};

/* ----------------------------------------------------------------- state */

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

/* image.c: which memory is near which device. Fixed, except for the credit. */
struct ht_numa {
    struct ht_nodes nodes; /* that memory comes from */
    /* Devices, as if they were nodes: whose turn it is to get new content. */
    struct ht_nodes turns;
    int64_t credit[HT_NODES_MAX] HT_GUARDED_BY(HT_LOCK_STORE);
    int8_t index[HT_DEVICES_MAX]; /* place of each device's node, or HT_NUMA_INDEX_ANY */
};

/* Bytes and images that are dirty or in flight now. */
struct ht_flow {
    uint64_t dirty_bytes;
    unsigned missing;           /* readers that wait for a device */
    unsigned coming;            /* images that writeback has begun to write, and that may go then */
    unsigned coming_workingset; /* the same of the working set, which go for readers only */
    unsigned writing;           /* images on their way to a device by writeback */
    uint64_t writing_blocks;    /* that they have */
    bool spilled;               /* content went to a device of the class capacity, and that was told */
};

struct ht_vault { /* where cold content lies, as the log has it */
    bool known;
    uint8_t uuid[16];
    char url[HT_VAULT_URL_BYTES];
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
    struct ht_trash trash HT_GUARDED_BY(HT_LOCK_STORE);
    struct ht_waits waits;
    struct ht_flow flow HT_GUARDED_BY(HT_LOCK_STORE);
    /* Events since the mount. All other figures of it are 0 here. */
    struct ht_store_stats counts HT_GUARDED_BY(HT_LOCK_STORE);
    struct ht_vault vault HT_GUARDED_BY(HT_LOCK_STORE);
    struct ht_next_uses next_uses HT_GUARDED_BY(HT_LOCK_STORE);
    _Atomic bool failed; /* the log cannot be written: read-only */
    /* Each folder has the type of its own. */
    struct ht_data *data;
    struct ht_shm_state *shm;
    struct ht_txn *txn;
    struct ht_engine *engine;
    struct ht_own *own; /* of store/ */
};

/* The device where the reference begins. NULL: it is missing, or there is none (ht_ref_home). */
static inline struct ht_dev *ht_ref_dev(const struct ht_store *s, const struct ht_ref *r)
{
    int device = ht_ref_home(r);

    return device < 0 ? NULL : s->dev[device];
}

/* NULL: it has none. */
static inline struct ht_image *ht_chunk_image(const struct ht_store *s, const struct ht_chunk *c)
    HT_REQUIRES(HT_LOCK_STORE)
{
    return c->slot != HT_SLOT_NONE ? ht_arena_image(s->arena, c->slot) : NULL;
}

/* Has it an image that is newer than its reference? */
static inline bool ht_chunk_is_dirty(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = ht_chunk_image(s, c);

    return im && im->dirty;
}

/* It takes no changes: it was opened read-only, or its log has failed. */
static inline bool ht_is_read_only(const struct ht_store *s)
{
    return s->opts.read_only || s->failed;
}

HT_MUTEX_OF(ht_super_mutex, struct ht_store, super_lock, HT_LOCK_SUPER)
HT_MUTEX_OF(ht_store_mutex, struct ht_store, lock, HT_LOCK_STORE)

void ht_store_unlock_and_wake(struct ht_store *s) HT_RELEASE(HT_LOCK_STORE);
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

/* As ht_locked. */
#define ht_store_locked(s, value)     \
    ({                                \
        ht_store_lock(s);             \
        __auto_type value_ = (value); \
        ht_store_unlock(s);           \
        value_;                       \
    })

void ht_waits_init(struct ht_waits *w);
void ht_waits_destroy(struct ht_waits *w);
/* Space became free. */
void ht_wake_for_discard(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/*
 * There is space to gain, and space became free or the log has grown since the last pass of compaction began. After a
 * pass in vain it has to be more space for a while (engine/move.c).
 */
bool ht_compact_may_begin(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* Space became free, also behind a discard; the log grew. */
void ht_wake_for_compact_freed(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
void ht_wake_for_compact(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* As ht_cond_wait_until with the lock; no other thread may wait with it. */
int ht_store_wait(struct ht_store *s, pthread_cond_t *c, uint64_t at_ns) HT_REQUIRES(HT_LOCK_STORE);
/* This image went, or may go: wakes a thread that waits for one. */
void ht_wake_for_slot(struct ht_store *s, uint32_t slot) HT_REQUIRES(HT_LOCK_STORE);
void ht_wake_one_for_slot(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/*
 * After each step of a loop over many chunks or objects. Between two slices anything may change but what the caller
 * keeps from changing. It holds a reference to its object, and looks chunks up again.
 *
 * At the end of a slice it releases the lock and takes it again. If threads wait for the lock, one gets it first. A
 * slice that rests gives them more time: most in a thread of a lower class (io/gate.h).
 */
void ht_slice_next(struct ht_store *s, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE);

/* A piece of malloc, as large as an address at least. NULL is none. */
void ht_trash_put(struct ht_store *s, void *piece) HT_REQUIRES(HT_LOCK_STORE);
/* Takes everything, for ht_trash_empty without the lock. */
struct ht_trash ht_trash_take(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
void ht_trash_empty(struct ht_trash *t);

/* -------------------------------------------------------------- nodes: image.c */

/* Before memory is made. -EINVAL: there is no such node. */
int ht_store_find_nodes(struct ht_store *s) HT_MUST_CHECK;

/*
 * The place for an image without a requested one: near the device of the chunk, or else near the device that the image
 * is meant for.
 */
int ht_chunk_numa_index(const struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* The device that its image is meant for, or -1. */
int ht_chunk_target_device(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
int ht_ref_numa_index(const struct ht_store *s, const struct ht_ref *ref);
/* The place of all its stored bytes, or HT_NUMA_INDEX_ANY. Releases the lock in between. */
int ht_obj_common_numa_index(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
