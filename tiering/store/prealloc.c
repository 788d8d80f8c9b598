/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prealloc.c - preallocates a range of an object, and gives preallocations back (object/space.c).
 *
 * A call goes through its chunks three times, in slices, for there may be millions. It counts what they lack, and
 * reserves that or fails. It makes the chunks that are missing and keeps their leaves (users), so that it can take
 * them back. Then it gives each chunk what it lacks now. It gives the rest back.
 *
 * Space that is set aside is a count of blocks for objects that do not exist yet.
 */

#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"
#include "tiering/store/store_priv.h"

struct range {
    struct ht_obj *o;
    uint64_t first, last, end; /* chunks, both included; the first byte after the range */
    uint8_t chunk_shift;
};

/* What a call has reserved, and not given to chunks yet. */
struct purse {
    uint64_t blocks, log_chunks;
};

static struct range range_of(struct ht_obj *o, uint64_t off, uint64_t len)
{
    return (struct range){.o = o,
                          .first = off >> o->chunk_shift,
                          .last = (off + len - 1) >> o->chunk_shift,
                          .end = off + len,
                          .chunk_shift = o->chunk_shift};
}

/* Bytes of chunk index up to the end of the range. */
static uint32_t wanted_bytes(const struct range *r, uint64_t index)
{
    return (uint32_t)ht_min_u64(r->end - (index << r->o->chunk_shift), ht_obj_bytes_per_chunk(r->o));
}

/* Blocks that the chunk lacks for a first write anywhere in the range. */
static uint32_t lacks(const struct range *r, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t bytes = wanted_bytes(r, index), have = c->prealloc;
    const struct ht_ref *ref = ht_chunk_ref(c);

    if (ref && ref->visible >= bytes)
        return 0;
    if (c->slot != HT_SLOT_NONE) {
        const struct ht_image *im = ht_arena_image(r->o->s->arena, c->slot);
        if (im->dirty && im->data_hi >= bytes)
            return 0;
        have += im->reserved_blocks;
    }
    return ht_blocks(bytes) > have ? ht_blocks(bytes) - have : 0;
}

/*
 * The blocks and log reserves that the range lacks: as if no chunk were in memory, less those of the present chunks.
 * Releases the lock in between.
 */
static void count(const struct range *r, struct purse *out) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t blocks =
        (r->last - r->first) * ht_blocks(ht_obj_bytes_per_chunk(r->o)) + ht_blocks(wanted_bytes(r, r->last));
    uint64_t log_chunks = r->last - r->first + 1, index = r->first;
    struct ht_slice slice = HT_SLICE_RESTING;

    ht_chunk_for_each_from(c, r->o, index) {
        if (index > r->last || r->chunk_shift != r->o->chunk_shift)
            break;
        uint32_t n = lacks(r, c, index);
        blocks -= ht_blocks(wanted_bytes(r, index)) - n;
        log_chunks -= !n || c->flags & HT_CH_LOG_RESERVED ? 1 : 0;
        ht_slice_next(r->o->s, &slice);
    }
    log_chunks -= ht_min_u64(log_chunks, ht_obj_log_promise_left(r->o));
    *out = (struct purse){blocks, r->o->obj_class == HT_CLASS_SCRATCH ? 0 : log_chunks};
}

/* All, or nothing. *aside: blocks that it may take, and then those that it left. */
static int fill(struct ht_store *s, const struct purse *p, uint64_t *aside) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t taken = ht_min_u64(p->blocks, *aside);
    int rc = ht_alloc_reserve(s->alloc, p->blocks - taken);

    if (rc)
        return rc;
    rc = p->log_chunks ? ht_journal_reserve(s->journal, p->log_chunks * HT_CHUNK_LOG_BYTES, false) : 0;
    if (rc) {
        ht_alloc_unreserve(s->alloc, p->blocks - taken);
        return rc;
    }
    s->objects.aside_blocks -= taken;
    *aside -= taken;
    return 0;
}

/* Releases the lock in between. */
static void let_leaves_go(const struct range *r, uint64_t end) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = HT_SLICE_RESTING;

    for (uint64_t i = r->first; i < end; i = ht_leaf_last(i) + 1) {
        ht_chunk_leaf(ht_chunk_find(r->o, i))->users--;
        ht_chunk_trim(r->o, i);
        ht_slice_next(r->o->s, &slice);
    }
}

/*
 * Makes all chunks, or none that was not there before, and keeps their leaves. Releases the lock in between.
 */
static int hold_leaves(const struct range *r) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    struct ht_chunk *c;
    uint64_t i = r->first;

    while (i <= r->last) {
        int rc = ht_chunk_ask(r->o, i, &c);
        if (rc) {
            let_leaves_go(r, i);
            return rc;
        }
        ht_chunk_leaf(c)->users++;
        i = ht_leaf_last(i) + 1;
        ht_slice_next(r->o->s, &slice);
    }
    return 0;
}

