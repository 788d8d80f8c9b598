/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fills.c - reading several chunks into their images at once. Each is held exclusively from its start until it has been verified, so
 * that unverified bytes are seen by none; the one that began first is waited for first.
 */
#include "tiering/store/store_priv.h"

void ht_fills_start(struct ht_fills *w, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = w->s;
    struct ht_fill *f = &w->fill[(w->first + w->count++) % HT_FILLS_MAX];
    uint8_t *data = ht_arena_data(s->arena, c->slot);
    /* A copy of the reference: publishing moves it without the chunk's lock. */
    *f = (struct ht_fill){.o = o, .c = c, .index = index, .ref = *ht_chunk_ref(c)};
    o->refs++;
    ht_store_unlock(s);
    f->rc = ht_xfer_start(&f->xfer, s, w->ring, &f->ref, data, HT_IO_READ);
    ht_store_lock(s);
}

/* What was read is what was written? No lock held. */
static int check(const struct ht_fills *w, struct ht_fill *f, const uint8_t *data, int rc)
{
    if (rc && w->tell)
        ht_read_failed(f->o, f->index, &f->xfer, rc);
    if (rc)
        return rc;
    if (w->tell)
        return ht_ref_verify(f->o, f->index, &f->ref, data);
    return ht_store_checksum(w->s, data, f->ref.stored) == f->ref.checksum ? 0 : -EIO;
}

void ht_fills_finish(struct ht_fills *w)
{
    struct ht_store *s = w->s;
    struct ht_fill *f = &w->fill[w->first];
    uint8_t *data = ht_arena_data(s->arena, f->c->slot);
    uint32_t bytes = ht_arena_slot_bytes(s->arena, f->c->slot);
    /* Of what is handed out there is no more than the object has, and the rest of a block. */
    uint32_t len = ht_arena_is_guest(s->arena, f->c->slot) ? ht_chunk_len(f->o, f->index) : bytes;
    uint32_t visible = (uint32_t)ht_min_u64(f->ref.visible, len);
    ht_store_unlock(s);
    int rc = ht_xfer_wait(&f->xfer, w->ring);
    rc = check(w, f, data, f->rc ? f->rc : rc);
    if (!rc)
        memset(data + visible, 0, ht_round_up(len, HT_BLOCK_BYTES) - visible);
    ht_store_lock(s);
    if (!rc) {
        struct ht_image *im = ht_arena_image(s->arena, f->c->slot);
        im->valid_hi = bytes;
        im->data_hi = visible;
        ht_obj_count_read(f->o, &f->ref);
    } else {
        ht_chunk_drop_empty(f->o, f->c, f->index);
        w->error = w->error ? w->error : rc;
    }
    ht_chunk_unlock_exclusive(f->o, f->c, f->index);
    ht_obj_put_locked(f->o);
    w->first = (w->first + 1) % HT_FILLS_MAX;
    w->count--;
}

void ht_fills_finish_all(struct ht_fills *w)
{
    while (w->count)
        ht_fills_finish(w);
}
