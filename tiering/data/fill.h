/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fill.h - the bytes of an image. The caller holds the lock, and the chunk exclusively; the call may release the lock.
 */
#pragma once

#include "tiering/object/chunk.h"

/*
 * All of the image is valid afterwards. -EREMOTE: the content lies in the vault (cold.h).
 */
int ht_chunk_fill(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The same with the verified content of the chunk's newest reference in memory. */
int ht_chunk_fill_with(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const uint8_t *content)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
