/* SPDX-License-Identifier: Apache-2.0 */
/*
 *   image of a new chunk --worth it--> encoded into a staging buffer --> written and published as any other
 *                    |                          |
 *                    |                          '-- no buffer, no encoder, or it saves too little
 *                    v                          v
 *                  raw bytes, straight from the image
 *
 * The image stays as it is, and is clean afterwards. A write that fails makes it dirty again, so the frame is never the
 * only copy before the device has it.
 */
#include "tiering/data/write_frame.h"

#include "tiering/base/mutant.h"
#include "tiering/cache/staging.h"
#include "tiering/data/data_priv.h"
#include "tiering/object/context.h"

bool ht_write_frame_may(const struct ht_obj *o, struct ht_chunk *c, uint32_t bytes)
{
    return o->compress && o->scope->id == 0 && o->obj_class == HT_CLASS_DURABLE && !o->extra->shm &&
        !o->extra->rewrite_reserve_blocks && bytes == ht_obj_bytes_per_chunk(o) && !ht_chunk_ref(c) && !c->prealloc &&
        o->s->opts.compress_inline != HT_INLINE_OFF;
}

/*
 * Readers of cold content need buffers of this kind, too: at most half are for frames of one thread, which waits for
 * its own writes, and for nothing else.
 */
static void *take_buffer(struct ht_write_batch *w, int numa_index)
{
    struct ht_staging *staging = w->s->staging;
    unsigned most = ht_staging_count(staging, HT_STAGING_FILL) / 2;
    void *buf;

    ht_store_lock(w->s);
    while (w->copies >= most)
        ht_write_batch_finish(w);
    ht_store_unlock(w->s);
    return ht_staging_get(staging, HT_STAGING_FILL, 1, true, numa_index, &buf) ? NULL : buf;
}

bool ht_write_frame_prepare(struct ht_write_batch *w, struct ht_batch_write *j, const void *data, int numa_index,
                            bool *out_vain)
{
    struct ht_encoders *e = &w->s->data->encoders;

    *out_vain = false;
    if (!ht_encode_is_worth_now(w->s))
        return false;
    if (!e->durable && !HT_MUTANT("frame-early")) {
        e->asked = true;
        return false;
    }
    void *frame = take_buffer(w, numa_index);
    if (!frame)
        return false;
    int len = ht_encode_now(w->s, data, j->bytes, frame);
    if (len <= 0) {
        *out_vain = len == 0;
        ht_staging_put(w->s->staging, HT_STAGING_FILL, frame);
        return false;
    }
    uint32_t saved = j->bytes - (uint32_t)ht_round_up((uint32_t)len, HT_BLOCK_BYTES);
    ht_chunk_write_prepare_frame(&j->io, frame, (uint32_t)len, j->bytes);
    j->copy = frame;
    j->bytes = (uint32_t)len;
    w->copies++;
    e->chunks++;
    e->saved_bytes += saved;
    return true;
}

void ht_write_frames_durable(struct ht_store *s)
{
    s->data->encoders.durable = true;
}

bool ht_write_frames_asked(const struct ht_store *s)
{
    return s->data->encoders.asked && !s->data->encoders.durable;
}

void ht_write_frame_figures(const struct ht_store *s, uint64_t *out_chunks, uint64_t *out_saved_bytes)
{
    *out_chunks = s->data->encoders.chunks;
    *out_saved_bytes = s->data->encoders.saved_bytes;
}
