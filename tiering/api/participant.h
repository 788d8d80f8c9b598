/* SPDX-License-Identifier: Apache-2.0 */
/*
 * participant.h - a participant of the commit: metadata of another layer that lives in the store's log.
 *
 * A participant has record types of its own, keeps published and unpublished state in memory, and registers before the
 * mount (ht_store_register). The store calls it in these orders, each participant in the order of registration:
 *
 *   mount        replay for each record, then replayed
 *   checkpoint   emit until it has put all published state
 *   commit       pending_bytes, then publish
 *   abort        abort
 *   a scope ends ended
 *
 * Lock order: transaction > names (fs/ns) > optimizer > store. A function here takes the participant's own lock. All
 * but replay, replayed and pending_bytes run inside a transaction, so between two participants nothing else is
 * published.
 */
#pragma once

#include "tiering/base/base.h"
#include <hitrain/participants.h>

struct ht_store;
struct ht_copy;
struct ht_tx;

/* Memory for each byte that metadata which lives reserves in the log: the bound of a replay (txn/replay.c). */
enum { HT_META_OF_LOG_BYTE_MAX = 13 };

enum ht_scope_end {
    HT_SCOPE_DISSOLVED, /* its files have left it, and go on outside of model roots */
    HT_SCOPE_DELETED,   /* its directory has lost its name; files that are still open follow */
};

/* Metadata of other layers that lives in the same log. It takes all records of the types [type_first, type_last]. */
struct ht_participant {
    uint16_t type_first, type_last;
    void *ctx;
    /*
     * One record; called in log order during mount. -EUCLEAN: malformed. Unknown ids are no error: a later record
     * decides. There is no journal yet: the participant reserves log bytes in replayed.
     */
    int (*replay)(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len);
    /* The whole log was replayed: check and link up. -EUCLEAN refuses the mount. */
    int (*replayed)(void *ctx);
    /*
     * Checkpoint: puts published state into tx, about max_bytes, starting at *cursor (0 at first) and advancing it.
     * Called inside a transaction, with no other lock held. 1: more to come, 0: complete, or -errno.
     */
    int (*emit)(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes);
    /*
     * The participant's part in a commit and in an abort of a scope (tiering/txn/commit.c); each may be NULL.
     * pending_bytes: about how many bytes publish would put now. The caller holds no lock, or the transaction's.
     */
    size_t (*pending_bytes)(void *ctx, uint64_t scope);
    /*
     * Puts everything unpublished of the scope into tx: it is published from then on. Called inside a transaction.
     * expected_bytes: what pending_bytes returned inside this transaction. Memory is reserved for so many, so a
     * participant that may leave a part to the next commit puts no more.
     */
    void (*publish)(void *ctx, uint64_t scope, size_t expected_bytes, struct ht_tx *tx);
    /* Restores the published state. Called inside a transaction that publishes nothing; never for scope 0. */
    void (*abort)(void *ctx, uint64_t scope);
    /*
     * The scope ends with this transaction (ht_scope_end): forgets it, pending changes included, and puts that into tx.
     * May delete objects. Never fails; never for scope 0. Called again when the inode of a deleted directory goes, also
     * by a later mount: a scope that the participant does not know is no error.
     */
    void (*ended)(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx);
    /*
     * The participant's part in a copy of a scope (tiering/txn/keep.c); each may be NULL. copy: makes everything that
     * the copy needs, except what the publication of the scope may still change. Inside a transaction without records.
     * An error (-ENOMEM, -ENOSPC) leaves nothing behind. copied: the scope is published; puts the copy into tx. Never
     * fails. copy_dropped: takes back what copy has made, instead of copied.
     */
    int (*copy)(void *ctx, struct ht_copy *k);
    void (*copied)(void *ctx, struct ht_copy *k, struct ht_tx *tx);
    void (*copy_dropped)(void *ctx, struct ht_copy *k);
    /*
     * The store is full. could_give: bytes of space that is needed by no promise. give_up: gives up so many bytes of
     * it, and no more than it has to; returns how many they were. Both may be NULL. The caller holds no lock.
     */
    uint64_t (*could_give)(void *ctx);
    uint64_t (*give_up)(void *ctx, uint64_t bytes);
    /* Heap of all that it has replayed. Called between two records. May be NULL. */
    uint64_t (*meta_bytes)(void *ctx);
};

/* How the programs make a participant. Each row of HT_PARTICIPANTS has one of these. */
struct ht_participant_type {
    /* Makes it and registers it. setup: what the program knows already, or NULL; the type is the participant's own. */
    int (*make)(struct ht_store *s, const void *setup, void **out);
    int (*start)(void *p); /* after the mount; may be NULL */
    void (*free)(void *p);
};
#define HT_PARTICIPANT_TYPE(ID, name, first, last) extern const struct ht_participant_type ht_participant_##name;
HT_PARTICIPANTS(HT_PARTICIPANT_TYPE)
#undef HT_PARTICIPANT_TYPE
