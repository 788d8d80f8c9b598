/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clone.c - copying between objects by sharing stored bytes, and going back to a copy.
 *
 * Whole chunks of the source that have the same place inside chunks of the same size get a second owner (owners.c);
 * dirty images are written back first. Holes stay holes. The rest is copied through memory, chunk by chunk of the
 * target: each such step happens as a whole or not at all, so the returned count is exact.
 *
 * Locks: one chunk at a time. Between releasing the source's and taking the target's the clone itself is an owner.
 */

#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/data/flush.h"
#include "tiering/data/write_batch.h"
#include "tiering/shm/shm.h"
#include "tiering/store/store_priv.h"

struct clone {
    struct ht_obj *src, *dst;
    uint64_t src_off, dst_off, len, done;
    bool share;   /* as far as objects and offsets allow sharing */
    bool in_root; /* content in the vault may be shared: it stays below its model root */
    uint8_t *buf; /* a chunk, once something has to be copied */
};

enum { COPY = 1 }; /* cannot be shared */

static uint64_t src_pos(const struct clone *k)
{
    return k->src_off + k->done;
}

static uint64_t dst_pos(const struct clone *k)
{
    return k->dst_off + k->done;
}

static bool holds(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_chunk_ref(c) || c->flags & HT_CH_BAD || c->writing || ht_chunk_is_dirty(o->s, c);
}

/*
 * Bytes from here to the end of the range, which the source's end may cut short; *out_hole of these come before the
 * first data.
 */
static uint64_t scan_ahead(struct clone *k, uint64_t *out_hole)
{
    struct ht_obj *o = k->src;
    struct ht_slice slice = {0};

    ht_store_lock(o->s);
    uint64_t pos = src_pos(k), end = ht_min_u64(k->src_off + k->len, o->size);
    uint64_t index = pos >> o->chunk_shift, data = ht_chunk_is_volatile(o, index) ? pos : end;
    ht_chunk_for_each_busy_from(c, o, index) {
        if (index << o->chunk_shift >= data)
            break;
        if (holds(o, c)) {
            data = ht_max_u64(pos, index << o->chunk_shift);
            break;
        }
        ht_slice_next(o->s, &slice);
    }
    ht_store_unlock(o->s);
    if (pos >= end)
        return 0;
    *out_hole = data - pos;
    return end - pos;
}

/* Clones n bytes of hole: up to the end of a begun chunk of the target, whole chunks, or the beginning of one. */
static ssize_t clone_hole(struct clone *k, uint64_t n)
{
    struct ht_obj *o = k->dst;
    uint64_t bytes = ht_obj_bytes_per_chunk(o), pos = dst_pos(k), inside = pos & (bytes - 1);

    if (inside)
        n = ht_min_u64(n, bytes - inside);
    else if (n > bytes)
        n -= n & (bytes - 1);
    int rc = ht_obj_punch(o, pos, n);
    if (rc)
        return rc;
    ht_store_lock(o->s);
    rc = ht_shm_grow(o, pos + n);
    if (!rc)
        ht_obj_set_size_locked(o, ht_max_u64(o->size, pos + n));
    ht_store_unlock(o->s);
    return rc ? rc : (ssize_t)n;
}

/*
 * Takes the content of chunk index of the source, if it lies in the first n bytes. Returns 0 or COPY; 0 with an empty
 * out: a hole.
 */
static int take_source(struct ht_obj *o, uint64_t index, uint32_t n, bool in_root, struct ht_ref *out)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c = ht_chunk_find(o, index);

    if (!c)
        return ht_chunk_is_volatile(o, index) ? COPY : 0;
    ht_chunk_lock_exclusive(o, c, index); /* so that none of its writes is in flight */
    const struct ht_ref *ref = ht_chunk_ref(c);
    bool newer = ht_chunk_is_dirty(o->s, c);
    int rc = 0;
    if (c->flags & HT_CH_BAD || (ref && ht_ref_lost(ref) && !newer))
        rc = -EIO;
    else if (newer || ht_obj_images(o)->mapped || (ref && ht_ref_is_cold(ref) && !in_root) ||
             (ref && (ref->visible > n || ht_ref_endangered(o->s, ref))))
        rc = COPY;
    else if (ref)
        rc = ht_chunk_share(o, c, out);
    ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

