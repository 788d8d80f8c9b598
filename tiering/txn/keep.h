/* SPDX-License-Identifier: Apache-2.0 */
/* keep.h - the steps of a copy of a scope within a transaction (tiering/api/keep.h). */
#pragma once

#include "tiering/api/keep.h"

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
/* Shares what is published now, and puts the copy into the transaction. An error: the copy is gone, with no record. */
int ht_keep_put(struct ht_keep *w, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_TX) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Ends a copy that was put, or none. */
void ht_keep_end(struct ht_keep *w) HT_REQUIRES(HT_LOCK_TX);
/* Takes back what ht_keep_make has made, if anything. */
void ht_keep_drop(struct ht_keep *w) HT_REQUIRES(HT_LOCK_TX) HT_EXCLUDES(HT_LOCK_STORE);
