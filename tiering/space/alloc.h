/* SPDX-License-Identifier: Apache-2.0 */
/*
 * alloc.h - which blocks are free. Rebuilt at mount from the references; never stored.
 *
 * A map per device (space_map.h) in groups of 256 blocks (1 MiB). Large requests take whole free groups first, small
 * ones have groups of their own, and fill these. A request costs the same at any size and fullness of a device.
 *
 * Accounting: available = free + pending_free - reserved. "pending_free" blocks are free as soon as a
 * log record is durable and the readers have left; the store counts them. A reservation holds: an allocation that
 * consumes one cannot fail for want of space, though it may come in pieces.
 *
 * Not locked: the store's lock guards it.
 */
#pragma once

#include "tiering/tier/placement.h"
#include <hitrain/limits.h>

/* A run of blocks on one device. */
struct ht_extent {
    uint64_t block; /* first, in 4 KiB units from the start of the device */
    uint32_t blocks;
    uint32_t device;
};

struct ht_alloc;

/* device_blocks[i]: size of device i in blocks. Everything starts free. */
int ht_alloc_new(unsigned device_count, const uint64_t device_blocks[], struct ht_alloc **out_alloc) HT_MUST_CHECK;
void ht_alloc_free(struct ht_alloc *a);
/* Heap for its maps: 38 MiB for each TiB of devices that was ever in use. */
uint64_t ht_alloc_meta_bytes(const struct ht_alloc *a);
/*
 * The device is absent: its blocks are marked and released as usual, but they count nowhere and none is allocated. For
 * good.
 */
void ht_alloc_set_offline(struct ht_alloc *a, unsigned device);
/* The device is of the class capacity (placement.h). For good. */
void ht_alloc_set_capacity(struct ht_alloc *a, unsigned device);
/* Allocate there only when no other device has space, or end this. */
void ht_alloc_set_failing(struct ht_alloc *a, unsigned device, bool failing);

/* The share of new blocks that each device gets (placement.h): together HT_PLACE_WHOLE, or 0 for all, as at first. */
void ht_alloc_set_shares(struct ht_alloc *a, const uint32_t share[]);
bool ht_alloc_has_shares(const struct ht_alloc *a);
uint32_t ht_alloc_share(const struct ht_alloc *a, unsigned device);

/*
 * Takes a run out of the free space (superblocks, logs, replay). -EEXIST: a part is taken already (nothing changed);
 * -ERANGE: outside the device.
 */
int ht_alloc_mark(struct ht_alloc *a, const struct ht_extent *e) HT_MUST_CHECK;
/* These taken blocks are never released: their groups cannot be emptied, so they are not sparse. */
void ht_alloc_fix(struct ht_alloc *a, const struct ht_extent *e);
/* While it is on, only markings and releases happen: a mount marks all that is in use. They cost less then. */
void ht_alloc_set_marking(struct ht_alloc *a, bool on);
/*
 * Prefetches memory for a marking that follows soon: neighbours in a file have places anywhere, and each marking would
 * wait for memory.
 */
void ht_alloc_prefetch(const struct ht_alloc *a, const struct ht_extent *e);
/* Frees a run. It must be taken. */
void ht_alloc_release(struct ht_alloc *a, const struct ht_extent *e);
/*
 * A taken run that does not hold the bytes written to it stays taken until the next mount. False: so much of the device
 * is bad already that it is not the place's fault; then the caller keeps the run.
 */
bool ht_alloc_keep_bad(struct ht_alloc *a, const struct ht_extent *e) HT_MUST_CHECK;
/* Inside its device, and its first block taken. */
bool ht_alloc_begins_taken(const struct ht_alloc *a, const struct ht_extent *e);
bool ht_alloc_is_free(const struct ht_alloc *a, const struct ht_extent *e);

/* Reserves blocks against available space. -ENOSPC. */
int ht_alloc_reserve(struct ht_alloc *a, uint64_t blocks) HT_MUST_CHECK;
void ht_alloc_unreserve(struct ht_alloc *a, uint64_t blocks);
/* Blocks that will be free soon (the store's deferred frees). */
void ht_alloc_pending_free_add(struct ht_alloc *a, const struct ht_extent *e);
void ht_alloc_pending_free_sub(struct ht_alloc *a, const struct ht_extent *e);

/*
 * Allocates exactly blocks (1 to 256) in as few runs as possible, contiguous if possible; consumes that much
 * reservation. placement.h chooses the device; without a hint they count for its share. Returns the number of runs
 * written to out (at most HT_FRAGS_MAX), or -EAGAIN when the blocks are only there as deferred frees (nothing changed;
 * make the log durable and try again).
 */
int ht_alloc_take(struct ht_alloc *a, uint32_t blocks, struct ht_alloc_hint hint,
                  struct ht_extent out[HT_FRAGS_MAX]) HT_MUST_CHECK;
