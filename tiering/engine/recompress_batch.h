/* SPDX-License-Identifier: Apache-2.0 */
/* recompress_batch.h - inside engine/: frames of chunks, written one by one and published together. */
#pragma once

#include "tiering/txn/txn.h"

struct ht_encoder;

/* The batch is full with so many owners; those of its last frame may exceed that. */
enum { HT_RECOMPRESS_FRAMES_MAX = 64, HT_RECOMPRESS_OWNERS = 1024 };

/* One thread's. */
struct ht_recompress_batch {
    struct ht_store *s;
    struct ht_encoder *encoder;
    void *raw, *frame; /* a chunk each */
    /* Frames that were written and wait for their transaction, without objects. */
    struct ht_move move[HT_RECOMPRESS_FRAMES_MAX];
    struct ht_move_owner *owner; /* of all, in the order of the frames */
    unsigned count, owners, owners_cap;
    uint64_t blocks; /* of the frames */
    uint64_t lsn;    /* of the last transaction; 0: all are durable */
};

/* -ENOMEM: destroy it all the same. */
int ht_recompress_batch_init(struct ht_recompress_batch *b, struct ht_store *s) HT_MUST_CHECK;
/* Its memory. Frames that wait were given back before, unless the store's allocator is gone, too. */
void ht_recompress_batch_destroy(struct ht_recompress_batch *b);
uint64_t ht_recompress_batch_bytes(const struct ht_recompress_batch *b); /* heap */
/*
 * Reads content with its owners, encodes it and writes the frame. m->was is a copy of the owner's published reference
 * that shows most. The batch is not full. *out_bytes: read and written. An error: nothing of that kind will succeed
 * now. Content that cannot be read, or of which the frame saves too little, stays as it is.
 */
int ht_recompress_batch_add(struct ht_recompress_batch *b, const struct ht_move *m, uint64_t *out_bytes)
    HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The same for content that was read, and for which there may be too little space. */
int ht_recompress_batch_encode(struct ht_recompress_batch *b, const struct ht_move *m, const void *content,
                               uint64_t *out_bytes) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* It is time to publish. */
bool ht_recompress_batch_is_full(struct ht_recompress_batch *b) HT_EXCLUDES(HT_LOCK_STORE);
/*
 * A flush and a transaction for frames that wait; one more for content of very many owners. Chunks that have changed
 * meanwhile keep their content.
 */
int ht_recompress_batch_publish(struct ht_recompress_batch *b) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The space of frames that wait. */
void ht_recompress_batch_give_back(struct ht_recompress_batch *b) HT_EXCLUDES(HT_LOCK_STORE);
