/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk_io.h - the one way of a chunk's bytes between memory and devices.
 *
 *   read:  start -----> finish: wait, verify -----> bytes, or an error
 *   write: prepare: what is stored -> place -> start -> wait -> finish: another place if that one failed, install
 *                                       |
 *                                       +---> cancel
 *
 * A read that has finished gives the first ref.visible bytes of the content; a compressed one was decoded in place.
 * Prepare alone decides how the bytes are stored (codec, sizes, checksum), place where; nothing later changes the
 * former. The caller sets obj and index of a struct ht_chunk_io, and keeps it from its start to its finish. Starting
 * queues requests on the ring. So a caller starts many, sends them together (ht_ring_offer, ht_ring_kick), and finishes
 * them.
 */
#pragma once

#include "tiering/base/event.h"
#include "tiering/base/guarded.h"
#include "tiering/io/dev.h"
#include "tiering/io/gate.h"
#include "tiering/object/ref.h"
#include "tiering/tier/placement.h"

struct ht_obj;
struct ht_chunk;

/* Requests for the extents of a reference. */
struct ht_xfer {
    struct ht_io io_[4], *ios;
    unsigned count;
    unsigned bad_dev; /* after an error: index of the device + 1 (0: no device failed), where, and the device's error */
    uint64_t bad_offset;
    int bad_error;
    uint64_t flush_error_passes; /* of a write: ht_flush_error_passes when its place was taken */
    bool lost;                   /* nothing was read: the chunk is marked lost */
};

struct ht_chunk_io {
    struct ht_obj *obj;
    struct ht_chunk *chunk; /* of a write; NULL: the bytes get a place, and no chunk gets the reference */
    uint64_t index;
    struct ht_ref ref; /* a copy: publishing moves references without the chunk's lock */
    void *data;        /* as they are on the device, in whole blocks; after a read the content */
    struct ht_xfer xfer;
    struct ht_permit permit; /* of a batch; it gives it back */
    int rc;                  /* the first error */
    bool as_stored;          /* in, of a read: verify the bytes and leave a compressed frame as it is */
    bool mismatch;           /* of a read: the bytes came, and they are not those of the checksum */
    bool undecodable;        /* a mismatch: they are, but no encoder writes such a frame */
};

/* Is the checksum of ref that of the chunk's first so many bytes, no fewer? Any thread, with or without the lock. */
bool ht_ref_has_checksum_of(const struct ht_ref *ref, uint32_t bytes);
/* Are these, in memory, all the bytes that ref has stored? As above. */
bool ht_ref_matches(const struct ht_store *s, const struct ht_ref *ref, const void *stored);

/* This thread's ring; NULL: the thread cannot have one. */
struct ht_ring *ht_store_ring(struct ht_store *s);

/* ------ permits of a batch: it has the permit for a chunk before it takes the chunk (io/gate.h) */

enum ht_admission {
    HT_ADMITTED,        /* the lock was held all the time */
    HT_ADMISSION_LATER, /* not beside the requests that the batch has: it completes one, and asks again */
    HT_ADMISSION_AGAIN, /* the call released the lock: the caller looks again at what it wants, and asks again */
};
/*
 * *spare: a permit without a request, which the batch keeps between calls. It fits after HT_ADMITTED, and the request
 * takes it over. holds: the batch has requests in flight, and with them chunks.
 */
enum ht_admission ht_admit(struct ht_store *s, struct ht_permit *spare, const struct ht_permit_request *r, bool holds)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* A read of these bytes. NULL: nothing is read. */
struct ht_permit_request ht_admission_of_ref(const struct ht_store *s, const struct ht_ref *ref);
/* The spare permit becomes that of a request. */
struct ht_permit ht_admission_take(struct ht_permit *spare);

/* ------------------------------------------------- reading, without the lock */

/* Queues a read of io->ref into buf: room for whole blocks, and for what is visible. io->rc: an error, for finish. */
void ht_chunk_read_start(struct ht_chunk_io *io, struct ht_ring *ring, void *buf);
/* Waits and verifies. The error, -EIO or -ENOMEM, is counted and reported. */
int ht_chunk_read_finish(struct ht_chunk_io *io, struct ht_ring *ring) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The same for a caller that goes on without the bytes: an error is neither counted nor reported. */
int ht_chunk_read_finish_quietly(struct ht_chunk_io *io, struct ht_ring *ring) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Several for a thread that holds nothing, and goes on without them: waits for permits, reads on its own ring, and
 * finishes quietly. io->data: the buffer. NULL, of one alone: it gets a staging buffer, which the caller puts
 * (HT_STAGING_FILL). As many are in flight as the gate lets pass. io->rc: the result of each. Returns the first error.
 */
