/* SPDX-License-Identifier: Apache-2.0 */
/*
 * read_batch.c - reads several chunks into their images at once. Each is held exclusively from its start until it has
 * been verified, so that no reader sees unverified bytes. The oldest read is finished first.
 */
#include "tiering/data/read_batch.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/data/admission.h"

void ht_read_batch_start(struct ht_read_batch *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = w->s;
    struct ht_chunk_io *io = &w->job[(w->first + w->count++) % HT_READ_BATCH_MAX];
    uint8_t *data = ht_arena_data(s->arena, c->slot);

    *io = (struct ht_chunk_io){.obj = o, .chunk = c, .index = index, .ref = *ht_chunk_ref(c)};
    io->permit = ht_admission_take(&w->spare);
    o->refs++;
    ht_store_unlock(s);
    ht_chunk_read_start(io, w->ring, data);
    ht_ring_offer(w->ring);
    ht_store_lock(s);
}

void ht_read_batch_finish(struct ht_read_batch *w)
{
    struct ht_store *s = w->s;
    struct ht_chunk_io *io = &w->job[w->first];
    struct ht_chunk *c = io->chunk;
    uint32_t reach = ht_image_reach(io->obj, c, io->index); /* and in shared memory the rest of a block */
    uint32_t visible = (uint32_t)ht_min_u64(io->ref.visible, reach);

    io->ref.visible = visible & HT_VISIBLE_MASK; /* the decoder writes no more */
    ht_store_unlock(s);
    int rc = w->report ? ht_chunk_read_finish(io, w->ring) : ht_chunk_read_finish_quietly(io, w->ring);
    ht_permit_put(&io->permit);
    if (!rc)
        memset((uint8_t *)io->data + visible, 0, ht_round_up(reach, HT_BLOCK_BYTES) - visible);
    ht_store_lock(s);
    if (!rc) {
        struct ht_image *im = ht_arena_image(s->arena, c->slot);
        im->valid_hi = ht_arena_slot_bytes(s->arena, c->slot);
        im->data_hi = visible;
        ht_obj_count_read(io->obj, &io->ref);
    } else {
        ht_chunk_drop_empty(io->obj, c, io->index);
        w->error = w->error ? w->error : rc;
    }
    ht_chunk_unlock_exclusive(io->obj, c, io->index);
    ht_obj_put_locked(io->obj);
    w->first = (w->first + 1) % HT_READ_BATCH_MAX;
    w->count--;
}

void ht_read_batch_finish_all(struct ht_read_batch *w)
{
    while (w->count)
        ht_read_batch_finish(w);
    ht_permit_put(&w->spare);
}
