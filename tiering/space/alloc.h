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
#include "tiering/space/placement.h"
#include <hitrain/limits.h>

/* A run of blocks on one device. */
struct ht_extent {
    uint64_t block; /* first, in 4 KiB units from the start of the device */
    uint32_t blocks;
    uint32_t device;
};

struct ht_alloc;

/* device_blocks[i]: size of device i in blocks. Everything starts free. */
int ht_alloc_new(unsigned device_count, const uint64_t device_blocks[], struct ht_alloc **out_alloc) HT_CHECK;
void ht_alloc_free(struct ht_alloc *a);
/* Heap for its maps: 34 MiB for each TiB of devices that was ever in use. */
uint64_t ht_alloc_meta_bytes(const struct ht_alloc *a);
/* The device is not there: its blocks are marked and released as ever, but they count nowhere and none is allocated. For good. */
void ht_alloc_set_offline(struct ht_alloc *a, unsigned device);
/* Allocate there only when nothing else is left, or not any more so. */
void ht_alloc_set_failing(struct ht_alloc *a, unsigned device, bool failing);

/* Take a run out of the free space (superblocks, logs, replay). -EEXIST: part of it is taken already (nothing changed);
 * -ERANGE: outside the device. */
int ht_alloc_mark(struct ht_alloc *a, const struct ht_extent *e) HT_CHECK;
/* Its marking follows soon: places of neighbours in a file are anywhere, and each would wait for memory. */
void ht_alloc_prefetch(const struct ht_alloc *a, const struct ht_extent *e);
/* Give a run back. It must be taken. */
void ht_alloc_release(struct ht_alloc *a, const struct ht_extent *e);
/*
 * A taken run that does not hold what is written to it stays taken until the next mount. False: so much of the device is bad already that
 * it is not the place's fault; then the caller keeps the run.
 */
bool ht_alloc_keep_bad(struct ht_alloc *a, const struct ht_extent *e) HT_CHECK;
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
 * Allocate exactly blocks (1 to 256) in as few runs as can be, contiguous if possible; consumes that much reservation. Which
 * device: placement.h. Returns the number of runs written to out (at most HT_FRAGS_MAX),
 * or -EAGAIN when the blocks are only there in limbo (nothing changed; make the log durable and try again).
 */
int ht_alloc_take(struct ht_alloc *a, uint32_t blocks, struct ht_place_wish wish,
                  struct ht_extent out[HT_FRAGS_MAX]) HT_CHECK;
/* Undo a take: its runs are free again, and its reservation is there again. n: what it returned. */
void ht_alloc_untake(struct ht_alloc *a, const struct ht_extent e[], int n);
/* The device that so many blocks would come from now, or -1. */
int ht_alloc_choose(const struct ht_alloc *a, uint32_t blocks, struct ht_place_wish wish);

uint64_t ht_alloc_total(const struct ht_alloc *a);
uint64_t ht_alloc_free_blocks(const struct ht_alloc *a); /* really free now */
/* Of these, in groups that are free as a whole: while there are such, nothing is allocated in pieces. */
uint64_t ht_alloc_whole_blocks(const struct ht_alloc *a);
uint64_t ht_alloc_available(const struct ht_alloc *a); /* free + limbo - reserved */
uint64_t ht_alloc_reserved(const struct ht_alloc *a);
/* Of the extent's blocks those that come free when it is released: none on a device that is not there. */
uint32_t ht_alloc_countable(const struct ht_alloc *a, const struct ht_extent *e);
struct ht_alloc_device {
    uint64_t blocks, free_blocks, bad_blocks;
};
void ht_alloc_device(const struct ht_alloc *a, unsigned device, struct ht_alloc_device *out);

#endif
