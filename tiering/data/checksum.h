/* SPDX-License-Identifier: Apache-2.0 */
/* checksum.h - are these the bytes that a reference stored? Any thread, with or without the lock. */
#ifndef HITRAIN_TIERING_DATA_CHECKSUM_H
#define HITRAIN_TIERING_DATA_CHECKSUM_H

#include "tiering/base/base.h"
#include "tiering/object/ref.h"

struct ht_store;

/* Is the checksum of ref that of the chunk's first so many bytes, no fewer? */
bool ht_ref_has_checksum_of(const struct ht_ref *ref, uint32_t bytes);
/* Bytes in memory, all that ref has stored. */
bool ht_ref_matches(const struct ht_store *s, const struct ht_ref *ref, const void *stored);
/* Bytes that were just read from a device: 0, or -EUCLEAN. */
int ht_ref_verify(const struct ht_store *s, const struct ht_ref *ref, const void *stored) HT_MUST_CHECK;

#endif
