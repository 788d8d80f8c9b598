/* SPDX-License-Identifier: Apache-2.0 */
/* tx.h - transactions: records of metadata that become durable together, and the records of a scope. */
#pragma once

#include "tiering/base/buf.h"
#include "tiering/journal/journal.h"
#include "tiering/api/participant.h"

struct ht_obj;
struct ht_tx; /* a group of log records being collected */

/* ---------------------------------------------------------- transactions */

/*
 * Opens the transaction; bytes: about how much will be put (waits for space in the log). Its lock is held until
 * ht_tx_commit. WAITS.
 */
int ht_tx_begin(struct ht_store *s, size_t bytes, struct ht_tx **out_tx) HT_ACQUIRE_IF_0(HT_LOCK_TX) HT_MUST_CHECK;

/*
 * When a flush of a device fails, the store gives up unflushed writes of that device: they are dirty again. A
 * publication must not miss that. So its transaction begins only if nothing was given up since its writeback began. If
 * the rounds name an object or a scope, it also begins only if nothing of that was written to a device since the flush.
 * Content that is published unflushed is flushed before the log goes on, and if that fails the log ends. Other threads
 * may write on and on, so after HT_ROUNDS_LATE_MAX such rounds it begins all the same.
 *
 *     struct ht_rounds rounds = HT_ROUNDS_OF(obj);
 *     do {
 *         ht_rounds_next(s, &rounds);
 *         rc = ht_obj_writeback_flushed(obj);
 *         if (!rc)
 *             rc = ht_tx_begin_round(s, bytes, &rounds, &tx);
 *     } while (rc == -EAGAIN);
 *
 * -EAGAIN: no transaction is open, begin again with the writeback; -EIO instead after HT_ROUNDS_MAX rounds.
 */
enum { HT_ROUNDS_MAX = 8, HT_ROUNDS_LATE_MAX = 2 };
struct ht_rounds {
    struct ht_obj *obj; /* the object to publish, or a whole scope; or neither is named */
    uint64_t scope;
    bool of_scope, rest; /* rest: without its derived objects */
    uint64_t given_up;
    unsigned count, late;
};
#define HT_ROUNDS_INIT ((struct ht_rounds){.obj = NULL})
#define HT_ROUNDS_OF(object) ((struct ht_rounds){.obj = (object)})
#define HT_ROUNDS_OF_SCOPE(id) ((struct ht_rounds){.scope = (id), .of_scope = true})
#define HT_ROUNDS_OF_REST(id) ((struct ht_rounds){.scope = (id), .of_scope = true, .rest = true})
void ht_rounds_next(struct ht_store *s, struct ht_rounds *r);
int ht_tx_begin_round(struct ht_store *s, size_t bytes, struct ht_rounds *r, struct ht_tx **out_tx)
    HT_ACQUIRE_IF_0(HT_LOCK_TX) HT_MUST_CHECK;

/*
 * For an open transaction without records: announces so many bytes, which can be known only now that no other
 * transaction publishes. -ENOMEM: put nothing, and commit that; later a lack of memory would end the log.
 */
int ht_tx_expect(struct ht_tx *tx, size_t bytes) HT_REQUIRES(HT_LOCK_TX) HT_MUST_CHECK;
/* The buffer records are put into with ht_record_begin/end/put. */
struct ht_buf *ht_tx_records(struct ht_tx *tx);
/*
 * Appends the records. *out_lsn (may be NULL): for ht_store_sync; 0 when there was none. Always closes the transaction.
 * An error means the log has failed: the store is read-only from now on.
 */
int ht_tx_commit(struct ht_tx *tx, uint64_t *out_lsn) HT_RELEASE(HT_LOCK_TX);
/* Waits until everything up to lsn is durable. WAITS. lsn 0 returns at once. */
int ht_store_sync(struct ht_store *s, uint64_t lsn) HT_MUST_CHECK;
/* Reserves log bytes for metadata that begins to exist (before the change), or gives them back when it ends. -ENOSPC */
int ht_store_log_reserve(struct ht_store *s, uint64_t bytes) HT_MUST_CHECK;
void ht_store_log_reserve_force(struct ht_store *s, uint64_t bytes);
void ht_store_log_unreserve(struct ht_store *s, uint64_t bytes);
/*
 * A number never used before in this store, for objects and inodes alike (first: 2). 0: none is left, which happens
 * only with a forged log.
 */
uint64_t ht_store_new_id(struct ht_store *s);
/* Registers an id found in replay. */
void ht_store_saw_id(struct ht_store *s, uint64_t id);

/* ---------------------------------------------------------------- scopes */

/* Writes back every dirty image of the scope's objects, and flushes. WAITS. */
int ht_scope_writeback(struct ht_store *s, uint64_t scope) HT_MUST_CHECK;
/* About how many bytes a commit of the scope would put now, and some for each dirty image. */
size_t ht_scope_pending_bytes(struct ht_store *s, uint64_t scope);
/*
 * Writes the scope back and puts everything unpublished of it into one transaction: from the metadata clients and from
 * its objects. After an error the scope is as before, or the log has failed. *out_lsn: for ht_store_sync, which makes
 * the commit durable. For a model root; ht_store_commit is for scope 0. WAITS.
 */
int ht_scope_commit(struct ht_store *s, uint64_t scope, uint64_t *out_lsn) HT_MUST_CHECK;
/*
 * The same without the content of derived objects (ht_obj_set_derived), for which a client puts what it can be computed
 * from. -EBUSY, with nothing done: a derived object is new, deleted, or was changed otherwise than through a batch pin.
 */
int ht_scope_commit_rest(struct ht_store *s, uint64_t scope, uint64_t *out_lsn) HT_MUST_CHECK;
/* Has a derived object changes that such a commit must not leave out? They may come until its transaction ends. */
bool ht_scope_edited(struct ht_store *s, uint64_t scope);
/* How many derived objects were published with such changes: grows only. 0: the scope is not in memory. */
uint64_t ht_scope_edits_published(struct ht_store *s, uint64_t scope);
/*
 * How often derived objects and other tensors were changed otherwise than through batch pins: grows only, at least by
 * one for each such call, and while a program may store into the memory of one. 0: the scope is not in memory.
 */
uint64_t ht_scope_edits(struct ht_store *s, uint64_t scope);
/*
 * The superblocks have these bits of feat_refuse when the call returns 0: programs that do not know what the log is
 * about to name refuse the store. WAITS.
 */
int ht_store_need_features(struct ht_store *s, uint64_t bits) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Restores the published state of a scope in one transaction: metadata of the clients, then content and sizes. Objects
 * created since are deleted, objects deleted since are there again. The caller holds no batch pin on them. WAITS for
 * chunks in use: a thread that holds one may wait for space that a publication frees, but never for a transaction.
 */
int ht_scope_abort(struct ht_store *s, uint64_t scope) HT_MUST_CHECK;
/*
 * The same without derived objects, after ht_scope_commit_rest: the caller knows that no batch pin has changed them
 * since, and its clients know that they stay. -EBUSY, with nothing done: as for that, or stores into shared memory
 * cannot be found out.
 */
int ht_scope_abort_rest(struct ht_store *s, uint64_t scope) HT_MUST_CHECK;
/*
 * Ends a scope in a transaction of the caller, which has put its own part into tx. Each client forgets the scope,
 * in the order of a commit; then everything unpublished of its objects goes into tx, also what the clients deleted. The
 * caller holds no lock of a client.
 */
void ht_scope_end(struct ht_store *s, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx);