/* The purse has too little only if another call took something from the range since it was counted. */
static int need(struct ht_store *s, struct purse *p, uint32_t blocks, bool logged) HT_REQUIRES(HT_LOCK_STORE)
{
    struct purse more = {blocks > p->blocks ? blocks - p->blocks : 0, logged && !p->log_chunks};
    uint64_t none = 0;
    int rc = more.blocks || more.log_chunks ? fill(s, &more, &none) : 0;

    if (rc)
        return rc;
    p->blocks += more.blocks - blocks;
    p->log_chunks += more.log_chunks - logged;
    return 0;
}

/* Releases the lock in between. */
static int give(const struct range *r, struct purse *p) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    uint64_t index = r->first;

    ht_chunk_for_each_from(c, r->o, index) {
        if (index > r->last)
            break;
        uint32_t n = lacks(r, c, index);
        bool logged = n && r->o->obj_class != HT_CLASS_SCRATCH && !(c->flags & HT_CH_LOG_RESERVED);
        int rc = need(r->o->s, p, n, logged && !ht_obj_log_promise_left(r->o));
        if (rc)
            return rc;
        ht_chunk_prealloc_return(r->o, c, n);
        if (logged)
            ht_chunk_set_log_reserved(r->o, c);
        ht_slice_next(r->o->s, &slice);
    }
    return 0;
}

/* *aside as for fill. Releases the lock in between. */
static int allocate(struct ht_obj *o, uint64_t off, uint64_t len, uint64_t *aside) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    int rc = ht_obj_need_extra(o);
    struct range r;
    struct purse p;

    if (rc)
        return rc;
    do {
        r = range_of(o, off, len);
        count(&r, &p);
    } while (r.chunk_shift != o->chunk_shift); /* not from here on: it has chunks */
    uint64_t before = *aside;
    rc = fill(s, &p, aside);
    if (rc)
        return rc;
    rc = hold_leaves(&r); /* not before: the space bounds their number */
    if (!rc) {
        rc = give(&r, &p);
        let_leaves_go(&r, r.last + 1);
    }
    uint64_t back = ht_min_u64(p.blocks, before - *aside);
    p.blocks -= back;
    s->objects.aside_blocks += back;
    *aside += back;
    ht_alloc_unreserve(s->alloc, p.blocks);
    if (p.log_chunks)
        ht_journal_unreserve(s->journal, p.log_chunks * HT_CHUNK_LOG_BYTES);
    return rc;
}

int ht_store_set_aside(struct ht_store *s, uint64_t bytes)
{
    ht_store_lock(s);
    int rc = ht_alloc_reserve(s->alloc, bytes / HT_BLOCK_BYTES);
    if (!rc)
        s->objects.aside_blocks += bytes / HT_BLOCK_BYTES;
    ht_store_unlock(s);
    return rc;
}

void ht_store_set_aside_end(struct ht_store *s, uint64_t bytes)
{
    ht_store_lock(s);
    assert(s->objects.aside_blocks >= bytes / HT_BLOCK_BYTES);
    s->objects.aside_blocks -= bytes / HT_BLOCK_BYTES;
    ht_alloc_unreserve(s->alloc, bytes / HT_BLOCK_BYTES);
    ht_store_unlock(s);
}

int ht_obj_prealloc(struct ht_obj *o, uint64_t off, uint64_t len)
{
    uint64_t none = 0;

    return ht_obj_prealloc_aside(o, off, len, &none);
}

int ht_obj_prealloc_aside(struct ht_obj *o, uint64_t off, uint64_t len, uint64_t *bytes)
{
    uint64_t aside = *bytes / HT_BLOCK_BYTES;

    if (off > HT_FILE_BYTES_MAX || len > HT_FILE_BYTES_MAX - off)
        return -EFBIG;
    if (!len)
        return ht_is_read_only(o->s) ? -EROFS : 0;
    struct ht_scope *sc;
    int rc = ht_obj_lock_for_change(o, &sc);
    if (rc)
        return rc;
    rc = allocate(o, off, len, &aside);
    ht_obj_unlock_after_change(o, sc);
    *bytes = aside * HT_BLOCK_BYTES;
    return rc;
}

/*
 * A preallocation counts blocks from its chunk's start, and which ones data has taken is not known. So a chunk with
 * data gives back only if its tail is in the range.
 */
void ht_obj_prealloc_drop(struct ht_obj *o, uint64_t off, uint64_t end)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    uint64_t index = off >> o->chunk_shift;

    ht_chunk_for_each_from(c, o, index) {
        uint64_t start = index << o->chunk_shift;
        uint64_t stop = ht_chunk_has_content(c) ? ht_obj_bytes_per_chunk(o) : (uint64_t)c->prealloc * HT_BLOCK_BYTES;
        if (start >= end)
            break;
        if (start + stop <= ht_round_up(end, HT_BLOCK_BYTES))
            ht_chunk_prealloc_drop(o, c, start < off ? (uint32_t)(off - start) : 0);
        ht_chunk_trim(o, index);
        ht_slice_next(o->s, &slice);
    }
}
