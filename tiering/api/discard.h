/* SPDX-License-Identifier: Apache-2.0 */
/* discard.h - devices forget what free space held: an SSD then has less to move, and a sparse file takes less. */
#ifndef HITRAIN_TIERING_API_DISCARD_H
#define HITRAIN_TIERING_API_DISCARD_H

#include "tiering/base/base.h"

struct ht_store;

/*
 * Discards all free space in runs of at least 64 KiB, in this thread, whatever the options say. WAITS. *out_bytes: how
 * much. -EROFS; -EOPNOTSUPP: no device can; -ECANCELED: ht_store_trim_cancel was called; or the error of a device.
 */
int ht_store_trim(struct ht_store *s, uint64_t *out_bytes) HT_MUST_CHECK;
/* The store is about to be unmounted: ends every trim after its batch, for good. Any thread, any lock held. */
void ht_store_trim_cancel(struct ht_store *s);

#endif
