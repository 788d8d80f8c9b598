/* SPDX-License-Identifier: Apache-2.0 */
/* rw.c - reading and writing bytes of objects, chunk by chunk. */
#include <assert.h>

#include "tiering/base/log.h"
#include "tiering/store/store_priv.h"

/* --------------------------------------------------------------- reading */

/* Has the chunk no bytes but zeros? */
static bool is_hole(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    return c->slot == HT_SLOT_NONE && !ht_chunk_ref(c) && !(c->flags & CH_BAD) && !ht_handed_hides(o, index);
}

static bool image_has(struct ht_store *s, const struct ht_chunk *c, uint32_t a, uint32_t b)
{
    if (c->slot == HT_SLOT_NONE)
        return false;
    const struct ht_image *im = ht_arena_image(s->arena, c->slot);
    return im->valid_lo <= a && b <= im->valid_hi;
}

/* A reader waits once, however many of his requests do. */
static void begin_miss(struct ht_obj *o, struct ht_obj_reader *r)
{
    ht_obj_count_miss(o);
    o->s->missing += !r || r->missing++ == 0;
}

static void end_miss(struct ht_obj *o, struct ht_obj_reader *r)
{
    o->s->missing -= !r || --r->missing == 0;
}

/*
 * Make [a, b) of the chunk readable in its image and hold it shared; c->slot stays HT_SLOT_NONE
 * for a hole. Lock held.
 */
static int hold_for_read(struct ht_obj *o, struct ht_obj_reader *r, struct ht_chunk *c, uint64_t index, uint32_t a,
                         uint32_t b)
{
    struct ht_store *s = o->s;
    ht_chunk_lock_shared(s, c);
    if (image_has(s, c, a, b) || is_hole(o, c, index)) {
        ht_obj_count_hit(o);
        return 0;
    }
    ht_chunk_relock_exclusive(s, c);
    int rc = 0;
    if (c->flags & CH_BAD)
        rc = -EIO;
    else if (!image_has(s, c, a, b) && !is_hole(o, c, index)) {
        begin_miss(o, r);
        rc = ht_chunk_get_slot(o, c, index, b);
        if (!rc)
            rc = ht_chunk_fill(o, c, index);
        end_miss(o, r);
        if (rc)
            ht_chunk_drop_empty(o, c, index);
    }
    if (rc)
        ht_chunk_unlock_exclusive(o, c, index);
    else
        ht_chunk_downgrade(s, c);
    return rc;
}

static int read_piece(struct ht_obj *o, struct ht_obj_reader *r, uint64_t index, uint32_t a, uint32_t len, uint8_t *buf)
{
    struct ht_store *s = o->s;
    bool hides = ht_handed_hides(o, index);
    struct ht_chunk *c = hides ? ht_chunk_make(o, index) : ht_chunk_find(o, index);
    if (!c) {
        memset(buf, 0, len);
        return hides ? -ENOMEM : 0;
    }
    int rc = hold_for_read(o, r, c, index, a, a + len);
    if (rc)
        return rc;
    uint32_t there = len;
    if (o->extra->handed) /* made shorter meanwhile: memory ends there, too */
        there = (uint32_t)ht_min_u64(len, ht_max_u64(ht_chunk_len(o, index), a) - a);
    const uint8_t *data = NULL;
    if (c->slot != HT_SLOT_NONE) {
        ht_arena_use(s->arena, c->slot);
        data = ht_arena_data(s->arena, c->slot) + a;
    }
    ht_store_unlock(s);
    if (data)
        memcpy(buf, data, there);
    memset(buf + (data ? there : 0), 0, len - (data ? there : 0));
    ht_store_lock(s);
    ht_chunk_unlock_shared(o, c, index);
    return 0;
}

static ssize_t read_for(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, void *buf, size_t len)
{
    struct ht_store *s = o->s;
    size_t done = 0;
    int rc = 0;
    ht_store_lock(s);
    if (off < o->size)
        len = ht_min_u64(len, o->size - off);
    else
        len = 0;
    while (done < len && !rc) {
        uint64_t pos = off + done;
        uint32_t a = (uint32_t)(pos & (ht_obj_bytes_per_chunk(o) - 1));
        uint32_t n = (uint32_t)ht_min_u64(len - done, ht_obj_bytes_per_chunk(o) - a);
        rc = read_piece(o, r, pos >> o->chunk_shift, a, n, (uint8_t *)buf + done);
        if (!rc)
            done += n;
    }
    if (o->vanished)
        rc = -ESTALE;
    ht_store_unlock(s);
    return rc ? rc : (ssize_t)done; /* less than there is would be taken for the end */
}