/* The result of take_source, with ht_flush_error_passes and the size of chunks at that time. */
struct taken {
    struct ht_ref ref;
    uint64_t flush_error_passes;
    uint8_t chunk_shift;
};

/* Has a later failed flush voided it? Then the source has its bytes in memory. */
static bool is_void(const struct ht_store *s, const struct taken *t) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_ref_unflushed(s, &t->ref) && ht_ref_is_void(s, &t->ref, t->flush_error_passes);
}

/* The chunk index of the target becomes the taken one; n of its bytes count. Lock held, no abort in progress. */
static int put_target_chunk(struct ht_obj *o, uint64_t index, uint32_t n, const struct taken *t)
    HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = &t->ref;
    struct ht_store *s = o->s;
    uint64_t end = (index << o->chunk_shift) + n;
    struct ht_chunk *c;
    int rc = ht_chunk_ask(o, index, &c);

    if (rc)
        return rc;
    ht_chunk_lock_exclusive(o, c, index);
    /* Bytes after n stay; mapped memory has its bytes in place. */
    rc = ht_obj_images(o)->mapped || (n < ht_obj_bytes_per_chunk(o) && o->size > end) || is_void(s, t) ? COPY : 0;
    if (!rc && !ht_ref_pieces_fit(s, ref, 1)) /* a copy may have fewer pieces, or is refused like any write */
        rc = COPY;
    if (!rc)
        rc = ht_chunk_reserve(o, c, 0);
    if (!rc) {
        ht_chunk_drop_image(o, c, index);
        ht_chunk_install(o, c, index, ref);
        o->stored_blocks += ht_ref_blocks(ref);
        ht_obj_count_shared(o, ref, 1);
        ht_obj_count_cold(o, ref, 1);
        o->version++;
        ht_obj_note_edit(o);
        ht_obj_set_size_locked(o, ht_max_u64(o->size, end));
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

/* COPY also if another thread has fixed another chunk size for the target while this one waited. */
static int put_target(struct ht_obj *o, uint64_t pos, uint32_t n, const struct taken *t) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_scope *sc;
    int rc = ht_obj_begin_change(o, &sc);

    if (rc)
        return rc;
    rc = o->chunk_shift == t->chunk_shift ? put_target_chunk(o, pos >> o->chunk_shift, n, t) : COPY;
    ht_scope_end_change(o->s, sc);
    return rc;
}

/* Returns the count, never COPY: 0 says that this piece must be copied. */
static ssize_t clone_chunk(struct clone *k, uint32_t n)
{
    struct ht_store *s = k->src->s;
    struct taken t = {0};

    ht_store_lock(s);
    t.chunk_shift = k->src->chunk_shift;
    /* Another thread may have fixed another chunk size for the target in between. */
    if (k->src->chunk_shift != k->dst->chunk_shift) {
        ht_store_unlock(s);
        return 0;
    }
    int rc = take_source(k->src, src_pos(k) >> k->src->chunk_shift, n, k->in_root, &t.ref);
    t.flush_error_passes = ht_flush_error_passes(s);
    bool hole = !rc && !ht_ref_holds(&t.ref);
    if (!rc && !hole) {
        rc = put_target(k->dst, dst_pos(k), n, &t);
        if (rc)
            ht_ref_drop(s, &t.ref);
    }
    ht_store_unlock(s);
    if (rc == COPY)
        return 0;
    if (hole)
        return clone_hole(k, n);
    return rc ? rc : (ssize_t)n;
}

static ssize_t copy_piece(struct clone *k, uint64_t n)
{
    uint64_t bytes = ht_obj_bytes_per_chunk(k->dst);

    n = ht_min_u64(n, bytes - (dst_pos(k) & (bytes - 1)));
    if (!k->buf)
        k->buf = malloc(HT_CHUNK_BYTES); /* of any target: its chunks may become larger meanwhile */
    if (!k->buf)
        return -ENOMEM;
    ssize_t got = ht_obj_read(k->src, src_pos(k), k->buf, n);
    return got > 0 ? ht_obj_write(k->dst, dst_pos(k), k->buf, (size_t)got) : got;
}

