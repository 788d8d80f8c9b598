/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prealloc.c - preallocation: space reserved for chunks before anything is written to them.
 *
 * It is a count of blocks at the chunk, reserved in the allocator, and the chunk's log reserve. Writing takes from it
 * the blocks that the image needs (ht_chunk_reserve) and then those that a staged write needs (ht_chunk_take_space). It
 * ends when the chunk is stored whole, cut off, punched or dropped. It is not in the log.
 *
 * Space that is set aside is a count of blocks for objects that do not exist yet.
 *
 * store.lock guards it; chunk locks do not matter.
 */
#include <assert.h>

#include "tiering/object/prealloc.h"
#include "tiering/journal/journal.h"
#include "tiering/space/alloc.h"
#include "tiering/cache/arena.h"
#include "tiering/api/object.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/record_bytes.h"
#include "tiering/object/ref.h"
#include "tiering/object/scope.h"
#include "tiering/object/space.h"

enum { LOG_RESERVE_BYTES = HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES };

struct range {
    struct ht_obj *o;
    uint64_t first, last, end; /* chunks, both included; the first byte after the range */
};

/* Bytes of chunk index up to the end of the range. */
static uint32_t wanted_bytes(const struct range *r, uint64_t index)
{
    return (uint32_t)ht_min_u64(r->end - (index << r->o->chunk_shift), ht_obj_bytes_per_chunk(r->o));
}

static uint32_t blocks_of(uint32_t bytes)
{
    return (uint32_t)ht_div_up(bytes, HT_BLOCK_BYTES);
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
    return blocks_of(bytes) > have ? blocks_of(bytes) - have : 0;
}

/* The blocks and log reserves that the range lacks: as if no chunk were in memory, less those of the present chunks. */
static void count(const struct range *r, uint64_t *out_blocks, uint64_t *out_log_chunks) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t blocks =
        (r->last - r->first) * blocks_of(ht_obj_bytes_per_chunk(r->o)) + blocks_of(wanted_bytes(r, r->last));
    uint64_t log_chunks = r->last - r->first + 1, index = r->first;
    struct ht_chunk *c;

    ht_chunk_for_each_from(c, r->o, index)
    {
        if (index > r->last)
            break;
        uint32_t n = lacks(r, c, index);
        blocks -= blocks_of(wanted_bytes(r, index)) - n;
        log_chunks -= !n || c->flags & HT_CH_LOG_RESERVED ? 1 : 0;
    }
    *out_blocks = blocks;
    *out_log_chunks = r->o->obj_class == HT_CLASS_SCRATCH ? 0 : log_chunks;
}

/* Makes all chunks, or none that was not there before. */
static int make_chunks(const struct range *r) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;
    int rc = 0;
    uint64_t i = r->first;

    for (; !rc && i <= r->last; i++)
        rc = ht_chunk_ask(r->o, i, &c);
    for (; rc && i > r->first; i--)
        ht_chunk_trim(r->o, i - 1);
    return rc;
}

static void prealloc(const struct range *r) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c;
    uint64_t index = r->first;

    ht_chunk_for_each_from(c, r->o, index)
    {
        if (index > r->last)
            break;
        uint32_t n = lacks(r, c, index);
        ht_chunk_prealloc_return(r->o, c, n);
        if (n && r->o->obj_class != HT_CLASS_SCRATCH)
            c->flags |= HT_CH_LOG_RESERVED;
    }
}

/* *aside: blocks that it may take, and then those that it left. */
static int allocate(const struct range *r, uint64_t *aside) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = r->o->s;
    uint64_t blocks, log_chunks;

    count(r, &blocks, &log_chunks);
    uint64_t taken = ht_min_u64(blocks, *aside);
    int rc = ht_obj_need_extra(r->o);
    blocks -= taken;
    if (!rc)
        rc = ht_alloc_reserve(s->alloc, blocks);
    if (rc)
        return rc;
    rc = log_chunks ? ht_journal_reserve(s->journal, log_chunks * LOG_RESERVE_BYTES, false) : 0;
    if (!rc) {
        rc = make_chunks(r); /* not before: the space bounds their number */
        if (rc && log_chunks)
            ht_journal_unreserve(s->journal, log_chunks * LOG_RESERVE_BYTES);
    }
    if (rc) {
        ht_alloc_unreserve(s->alloc, blocks);
        return rc;
    }
    s->objects.aside_blocks -= taken;
    *aside -= taken;
    prealloc(r);
    return 0;
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
    const struct range r = {
        .o = o, .first = off >> o->chunk_shift, .last = (off + len - 1) >> o->chunk_shift, .end = off + len};
    rc = allocate(&r, &aside);
    ht_obj_unlock_after_change(o, sc);
    *bytes = aside * HT_BLOCK_BYTES;
    return rc;
}

void ht_chunk_prealloc_drop(struct ht_obj *o, struct ht_chunk *c, uint32_t keep_bytes)
{
    uint32_t keep = blocks_of(keep_bytes);

    if (c->prealloc <= keep)
        return;
    ht_alloc_unreserve(o->s->alloc, ht_chunk_prealloc_use(o, c, c->prealloc - keep));
    if (!keep)
        ht_chunk_drop_log_reserve(o, c);
}

void ht_obj_prealloc_drop_behind(struct ht_obj *o, uint64_t size)
{
    struct ht_chunk *c;
    uint64_t first = size >> o->chunk_shift, index = first;

    ht_chunk_for_each_from(c, o, index)
    {
        ht_chunk_prealloc_drop(o, c, index == first ? (uint32_t)(size & (ht_obj_bytes_per_chunk(o) - 1)) : 0);
        ht_chunk_trim(o, index);
    }
}
