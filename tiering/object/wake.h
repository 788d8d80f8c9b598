/* SPDX-License-Identifier: Apache-2.0 */
/* wake.h - chooses the threads to wake when the store's lock is released. */
#ifndef HITRAIN_TIERING_OBJECT_WAKE_H
#define HITRAIN_TIERING_OBJECT_WAKE_H

#include <pthread.h>
#include <stdatomic.h>

#include "tiering/base/base.h"

struct ht_store;

struct ht_wakes {        /* wake.c: threads to wake when the lock has been released */
    uint64_t chunks;     /* as bits: places in ht_waits.chunk */
    unsigned slots;      /* how many threads that wait for an image */
    unsigned slots_read; /* of these, so many that want to read */
    bool all_slots;
    bool settled;              /* those that wait for room of a publication */
    bool writeback, readahead; /* engines: the tier is under pressure; a reader is pending */
    bool cleaning;             /* engine: an image is final */
    bool planner;              /* engine: a plan may be made, or ends */
    bool discard, compact;     /* engines: space became free; compaction could gain some */
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

void ht_waits_init(struct ht_waits *w);
void ht_waits_destroy(struct ht_waits *w);
void ht_store_unlock_and_wake(struct ht_store *s) HT_RELEASE(HT_LOCK_STORE);
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

#endif
