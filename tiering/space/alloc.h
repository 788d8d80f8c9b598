/* SPDX-License-Identifier: Apache-2.0 */
/*
 * alloc.h - which blocks are free. Rebuilt at mount from the references; never stored.
 *
 * A bitmap per device with the free count of each group of 256 blocks (1 MiB). Large
 * requests take whole free groups first, small ones fill partly used groups.
 *
 * Accounting: available = free + limbo - reserved. "limbo" blocks are free as soon as a
 * log record is durable and the readers have left; the store counts them. A reservation is a promise: an allocation that consumes one
 * cannot fail for want of space, though it may come in pieces.
 *
 * Not locked: the store's lock guards it.
 */
#ifndef HITRAIN_TIERING_SPACE_ALLOC_H
#define HITRAIN_TIERING_SPACE_ALLOC_H

#include "tiering/base/base.h"
#include <hitrain/limits.h>

/* A run of blocks on one device. */
struct ht_extent {
    uint64_t block; /* first, in 4 KiB units from the start of the device */
    uint32_t blocks;
    uint32_t device;
};

struct ht_alloc;

/* device_blocks[i]: size of device i in blocks; 0 for a missing one. Everything starts free. */
int ht_alloc_new(unsigned device_count, const uint64_t device_blocks[], struct ht_alloc **out_alloc) HT_CHECK;
void ht_alloc_free(struct ht_alloc *a);

/* Take a run out of the free space (superblocks, logs, replay). -EEXIST: part of it is taken already (nothing changed);
 * -ERANGE: outside the device. */
int ht_alloc_mark(struct ht_alloc *a, const struct ht_extent *e) HT_CHECK;
/* Give a run back. It must be taken. */
void ht_alloc_release(struct ht_alloc *a, const struct ht_extent *e);
/* Inside its device, and its first block taken. */
bool ht_alloc_begins_taken(const struct ht_alloc *a, const struct ht_extent *e);
bool ht_alloc_is_free(const struct ht_alloc *a, const struct ht_extent *e);

/* Reserve blocks against available space. -ENOSPC. */
int ht_alloc_reserve(struct ht_alloc *a, uint64_t blocks) HT_CHECK;
void ht_alloc_unreserve(struct ht_alloc *a, uint64_t blocks);
/* Blocks that will be free soon (the store's deferred frees). */
void ht_alloc_limbo_add(struct ht_alloc *a, uint64_t blocks);
void ht_alloc_limbo_sub(struct ht_alloc *a, uint64_t blocks);

/*
 * Allocate exactly blocks (1 to 256) in as few runs as can be, contiguous if possible; consumes that much reservation. hint: a device
 * to prefer, or -1. Returns the number of runs written to out (at most HT_FRAGS_MAX),
 * or -EAGAIN when the blocks are only there in limbo (nothing changed; make the log durable and try again).
 */
int ht_alloc_take(struct ht_alloc *a, uint32_t blocks, int hint, struct ht_extent out[HT_FRAGS_MAX]) HT_CHECK;

uint64_t ht_alloc_total(const struct ht_alloc *a);
uint64_t ht_alloc_free_blocks(const struct ht_alloc *a); /* really free now */
uint64_t ht_alloc_available(const struct ht_alloc *a);   /* free + limbo - reserved */
uint64_t ht_alloc_reserved(const struct ht_alloc *a);

#endif