/* 0: the source now ends here. */
static ssize_t clone_step(struct clone *k)
{
    uint64_t hole, n = scan_ahead(k, &hole);

    if (!n)
        return 0;
    if (hole)
        return clone_hole(k, hole);
    uint64_t bytes = ht_obj_bytes_per_chunk(k->src), inside = src_pos(k) & (bytes - 1);
    n = ht_min_u64(n, bytes - inside);
    ssize_t rc = k->share && !inside ? clone_chunk(k, (uint32_t)n) : 0;
    return rc ? rc : copy_piece(k, n);
}

/* May chunks be shared? If so, a target that never held a byte gets the larger chunks of the source. */
static bool may_share(struct ht_obj *src, uint64_t src_off, struct ht_obj *dst, uint64_t dst_off)
{
    if (src->obj_class == HT_CLASS_SCRATCH || dst->obj_class == HT_CLASS_SCRATCH)
        return false;
    uint32_t bytes = ht_obj_chunk_bytes(src), own = ht_obj_chunk_bytes(dst);
    /* Never smaller ones: a caller that wants large chunks will update them. */
    if (own > bytes || (own < bytes && ht_obj_set_chunk_bytes(dst, bytes)))
        return false;
    return ((src_off ^ dst_off) & (bytes - 1)) == 0;
}

static bool overlap(uint64_t a, uint64_t b, uint64_t len)
{
    return a < b ? b - a < len : a - b < len;
}

/* Is the target in the scope of the source, which is a model root? It stays there while it is being written. */
static bool in_one_root(struct ht_obj *src, struct ht_obj *dst)
{
    return ht_store_locked(src->s, src->scope == dst->scope && src->scope->id);
}

static ssize_t clone_from(struct ht_obj *src, uint64_t src_off, struct ht_obj *dst, uint64_t dst_off, uint64_t len,
                          bool in_root)
{
    uint64_t size = ht_obj_size(src);

    if (ht_store_read_only(src->s))
        return -EROFS;
    len = src_off < size ? ht_min_u64(len, size - src_off) : 0;
    if (!len)
        return 0;
    if (dst_off > HT_FILE_BYTES_MAX || len > HT_FILE_BYTES_MAX - dst_off)
        return -EFBIG;
    if (src == dst && overlap(src_off, dst_off, len))
        return -EINVAL;
    struct clone k = {.src = src, .dst = dst, .src_off = src_off, .dst_off = dst_off, .len = len, .in_root = in_root};
    k.share = may_share(src, src_off, dst, dst_off);
    if (k.share)
        ht_obj_clean(src, (src_off + ht_obj_bytes_per_chunk(src) - 1) >> src->chunk_shift,
                     ((src_off + len - 1) >> src->chunk_shift) + 1);
    unsigned aborts = ht_obj_aborts(dst);
    ssize_t n = 1;
    while (k.done < len && (n = clone_step(&k)) > 0)
        k.done += (uint64_t)n;
    free(k.buf);
    if (ht_obj_aborts(dst) != aborts) /* an abort may have taken back a part */
        return -ESTALE;
    return k.done ? (ssize_t)k.done : n;
}

ssize_t ht_obj_clone(struct ht_obj *src, uint64_t src_off, struct ht_obj *dst, uint64_t dst_off, uint64_t len)
{
    return clone_from(src, src_off, dst, dst_off, len, in_one_root(src, dst));
}

/* ---------------------------------------------------------------- restoring */

/*
 * An object gets the content of another one that was copied from it (tiering/api/keep.h): what has not changed since
 * lies in the same place, and stays as it is. Two objects are compared in the same way.
 */

/* Is there something that may be newer than the reference? */
static bool is_newer(struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return c->flags & HT_CH_BAD || c->writing || c->exclusive || ht_chunk_is_dirty(o->s, c);
}