ssize_t ht_obj_read(struct ht_obj *o, uint64_t off, void *buf, size_t len)
{
    return read_for(o, NULL, off, buf, len);
}

/* The bytes where they are, with their chunk held shared; *out_bytes is NULL when no single image has them. Lock held. */
static int hold_in_place(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, size_t len, struct ht_chunk **out_c,
                         const uint8_t **out_bytes)
{
    struct ht_store *s = o->s;
    uint64_t index = off >> o->chunk_shift;
    uint32_t bytes = ht_obj_bytes_per_chunk(o), a = (uint32_t)(off & (bytes - 1));
    struct ht_chunk *c = len && len <= bytes - a ? ht_chunk_find(o, index) : NULL;
    *out_bytes = NULL;
    if (!c)
        return 0;
    int rc = hold_for_read(o, r, c, index, a, a + (uint32_t)len);
    if (rc)
        return rc;
    /* Memory of a handed-out object may end earlier; of one that vanished reading it says so. */
    if (o->vanished || c->slot == HT_SLOT_NONE || ht_arena_is_guest(s->arena, c->slot)) {
        ht_chunk_unlock_shared(o, c, index);
        return 0;
    }
    ht_arena_use(s->arena, c->slot);
    *out_bytes = ht_arena_data(s->arena, c->slot) + a;
    *out_c = c;
    return 0;
}

ssize_t ht_obj_read_in_place(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, void *buf, size_t len,
                             ht_obj_read_fn fn, void *ctx)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    const uint8_t *bytes;
    ht_store_lock(s);
    len = off < o->size ? ht_min_u64(len, o->size - off) : 0;
    if (r)
        ht_obj_reader_note(o, r, off, len); /* first, so that the device has more to do while we wait */
    int rc = hold_in_place(o, r, off, len, &c, &bytes);
    if (bytes)
        o->refs++; /* whoever has been answered may let go of it */
    ht_store_unlock(s);
    if (rc)
        return rc;
    ssize_t n = bytes ? (ssize_t)len : read_for(o, r, off, buf, len);
    if (n >= 0)
        fn(ctx, bytes ? bytes : buf, (size_t)n);
    if (bytes) {
        ht_store_lock(s);
        ht_chunk_unlock_shared(o, c, off >> o->chunk_shift);
        ht_obj_put_locked(o);
        ht_store_unlock(s);
    }
    return n;
}

/* --------------------------------------------------------------- writing */

/* Blocks the chunk will need when [.., b) of it has been written. */
static uint32_t blocks_after_write(struct ht_obj *o, struct ht_chunk *c, uint32_t b)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    uint32_t end = b;
    if (ref && ref->visible > end)
        end = ref->visible;
    if (c->slot != HT_SLOT_NONE)
        end = (uint32_t)ht_max_u64(end, ht_arena_image(o->s->arena, c->slot)->data_hi);
    return (uint32_t)ht_div_up(end, HT_BLOCK_BYTES);
}

/* Does [a, b) touch the valid interval, or is there none? */
static bool extends_valid(const struct ht_image *im, uint32_t a, uint32_t b)
{
    return im->valid_lo == im->valid_hi || (a <= im->valid_hi && b >= im->valid_lo);
}

static void extend_valid(struct ht_image *im, uint32_t a, uint32_t b)
{
    im->data_hi = (uint32_t)ht_max_u64(im->data_hi, b);
    if (im->valid_lo == im->valid_hi) {
        im->valid_lo = a;
        im->valid_hi = b;
        return;
    }
    if (a < im->valid_lo)
        im->valid_lo = a;
    if (b > im->valid_hi)
        im->valid_hi = b;
}

/*
 * An image for a chunk that is held, in which [.., b) may be written. An object that was handed out while the image was waited for has
 * memory for no more than its size, and what lies behind that no address yet.
 */
