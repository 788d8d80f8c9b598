/* SPDX-License-Identifier: Apache-2.0 */
/* txn.h - the store's own records in the log, and reading them at a mount. */
#ifndef HITRAIN_TIERING_TXN_TXN_H
#define HITRAIN_TIERING_TXN_TXN_H

#include "tiering/base/base.h"
#include "tiering/io/rings.h"
#include "tiering/api/stats.h"
#include "tiering/api/store.h"
#include "tiering/object/ref.h"

struct ht_store;
struct ht_obj;
struct ht_tx;

/* Makes, and ends, the state of txn/, before and after everything else. -ENOMEM */
int ht_txn_setup(struct ht_store *s) HT_MUST_CHECK;
void ht_txn_teardown(struct ht_store *s);
/* -EBUSY: there are too many. */
int ht_txn_add_client(struct ht_store *s, const struct ht_meta_client *client) HT_MUST_CHECK;
/* ht_scope_writeback, and the same without a scan for changes first. rest: without derived objects. */
int ht_scope_scan_and_write(struct ht_store *s, uint64_t scope, bool rest) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
int ht_scope_write(struct ht_store *s, uint64_t scope, bool rest) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* ht_store_commit without a scan for changes first. found: the scan's error, returned if all else succeeds. */
int ht_txn_commit_outside(struct ht_store *s, int found) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Adds its part to the figures. */
void ht_txn_stats(const struct ht_store *s, struct ht_store_stats *out) HT_REQUIRES(HT_LOCK_STORE);

/* Puts a record into an open transaction that announces numbers before they are given out. */
void ht_tx_reserve_ids(struct ht_tx *tx);

int ht_store_replay(struct ht_store *s, uint16_t type, const uint8_t *payload, uint32_t len) HT_REQUIRES(HT_LOCK_STORE);
int ht_store_replayed(struct ht_store *s);

/*
 * Puts everything unpublished of the scope's objects alone into tx: sizes, references, deletions. rest: without derived
 * objects, but with their deletions.
 */
void ht_scope_publish(struct ht_store *s, uint64_t scope, bool rest, struct ht_tx *tx) HT_EXCLUDES(HT_LOCK_STORE);

/* feature.c: the superblocks have this bit of feat_refuse when the call returns 0. WAITS. */
int ht_store_need_feature(struct ht_store *s, uint64_t bit) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* ------------------------------------------------------------ relocation */

/*
 * relocate.c: published bytes to another place, as they are. No lock, no chunk held. begin: write len bytes (room for
 * whole blocks) to new space, and flush. end: publish and make durable that the published reference `was` of the chunk
 * is there now; *ref is used up. -ENOSPC; -ESTALE, -EAGAIN: the chunk changed or is busy, nothing was done.
 */
int ht_relocate_begin(struct ht_obj *o, struct ht_ring *ring, void *bytes, uint32_t len, struct ht_ref *out)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
int ht_relocate_end(struct ht_obj *o, uint64_t index, const struct ht_ref *was, struct ht_ref *ref)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* ---------------------------------------------------------------- moving */

/* move.c: stored bytes with all of their owners; or a compressed frame instead of their raw bytes. */
struct ht_move_owner {
    struct ht_obj *obj; /* the caller keeps its reference */
    uint64_t index;
};
struct ht_move {
    struct ht_ref was, now;      /* a copy of the owners' reference; the new place, once it was written */
    struct ht_move_owner *owner; /* all of them */
    unsigned owners;
    uint64_t flush_error_passes; /* when the new place was taken */
    bool moved;                  /* out */
};
/*
 * Writes bytes (room for whole blocks) to a new place, unflushed: as they are stored at m->was, or a compressed frame
 * of that content with so many bytes. It takes no more pieces than m->was has. The call waits for the permit of the
 * device. compacts: the place is one that compaction fills. No lock, no chunk held. -ENOSPC, -EIO: m->now is empty.
 */
int ht_move_write(struct ht_move *m, struct ht_ring *ring, void *bytes, uint32_t frame_bytes, bool compacts)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Are the owners that m names all there are, and has none changed? Asked again when m is published. */
bool ht_move_may(struct ht_store *s, const struct ht_move *m) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Flushes, and publishes the new places of all for which no owner has changed meanwhile, in one transaction; gives the
 * other places back. *out_lsn: for ht_store_sync, which frees the old places. An error: nothing was moved, or the log
 * has failed.
 */
int ht_move_publish(struct ht_store *s, struct ht_move m[], unsigned count, uint64_t *out_lsn)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* --------------------------------------------------------------- sharing */

/* share.c: a chunk as it was when it was read, and the one that gives up its own bytes for those of the first. */
struct ht_sharer_side {
    struct ht_obj *obj; /* the caller keeps its reference; NULL of the first: there is none, the bytes are zeros */
    uint64_t index, version;
    struct ht_ref was; /* a copy of its published reference */
};
struct ht_sharer {
    struct ht_sharer_side first, other;
    uint32_t freed_blocks; /* out */
    int rc;                /* out */
};
/* Has the object nothing in memory that is not published, and no space that it may not lose? */
bool ht_obj_may_share(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Publishes that the other chunks have the bytes of the first ones, which are the same as their own, or are holes.
 * Durable with a later sync. Each rc says what became of one: -ESTALE: object or chunk has changed; -EAGAIN: a thread
 * holds a chunk, or the bytes are not flushed; -ENOSPC: the log has no room for the pieces; -ENOMEM. Then nothing was
 * done with it. An error of the call: none was shared, or the log has failed.
 */
int ht_chunks_share(struct ht_store *s, struct ht_sharer x[], unsigned n) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

#endif
