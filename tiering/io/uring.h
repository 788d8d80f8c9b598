/* SPDX-License-Identifier: Apache-2.0 */
/*
 * uring.h - rings of the kernel: what this one can do, asked once, and rings set up accordingly.
 *
 * Any thread; a ring itself belongs to the thread that opened it.
 */
#ifndef HITRAIN_TIERING_IO_URING_H
#define HITRAIN_TIERING_IO_URING_H

#include <liburing.h>

#include "tiering/io/dev.h"

/* A ring with room for depth requests, in the best mode that there is and that is asked for. 0 or -errno, which was told. */
int ht_uring_open(struct io_uring *uring, unsigned depth, enum ht_ring_mode best) HT_CHECK;
/* settle: the caller is the ring's thread; what requests that ended still hold is given back before. */
void ht_uring_close(struct io_uring *uring, bool settle);

/* Where registered memory is in the ring's table. */
#define HT_URING_AREAS_MAX 8u
struct ht_uring_memory {
    struct {
        uintptr_t base;
        uint64_t bytes;
        unsigned first_piece;
        bool huge;
    } area[HT_URING_AREAS_MAX];
    unsigned count;
};
/* False, and nothing is registered: all works without, slower. */
bool ht_uring_register(struct io_uring *uring, const struct ht_pinned_area *areas, unsigned count,
                       struct ht_uring_memory *out_memory);
/* Take over what is registered with another ring, which works for nobody, in place of one's own. False: one's own is gone, too. */
bool ht_uring_clone(struct io_uring *uring, const struct io_uring *from);
/* The registered piece that holds all of these bytes, or -1. */
int ht_uring_lookup(const struct ht_uring_memory *m, uintptr_t base, uint32_t len);
/* Is this address in registered memory of huge pages? */
bool ht_uring_is_huge(const struct ht_uring_memory *m, uintptr_t base);

/* Open files: false, and none is registered. */
bool ht_uring_register_files(struct io_uring *uring, const int *fds, unsigned count);

#endif
