/* SPDX-License-Identifier: Apache-2.0 */
/* txn.h - the store's own records in the log, and reading them at a mount. */
#pragma once

#include <hitrain/format.h>
#include "tiering/io/rings.h"
#include "tiering/api/stats.h"
#include "tiering/api/store.h"
#include "tiering/object/ref.h"

struct ht_chunk;
struct ht_obj;

/* Makes, and ends, the state of txn/, before and after everything else. -ENOMEM */
int ht_txn_setup(struct ht_store *s) HT_MUST_CHECK;
void ht_txn_teardown(struct ht_store *s);
/* -EBUSY: there are too many. */
int ht_txn_add_participant(struct ht_store *s, const struct ht_participant *participant) HT_MUST_CHECK;
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

/* Objects of the scope that change from now on are noted (object/scope.h). One at a time: in a transaction. */
struct ht_scope_changes;
void ht_scope_changes_begin(struct ht_scope_changes *c, struct ht_store *s, uint64_t scope) HT_REQUIRES(HT_LOCK_STORE);
void ht_scope_changes_end(struct ht_scope_changes *c) HT_REQUIRES(HT_LOCK_STORE);

/* ---------------------------------------------------------------- moving */

/* move.c: stored bytes with all of their owners; or other bytes instead, with the same content. */
struct ht_move_owner {
    uint64_t oid, index; /* if it is gone it cannot move */
};
struct ht_move {
    struct ht_ref was, now;      /* a copy of the owners' reference; the new place, once it was written */
    struct ht_obj *obj;          /* of an owner, to read and write: the caller keeps its reference so long */
    struct ht_move_owner *owner; /* all of them, in any order */
    unsigned owners;
    uint64_t flush_error_passes; /* when the new place was taken */
    bool keeps;                  /* `now` stays an owner of the new place. move.c alone sets it */
    bool moved;                  /* out */
};
/*
 * *owner has room for need owners then, and those of each move follow those of the one before it. They are the
 * caller's, of malloc. -ENOMEM: nothing changed.
 */
int ht_move_make_room(struct ht_move_owner **owner, unsigned *cap, unsigned need, struct ht_move m[],
                      unsigned count) HT_MUST_CHECK;
/* Of one owner of such bytes in a transaction. A new place has at most as many pieces, but for bad bytes. */
uint32_t ht_move_record_bytes(const struct ht_ref *ref);
enum { HT_MOVE_WRITES_MAX = 16 };
/*
 * Writes bytes (room for whole blocks) to new places, unflushed, as they are stored at m[i].was: all together in
 * flight. A copy takes no more pieces than the original has. The call waits for the permit of a device. No lock, no
 * chunk held. out_rc[i]: -ENOSPC, -EIO: m[i].now is empty. -ENOSPC of the call: of all.
 */
int ht_move_write_copies(struct ht_store *s, struct ht_move m[], uint8_t *const bytes[], unsigned n,
                         struct ht_ring *ring, int out_rc[]) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The same for a compressed frame with so many bytes, of the content at m->was. */
int ht_move_write_frame(struct ht_move *m, struct ht_ring *ring, void *frame, uint32_t len)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * The same for raw content that replaces bad bytes, in as many pieces as it takes. The caller may hold the chunk, and
 * the call waits for no permit.
 */
int ht_move_write_raw(struct ht_move *m, struct ht_ring *ring, void *bytes, uint32_t len)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Are the owners that m names all there are, and has none changed? Asked again when m is published. It may release the
 * lock in between.
 */
bool ht_move_may(struct ht_store *s, const struct ht_move *m) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Flushes, and publishes the new places of all for which no owner has changed meanwhile, in one transaction; gives the
 * other places back. *out_lsn: for ht_store_sync, which frees the old places. An error: nothing was moved, or the log
 * has failed.
 */
int ht_move_publish(struct ht_store *s, struct ht_move m[], unsigned count, uint64_t *out_lsn)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * The same for bad bytes. If not all owners can move, those move that show no more than what was written, and among
 * them the first. If the log has no room for all records at once they move in several transactions. 0: the first one
 * moved; -ESTALE, -EAGAIN: it has changed or is busy, and nothing was done; -ENOSPC: not even for one.
 */
int ht_move_publish_bad(struct ht_store *s, struct ht_move *m, uint64_t *out_lsn)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* --------------------------------------------------------------- sharing */

/* share.c: a chunk as it was when it was read, in numbers: no object keeps its space for it. */
struct ht_sharer_side {
    uint64_t oid, version; /* of the object, before; oid 0: there is none, the bytes are zeros */
    uint64_t index, place;
    uint32_t extra_bytes; /* of its reference's record (ht_ref_extra_bytes) */
};
/* The one that gives up its own bytes for those of the first. */
struct ht_sharer {
    struct ht_sharer_side first, other;
    uint32_t freed_blocks; /* out */
    int rc;                /* out */
};
/* Has the object nothing in memory that is not published, and no space that it may not lose? */
bool ht_obj_may_share(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Is the chunk's content published, on present devices, and nothing newer in memory? Raw bytes and compressed frames
 * may be.
 */
bool ht_chunk_may_share(const struct ht_store *s, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);
/* The chunk, if both may share and nothing has changed since it was read. Or NULL. */
struct ht_chunk *ht_sharer_find(struct ht_store *s, const struct ht_sharer_side *x, struct ht_obj **out_o)
    HT_REQUIRES(HT_LOCK_STORE);
/*
 * Publishes that the other chunks have the bytes of the first ones, which are the same as their own, or are holes.
 * Durable with a later sync. Each rc says what became of one: -ESTALE: object or chunk has changed; -EAGAIN: a thread
 * holds a chunk, or the bytes are not flushed; -ENOSPC: the log has no room for the pieces; -ENOMEM. Then nothing was
 * done with it. An error of the call: none was shared, or the log has failed.
 */
int ht_chunks_share(struct ht_store *s, struct ht_sharer x[], unsigned n) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

struct ht_vault;
/* The record of the store's vault. It has log bytes as long as there is one. */
enum { HT_VAULT_RECORD_BYTES = 8 + 16 + HT_VAULT_URL_BYTES };
void ht_tx_put_vault(struct ht_tx *tx, const struct ht_vault *v);
