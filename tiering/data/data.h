/* SPDX-License-Identifier: Apache-2.0 */
/* data.h - the state of data/, and what it does beside the I/O of chunks. */
#pragma once

#include "tiering/io/dev.h"

struct ht_journal_report;
struct ht_store;
struct ht_store_stats;

/* Before and after everything else. -ENOMEM */
int ht_data_setup(struct ht_store *s) HT_MUST_CHECK;
void ht_data_teardown(struct ht_store *s);
/* From now on chunks may be compressed: reading one never fails for want of a decoder. -ENOMEM */
int ht_data_need_decoder(struct ht_store *s) HT_MUST_CHECK;
/* Heap that it holds for decoders and encoders. */
uint64_t ht_data_bytes(struct ht_store *s);

/*
 * --- write_frame.c: a chunk that is written for the first time becomes a compressed frame at once, if that is faster
 */

/* txn/tx.c and the mount: the superblocks say that there may be frames. */
void ht_write_frames_durable(struct ht_store *s);
/* Shall they say so? The engine that does it asks. */
bool ht_write_frames_asked(const struct ht_store *s);
/* How many chunks became frames when they were written, and the bytes that these take less. */
void ht_write_frame_figures(const struct ht_store *s, uint64_t *out_chunks, uint64_t *out_saved_bytes);

/* shares.c: before a device is chosen: brings the shares of new content up to date, if that is due. */
void ht_shares_update(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);

/*
 * --- health.c: how the devices do, for callers that must not wait for one that does not answer. Sets of devices are
 * bits.
 */

/* Counts what the devices took in a day, warns by an event if it exceeds the budget, and sets its figures in out. */
void ht_endurance_stats(struct ht_store *s, struct ht_store_stats *out) HT_REQUIRES(HT_LOCK_STORE);
/* The present state of the device; reports changes, and remembers them for placement. */
enum ht_health ht_store_check_device(struct ht_store *s, unsigned device) HT_REQUIRES(HT_LOCK_STORE);
/* Its path, or a text for an absent one, or the vault. */
const char *ht_device_name(const struct ht_store *s, unsigned device);
/* Time between two looks of the background. */
uint64_t ht_health_period_ns(const struct ht_store *s);
/* Of superblocks and log on a device, which are not space for data. */
uint64_t ht_store_fixed_bytes(const struct ht_store *s, unsigned device);
/* Space for data on all devices that take new content. */
uint64_t ht_store_data_bytes(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);

/* Devices with a copy of the log that is written: without these nothing becomes durable. */
uint32_t ht_log_devices(const struct ht_store *s);
/*
 * Devices that a commit of the scope waits for, including those of other threads' requests.
 * Releases the lock in between.
 */
uint32_t ht_commit_devices_locked(struct ht_store *s, uint64_t scope) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Returns those of the devices that do not answer. Ends when each has answered or counts as silent, which is after the
 * time that the options allow. The store's lock is not held.
 */
uint32_t ht_probe_devices(struct ht_store *s, uint32_t devices) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Waits for the probes that still run. No other thread works with the store. */
void ht_probes_end(struct ht_store *s);

/* --- members.c: the devices of a store: which are there, and which take part in an epoch */

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
