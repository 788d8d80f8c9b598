/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.h - pieces of one size for structs that exist by the million: no head in front of each, no rounding.
 *
 * Pieces come from blocks; an empty block goes, except one. No lock: the owner's. In builds with AddressSanitizer each
 * piece is an allocation of its own, so that every misuse of one is found.
 */
#pragma once

#include "tiering/base/list.h"

struct ht_pool {
    uint32_t piece_bytes;
    uint32_t idle;       /* blocks that are empty */
    struct ht_list open; /* blocks with free pieces */
};

enum { HT_POOL_PIECE_BYTES_MAX = 1024 };

/* piece_bytes is rounded up to whole 8 bytes. */
void ht_pool_init(struct ht_pool *p, size_t piece_bytes);
/* Zeros, or NULL: no memory. */
void *ht_pool_get(struct ht_pool *p);
/*
 * Returns what the caller frees, at once or when it has let its locks go: a block that became empty, or NULL. The last
 * free() of many blocks takes milliseconds. piece NULL: none.
 */
void *ht_pool_put(struct ht_pool *p, void *piece) HT_MUST_CHECK;
/* Is each piece an allocation of its own? */
bool ht_pool_is_apart(void);
/* All pieces were put. */
void ht_pool_destroy(struct ht_pool *p);