/* Do both have the same bytes in this chunk, by their places alone? */
static bool same_chunk(struct ht_obj *a, struct ht_obj *b, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *x = ht_chunk_find(a, index), *y = ht_chunk_find(b, index);
    const struct ht_ref *r = x ? ht_chunk_ref(x) : NULL, *q = y ? ht_chunk_ref(y) : NULL;

    if ((x && is_newer(a, x)) || (y && is_newer(b, y)) || ht_chunk_is_volatile(b, index))
        return false;
    return r && q ? r->visible == q->visible && ht_ref_same_place(r, q) : !r && !q;
}

/* The first chunk from there on that one of both has in memory; UINT64_MAX: there is none. */
static uint64_t next_chunk(struct ht_obj *a, struct ht_obj *b, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t x = index, y = index;

    if (ht_chunk_is_volatile(a, index) || ht_chunk_is_volatile(b, index))
        return index;
    x = ht_chunk_next(a, &x) ? x : UINT64_MAX;
    y = ht_chunk_next(b, &y) ? y : UINT64_MAX;
    return ht_min_u64(x, y);
}

enum { BATCH = 1024 }; /* chunks that are compared under one hold of the lock */

/* Moves *index to the first chunk from there on that differs. False: there is none before end. */
static bool find_different(struct ht_obj *from, struct ht_obj *to, uint64_t *index, uint64_t end)
{
    bool found = false;

    while (!found && *index < end) {
        ht_store_lock(from->s);
        for (unsigned n = 0; !found && n < BATCH && (*index = next_chunk(from, to, *index)) < end; n++) {
            found = !same_chunk(from, to, *index);
            *index += !found;
        }
        ht_store_unlock(from->s);
    }
    return found;
}

bool ht_obj_same(struct ht_obj *a, struct ht_obj *b, uint64_t off, uint64_t *out_end)
{
    uint64_t index = off >> a->chunk_shift;
    bool same = false;

    *out_end = UINT64_MAX;
    if (a->chunk_shift != b->chunk_shift)
        return false;
    ht_store_lock(a->s);
    for (unsigned n = 0; n < BATCH; n++) {
        uint64_t next = next_chunk(a, b, index);
        bool is_same = next != index || same_chunk(a, b, index);
        if (n && is_same != same)
            break;
        same = is_same;
        index = next != index ? next : index + 1;
        if (index == UINT64_MAX) /* both end with a hole */
            break;
    }
    ht_store_unlock(a->s);
    if (index != UINT64_MAX)
        *out_end = index << a->chunk_shift;
    return same;
}

static int clone_all(struct ht_obj *from, struct ht_obj *to, uint64_t off, uint64_t len)
{
    while (len) {
        ssize_t n = clone_from(from, off, to, off, len, true); /* of its own kept step */
        if (n <= 0)
            return n ? (int)n : -ESTALE; /* the source was cut */
        off += (uint64_t)n;
        len -= (uint64_t)n;
    }
    return 0;
}

/* Chunks of one size: those that are in another place. */
static int clone_different(struct ht_obj *from, struct ht_obj *to, uint64_t size)
{
    uint64_t bytes = ht_obj_chunk_bytes(from), chunks = ht_div_up(size, bytes);
    int rc = 0;

    for (uint64_t i = 0; !rc && find_different(from, to, &i, chunks); i++)
        rc = clone_all(from, to, i * bytes, ht_min_u64(bytes, size - i * bytes));
    return rc;
}

int ht_obj_restore(struct ht_obj *to, struct ht_obj *from)
{
    uint64_t size = ht_obj_size(from);
    int rc = ht_obj_size(to) > size ? ht_obj_truncate(to, size) : 0;

    if (!rc)
        rc = ht_obj_chunk_bytes(from) == ht_obj_chunk_bytes(to) ? clone_different(from, to, size)
                                                                : clone_all(from, to, 0, size);
    return rc || ht_obj_size(to) == size ? rc : ht_obj_truncate(to, size); /* which gives preallocations back */
}
