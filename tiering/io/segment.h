/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment.h - a segment of a request: as much as its device does at once. A ring gives it to the kernel until it is
 * done.
 *
 * No state but the segment; the thread of its ring.
 */
#pragma once

#include <hitrain/limits.h>

#include "tiering/io/io_priv.h"
#include "tiering/io/nvme.h"
#include "tiering/io/uring.h"

/* The part that is still to be moved. */
struct ht_segment {
    struct ht_io *io;
    uint32_t at, len;
    unsigned tries;                     /* raw: after these the controller wanted another try */
    bool unregistered;                  /* raw: the kernel refused it once, perhaps for its registered memory */
    uint8_t range[HT_NVME_RANGE_BYTES]; /* raw: of a discard */
    struct ht_segment *next_free;
};

/* The registrations that the kernel knows by a number, in one ring. */
struct ht_registered {
    struct ht_uring_memory memory;
    const struct ht_dev *file[2 * HT_DEVICES_MAX]; /* a place is the kernel's number */
    unsigned file_count;
};

/* Asks the kernel for the whole rest, by the kind of the device. */
void ht_segment_prepare(struct ht_segment *p, const struct ht_registered *known, struct io_uring_sqe *sqe);
/* After a completion. 0: it is done; 1: submit the rest; -EAGAIN: submit it later; else the error it ends with. */
int ht_segment_complete(struct ht_segment *p, int res) HT_MUST_CHECK;
