/* SPDX-License-Identifier: Apache-2.0 */
/* rw.c - reading and writing bytes of objects, chunk by chunk. */

#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/cache/staging.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/cold.h"
#include "tiering/shm/shm.h"
#include "tiering/engine/engine.h"
#include "tiering/store/store_priv.h"

/* --------------------------------------------------------------- reading */

/* Has the chunk no bytes but zeros? */
static bool is_hole(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return !ht_chunk_has_content(c) && !ht_chunk_is_volatile(o, index);
}

static bool image_has(struct ht_store *s, const struct ht_chunk *c, uint32_t a, uint32_t b) HT_REQUIRES(HT_LOCK_STORE)
{
    if (c->slot == HT_SLOT_NONE)
        return false;
    const struct ht_image *im = ht_arena_image(s->arena, c->slot);
    return im->valid_lo <= a && b <= im->valid_hi;
}

/* A reader waits once, even if several of its requests do. */
static void begin_miss(struct ht_obj *o, struct ht_obj_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_obj_count_miss(o);
    o->s->flow.missing += !r || r->missing++ == 0;
}

static void end_miss(struct ht_obj *o, struct ht_obj_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    o->s->flow.missing -= !r || --r->missing == 0;
}

/*
 * Makes [a, b) of the chunk readable in its image and holds it shared; c->slot stays HT_SLOT_NONE for a hole. Lock
 * held.
 */
static int hold_for_read(struct ht_obj *o, struct ht_obj_reader *r, struct ht_chunk *c, uint64_t index, uint32_t a,
                         uint32_t b) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    ht_chunk_lock_shared(s, c);
    if (image_has(s, c, a, b) || is_hole(o, c, index)) {
        ht_obj_count_hit(o);
        return 0;
    }
    ht_chunk_relock_exclusive(o, c, index);
    int rc = 0;
    while (!image_has(s, c, a, b) && ht_chunk_is_away(s, c)) { /* an image that came may go again */
        ht_chunk_unlock_exclusive_staying(o, c, index);
        begin_miss(o, r);
        rc = ht_cold_bring(o, c, index);
        end_miss(o, r);
        if (rc)
            return rc;
        ht_chunk_lock_exclusive(o, c, index);
    }
    if (c->flags & HT_CH_BAD)
        rc = -EIO;
    else if (!image_has(s, c, a, b) && !is_hole(o, c, index)) {
        begin_miss(o, r);
        rc = ht_image_attach(o, c, index, b, false);
        if (!rc)
            rc = ht_chunk_fill(o, c, index, NULL);
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

/* Is it published content that no image has, and that nothing has changed since? */
static bool may_read_past(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return c->slot == HT_SLOT_NONE && (c->flags & (HT_CH_PUB | HT_CH_CUR | HT_CH_GONE | HT_CH_BAD)) == HT_CH_PUB &&
        ht_ref_holds(&c->pub) && !ht_chunk_is_volatile(o, index);
}

/* Of content that shows visible bytes, and zeros after them. */
static void copy_out(uint8_t *buf, const uint8_t *content, uint32_t visible, uint32_t a, uint32_t len)
{
    uint32_t there = visible > a ? (uint32_t)ht_min_u64(len, visible - a) : 0;

    if (there)
        memcpy(buf, content + a, there);
    memset(buf + there, 0, len - there);
}

/* Without the lock and the chunk: the bytes of a reference, by way of a staging buffer. */
static int read_ref(struct ht_obj *o, uint64_t index, const struct ht_ref *ref, uint32_t a, uint32_t len, uint8_t *buf)
{
    struct ht_chunk_io io = {.obj = o, .index = index, .ref = *ref};
    int rc = ht_chunks_read_permitted(&io, 1);

    if (!rc)
        copy_out(buf, io.data, ref->visible, a, len);
    if (io.data)
        ht_staging_put(o->s->staging, HT_STAGING_FILL, io.data);
    return rc;
}

static bool is_background(void)
{
    return ht_io_class() == HT_IO_BACKGROUND;
}

/*
 * A background thread reads past the DRAM tier: no image is evicted for it, and no other thread waits for its chunk.
 * Releases the lock in between. False: nothing was read, because there is an image, a change or an error; the usual way
 * shows which.
 */
static bool read_past_cold(struct ht_obj *o, uint64_t index, uint32_t visible, uint32_t a, uint32_t len, uint8_t *buf)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_cold_want w;
    int rc = ht_cold_begin(o, index, false, false, &w);

    if (rc || !w.fetch)
        return false;
    rc = ht_cold_wait(&w);
    if (!rc && visible > ht_cold_ref(&w)->visible)
        rc = -EAGAIN;
    if (!rc)
        copy_out(buf, ht_cold_bytes(&w), visible, a, len);
    ht_cold_put(&w);
    return rc == 0;
}

