/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fill.c - brings the bytes of chunks into their images.
 *
 * One by one: an image is valid in one interval, up to its own end at most. A write next to the interval extends it.
 * Any other write first fills the rest from the reference, so that sequential writers never read.
 *
 * Several at once: each chunk is held exclusively from the start of its read until it has been verified, so that no
 * reader sees unverified bytes. The oldest read is finished first.
 */

#include "tiering/data/chunk_io.h"
#include "tiering/cache/staging.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"

static void copy_outside(uint8_t *dst, const uint8_t *src, uint32_t visible, uint32_t lo, uint32_t hi)
{
    uint32_t left = visible < lo ? visible : lo;

    memcpy(dst, src, left);
    if (visible > hi)
        memcpy(dst + hi, src + hi, visible - hi);
}

/* Reads around the valid part [lo, hi) of an image, through a staging buffer. */
static int merge_ref(struct ht_obj *o, uint64_t index, const struct ht_ref *ref, uint8_t *data, uint32_t lo,
                     uint32_t hi)
{
    void *buf;
    int rc = ht_staging_get(o->s->staging, HT_STAGING_FILL, 1, false, ht_ref_numa_index(o->s, ref), &buf);

    if (rc)
        return rc;
    rc = ht_chunk_read(o, index, ref, buf);
    if (!rc)
        copy_outside(data, buf, ref->visible, lo, hi);
    ht_staging_put(o->s->staging, HT_STAGING_FILL, buf);
    return rc;
}

static void zero_outside(uint8_t *data, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi)
{
    if (from < lo)
        memset(data + from, 0, (to < lo ? to : lo) - from);
    if (to > hi)
        memset(data + (from > hi ? from : hi), 0, to - (from > hi ? from : hi));
}

int ht_chunk_fill(struct ht_obj *o, struct ht_chunk *c, uint64_t index, const uint8_t *content)
{
    struct ht_store *s = o->s;

    assert(c->exclusive && c->slot != HT_SLOT_NONE);
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    uint32_t bytes = ht_arena_slot_bytes(s->arena, c->slot), lo = im->valid_lo, hi = im->valid_hi;
    if (lo == 0 && hi == bytes)
        return 0;
    if (c->flags & HT_CH_BAD)
        return -EIO;
    const struct ht_ref *now = ht_chunk_ref(c);
    /* A copy: publishing moves references without the chunk's lock. The space stays ours while we hold the chunk. */
    struct ht_ref ref = now ? *now : (struct ht_ref){0};
    uint8_t *data = ht_arena_data(s->arena, c->slot);
    /* Mapped memory shows verified bytes only, and has no room for a stored block that passes the object's end. */
    bool mapped = ht_chunk_images(o, c)->mapped;
    uint32_t end = ht_image_reach(o, c, index);
    assert(mapped || ref.visible <= bytes);
    uint32_t visible = ref.visible = ht_min_u64(ref.visible, end) & HT_VISIBLE_MASK;
    bool needed = now && (lo == hi ? visible > 0 : lo > 0 || visible > hi);
    if (needed && !content && ht_ref_is_cold(&ref))
        return -EREMOTE;
    ht_store_unlock(s);
    int rc = 0;
    if (needed && content)
        copy_outside(data, content, visible, lo, hi);
    else if (needed)
        rc = lo == hi && !mapped ? ht_chunk_read(o, index, &ref, data) : merge_ref(o, index, &ref, data, lo, hi);
    if (!rc)
        zero_outside(data, visible, end, lo, hi);
    ht_store_lock(s);
    if (needed && !rc && !content)
        ht_obj_count_read(o, &ref);
    if (!rc) {
        im->valid_lo = 0;
        im->valid_hi = bytes;
        im->data_hi = (uint32_t)ht_max_u64(im->data_hi, visible);
    }
    return rc;
}

/* ------------------------------------------------------- several at once */

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
