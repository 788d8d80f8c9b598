/* SPDX-License-Identifier: Apache-2.0 */
/*
 * publish.c - current becomes published: records into a transaction, for one object or all of a scope; deletions and
 * moves, too.
 *
 * The transaction frees space that a record replaces once the record is durable.
 */
#include "tiering/base/mutant.h"
#include "tiering/base/verify.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"
#include "tiering/data/flush.h"
#include "tiering/shm/shm.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

void ht_record_ids(struct ht_buf *b, uint64_t next)
{
    uint8_t bytes[8];

    ht_le64_store(bytes, next);
    ht_record_put(b, HT_REC_IDS, bytes, sizeof(bytes));
}

void ht_tx_put_vault(struct ht_tx *tx, const struct ht_vault *v)
{
    size_t mark = ht_record_begin(&tx->records, HT_REC_VAULT);

    ht_buf_put(&tx->records, v->uuid, sizeof(v->uuid));
    ht_buf_put(&tx->records, v->url, strlen(v->url));
    ht_record_end(&tx->records, mark);
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
    unsigned n = ht_ref_holds(r) ? ht_ref_extents(r) : 0;
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

void ht_record_chunk_del(struct ht_buf *b, uint64_t oid, uint64_t index)
{
    size_t mark = ht_record_begin(b, HT_REC_CHUNK_DEL);

    ht_buf_put_u64(b, oid);
    ht_buf_put_u64(b, index);
    ht_buf_put_u64(b, 1);
    ht_record_end(b, mark);
}

static void note_delete(struct ht_tx *tx, struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    if (o->leaving) /* its scope was published earlier in this transaction */
        return;
    o->leaving = true;
    size_t mark = ht_record_begin(&tx->records, HT_REC_OBJECT_DEL);
    ht_buf_put_u64(&tx->records, o->oid);
    ht_record_end(&tx->records, mark);
    if (ht_list_empty(&o->touched))
        o->refs++;
    ht_obj_untouch(o); /* takes over the reference of the scope's list */
    ht_list_add_tail(&tx->deleted, &o->touched);
}

/* ----------------------------------------------------------------- changes */

static void clear_changes(struct ht_scope_changes *c) HT_REQUIRES(HT_LOCK_STORE)
{
    while (c->count)
        ht_obj_put_locked(c->obj[--c->count]);
    c->more = false;
}

/* The publication has room for changes up to here. */
static void allow_changes(struct ht_scope_changes *c, uint64_t found_bytes_max) HT_REQUIRES(HT_LOCK_STORE)
{
    c->found_bytes_max = found_bytes_max;
    if (!c->awaited || c->scope->found_bytes > found_bytes_max)
        return;
    c->awaited = false;
    c->s->waits.wakes.settled = c->s->waits.wakes.any = true;
}

void ht_scope_changes_begin(struct ht_scope_changes *c, struct ht_store *s, uint64_t scope)
{
    *c = (struct ht_scope_changes){.s = s, .scope = ht_scope_find(s, scope, false)};
    if (c->scope)
        ht_scope_hold(c->scope);
    s->objects.changes = c;
}

void ht_scope_changes_end(struct ht_scope_changes *c)
{
    allow_changes(c, UINT64_MAX);
    c->s->objects.changes = NULL;
    clear_changes(c);
    if (c->scope)
        ht_scope_let_go(c->s, c->scope);
}

/* ------------------------------------------------------------- publication */

/*
 * One chunk's current reference into tx. A voided reference waits until it is written anew; a transaction
 * that must be complete cannot leave it out, and the log ends with it (ht_note_published).
 */
static void publish_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index, struct ht_tx *tx)
    HT_REQUIRES(HT_LOCK_STORE)
{
    if (ht_chunk_has_place(c) && !tx->whole && ht_ref_endangered(o->s, &c->cur))
        return;
    struct ht_chunk_before was = ht_chunk_before(c);
    if (c->flags & HT_CH_CUR) {
        ht_record_chunk(&tx->records, o, index, c, &c->cur);
        if ((c->flags & HT_CH_PUB) && !(c->flags & HT_CH_SHARE))
            ht_tx_free_ref(o, &c->pub);
        if (!(c->flags & HT_CH_PUB))
            o->s->objects.chunks++;
        c->pub = c->cur;
        ht_refcount_named(o->s, &c->pub);
        if (!(c->flags & HT_CH_SHARE))
            ht_note_published(o->s, &c->pub);
        memset(&c->cur, 0, sizeof(c->cur));
        c->flags |= HT_CH_PUB;
    } else if (c->flags & HT_CH_GONE) {
        ht_record_chunk_del(&tx->records, o->oid, index);
        ht_tx_free_ref(o, &c->pub);
        c->flags &= (uint8_t)~HT_CH_PUB;
        o->s->objects.chunks--;
    }
    c->flags &= (uint8_t) ~(HT_CH_CUR | HT_CH_SHARE | HT_CH_GONE);
    ht_chunk_note_unpublished(o, c, index, was);
    ht_chunk_drop_log_reserve(o, c);
}

