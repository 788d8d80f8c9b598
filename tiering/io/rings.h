/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rings.h - a ring for each thread.
 *
 * A thread has one ring for each set that it works with, and one of no set if it needed one before; they are made when
 * it first asks and freed when it ends. A set is what rings know of a store: its memory is registered with them. Closing the set
 * ends its rings, also those of threads that live on, before the store's devices are closed. A forked child has none of its parent's.
 *
 * Threads: any. What is asked for is the calling thread's until the thread or the set ends.
 */
#ifndef HITRAIN_TIERING_IO_RINGS_H
#define HITRAIN_TIERING_IO_RINGS_H

#include "tiering/io/dev.h"

struct ht_rings;

/* areas: copied; the memory stays mapped as it is until the set is freed. */
int ht_rings_new(const struct ht_pinned_area *areas, unsigned count, struct ht_rings **out_rings) HT_CHECK;
/* No thread that has a ring of the set does I/O meanwhile. */
void ht_rings_free(struct ht_rings *rings);

/* This thread's ring of this set; rings NULL: of any, or of none. NULL: none can be had, which was told. */
struct ht_ring *ht_ring_mine(struct ht_rings *rings);

#endif