static bool read_past(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t a, uint32_t len, uint8_t *buf)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_ref ref;

    if (!is_background() || !may_read_past(o, c, index))
        return false;
    if (ht_ref_is_cold(&c->pub))
        return read_past_cold(o, index, c->pub.visible, a, len, buf);
    if (ht_ref_copy(&ref, &c->pub))
        return false;
    ht_store_unlock(s);
    int rc = read_ref(o, index, &ref, a, len, buf);
    ht_store_lock(s);
    ht_ref_forget(&ref);
    return rc == 0;
}

static int read_piece(struct ht_obj *o, struct ht_obj_reader *r, uint64_t index, uint32_t a, uint32_t len, uint8_t *buf)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    bool hides = ht_chunk_is_volatile(o, index);
    struct ht_chunk *c = hides ? ht_chunk_make(o, index) : ht_chunk_find(o, index);

    if (!c && hides)
        return -ENOMEM;
    if (c && read_past(o, c, index, a, len, buf))
        return 0;
    c = ht_chunk_find(o, index);
    if (!c) {
        memset(buf, 0, len);
        return 0;
    }
    int rc = hold_for_read(o, r, c, index, a, a + len);
    if (rc)
        return rc;
    if (!is_background())
        ht_planner_note(o, c, index, HT_PLAN_READ, a == 0);
    uint32_t reach = 0;
    const uint8_t *data = NULL;
    if (c->slot != HT_SLOT_NONE) {
        if (!is_background()) /* nor does an image stay for its sake */
            ht_chunk_use_image(o, c);
        data = ht_arena_data(s->arena, c->slot);
        reach = ht_image_reach(o, c, index); /* made shorter by another thread: shared memory ends there, too */
    }
    ht_store_unlock(s);
    copy_out(buf, data, reach, a, len);
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
    len = off < o->size ? ht_min_u64(len, o->size - off) : 0;
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
    return rc ? rc : (ssize_t)done; /* the caller would take a short count for the end */
}

ssize_t ht_obj_read(struct ht_obj *o, uint64_t off, void *buf, size_t len)
{
    return read_for(o, NULL, off, buf, len);
}

ssize_t ht_obj_read_for(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, void *buf, size_t len)
{
    ht_store_lock(o->s);
    if (r)
        ht_obj_reader_note(o, r, off, off < o->size ? ht_min_u64(len, o->size - off) : 0);
    ht_store_unlock(o->s);
    return read_for(o, r, off, buf, len);
}

/*
 * Finds the bytes in place, and holds their chunk shared; *out_bytes is NULL when no single image has them.
 */
static int hold_in_place(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, size_t len, struct ht_chunk **out_c,
                         const uint8_t **out_bytes) HT_REQUIRES(HT_LOCK_STORE)
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
    /* Mapped memory may end earlier; reading a vanished object returns the error. */
    if (o->vanished || c->slot == HT_SLOT_NONE || ht_image_reach(o, c, index) < a + len) {
        ht_chunk_unlock_shared(o, c, index);
        return 0;
    }
    ht_chunk_use_image(o, c);
    ht_planner_note(o, c, index, HT_PLAN_READ, a == 0);
    *out_bytes = ht_arena_data(s->arena, c->slot) + a;
    *out_c = c;
    return 0;
}

ssize_t ht_obj_read_in_place(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, void *buf, size_t len,
                             ht_obj_read_fn fn, void *ctx)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    const uint8_t *bytes = NULL;

    ht_store_lock(s);
    len = off < o->size ? ht_min_u64(len, o->size - off) : 0;
    if (r)
        ht_obj_reader_note(o, r, off, len); /* first, so that the device has more to do during our own wait */
    int rc = is_background() ? 0 : hold_in_place(o, r, off, len, &c, &bytes);
    if (bytes)
        o->refs++; /* the client may release it after the answer */
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

uint32_t ht_chunk_blocks_after_write(struct ht_obj *o, struct ht_chunk *c, uint32_t b)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    uint32_t end = b;

    if (ref && ref->visible > end)
        end = ref->visible;
    if (c->slot != HT_SLOT_NONE)
        end = (uint32_t)ht_max_u64(end, ht_arena_image(o->s->arena, c->slot)->data_hi);
    return ht_blocks(end);
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