int ht_chunks_read_permitted(struct ht_chunk_io io[], unsigned n) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Starts and finishes the request on the thread's own ring. */
int ht_chunk_read(struct ht_obj *o, uint64_t index, const struct ht_ref *ref, void *buf)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/* --------------------------------------------- writing; the chunk is held */

/*
 * Decides how the bytes are stored, which show visible bytes of content: io->ref, without a place. Pads data to whole
 * blocks. Nothing changes data from here to the finish.
 */
void ht_chunk_write_prepare(struct ht_chunk_io *io, void *data, uint32_t bytes, uint8_t codec, uint32_t visible)
    HT_EXCLUDES(HT_LOCK_STORE);
/* The same for bytes that were read as they are stored at `was`: all but the place stays. */
void ht_chunk_write_prepare_copy(struct ht_chunk_io *io, void *stored, const struct ht_ref *was)
    HT_EXCLUDES(HT_LOCK_STORE);
/*
 * Takes space for io->ref. An object with a rewrite reserve has space for two copies only: if there is no more, the
 * call gives up the chunk's unpublished one for the bytes that replace it. Without a chunk the space is nobody's yet.
 * After an error io->ref names nothing. The caller holds the lock, which the call may release.
 */
int ht_chunk_write_place(struct ht_chunk_io *io, struct ht_alloc_hint hint) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Instead of a start: gives the space back. */
void ht_chunk_write_cancel(struct ht_chunk_io *io) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Queues the write. The caller holds the lock; the call releases it, and the caller takes it again when it has sent the
 * request.
 */
void ht_chunk_write_start(struct ht_chunk_io *io, struct ht_ring *ring) HT_RELEASE(HT_LOCK_STORE);
/* Waits for the device. */
void ht_chunk_write_wait(struct ht_chunk_io *io, struct ht_ring *ring) HT_EXCLUDES(HT_LOCK_STORE);
/*
 * After wait: io->ref becomes the chunk's current reference. Another place replaces one that failed.
 * After an error the chunk has its old reference, and io->ref names nothing. The caller holds the lock, which the call
 * may release. Without a chunk the caller gets io->ref, and no other place is tried.
 */
int ht_chunk_write_finish(struct ht_chunk_io *io, struct ht_ring *ring) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Pieces of its requests that have not ended; 0: all have. */
unsigned ht_chunk_write_pieces_left(const struct ht_chunk_io *io);
/* Counts and reports a write that failed with rc. then: the further use of the bytes. */
void ht_chunk_write_report(const struct ht_chunk_io *io, int rc, const char *then) HT_REQUIRES(HT_LOCK_STORE);

/*
 * After an error rc: the object, and the device, offset and error of the failed request. device is NULL if no device
 * failed.
 */
struct ht_event_about ht_chunk_io_about(const struct ht_chunk_io *io, int rc);

/*
 * ----- fill.c: the bytes of images. The caller holds the lock, which the calls may release, and the chunk exclusively
 */

/*
 * All of the image is valid afterwards. content: that of the chunk's newest reference, verified; NULL: it is read.
 * -EREMOTE: it lies in the vault (cold.h).
 */
int ht_chunk_fill(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const uint8_t *content)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;

/* A thread that has some waits for another chunk only after finishing them all. */
enum { HT_READ_BATCH_MAX = 32 };
struct ht_read_batch {
    struct ht_store *s;
    struct ht_ring *ring;
    bool report;            /* errors */
    int error;              /* the first */
    struct ht_permit spare; /* for the next one; it goes back with the last */
    unsigned first, count;
    struct ht_chunk_io job[HT_READ_BATCH_MAX]; /* in flight, oldest first */
};
/*
 * Reads into the new image of a chunk that is stored and held exclusively; the batch has a free place. Lock held;
 * releases it in between.
 */
void ht_read_batch_start(struct ht_read_batch *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE);
/*
 * Finishes the oldest: its chunk gets free, without an image if it cannot be read. Releases the lock in between.
 */
void ht_read_batch_finish(struct ht_read_batch *w) HT_REQUIRES(HT_LOCK_STORE);
void ht_read_batch_finish_all(struct ht_read_batch *w) HT_REQUIRES(HT_LOCK_STORE);
