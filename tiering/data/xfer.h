/* SPDX-License-Identifier: Apache-2.0 */
/* xfer.h - inside data/: requests for the extents of a reference. chunk_io.h is for others. */
#pragma once

#include "tiering/io/dev.h"
#include "tiering/object/ref.h"

struct ht_xfer {
    struct ht_io io_[4], *ios;
    unsigned count;
    unsigned bad_dev; /* after an error: index of the device + 1 (0: no device failed), where, and the device's error */
    uint64_t bad_offset;
    int bad_error;
    uint64_t flush_error_passes; /* of a write: ht_flush_error_passes when its place was taken; set by the caller */
    bool lost;                   /* nothing was read: the chunk is marked lost */
};
/* To the ring, and no further: requests go to the device with the next ht_ring_kick or ht_ring_offer, or a wait. */
int ht_xfer_queue(struct ht_xfer *x, struct ht_store *s, struct ht_ring *ring, const struct ht_ref *ref, void *buf,
                  enum ht_io_op op) HT_MUST_CHECK;
/* Pieces of requests that have not ended; 0: all have. */
unsigned ht_xfer_pieces_left(const struct ht_xfer *x);
/* Frees what queue took. Every error of a device is -EIO: a full one below us (thin, or a file) is not a full store. */
int ht_xfer_wait(struct ht_xfer *x, struct ht_ring *ring) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The error is the one of the first extent. */
void ht_xfer_blame(struct ht_xfer *x, const struct ht_ref *ref, int error);
/* A write succeeded and is about to be installed; -EIO if a flush of its device has failed since. */
int ht_xfer_validate(struct ht_store *s, struct ht_xfer *x, struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Its path, or a text for an absent one. */
const char *ht_device_name(const struct ht_store *s, unsigned device);
