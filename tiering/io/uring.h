/* SPDX-License-Identifier: Apache-2.0 */
/*
 * uring.h - rings of the kernel: its abilities, probed once, and rings set up accordingly.
 *
 * Any thread; a ring itself belongs to the thread that opened it.
 */
#pragma once

#include <liburing.h>

#include "tiering/io/dev.h"

/*
 * Opens a ring with room for depth requests, in the best available mode up to `best`. 0 or -errno, which was reported.
 */
int ht_uring_open(struct io_uring *uring, unsigned depth, enum ht_ring_mode best) HT_MUST_CHECK;
/* settle: the caller is the ring's thread; first releases the files that finished requests still hold. */
void ht_uring_close(struct io_uring *uring, bool settle);

/* Where registered memory is in the ring's table. */
#define HT_URING_AREAS_MAX 8u
struct ht_uring_memory {
    struct ht_pinned_area area[HT_URING_AREAS_MAX];
    unsigned first_segment[HT_URING_AREAS_MAX];
    unsigned count;
};
/* False, and nothing is registered: all works without, slower. */
bool ht_uring_register(struct io_uring *uring, const struct ht_pinned_area *areas, unsigned count,
                       struct ht_uring_memory *out_memory);
/*
 * Takes over the registrations of another ring, which has no requests, in place of its own. False: its own are gone,
 * too.
 */
bool ht_uring_clone(struct io_uring *uring, const struct io_uring *from);
/* The registered segment that holds all of these bytes, or -1. */
int ht_uring_lookup(const struct ht_uring_memory *m, uintptr_t base, uint32_t len);
/* Is this address in registered memory of huge pages? */
bool ht_uring_is_huge(const struct ht_uring_memory *m, uintptr_t base);
