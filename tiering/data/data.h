/* SPDX-License-Identifier: Apache-2.0 */
/* data.h - the state of data/, and what it does beside the I/O of chunks. */
#pragma once

#include "tiering/base/base.h"

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

/* health.c: counts what the devices took in a day, and warns by an event if it exceeds the budget. */
void ht_endurance_check(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* The same, and sets its figures in out. */
void ht_endurance_stats(struct ht_store *s, struct ht_store_stats *out) HT_REQUIRES(HT_LOCK_STORE);
