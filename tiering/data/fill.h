/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fill.h - the bytes of an image. The caller holds the lock, and the chunk exclusively; the call may release the lock.
 */
#pragma once

#include "tiering/object/chunk.h"

/*
 * All of the image is valid afterwards. content: that of the chunk's newest reference, verified; NULL: it is read.
 * -EREMOTE: it lies in the vault (cold.h).
 */
int ht_chunk_fill(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const uint8_t *content)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
