/* SPDX-License-Identifier: Apache-2.0 */
/*
 * publish.c - current becomes published: records into a transaction, for one object or a whole scope; and back (abort).
 *
 * What a record replaces is freed by the transaction once it is durable.
 */
#include <assert.h>
#include <stdlib.h>

#include "tiering/store/store_priv.h"

void ht_record_ids(struct ht_buf *b, uint64_t next)
{
    uint8_t bytes[8];
    ht_le64_store(bytes, next);
    ht_record_put(b, HT_REC_IDS, bytes, sizeof(bytes));
}

void ht_record_object(struct ht_buf *b, const struct ht_obj *o, uint64_t size)
{
    size_t mark = ht_record_begin(b, HT_REC_OBJECT);
    ht_buf_put_u64(b, o->oid);
    ht_buf_put_u32(b, ht_obj_bytes_per_chunk(o));
    ht_buf_put_u32(b, o->obj_class);
    ht_buf_put_u64(b, size);
    ht_buf_put_u64(b, o->scope->id);
    ht_record_end(b, mark);
}

void ht_record_chunk(struct ht_buf *b, const struct ht_obj *o, uint64_t index, const struct ht_chunk *c,
                     const struct ht_ref *r)
{
    unsigned n = ht_ref_lost(r) ? 0 : ht_ref_extents(r);
    size_t mark = ht_record_begin(b, HT_REC_CHUNK);
    ht_buf_put_u64(b, o->oid);
    ht_buf_put_u64(b, index);
    ht_buf_put_u32(b, c->generation);
    ht_buf_put_u8(b, r->codec);
    ht_buf_put_u8(b, 0);
    ht_buf_put_u16(b, (uint16_t)n);
    ht_buf_put_u32(b, r->stored);
    ht_buf_put_u32(b, r->visible);
    ht_buf_put_u64(b, r->checksum);
    for (unsigned i = 0; i < n; i++) {
        struct ht_extent e = ht_ref_extent(r, i);
        ht_buf_put_u8(b, (uint8_t)e.device);
        ht_buf_put_u8(b, 0);
        ht_buf_put_u16(b, (uint16_t)e.blocks);
        ht_buf_put_u64(b, e.block);
    }
    ht_record_end(b, mark);
}

static void record_chunk_del(struct ht_buf *b, uint64_t oid, uint64_t index)
{
    size_t mark = ht_record_begin(b, HT_REC_CHUNK_DEL);
    ht_buf_put_u64(b, oid);
    ht_buf_put_u64(b, index);
    ht_buf_put_u64(b, 1);
    ht_record_end(b, mark);
}

void ht_tx_note_delete(struct ht_tx *tx, struct ht_obj *o)
{
    if (o->leaving) /* its scope was published in this transaction already */
        return;
    o->leaving = true;
    size_t mark = ht_record_begin(&tx->records, HT_REC_OBJECT_DEL);
    ht_buf_put_u64(&tx->records, o->oid);
    ht_record_end(&tx->records, mark);
    if (ht_list_empty(&o->touched))
        o->refs++;
    ht_list_del(&o->touched); /* what the scope's list held, this one holds */
    ht_list_add_tail(&tx->deleted, &o->touched);
}

/*
 * One chunk's current reference into tx. Lock held. What a failed flush has voided waits until it is written anew; a transaction that is to
 * have everything cannot leave it out, and the log ends with it (ht_note_published).
 */
static void publish_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index, struct ht_tx *tx)
{
    if ((c->flags & CH_CUR) && !tx->whole && ht_ref_endangered(o->s, &c->cur))
        return;
    if (c->flags & CH_CUR) {
        ht_record_chunk(&tx->records, o, index, c, &c->cur);
        if ((c->flags & CH_PUB) && !(c->flags & CH_SHARE))
            ht_tx_free_ref(tx, o, &c->pub);
        if (!(c->flags & CH_PUB))
            o->s->chunks++;
        c->pub = c->cur;
        ht_share_named(o->s, &c->pub);
        ht_note_published(o->s, &c->pub);
        memset(&c->cur, 0, sizeof(c->cur));
        c->flags |= CH_PUB;
    } else if (c->flags & CH_GONE) {
        record_chunk_del(&tx->records, o->oid, index);
        ht_tx_free_ref(tx, o, &c->pub);
        c->flags &= (uint8_t)~CH_PUB;
        o->s->chunks--;
    }
    c->flags &= (uint8_t) ~(CH_CUR | CH_SHARE | CH_GONE);
    ht_chunk_note_unpublished(o, c, index, true);
    ht_chunk_settle_claim(o, c);
}

static void publish_chunks(struct ht_obj *o, struct ht_tx *tx)
{
    struct ht_chunk *c;
    uint64_t index = 0;
    ht_chunk_for_each_from(c, o, index)
    {
        if (!o->unpublished)
            break;
        if (!ht_chunk_leaf(c)->unpublished)
            index = ht_leaf_last(index);
        else if (ht_chunk_unpublished(c)) {
            publish_chunk(o, c, index, tx);
            ht_chunk_trim(o, index);
        }
    }
}

void ht_obj_publish_locked(struct ht_obj *o, struct ht_tx *tx)
{
    if (o->obj_class == HT_CLASS_SCRATCH || o->dead)
        return;
    if (o->meta_dirty || !o->published) {
        ht_record_object(&tx->records, o, o->size);
        o->pub_size = o->size;
        o->published = true;
        o->meta_dirty = false;
    }
    publish_chunks(o, tx);
    ht_obj_untouch_if_idle(o);
}

