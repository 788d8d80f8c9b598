/* SPDX-License-Identifier: Apache-2.0 */
/*
 * piece.h - a piece of a request: as much as its device does at once. A ring gives it to the kernel until nothing of it is left.
 *
 * No state but the piece; the thread of its ring.
 */
#ifndef HITRAIN_TIERING_IO_PIECE_H
#define HITRAIN_TIERING_IO_PIECE_H

#include <hitrain/limits.h>

#include "tiering/io/io_priv.h"
#include "tiering/io/nvme.h"
#include "tiering/io/uring.h"

/* What is left to be moved of it. */
struct ht_piece {
    struct ht_io *io;
    uint32_t at, len;
    unsigned tries;                     /* raw: after which the controller wanted another one */
    bool unregistered;                  /* raw: the kernel refused it once, perhaps for its registered memory */
    uint8_t range[HT_NVME_RANGE_BYTES]; /* raw: of a discard */
    struct ht_piece *next_free;
};

/* What the kernel knows by a number, in one ring. */
struct ht_registered {
    struct ht_uring_memory memory;
    const struct ht_dev *file[2 * HT_DEVICES_MAX]; /* a place is the kernel's number */
    unsigned file_count;
};

/* Ask the kernel for all of what is left, by the kind of the device. */
void ht_piece_prepare(struct ht_piece *p, const struct ht_registered *known, struct io_uring_sqe *sqe);
/* After a completion. 0: it is done; 1: the kernel is to be asked for the rest; -EAGAIN: so it is, later; else the error it ends with. */
int ht_piece_take(struct ht_piece *p, int res) HT_CHECK;

#endif
