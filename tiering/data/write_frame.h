/* SPDX-License-Identifier: Apache-2.0 */
/* write_frame.h - a chunk that is written for the first time becomes a compressed frame at once, if that is faster. */
#pragma once

#include "tiering/data/write_batch.h"

/*
 * May so many bytes of the image become a frame? Of files outside models that may be compressed, chunks that are whole
 * and new: content that is written again and again would be compressed each time.
 */
bool ht_write_frame_may(const struct ht_obj *o, struct ht_chunk *c, uint32_t bytes) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Prepares a frame of the image's bytes in a staging buffer, which belongs to the job then. The caller holds the chunk;
 * the call may finish older writes of the batch. False: nothing was prepared. *out_vain: a frame would save too little.
 */
bool ht_write_frame_prepare(struct ht_write_batch *w, struct ht_batch_write *j, const void *data, int numa_index,
                            bool *out_vain) HT_EXCLUDES(HT_LOCK_STORE);

/* txn/tx.c and the mount: the superblocks say that there may be frames. */
void ht_write_frames_durable(struct ht_store *s);
/* Shall they say so? The engine that does it asks. */
bool ht_write_frames_asked(const struct ht_store *s);
/* How many chunks became frames when they were written, and the bytes that these take less. */
void ht_write_frame_figures(const struct ht_store *s, uint64_t *out_chunks, uint64_t *out_saved_bytes);
