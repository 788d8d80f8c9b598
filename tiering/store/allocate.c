/* SPDX-License-Identifier: Apache-2.0 */
/*
 * allocate.c - promises: space set aside for chunks before anything is written to them.
 *
 * A promise is a count of blocks at the chunk, reserved in the allocator, and the chunk's claim of log room. Writing takes from it what
 * the image needs (ht_chunk_reserve) and then what a staged write needs (ht_chunk_take_space). It ends when the chunk is stored whole,
 * cut off, punched or dropped. Nothing of it is in the log.
 *
 * store.lock guards it; chunk locks do not matter.
 */
#include <assert.h>

#include "tiering/store/store_priv.h"

enum { CLAIM_BYTES = HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES };

struct range {
    struct ht_obj *o;
    uint64_t first, last, end; /* chunks, both included; byte behind the range */
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

/* Never more than a chunk has, and what a writer that lets go of it gives back. */
static void set_promised(struct ht_chunk *c, uint32_t blocks)
{
    assert(blocks <= HT_CHUNK_PROMISED_MAX);
    c->promised = blocks & HT_CHUNK_PROMISED_MAX;
}

/* Blocks that the chunk lacks for a first write anywhere in the range. */
static uint32_t lacks(const struct range *r, struct ht_chunk *c, uint64_t index)
{
    uint32_t bytes = wanted_bytes(r, index), have = c->promised;
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

/* What all of the range lacks: as if no chunk were in memory, and then what those that are have. */
static void count(const struct range *r, uint64_t *out_blocks, uint64_t *out_claims)
{
    uint64_t blocks =
        (r->last - r->first) * blocks_of(ht_obj_bytes_per_chunk(r->o)) + blocks_of(wanted_bytes(r, r->last));
    uint64_t claims = r->last - r->first + 1, index = r->first;
    struct ht_chunk *c;
    ht_chunk_for_each_from(c, r->o, index)
    {
        if (index > r->last)
            break;
        uint32_t n = lacks(r, c, index);
        blocks -= blocks_of(wanted_bytes(r, index)) - n;
        claims -= !n || c->flags & CH_CLAIM ? 1 : 0;
    }
    *out_blocks = blocks;
    *out_claims = r->o->obj_class == HT_CLASS_SCRATCH ? 0 : claims;
}

static void count_promised(struct ht_obj *o, int64_t blocks)
{
    if (blocks)
        ht_obj_extra(o)->promised_blocks += (uint64_t)blocks;
}

/* All of them, or none that was not there before. */
static int make_chunks(const struct range *r)
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

static void promise(const struct range *r)
{
    struct ht_chunk *c;
    uint64_t index = r->first;
    ht_chunk_for_each_from(c, r->o, index)
    {
        if (index > r->last)
            break;
        uint32_t n = lacks(r, c, index);
        set_promised(c, c->promised + n);
        count_promised(r->o, n);
        if (n && r->o->obj_class != HT_CLASS_SCRATCH)
            c->flags |= CH_CLAIM;
    }
}

static int allocate(const struct range *r)
{
    struct ht_store *s = r->o->s;
    uint64_t blocks, claims;
    count(r, &blocks, &claims);
    int rc = ht_obj_need_extra(r->o);
    if (!rc)
        rc = ht_alloc_reserve(s->alloc, blocks);
    if (rc)
        return rc;
    rc = claims ? ht_journal_claim(s->journal, claims * CLAIM_BYTES, false) : 0;
    if (!rc) {
        rc = make_chunks(r); /* not before: the space bounds their number */
        if (rc && claims)
            ht_journal_unclaim(s->journal, claims * CLAIM_BYTES);
    }
    if (rc)
        ht_alloc_unreserve(s->alloc, blocks);
    else
        promise(r);
    return rc;
}

int ht_obj_allocate(struct ht_obj *o, uint64_t off, uint64_t len)
{
    if (off > HT_FILE_BYTES_MAX || len > HT_FILE_BYTES_MAX - off)
        return -EFBIG;
    if (!len)
        return ht_store_read_only(o->s) ? -EROFS : 0;
    struct ht_scope *sc;
    int rc = ht_obj_lock_for_change(o, &sc);
    if (rc)
        return rc;
    const struct range r = {
        .o = o, .first = off >> o->chunk_shift, .last = (off + len - 1) >> o->chunk_shift, .end = off + len};
    rc = allocate(&r);
    ht_obj_unlock_after_change(o, sc);
    return rc;
}

void ht_chunk_unpromise(struct ht_obj *o, struct ht_chunk *c, uint32_t keep_bytes)
{
    uint32_t keep = blocks_of(keep_bytes);
    if (c->promised <= keep)
        return;
    ht_alloc_unreserve(o->s->alloc, c->promised - keep);
    count_promised(o, -(int64_t)(c->promised - keep));
    set_promised(c, keep);
    if (!keep)
        ht_chunk_settle_claim(o, c);
}

uint32_t ht_chunk_use_promise(struct ht_obj *o, struct ht_chunk *c, uint32_t need)
{
    uint32_t n = c->promised < need ? c->promised : need;
    set_promised(c, c->promised - n);
    count_promised(o, -(int64_t)n);
    return n;
}

void ht_chunk_return_promise(struct ht_obj *o, struct ht_chunk *c, uint32_t n)
{
    set_promised(c, c->promised + n);
    count_promised(o, n);
}

void ht_obj_unpromise_behind(struct ht_obj *o, uint64_t size)
{
    struct ht_chunk *c;
    uint64_t first = size >> o->chunk_shift, index = first;
    ht_chunk_for_each_from(c, o, index)
    {
        ht_chunk_unpromise(o, c, index == first ? (uint32_t)(size & (ht_obj_bytes_per_chunk(o) - 1)) : 0);
        ht_chunk_trim(o, index);
    }
}