/* The chunk exclusively, with an image that [a, b) may be copied into, space reserved. */
static int prepare_write(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t a, uint32_t b)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    bool whole = a == 0 && b == ht_obj_bytes_per_chunk(o);
    int rc = ht_shm_grow(o, (index << o->chunk_shift) + b); /* first: if it is refused nothing has changed */

    if (!rc)
        rc = ht_image_attach(o, c, index, b, true);
    if (rc)
        return rc;
    struct ht_image *im = ht_arena_image(s->arena, c->slot);
    if ((c->flags & HT_CH_BAD) && !whole)
        rc = -EIO;
    else if (ht_chunk_is_away(s, c) && (a > 0 || b < ht_chunk_ref(c)->visible))
        rc = -EREMOTE; /* its image went while this waited for room */
    else if (!extends_valid(im, a, b))
        rc = ht_chunk_fill(o, c, index, NULL);
    if (!rc)
        rc = ht_chunk_reserve(o, c, ht_chunk_blocks_after_write(o, c, b));
    ht_chunk_use_image(o, c);
    if (rc)
        ht_chunk_drop_empty(o, c, index);
    else
        ht_planner_note(o, c, index, HT_PLAN_OVERWRITE, a == 0);
    return rc;
}

void ht_obj_set_size_locked(struct ht_obj *o, uint64_t size)
{
    if (size == o->size)
        return;
    o->size = size;
    o->version++;
    ht_obj_note_edit(o);
    ht_obj_touch_meta(o);
}

/*
 * The first content of a tensor's chunk in a model: it was never stored, and is whole now. So no change is expected
 * before the commit. Chunks that are written again and again have been stored, and wait for the commit.
 */
static bool is_first_content(const struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_image *im = ht_arena_image(o->s->arena, c->slot);

    return o->scope->id && !ht_chunk_ref(c) && ht_obj_bytes_per_chunk(o) == HT_CHUNK_BYTES && im->valid_lo == 0 &&
        im->data_hi == HT_CHUNK_BYTES;
}

static int write_piece(struct ht_obj *o, uint64_t index, uint32_t a, uint32_t len, const uint8_t *buf)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    int rc = ht_chunk_ask(o, index, &c);

    if (rc)
        return rc;
    bool late = false;
    ht_chunk_lock_exclusive(o, c, index);
    /* Writeback never waits for the vault: an image that replaces a part of such content has the rest. */
    bool keeps = ht_chunk_is_away(s, c) && (a > 0 || a + len < ht_chunk_ref(c)->visible);
    rc = keeps ? -EREMOTE : prepare_write(o, c, index, a, a + len);
    if (!rc) {
        uint8_t *data = ht_arena_data(s->arena, c->slot) + a;
        ht_store_unlock(s);
        memcpy(data, buf, len);
        ht_store_lock(s);
        extend_valid(ht_arena_image(s->arena, c->slot), a, a + len);
        if (c->flags & HT_CH_BAD)
            ht_chunk_install_hole(o, c, index);
        ht_chunk_set_dirty(o, c, index);
        if (is_first_content(o, c))
            ht_chunk_set_final(o, c);
        ht_obj_note_edit(o);
        late = ht_chunk_images(o, c) != ht_obj_images(o);
        rc = late ? ht_shm_grow(o, (index << o->chunk_shift) + a + len) : 0;
        if (!rc)
            ht_obj_set_size_locked(o, ht_max_u64(o->size, (index << o->chunk_shift) + a + len));
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return !rc && late ? ht_shm_complete(o)
                       : rc; /* it was opened as shared memory in between, maybe without this chunk */
}

/* Releases the lock in between. */
static size_t write_locked(struct ht_obj *o, uint64_t off, const uint8_t *buf, size_t len, int *out_rc)
    HT_REQUIRES(HT_LOCK_STORE)
{
    size_t done = 0;
    int rc = 0;

    while (done < len && !rc) {
        uint64_t pos = off + done;
        uint32_t a = (uint32_t)(pos & (ht_obj_bytes_per_chunk(o) - 1));
        uint32_t n = (uint32_t)ht_min_u64(len - done, ht_obj_bytes_per_chunk(o) - a);
        rc = write_piece(o, pos >> o->chunk_shift, a, n, buf + done);
        if (!rc)
            done += n;
    }
    *out_rc = rc;
    return done;
}

ssize_t ht_obj_write(struct ht_obj *o, uint64_t off, const void *buf, size_t len)
{
    struct ht_scope *sc;

    if (off > HT_FILE_BYTES_MAX || len > HT_FILE_BYTES_MAX - off)
        return -EFBIG;
    size_t done = 0;
    int rc;
    do {
        rc = ht_obj_lock_for_change(o, &sc);
        if (rc)
            break;
        done += write_locked(o, off + done, (const uint8_t *)buf + done, len - done, &rc);
        ht_obj_unlock_after_change(o, sc);
        if (rc == -EREMOTE) /* no abort waits for a change that waits for the vault */
            rc = ht_cold_bring_ends(o, off + done, len - done);
    } while (!rc && done < len);
    return done ? (ssize_t)done : rc;
}
