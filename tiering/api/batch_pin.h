/* SPDX-License-Identifier: Apache-2.0 */
/* batch_pin.h - a few chunks held for one piece of work. */
#pragma once

#include "tiering/io/rings.h"

struct ht_store;
struct ht_obj;

/*
 * A batch pin holds a few chunks for one piece of work: exclusively (update) or shared (read; the chunk is held
 * exclusively all the same). Chunks with an image are used there. Others pass through staging buffers. A batch pin
 * takes all its buffers at once, so batch pins never wait for each other's memory: updates make progress with the
 * staging pool alone.
 *
 *   begin   take the chunks in (object, index) order and the buffers, submit the reads. WAITS. -EINVAL: a chunk to
 *           change lies after the end of an object in shared memory.
 *   wait    until the bytes are there, checksums verified. -EIO: then end with dirty = 0, and finish.
 *   (work on .data)
 *   end     dirty: mark images dirty, or start writing staged chunks to new space
 *   finish  wait for those writes, install their references, release. Must follow end. Readers
 *           see the new content from now on.
 *
 * A thread may have two batch pins open if they share no chunk. It calls begin() for the second only after wait() on
 * the first, and with nowait set. -EAGAIN: the buffers are not there at once (finish the first, then try again).
 */
enum { HT_BATCH_PIN_CHUNKS_MAX = 12 };
enum ht_batch_pin_mode {
    HT_BATCH_PIN_READ,
    HT_BATCH_PIN_UPDATE,    /* read and write */
    HT_BATCH_PIN_OVERWRITE, /* write the whole chunk: the old content is not read */
};
struct ht_batch_pin_chunk {
    struct ht_obj *obj;          /* in; the caller keeps its reference until finish */
    uint64_t index;              /* in: chunk */
    enum ht_batch_pin_mode mode; /* in */
    uint32_t len;                /* out: bytes of this chunk inside the object's size */
    uint8_t *data;               /* out: len bytes, aligned to 4096; holes are zeros */
    bool staged;                 /* out */
    bool waits;    /* in, for READ: the image stays in memory until the content is dropped, if there is room */
    bool consumed; /* in, for READ: the content is dropped after that */
    bool passes;   /* in, for changes: it is read and dropped soon: an image, if content that passes can give room */
};
struct ht_batch_pin {
    struct ht_store *store;
    unsigned count;
    struct ht_batch_pin_chunk chunk[HT_BATCH_PIN_CHUNKS_MAX];
    bool nowait; /* do not wait for staging buffers: for a second batch pin of a thread */
    bool spare;  /* buffers that others leave are for it: one in the store at a time */
    bool here;   /* -EREMOTE: content is in the vault, and it does not wait for that */
    bool final;  /* what changes is published as it is then: its images are written once the devices have time */
    struct ht_ring *ring_;
    void *priv_;
};
int ht_batch_pin_begin(struct ht_batch_pin *l) HT_MUST_CHECK;
int ht_batch_pin_wait(struct ht_batch_pin *l) HT_MUST_CHECK;
/* dirty: bit i set: chunk i was changed (only for UPDATE and OVERWRITE). */
void ht_batch_pin_end(struct ht_batch_pin *l, uint32_t dirty);
int ht_batch_pin_finish(struct ht_batch_pin *l) HT_MUST_CHECK;
