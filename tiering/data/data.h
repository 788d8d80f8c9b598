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

/* shares.c: before a device is chosen: brings the shares of new content up to date, if that is due. */
void ht_shares_update(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);

/* health.c: counts what the devices took in a day, and warns by an event if it exceeds the budget. */
void ht_endurance_check(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/* The same, and sets its figures in out. */
void ht_endurance_stats(struct ht_store *s, struct ht_store_stats *out) HT_REQUIRES(HT_LOCK_STORE);