/*
 * Before the slice may end. The transaction has room for some objects and chunks that change while it is collected.
 * Writers may use as large a part of a half of it as the records take of those expected, and then wait: they are
 * never faster than the publication. Threads that cannot wait have the other half. When all is used, the rest is
 * published without a break.
 */
static void keep_room(const struct ht_obj *o, const struct ht_tx *tx, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!slice)
        return;
    size_t put = ht_min_u64(tx->records.len, tx->expected_bytes);
    allow_changes(o->s->objects.changes,
                  tx->found_bytes + tx->again_bytes / 2 * put / ht_max_u64(tx->expected_bytes, 1));
    slice->last = o->scope->found_bytes - tx->found_bytes > tx->again_bytes;
}

/* slice: releases the lock in between; NULL: does not. */
static void publish_chunks(struct ht_obj *o, struct ht_tx *tx, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_chunk_for_each_unpublished(c, o, index) {
        if (ht_chunk_unpublished(c)) {
            publish_chunk(o, c, index, tx);
            ht_chunk_trim(o, index);
        }
        keep_room(o, tx, slice);
        if (slice)
            ht_slice_next(o->s, slice);
    }
}

/* Is there more to it than changes through batch pins? */
static bool is_edited(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    return !o->published || o->deleted || o->meta_dirty || o->lost || (o->extra->edited && !HT_MUTANT("edit-unseen"));
}

static void count_edit(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    if (o->extra->derived && is_edited(o))
        o->scope->edits_published++;
}

static void publish_size(struct ht_obj *o, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_record_object(&tx->records, o, o->size);
    o->pub_size = o->size;
    o->published = true;
    o->meta_dirty = false;
}

static void publish_object(struct ht_obj *o, struct ht_tx *tx, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    if (o->obj_class == HT_CLASS_SCRATCH || o->dead)
        return;
    count_edit(o);
    if (o->meta_dirty || !o->published)
        publish_size(o, tx);
    publish_chunks(o, tx, slice);
    count_edit(o); /* one may have come between two slices */
    if (o->extra->edited && !o->dirty && !o->writing && !o->extra->may_be_dirty)
        ht_obj_extra(o)->edited = false;
    ht_obj_untouch_if_idle(o);
    HT_VERIFY(ht_obj_verify(o));
}

/* The bytes that a publication would put now, and as much again for each image that may be written back before. */
struct pending {
    size_t bytes;
    bool rest;
};

static void add_pending(struct ht_obj *o, struct ht_slice *slice, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    struct pending *n = ctx;

    if (o->obj_class == HT_CLASS_SCRATCH || o->dead || (n->rest && o->extra->derived))
        return;
    if (o->deleted) {
        n->bytes += o->published ? HT_OBJECT_DEL_RECORD_BYTES : 0;
        return;
    }
    n->bytes += o->meta_dirty || !o->published ? HT_OBJECT_RECORD_BYTES : 0;
    n->bytes += (size_t)(o->dirty + o->writing) * HT_CHUNK_LOG_BYTES;
    ht_chunk_for_each_unpublished(c, o, index) {
        if (c->flags & HT_CH_CUR)
            n->bytes += HT_CHUNK_LOG_BYTES + ht_ref_extra_bytes(&c->cur);
        else if (c->flags & HT_CH_GONE)
            n->bytes += HT_CHUNK_DEL_RECORD_BYTES;
        if (slice)
            ht_slice_next(o->s, slice);
    }
}