static int get_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t b)
{
    uint64_t start = index << o->chunk_shift;
    int rc;
    do {
        const struct ht_handed *h = o->extra->handed;
        if (h && start >= h->memory.bytes && ht_arena_is_guest(o->s->arena, c->slot))
            ht_chunk_drop_image(o, c, index);
        rc = ht_handed_reach(o, start + b);
        if (!rc)
            rc = ht_chunk_get_slot(o, c, index, b);
    } while (!rc && o->extra->handed && o->extra->handed->memory.bytes < start + b);
    return rc;
}

/* The chunk exclusively, with an image that [a, b) may be copied into, space reserved. Lock held. */
static int prepare_write(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t a, uint32_t b)
{
    struct ht_store *s = o->s;
    bool whole = a == 0 && b == ht_obj_bytes_per_chunk(o);
    int rc = get_image(o, c, index, b);
    if (rc)
        return rc;
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    if ((c->flags & CH_BAD) && !whole)
        rc = -EIO;
    else if (!extends_valid(im, a, b))
        rc = ht_chunk_fill(o, c, index);
    if (!rc)
        rc = ht_chunk_reserve(o, c, blocks_after_write(o, c, b));
    ht_arena_use(s->arena, c->slot);
    if (rc)
        ht_chunk_drop_empty(o, c, index);
    return rc;
}

void ht_obj_grow_locked(struct ht_obj *o, uint64_t size)
{
    if (size <= o->size)
        return;
    o->size = size;
    o->meta_dirty = true;
    o->version++;
    ht_obj_touch(o);
}

static int write_piece(struct ht_obj *o, uint64_t index, uint32_t a, uint32_t len, const uint8_t *buf)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    int rc = ht_chunk_ask(o, index, &c);
    if (rc)
        return rc;
    bool late = false;
    ht_chunk_lock_exclusive(s, c);
    rc = prepare_write(o, c, index, a, a + len);
    if (!rc) {
        uint8_t *data = ht_arena_data(s->arena, c->slot) + a;
        ht_store_unlock(s);
        memcpy(data, buf, len);
        ht_store_lock(s);
        extend_valid(ht_arena_image(s->arena, c->slot), a, a + len);
        if (c->flags & CH_BAD)
            ht_chunk_install_hole(o, c, index);
        ht_chunk_set_dirty(o, c, index);
        late = o->extra->handed && !ht_arena_is_guest(s->arena, c->slot);
        rc = ht_handed_reach(o, (index << o->chunk_shift) + a + len);
        if (!rc)
            ht_obj_grow_locked(o, (index << o->chunk_shift) + a + len);
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return !rc && late ? ht_handed_complete(o) : rc; /* it was handed out meanwhile, maybe without this chunk */
}

/* Lock held, let go meanwhile. */
static ssize_t write_locked(struct ht_obj *o, uint64_t off, const void *buf, size_t len)
{
    size_t done = 0;
    int rc = 0;
    while (done < len && !rc) {
        uint64_t pos = off + done;
        uint32_t a = (uint32_t)(pos & (ht_obj_bytes_per_chunk(o) - 1));
        uint32_t n = (uint32_t)ht_min_u64(len - done, ht_obj_bytes_per_chunk(o) - a);
        rc = write_piece(o, pos >> o->chunk_shift, a, n, (const uint8_t *)buf + done);
        if (!rc)
            done += n;
    }
    return done ? (ssize_t)done : rc;
}

ssize_t ht_obj_write(struct ht_obj *o, uint64_t off, const void *buf, size_t len)
{
    struct ht_scope *sc;
    if (off > HT_FILE_BYTES_MAX || len > HT_FILE_BYTES_MAX - off)
        return -EFBIG;
    ssize_t rc = ht_obj_lock_for_change(o, &sc);
    if (rc)
        return rc;
    rc = write_locked(o, off, buf, len);
    ht_obj_unlock_after_change(o, sc);
    return rc;
}

/* ------------------------------------------------- truncate, punch, seek */

/* The chunk keeps its first keep bytes; the rest reads as zeros. Needs no space. Lock and chunk held. */
static void cut_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t keep)
{
    struct ht_store *s = o->s;
    o->version++;
    ht_chunk_unpromise(o, c, keep);
    if (ht_arena_is_guest(s->arena, c->slot)) {
        ht_handed_cut(o, c, index, keep);
    } else if (c->slot != HT_SLOT_NONE) {
        struct ht_image *im = ht_arena_image(s->arena, c->slot);
        if (im->valid_hi > keep)
            im->valid_hi = keep;
        if (im->data_hi > keep)
            im->data_hi = keep;
        if (im->valid_lo >= im->valid_hi)
            ht_chunk_drop_image(o, c, index);
    }
    struct ht_ref *ref = ht_chunk_ref(c);
    if (keep == 0) {
        ht_chunk_install_hole(o, c, index);
        return;
    }
    if (!ref || ref->visible <= keep)
        return;
    bool was = ht_chunk_unpublished(c);
    if (ref == &c->pub) {
        c->cur = c->pub;
        c->flags |= CH_CUR | CH_SHARE;
    }
    c->cur.visible = keep & HT_VISIBLE_MASK;
    c->generation++;
    ht_chunk_note_unpublished(o, c, index, was);
}

