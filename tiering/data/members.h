/* SPDX-License-Identifier: Apache-2.0 */
/* members.h - the devices of a store: which are there, and which take part in an epoch. */
#pragma once

#include "tiering/io/dev.h"

struct ht_store;
struct ht_journal_report;

/* Reads the superblocks; puts devices into the order of their indices, missing ones as NULL. Reports errors. */
int ht_store_gather(struct ht_store *s, struct ht_dev *const devs[], unsigned n) HT_MUST_CHECK;
/* The caller's list: members by index, then the devices that are none. */
void ht_store_put_in_order(const struct ht_store *s, struct ht_dev *devs[], unsigned n);
/* Before a store that will be written is replayed: nobody else has it (claim.h). */
int ht_store_claim(struct ht_store *s) HT_MUST_CHECK;
/* It was not mounted, and nothing was written. */
void ht_store_unclaim(struct ht_store *s);
/* A new epoch, in superblocks and log. */
int ht_store_begin_epoch(struct ht_store *s, const struct ht_journal_report *report) HT_MUST_CHECK;

/*
 * Writes sb to all members. A member that cannot be written is excluded, as long as another one has the log; it is
 * tried again each time while its own copy of the log is written. super_lock held.
 */
int ht_store_write_super(struct ht_store *s) HT_REQUIRES(HT_LOCK_SUPER) HT_MUST_CHECK;
void ht_store_report_missing(struct ht_store *s);
/* The journal's copy_lost. */
int ht_store_copy_lost(void *ctx, unsigned copy);
/* The journal's copy_back. */
int ht_store_copy_back(void *ctx, unsigned copy);