/* ----------------------------------------------- deletions and other scopes */

/* The object exists no more; releases the reference of the scope's list. */
static void bury(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    o->dead = true;
    o->refs++;
    if (!ht_list_empty(&o->touched)) {
        ht_obj_untouch(o);
        ht_obj_put_locked(o);
    }
    ht_obj_put_locked(o);
}

void ht_obj_delete(struct ht_obj *o, struct ht_tx *tx)
{
    struct ht_store *s = o->s;

    ht_store_lock(s);
    o->deleted = true;
    if (!o->published) {
        bury(o);
    } else if (o->scope->id) {
        ht_obj_touch_meta(o);
    } else {
        note_delete(tx, o);
    }
    ht_store_unlock(s);
}

int ht_obj_set_scope(struct ht_obj *o, uint64_t scope, struct ht_tx *tx)
{
    struct ht_store *s = o->s;

    ht_store_lock(s);
    bool made = !ht_scope_find(s, scope, false);
    struct ht_scope *sc = ht_scope_find(s, scope, true);
    bool known = o->published || o->obj_class == HT_CLASS_SCRATCH, touched = !ht_list_empty(&o->touched);
    int rc = !sc ? -ENOMEM : !known || (touched && sc != s->objects.scope0) ? -EBUSY : 0;
    if (!rc && !o->leaving) {
        if (touched)
            ht_obj_untouch(o);
        ht_obj_join(o, sc); /* the scope that it leaves may go with that */
        if (touched)        /* the reference moves, too */
            ht_list_add_tail(&sc->touched, &o->touched);
        if (o->published)
            ht_record_object(&tx->records, o, o->pub_size);
    }
    if (rc && sc && made)
        ht_scope_forget(s, scope);
    ht_store_unlock(s);
    return rc;
}

/* ---------------------------------------------------------------- scopes */

struct publication {
    struct ht_tx *tx;
    struct ht_obj *obj; /* NULL: all of the scope */
    uint64_t scope;
    bool rest;
};

static void publish_touched(struct ht_obj *o, struct ht_slice *slice, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    struct publication *p = ctx;

    if (o->deleted && o->published) { /* a name may have gone with this transaction */
        count_edit(o);
        note_delete(p->tx, o);
    } else if (!o->deleted && !(p->rest && o->extra->derived)) {
        publish_object(o, p->tx, slice);
    }
    keep_room(o, p->tx, slice);
}

static void publish_all(struct publication *p, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!p->obj)
        ht_scope_visit_touched(p->tx->s, p->scope, slice, publish_touched, p);
    else if (!p->obj->deleted)
        publish_object(p->obj, p->tx, slice);
}

static uint64_t found_bytes(const struct ht_scope_changes *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return c->scope ? c->scope->found_bytes : 0;
}

/*
 * Everything in slices, and then all changes since at once. So the transaction has the state of one moment, and threads
 * hardly wait for the lock. While too much has changed for that, again in slices: each time takes a part of the time
 * before.
 */
static void publish_in_slices(struct publication *p) HT_REQUIRES(HT_LOCK_STORE)
{
    enum { TIMES_MAX = 8, AT_ONCE_BYTES = HT_SLICE_STEPS * HT_CHUNK_RECORD_BYTES };
    struct ht_scope_changes changes;
    struct ht_slice slice;
    unsigned times = 0;
    uint64_t before;

    ht_scope_changes_begin(&changes, p->tx->s, p->scope);
    do {
        slice = (struct ht_slice)HT_SLICE_RESTING;
        before = found_bytes(&changes);
        clear_changes(&changes);
        publish_all(p, &slice);
    } while (slice.ended && (changes.more || found_bytes(&changes) - before > AT_ONCE_BYTES) && ++times < TIMES_MAX);
    if (slice.ended && (changes.more || p->obj))
        publish_all(p, NULL);
    else
        for (unsigned i = 0; slice.ended && i < changes.count; i++)
            publish_touched(changes.obj[i], NULL, p);
    ht_scope_changes_end(&changes);
}