/* Undoes a take: its runs are free again, and its reservation is there again. n: the take's result. */
void ht_alloc_untake(struct ht_alloc *a, const struct ht_extent e[], int n);
/* The device that so many blocks would come from now, or -1. */
int ht_alloc_choose(const struct ht_alloc *a, uint32_t blocks, struct ht_alloc_hint hint);
/*
 * The same, and counts the blocks for its share: content that is meant for a device and taken later, with the device as
 * a hint.
 */
int ht_alloc_assign(struct ht_alloc *a, uint32_t blocks, struct ht_alloc_hint hint);

/*
 * Discarding. A device may forget what free blocks held, while they are marked as taken: nothing is written there
 * meanwhile. They count as pending_free, so they stay available, and a caller of ht_alloc_take may have to wait for
 * them. Those of a device that fails or does not answer do not count: a discard there may never end.
 *
 * note_freed: from now on the allocator remembers groups in which blocks are released.
 */
void ht_alloc_note_freed(struct ht_alloc *a, bool on);
bool ht_alloc_notes_freed(const struct ht_alloc *a);
bool ht_alloc_has_freed(const struct ht_alloc *a, unsigned device); /* noted groups */
struct ht_alloc_freed_walk {
    unsigned device;
    bool all;      /* all free blocks, and not only those of groups that were noted */
    uint64_t from; /* 0 at the begin */
    bool ended;    /* out: the device has no more */
};
/*
 * Takes free blocks of a device for a discard, at most a quarter of the free ones or 64: no whole group while
 * that is less, so that writers keep the last ones. Returns the number of extents, at most n_max; 0 before the end of
 * the walk means only that the next call continues.
 */
unsigned ht_alloc_take_freed(struct ht_alloc *a, struct ht_alloc_freed_walk *walk, struct ht_extent out[],
                             unsigned n_max);
/* They are free again. */
void ht_alloc_put_freed(struct ht_alloc *a, const struct ht_extent e[], unsigned n);
/* Blocks that are marked as taken for that. awaited: without those of failing devices. */
uint64_t ht_alloc_discarding(const struct ht_alloc *a, bool awaited);
/*
 * Groups of HT_GROUP_BLOCKS blocks, and the taken blocks of one. Sparse groups lie wholly on the device, and some of
 * their blocks are taken, but at most so many: compaction empties them.
 */
enum { HT_GROUP_BLOCKS = 256, HT_SPARSE_TAKEN_MAX = 64 };
#define HT_NO_GROUP UINT64_MAX
unsigned ht_alloc_group_taken(const struct ht_alloc *a, unsigned device, uint64_t group);
/* How many on all devices. */
uint64_t ht_alloc_sparse_groups(const struct ht_alloc *a);
/* Is a good part of the free space in broken groups, of which some are sparse? */
bool ht_alloc_wants_compaction(const struct ht_alloc *a);
/* The first one of a device at or after this group, or HT_NO_GROUP. */
uint64_t ht_alloc_next_sparse(const struct ht_alloc *a, unsigned device, uint64_t from);
/*
 * From now on nothing is allocated in the group. Its free blocks stay free and available: when the device has no other
 * run for a request, the allocator opens all closed groups. The caller closes few at a time.
 */
void ht_alloc_close_group(struct ht_alloc *a, unsigned device, uint64_t group);
bool ht_alloc_is_closed_group(const struct ht_alloc *a, unsigned device, uint64_t group);
void ht_alloc_open_group(struct ht_alloc *a, unsigned device, uint64_t group); /* if it is closed */

uint64_t ht_alloc_total(const struct ht_alloc *a);
uint64_t ht_alloc_free_blocks(const struct ht_alloc *a); /* really free now */
/* Blocks of these in groups that are free as a whole and not closed: while there are such, nothing is in pieces. */
uint64_t ht_alloc_whole_blocks(const struct ht_alloc *a);
uint64_t ht_alloc_available(const struct ht_alloc *a); /* free + pending_free - reserved */
uint64_t ht_alloc_reserved(const struct ht_alloc *a);
/* The blocks of the extent that come free when it is released: none on an absent device. */
uint32_t ht_alloc_countable(const struct ht_alloc *a, const struct ht_extent *e);
struct ht_alloc_device {
    uint64_t blocks, free_blocks, bad_blocks;
    uint64_t ending_blocks; /* deferred frees, and those that are being discarded */
};
void ht_alloc_device(const struct ht_alloc *a, unsigned device, struct ht_alloc_device *out);
/*
 * Asserts that bitmaps and counts agree, and that so many blocks are deferred frees (tiering/base/verify.h). They are
 * pending_free together with those that are being discarded.
 */
void ht_alloc_verify(const struct ht_alloc *a, uint64_t pending_free);