/* Cut every chunk in [first, last) whole. */
static void drop_chunks(struct ht_obj *o, uint64_t first, uint64_t last)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    uint64_t index = first;
    ht_chunk_for_each_from(c, o, index)
    {
        if (index >= last)
            break;
        if (!ht_chunk_in_use(c))
            continue;
        ht_chunk_lock_exclusive(s, c);
        cut_chunk(o, c, index, 0);
        ht_chunk_unlock_exclusive(o, c, index);
    }
}

/* Is there nothing at or beyond size? */
static bool is_cut(struct ht_obj *o, uint64_t size)
{
    uint64_t first = size >> o->chunk_shift, index = first;
    uint32_t keep = (uint32_t)(size & (ht_obj_bytes_per_chunk(o) - 1));
    struct ht_chunk *c;
    ht_chunk_for_each_from(c, o, index)
    {
        const struct ht_ref *ref = ht_chunk_ref(c);
        uint32_t end = ref ? ref->visible : 0;
        if (c->slot != HT_SLOT_NONE)
            end = (uint32_t)ht_max_u64(end, ht_arena_image(o->s->arena, c->slot)->data_hi);
        if (c->exclusive || end > (index == first ? keep : 0)) /* who holds it may have begun with the old size */
            return false;
    }
    return true;
}

static void cut_object(struct ht_obj *o, uint64_t size)
{
    struct ht_store *s = o->s;
    uint32_t keep = (uint32_t)(size & (ht_obj_bytes_per_chunk(o) - 1));
    uint64_t index = size >> o->chunk_shift;
    struct ht_chunk *c = keep ? ht_chunk_find(o, index) : NULL;
    if (c) {
        ht_chunk_lock_exclusive(s, c);
        cut_chunk(o, c, index, keep);
        ht_chunk_unlock_exclusive(o, c, index);
    }
    drop_chunks(o, index + (keep != 0), UINT64_MAX);
}

/* Lock held, let go meanwhile. */
static int truncate_locked(struct ht_obj *o, uint64_t size)
{
    /* The size comes last: published before the cuts it would leave bytes beyond the end that a later growth shows. */
    while (size < o->size) {
        cut_object(o, size);
        if (is_cut(o, size))
            break;
    }
    if (size == o->size)
        ht_obj_unpromise_behind(o, size);
    int rc = ht_handed_reach(o, size);
    if (!rc && size != o->size) {
        o->size = size;
        o->meta_dirty = true;
        o->version++;
        ht_obj_touch(o);
    }
    if (o->extra->handed)
        ht_handed_trim(o);
    return rc;
}

int ht_obj_truncate(struct ht_obj *o, uint64_t size)
{
    struct ht_scope *sc;
    if (size > HT_FILE_BYTES_MAX)
        return -EFBIG;
    int rc = ht_obj_lock_for_change(o, &sc);
    if (rc)
        return rc;
    rc = truncate_locked(o, size);
    ht_obj_unlock_after_change(o, sc);
    return rc;
}

int ht_obj_ungrow(struct ht_obj *o, uint64_t size, uint64_t end)
{
    struct ht_scope *sc;
    int rc = ht_obj_lock_for_change(o, &sc);
    if (rc)
        return rc;
    if (size < end && o->size == end)
        rc = truncate_locked(o, size);
    ht_obj_unlock_after_change(o, sc);
    return rc;
}