void ht_scope_publish(struct ht_store *s, uint64_t scope, bool rest, struct ht_tx *tx)
{
    struct publication p = {.tx = tx, .scope = scope, .rest = rest};

    ht_store_lock(s);
    publish_in_slices(&p);
    ht_store_unlock(s);
}

/* Participants forget the scope, and objects come last. */
void ht_scope_end(struct ht_store *s, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx)
{
    assert(scope);
    ht_participant_for_each(c, s, ended)
        c->ended(c->ctx, scope, how, tx);
    tx->found_bytes = ht_scope_found_bytes(s, scope);
    ht_scope_publish(s, scope, false, tx);
    ht_store_lock(s);
    ht_scope_forget(s, scope);
    ht_store_unlock(s);
}

void ht_obj_publish(struct ht_obj *o, struct ht_tx *tx)
{
    struct publication p = {.tx = tx, .obj = o};

    ht_store_lock(o->s);
    tx->found_bytes = o->scope->found_bytes;
    p.scope = o->scope->id;
    publish_in_slices(&p);
    ht_store_unlock(o->s);
}

/*
 * No chunk is published before the size that it lies in: a later growth would show its bytes after a crash. A shorter
 * size comes last, when nothing is published after it.
 */
bool ht_obj_publish_part(struct ht_obj *o, uint64_t *index, size_t bytes, struct ht_tx *tx)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    struct ht_store *s = o->s;
    struct ht_chunk *c = NULL;

    ht_store_lock(s);
    bool alone = o->scope == s->objects.scope0 && !o->deleted;
    for (; alone && (c = ht_chunk_next_marked(o, HT_MARK_UNPUBLISHED, index)); ++*index) {
        if (tx->records.len >= bytes)
            break;
        if (!o->published || o->size > o->pub_size) /* it may have grown since the last chunk */
            publish_size(o, tx);
        if (ht_chunk_unpublished(c)) {
            publish_chunk(o, c, *index, tx);
            ht_chunk_trim(o, *index);
        }
        ht_slice_next(s, &slice);
    }
    ht_store_unlock(s);
    return c != NULL;
}

static void note_edited(struct ht_obj *o, struct ht_slice *slice, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    bool *edited = ctx;

    *edited |= o->extra->derived && is_edited(o);
}

bool ht_scope_edited(struct ht_store *s, uint64_t scope)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    bool edited = false;

    ht_store_lock(s);
    ht_scope_visit_touched(s, scope, &slice, note_edited, &edited);
    ht_store_unlock(s);
    return edited;
}

uint64_t ht_scope_edits_published(struct ht_store *s, uint64_t scope)
{
    ht_store_lock(s);
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    uint64_t edits = sc ? sc->edits_published : 0;
    ht_store_unlock(s);
    return edits;
}

uint64_t ht_scope_edits(struct ht_store *s, uint64_t scope)
{
    ht_store_lock(s);
    ht_shm_for_each_stored(s, scope, ht_obj_note_stores); /* an edit of each */
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    uint64_t edits = sc ? sc->edits : 0;
    ht_store_unlock(s);
    return edits;
}

size_t ht_obj_pending_bytes(struct ht_obj *o)
{
    struct pending n = {.bytes = HT_OBJECT_RECORD_BYTES};
    struct ht_slice slice = HT_SLICE_RESTING;

    ht_store_lock(o->s);
    add_pending(o, &slice, &n);
    ht_store_unlock(o->s);
    return n.bytes;
}

size_t ht_scope_pending_object_bytes(struct ht_store *s, uint64_t scope, bool rest)
{
    struct pending n = {.rest = rest};
    struct ht_slice slice = HT_SLICE_RESTING;

    ht_store_lock(s);
    ht_scope_visit_touched(s, scope, &slice, add_pending, &n);
    ht_store_unlock(s);
    return n.bytes;
}
