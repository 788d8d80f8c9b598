/* SPDX-License-Identifier: Apache-2.0 */
/* txn_priv.h - inside txn/: its state, and the records. */
#pragma once

#include <stdatomic.h>

#include "tiering/base/buf.h"
#include "tiering/base/list.h"
#include "tiering/api/check.h"
#include "tiering/api/keep.h"
#include "tiering/api/store.h"
#include "tiering/object/chunk.h"

/* ----------------------------------------------------------------- state */

struct ht_tx {
    struct ht_store *s;
    struct ht_buf records;
    bool whole;             /* it publishes all that a writeback wrote, or nothing */
    size_t expected_bytes;  /* of records, as it was begun with */
    size_t again_bytes;     /* room for chunks that change while they are published */
    uint64_t found_bytes;   /* ht_scope.found_bytes before the records were counted */
    struct ht_list deleted; /* objects whose deletion is in this transaction, by touched; each holds a reference */
};

enum { HT_TXN_PARTICIPANTS_MAX = 16 };

/* The state of txn/. */
struct ht_txn {
    struct ht_tx tx;     /* tx_lock */
    uint64_t ids_logged; /* the log announces numbers up to here; tx_lock */
    _Atomic uint64_t next_id;
    /* Heap of tx.records after the last transaction. */
    uint64_t records_bytes HT_GUARDED_BY(HT_LOCK_STORE);
    /* Fixed once the store is mounted. */
    struct ht_participant participant[HT_TXN_PARTICIPANTS_MAX];
    unsigned participants;
    struct ht_ref_conflict *conflicts; /* found in replay */
    size_t conflict_count, conflict_cap;
    uint64_t lists_bytes;              /* heap of these, and of other lists that a replay has made */
    struct ht_unknown_records unknown; /* found in replay */
    uint64_t malformed;                /* so were these */
};

/* Each participant c of the store s that has this function. */
#define ht_participant_for_each(c, s, function)                                                                      \
    for (const struct ht_participant *c = (s)->txn->participant; c < (s)->txn->participant + (s)->txn->participants; \
         c++)                                                                                                        \
        if (c->function)

/* The log has failed: the store is read-only from now on. An event says so, once. */
void ht_tx_log_failed(struct ht_store *s, int error);

/* ------------------------------------------- the objects' part in a commit */

/*
 * Bytes that ht_scope_publish would put now, and as much again for each image that may be written back before. rest:
 * without derived objects.
 */
size_t ht_scope_pending_object_bytes(struct ht_store *s, uint64_t scope, bool rest);
/* Some chunks of an object outside of model roots, from *index on: about so many bytes. True: there are more. */
bool ht_obj_publish_part(struct ht_obj *o, uint64_t *index, size_t bytes, struct ht_tx *tx);

/* --------------------------------------------------------------- records */

void ht_record_ids(struct ht_buf *b, uint64_t next);
void ht_record_object(struct ht_buf *b, const struct ht_obj *o, uint64_t size) HT_REQUIRES(HT_LOCK_STORE);
void ht_record_chunk(struct ht_buf *b, const struct ht_obj *o, uint64_t index, const struct ht_chunk *c,
                     const struct ht_ref *r);
void ht_record_chunk_del(struct ht_buf *b, uint64_t oid, uint64_t index);

/* ------------------------------------------------- copies: tiering/api/keep.h */

enum { HT_KEEP_TRIES_MAX = 4 }; /* transactions that a copy begins, each with more room in the log */

/* A copy in progress. */
struct ht_keep {
    struct ht_copy *k;
    bool made;
    unsigned tries;           /* transactions that had too little room for it */
    uint64_t reserved_blocks; /* for the next rewrite of what becomes shared */
};

/*
 * Makes the copy in memory. k->bytes: what its records take. In a transaction without records. An error leaves nothing
 * behind.
 */
int ht_keep_make(struct ht_keep *w) HT_REQUIRES(HT_LOCK_TX) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Shares what is published now, and puts the copy into the transaction, and then the end of kept steps that expire. An
 * error: the copy is gone, with no record.
 */
int ht_keep_put(struct ht_keep *w, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_TX) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Takes back what ht_keep_make has made, if anything. */
void ht_keep_drop(struct ht_keep *w) HT_REQUIRES(HT_LOCK_TX) HT_EXCLUDES(HT_LOCK_STORE);