static int zero_piece(struct ht_obj *o, uint64_t index, uint32_t a, uint32_t b)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c = ht_chunk_find(o, index);
    if (!c)
        return 0;
    ht_chunk_lock_exclusive(s, c);
    int rc = 0;
    if (c->slot != HT_SLOT_NONE || ht_chunk_ref(c)) {
        rc = ht_chunk_get_slot(o, c, index, b);
        if (!rc)
            rc = ht_chunk_fill(o, c, index);
        if (!rc)
            rc = ht_chunk_reserve(o, c, blocks_after_write(o, c, 0));
        if (!rc) {
            memset(ht_arena_data(s->arena, c->slot) + a, 0, b - a);
            ht_chunk_set_dirty(o, c, index);
        } else {
            ht_chunk_drop_empty(o, c, index);
        }
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

static bool has_data(struct ht_chunk *c)
{
    return c->slot != HT_SLOT_NONE || ht_chunk_ref(c);
}

/*
 * What is set aside in [off, end), which lies behind the size. A promise counts blocks from its chunk's start; which of them
 * data has taken is not known, so of a chunk with data only a punched tail gives back.
 */
static void unpromise_range(struct ht_obj *o, uint64_t off, uint64_t end)
{
    uint64_t index = off >> o->chunk_shift;
    struct ht_chunk *c;
    ht_chunk_for_each_from(c, o, index)
    {
        uint64_t start = index << o->chunk_shift;
        uint64_t stop = has_data(c) ? ht_obj_bytes_per_chunk(o) : (uint64_t)c->promised * HT_BLOCK_BYTES;
        if (start >= end)
            break;
        if (start + stop <= ht_round_up(end, HT_BLOCK_BYTES))
            ht_chunk_unpromise(o, c, start < off ? (uint32_t)(off - start) : 0);
        ht_chunk_trim(o, index);
    }
}

/* Lock held, let go meanwhile. */
static int punch_locked(struct ht_obj *o, uint64_t off, uint64_t len)
{
    int rc = ht_handed_complete(o);
    uint64_t end = len > o->size || off > o->size - len ? o->size : off + len;
    uint64_t behind = ht_max_u64(off, o->size),
             all = len > HT_FILE_BYTES_MAX - ht_min_u64(off, HT_FILE_BYTES_MAX) ? HT_FILE_BYTES_MAX : off + len;
    uint64_t bytes = ht_obj_bytes_per_chunk(o);
    while (off < end && !rc) {
        uint64_t index = off >> o->chunk_shift, start = index << o->chunk_shift;
        uint64_t stop = ht_min_u64(end, start + bytes);
        if (off == start && (stop == start + bytes || stop == o->size)) {
            if (stop < end) /* all whole ones at once: there may be many */
                stop = end >> o->chunk_shift << o->chunk_shift;
            drop_chunks(o, index, (stop + bytes - 1) >> o->chunk_shift);
        } else {
            rc = zero_piece(o, index, (uint32_t)(off - start), (uint32_t)(stop - start));
        }
        off = stop;
    }
    if (!rc)
        unpromise_range(o, behind, all);
    return rc;
}

int ht_obj_punch(struct ht_obj *o, uint64_t off, uint64_t len)
{
    struct ht_scope *sc;
    int rc = ht_obj_lock_for_change(o, &sc);
    if (rc)
        return rc;
    rc = punch_locked(o, off, len);
    ht_obj_unlock_after_change(o, sc);
    return rc;
}

/* The first chunk at or after index with data, or without; chunks that are not in memory hold none. */
static uint64_t seek_chunk(struct ht_obj *o, uint64_t index, bool hole)
{
    uint64_t at = index;
    struct ht_chunk *c;
    ht_chunk_for_each_from(c, o, at)
    {
        if (hole && at != index)
            return index; /* passed over some */
        if (has_data(c) != hole)
            return at;
        index = at + 1;
    }
    return hole ? index : UINT64_MAX;
}

int64_t ht_obj_seek(struct ht_obj *o, uint64_t off, bool hole)
{
    struct ht_store *s = o->s;
    ht_store_lock(s);
    int64_t result = -ENXIO;
    uint64_t size = o->size, index = off >> o->chunk_shift;
    if (off < size && ht_handed_stores(o)) { /* anything may be there */
        result = (int64_t)(hole ? size : off);
    } else if (off < size) {
        uint64_t found = seek_chunk(o, index, hole);
        uint64_t at = found == index ? off : found == UINT64_MAX ? UINT64_MAX : found << o->chunk_shift;
        if (at < size)
            result = (int64_t)at;
        else if (hole) /* the end is a hole */
            result = (int64_t)size;
    }
    ht_store_unlock(s);
    return result;
}
