/* SPDX-License-Identifier: Apache-2.0 */
/*
 * extra.c - the part of an object that few objects need.
 *
 * More than one chunk, a rewrite reserve, preallocation and shared memory need an extra. It is made where that begins
 * and can still be refused, so a call that must succeed needs no memory for it. A small file that kept steps share
 * needs none: there are millions of these.
 */

#include "tiering/api/object.h"
#include "tiering/object/context.h"

const struct ht_obj_extra ht_obj_no_extra;

int ht_obj_need_extra(struct ht_obj *o)
{
    if (ht_obj_has_extra(o))
        return 0;
    struct ht_obj_extra *x = calloc(1, sizeof(*x));
    if (!x)
        return -ENOMEM;
    x->shared_blocks = ht_obj_shared_blocks(o);
    x->cold_blocks = ht_obj_cold_blocks(o);
    x->log_chunks = o->first.head.there && o->first.chunk.flags & HT_CH_LOG_RESERVED;
    o->extra = x;
    o->s->objects.meta_bytes += sizeof(*x);
    return 0;
}

struct ht_obj_extra *ht_obj_extra(struct ht_obj *o)
{
    assert(ht_obj_has_extra(o));
    return (struct ht_obj_extra *)(uintptr_t)o->extra;
}

/* Of a chunk's references, those that are shared; or cold ones, which are a part of these. */
static uint64_t blocks_of(const struct ht_chunk *c, bool cold) HT_REQUIRES(HT_LOCK_STORE)
{
    bool pub = c->flags & HT_CH_PUB && (cold ? ht_ref_is_cold(&c->pub) : c->pub.shared);
    bool cur = ht_chunk_has_place(c) && (cold ? ht_ref_is_cold(&c->cur) : c->cur.shared);

    return (pub ? ht_ref_blocks(&c->pub) : 0) + (cur ? ht_ref_blocks(&c->cur) : 0);
}

uint64_t ht_obj_cold_blocks(const struct ht_obj *o)
{
    if (ht_obj_has_extra(o))
        return o->extra->cold_blocks;
    /* A replay counts in the end. */
    return o->first.head.there && !o->s->objects.replaying ? blocks_of(&o->first.chunk, true) : 0;
}

void ht_obj_count_cold(struct ht_obj *o, const struct ht_ref *ref, int sign)
{
    uint64_t blocks = ht_ref_is_cold(ref) ? (uint64_t)(sign * (int64_t)ht_ref_blocks(ref)) : 0;

    if (blocks && ht_obj_has_extra(o))
        ht_obj_extra(o)->cold_blocks += blocks;
    o->scope->cold_blocks += blocks;
    o->s->objects.cold_blocks += blocks;
}

uint64_t ht_obj_shared_blocks(const struct ht_obj *o)
{
    if (ht_obj_has_extra(o))
        return o->extra->shared_blocks;
    return o->first.head.there ? blocks_of(&o->first.chunk, false) : 0;
}

void ht_obj_count_shared(struct ht_obj *o, const struct ht_ref *ref, int sign)
{
    if (ht_obj_has_extra(o))
        ht_obj_extra(o)->shared_blocks += (uint64_t)(sign * (int64_t)ht_ref_blocks(ref));
}

int ht_obj_set_derived(struct ht_obj *o, bool edited)
{
    ht_store_lock(o->s);
    int rc = ht_obj_need_extra(o);
    if (!rc && !o->extra->derived) {
        ht_obj_extra(o)->derived = true;
        ht_obj_extra(o)->edited = edited || o->extra->may_be_dirty;
        o->scope->edits += edited;
    }
    ht_store_unlock(o->s);
    return rc;
}

int ht_obj_set_used(struct ht_obj *o, uint32_t bytes)
{
    ht_store_lock(o->s);
    uint64_t stored = ht_obj_stored_blocks(o) - ht_obj_shared_blocks(o),
             chunks = ht_div_up(o->size, ht_obj_bytes_per_chunk(o));
    bool less = bytes < ht_obj_bytes_per_chunk(o) && !o->extra->used_bytes &&
        stored <= chunks * ht_div_up(bytes, HT_BLOCK_BYTES);
    int rc = less ? ht_obj_need_extra(o) : 0;
    if (!rc && less)
        ht_obj_extra(o)->used_bytes = bytes;
    ht_store_unlock(o->s);
    return rc;
}

bool ht_obj_is_derived(struct ht_obj *o)
{
    return ht_store_locked(o->s, o->extra->derived);
}

void ht_obj_free_extra(struct ht_obj *o)
{
    if (!ht_obj_has_extra(o))
        return;
    o->s->objects.meta_bytes -= sizeof(*o->extra);
    free(ht_obj_extra(o));
}

/* -------------------------------------------------------------- log bytes */

uint64_t ht_obj_log_promise_left(const struct ht_obj *o)
{
    const struct ht_obj_extra *x = o->extra;

    return x->log_promised > x->log_chunks ? x->log_promised - x->log_chunks : 0;
}

int ht_obj_promise_log(struct ht_obj *o, uint64_t size)
{
    const struct ht_obj_extra *x = o->extra;
    uint64_t chunks = o->obj_class == HT_CLASS_SCRATCH ? 0 : ht_div_up(size, ht_obj_bytes_per_chunk(o));
    uint64_t had = ht_max_u64(x->log_chunks, x->log_promised), want = ht_max_u64(x->log_chunks, chunks);
    int rc = want > had ? ht_journal_reserve(o->s->journal, (want - had) * HT_CHUNK_LOG_BYTES, false) : 0;

    if (rc || x->log_promised == chunks)
        return rc;
    if (want < had)
        ht_journal_unreserve(o->s->journal, (had - want) * HT_CHUNK_LOG_BYTES);
    ht_obj_extra(o)->log_promised = chunks;
    return 0;
}

void ht_chunk_set_log_reserved(struct ht_obj *o, struct ht_chunk *c)
{
    c->flags |= HT_CH_LOG_RESERVED;
    if (ht_obj_has_extra(o))
        ht_obj_extra(o)->log_chunks++;
}
