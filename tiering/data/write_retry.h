/* SPDX-License-Identifier: Apache-2.0 */
/* write_retry.h - a write that failed goes to another place. */
#ifndef HITRAIN_TIERING_DATA_WRITE_RETRY_H
#define HITRAIN_TIERING_DATA_WRITE_RETRY_H

#include "tiering/data/chunk_io.h"

/*
 * A write failed with io->rc: find a place that takes its bytes, which do not change until then. The caller holds the
 * chunk and the lock; the call releases the lock. 0: io->ref names the place. Else the last error: io->ref names
 * nothing, and the object has no space for the bytes.
 */
int ht_write_retry(struct ht_chunk_io *io, struct ht_ring *ring) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;

#endif