size_t ht_obj_pending_bytes_locked(struct ht_obj *o)
{
    if (o->obj_class == HT_CLASS_SCRATCH || o->dead)
        return 0;
    if (o->deleted)
        return o->published ? HT_OBJECT_DEL_RECORD_BYTES : 0;
    size_t bytes = o->meta_dirty || !o->published ? HT_OBJECT_RECORD_BYTES : 0;
    bytes += (size_t)(o->dirty + o->writing) * (HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES);
    struct ht_chunk *c;
    uint64_t index = 0;
    ht_chunk_for_each_from(c, o, index)
    {
        if (!o->unpublished)
            break;
        if (!ht_chunk_leaf(c)->unpublished)
            index = ht_leaf_last(index);
        else if (c->flags & CH_CUR)
            bytes += HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES + ht_ref_extra_bytes(&c->cur);
        else if (c->flags & CH_GONE)
            bytes += HT_CHUNK_DEL_RECORD_BYTES;
    }
    return bytes;
}

void ht_obj_publish(struct ht_obj *o, struct ht_tx *tx)
{
    ht_store_lock(o->s);
    if (!o->deleted)
        ht_obj_publish_locked(o, tx);
    ht_store_unlock(o->s);
}

/* ---------------------------------------------------------------- scopes */

void ht_scope_publish(struct ht_store *s, uint64_t scope, struct ht_tx *tx)
{
    ht_store_lock(s);
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    if (sc)
        ht_list_for_each_safe(p, next, &sc->touched) {
            struct ht_obj *o = ht_list_entry(p, struct ht_obj, touched);
            if (o->deleted && o->published)
                ht_tx_note_delete(tx, o);
            else if (!o->deleted)
                ht_obj_publish_locked(o, tx);
        }
    ht_store_unlock(s);
}

size_t ht_obj_pending_bytes(struct ht_obj *o)
{
    ht_store_lock(o->s);
    size_t bytes = ht_obj_pending_bytes_locked(o) + HT_OBJECT_RECORD_BYTES;
    ht_store_unlock(o->s);
    return bytes;
}

size_t ht_scope_pending_bytes(struct ht_store *s, uint64_t scope)
{
    size_t bytes = 0;
    ht_store_lock(s);
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    if (sc)
        ht_list_for_each(p, &sc->touched)
            bytes += ht_obj_pending_bytes_locked(ht_list_entry(p, struct ht_obj, touched));
    ht_store_unlock(s);
    return bytes;
}

/* One chunk back to what is published. Lock held, let go while waiting for the chunk. */
static void abort_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_store *s = o->s;
    ht_chunk_lock_exclusive(s, c);
    ht_chunk_unpromise(o, c, 0);
    bool was = ht_chunk_unpublished(c);
    bool newer = was || (c->flags & CH_BAD) || ht_handed_stores(o) ||
        (c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->dirty);
    if (newer) {
        if (ht_arena_is_guest(s->arena, c->slot))
            ht_handed_revert(o, c, index);
        else
            ht_chunk_drop_image(o, c, index);
        ht_chunk_drop_cur(o, c);
        c->flags &= (uint8_t)~CH_BAD;
        c->generation++;
        o->version++;
        ht_chunk_note_unpublished(o, c, index, was);
        ht_chunk_settle_claim(o, c);
    }
    ht_chunk_unlock_exclusive(o, c, index);
}

static void abort_object(struct ht_obj *o)
{
    struct ht_chunk *c;
    uint64_t index = 0;
    o->vanished = !o->published; /* first: who reads meanwhile sees that it is gone, and not what is left */
    ht_chunk_for_each_from(c, o, index) if (ht_chunk_in_use(c)) abort_chunk(o, c, index);
    o->error = 0;
    o->lost = false;
    o->meta_dirty = false;
    if (o->published) {
        ht_handed_reach_again(o, o->pub_size);
        o->size = o->pub_size;
        o->deleted = false;
        ht_obj_untouch_if_idle(o); /* not when somebody wrote to it again meanwhile */
        return;
    }
    o->dead = true;
    o->deleted = true;
    if (!ht_list_empty(&o->touched)) {
        ht_list_del(&o->touched);
        ht_obj_put_locked(o);
    }
}

/* Lock held, let go meanwhile. */
static void shut_out_changes(struct ht_store *s, struct ht_scope *sc)
{
    sc->aborts++;
    sc->aborting = true;
    while (sc->changing)
        ht_store_wait(s, &s->settled, 0);
}

static void let_changes_in(struct ht_store *s, struct ht_scope *sc)
{
    sc->aborting = false;
    pthread_cond_broadcast(&s->settled);
}

/*
 * Without memory of its own: whoever aborts has taken the names back already, and must get through. Each object goes to the end of the
 * list before the lock may be let go, so as many as there were at the beginning are all of them.
 */
int ht_scope_abort(struct ht_store *s, uint64_t scope)
{
    size_t left = 0;
    ht_store_lock(s);
    ht_handed_touch(s, scope);
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    if (sc)
        shut_out_changes(s, sc);
    if (sc)
        ht_list_for_each(p, &sc->touched)
            left++;
    for (; left && !ht_list_empty(&sc->touched); left--) {
        struct ht_obj *o = ht_list_entry(sc->touched.next, struct ht_obj, touched);
        ht_list_del(&o->touched);
        ht_list_add_tail(&sc->touched, &o->touched);
        o->refs++;
        abort_object(o);
        ht_obj_put_locked(o);
    }
    if (sc)
        let_changes_in(s, sc);
    ht_store_unlock(s);
    return 0;
}
