/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rings.h - a ring for each thread.
 *
 * A thread has one ring for each set that it works with, and one of no set if it needed one before. They are made at
 * the first use and freed when the thread ends. A set is a store from the view of rings: its devices and memory are
 * registered with them. Freeing the set ends its rings, also those of threads that live on; then the devices may be
 * closed. A forked child has none of its parent's.
 *
 * Threads: any. A returned ring is the calling thread's until the thread or the set ends.
 */
#pragma once

#include <hitrain/limits.h>

#include "tiering/io/dev.h"

#define HT_RING_AREAS_MAX 4u

struct ht_rings;

/*
 * The registrations of each ring of a set: they stay as they are until the set is freed. Memory is only registered if
 * there is a device of the kernel.
 */
struct ht_rings_of {
    struct ht_dev *dev[HT_DEVICES_MAX]; /* NULL: none */
    struct ht_pinned_area area[HT_RING_AREAS_MAX];
    unsigned area_count;
};
int ht_rings_new(const struct ht_rings_of *of, struct ht_rings **out_rings) HT_MUST_CHECK;
/*
 * Registers one more area, once for all rings together. If the kernel does not allow them to share it, the area stays
 * unregistered. Pins all memory of the area, which takes long. Once for each set; any thread.
 */
void ht_rings_share(struct ht_rings *rings, const struct ht_pinned_area *area);
/* No thread that has a ring of the set does I/O during this. */
void ht_rings_free(struct ht_rings *rings);

struct ht_rings_stats {
    uint64_t rings, mode, devices; /* mode: enum ht_ring_mode; devices registered with each */
    uint64_t memory_bytes;         /* registered, once for all rings or with each */
};
void ht_rings_stats(struct ht_rings *rings, struct ht_rings_stats *out);

/*
 * This thread's ring of this set; rings NULL: of any, or of none. NULL: there can be no ring, which was reported; errno
 * says why.
 */
struct ht_ring *ht_ring_mine(struct ht_rings *rings);
