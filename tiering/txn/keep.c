/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep.c - copies of a scope that share all stored bytes (tiering/api/keep.h).
 *
 *   a commit with a copy                                      what a crash right after it leaves
 *   1. writes back, flushes, begins the transaction           the commit before
 *   2. makes objects, names and parameters of the copy,       the same: they are only in memory
 *      and reserves space and log bytes for it
 *   3. puts the commit's records                              the same
 *   4. shares the published chunks, and puts the copy         the same
 *   5. appends the transaction                                the commit before, or this one with its copy
 *
 * 2 and 4 can fail; then everything of the copy goes, and the transaction is that of the commit alone. A kept step that
 * expires ends after 4, when the copy is complete.
 *
 * A clone is the same without a commit: its transaction has steps 2, 4 and 5 alone.
 *
 * The list of what belongs to the scope comes from the participants: each adds the numbers of its things to the copy,
 * names before the optimizer. Objects come last: each number that is an object's gets one with the same chunks.
 *
 * Lock order: transaction > names > optimizer > store. This file holds only the transaction when it calls a
 * participant.
 */

#include "tiering/base/mutant.h"
#include "tiering/base/verify.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

enum { TABLE_START = 64 };

/* ----------------------------------------------------------------- numbers */

/* Its place in the hash; of a free one the value is 0. */
static size_t *find(const struct ht_copy *k, uint64_t from)
{
    size_t i = ht_id_hash(from) & (k->table_size - 1);

    while (k->table[i] && k->ids[k->table[i] - 1].from != from)
        i = (i + 1) & (k->table_size - 1);
    return &k->table[i];
}

uint64_t ht_copy_of(const struct ht_copy *k, uint64_t from)
{
    size_t n = k->table_size ? *find(k, from) : 0;

    return n ? k->ids[n - 1].to : 0;
}

void ht_copy_reserve(struct ht_copy *k, uint64_t from, uint64_t bytes, uint32_t used_bytes)
{
    struct ht_copy_id *id = &k->ids[*find(k, from) - 1];

    id->reserve_bytes = bytes;
    id->used_bytes = used_bytes;
}

/* For so many numbers in all. At most half of the hash is in use. */
static int make_room(struct ht_copy *k, size_t count)
{
    size_t size = k->table_size ? k->table_size : TABLE_START;

    while (size <= 2 * count)
        size *= 2;
    if (size > k->table_size) {
        size_t *table = calloc(size, sizeof(*table));
        if (!table)
            return -ENOMEM;
        free(k->table);
        k->table = table;
        k->table_size = size;
        for (size_t i = 0; i < k->count; i++)
            *find(k, k->ids[i].from) = i + 1;
    }
    return ht_array_grow((void **)&k->ids, &k->cap, count, sizeof(*k->ids));
}

int ht_copy_expect(struct ht_copy *k, size_t count)
{
    return make_room(k, k->count + count);
}

uint64_t ht_copy_add(struct ht_copy *k, uint64_t from)
{
    if (make_room(k, k->count + 1))
        return 0;
    const struct ht_copy_id id = {.from = from, .to = ht_store_new_id(k->s)};
    if (!id.to)
        return 0;
    *find(k, from) = k->count + 1;
    k->ids[k->count++] = id;
    return id.to;
}

int ht_copy_expire(struct ht_copy *k, uint64_t kept, size_t bytes)
{
    uint64_t *expired = realloc(k->expired, (k->expired_count + 1) * sizeof(*expired));

    if (!expired)
        return -ENOMEM;
    k->expired = expired;
    expired[k->expired_count++] = kept;
    k->bytes += bytes;
    return 0;
}

/* Numbers that were given out are not used again. */
static void forget_numbers(struct ht_copy *k)
{
    free(k->ids);
    free(k->table);
    free(k->expired);
    k->ids = NULL;
    k->table = NULL;
    k->expired = NULL;
    k->count = k->cap = k->table_size = k->expired_count = 0;
}

/* ----------------------------------------------------------------- objects */

/* A reference to the object of a number, if its content is published, or will be with the commit. */
static struct ht_obj *object_of(struct ht_store *s, uint64_t oid) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = ht_obj_find_locked(s, oid);

    if (!o || o->dead || o->deleted || o->leaving || o->obj_class == HT_CLASS_SCRATCH)
        return NULL;
    o->refs++;
    return o;
}

/* May the chunk have a published reference when the commit is done? */
static bool may_hold(const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return !(c->flags & HT_CH_GONE) && (c->flags & (HT_CH_PUB | HT_CH_CUR) || c->writing);
}

/* What the objects of a copy need. */
struct need {
    uint64_t chunks, pieces_bytes;
    uint64_t reserve_blocks; /* for the next rewrite of what becomes shared */
};

static void count_chunk(const struct ht_obj *o, const struct ht_chunk *c, struct need *n) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_ref *ref = ht_chunk_has_place(c) ? &c->cur : &c->pub;

    n->chunks++;
    n->pieces_bytes += ht_ref_holds(ref) ? ht_ref_extra_bytes(ref) : 0;
    if (o->extra->rewrite_reserve_blocks && !ref->shared)
        n->reserve_blocks += ht_ref_blocks(ref);
}

static void count_chunks(struct ht_obj *o, struct need *n, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_chunk_for_each(c, o, index) {
        if (may_hold(c))
            count_chunk(o, c, n);
        ht_slice_next(o->s, slice);
    }
}

/* An object without content yet, in no list: no commit publishes it, and no checkpoint emits it. */
static int make_object(struct ht_obj *from, uint64_t oid, struct ht_scope *sc, struct ht_slice *slice, uint64_t *chunks)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = ht_obj_insert_locked(from->s, oid);

    if (!o)
        return -ENOMEM;
    ht_obj_join(o, sc);
    o->chunk_shift = from->chunk_shift;
    o->obj_class = from->obj_class;
    o->defined = true;
    o->refs = 1;
    struct ht_chunk *to;
    int rc = 0;
    ht_chunk_for_each(c, from, index) {
        if (rc)
            break;
        if (may_hold(c))
            rc = ht_chunk_ask(o, index, &to);
        if (may_hold(c) && !rc) {
            ht_chunk_set_log_reserved(o, to);
            ++*chunks;
        }
        ht_slice_next(from->s, slice);
    }
    return rc;
}

static size_t log_bytes(uint64_t objects, uint64_t chunks)
{
    return objects * HT_OBJECT_RECORD_BYTES + chunks * HT_CHUNK_LOG_BYTES;
}

/* What was reserved for objects and chunks becomes what they need: some changed after they were counted. */
static void settle_log(struct ht_copy *k, size_t reserved, size_t needed)
{
    if (reserved > needed)
        ht_journal_unreserve(k->s->journal, reserved - needed);
    if (reserved >= needed)
        return;
    int rc = ht_journal_reserve(k->s->journal, needed - reserved, true);
    (void)rc;
    k->bytes += needed - reserved;
}

static void drop_objects(struct ht_keep *w) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->k->s;
    struct ht_slice slice = HT_SLICE_RESTING;

    for (size_t i = 0; i < w->k->count; i++) {
        struct ht_obj *o = ht_obj_find_locked(s, w->k->ids[i].to);
        if (o) {
            o->dead = o->deleted = true;
            o->published = false;
            o->delete_lsn = 0;
            ht_obj_put_locked(o);
        }
        ht_lock_step();
        ht_slice_next(s, &slice);
    }
    ht_alloc_unreserve(s->alloc, w->reserved_blocks);
    w->reserved_blocks = 0;
    ht_scope_forget(s, w->k->to); /* it never was there */
}

/* It was the devices that refused a copy, or the bound for tables. */
static void lacks_space(struct ht_copy *k, int rc, uint64_t bytes)
{
    if (rc != -ENOSPC)
        return;
    k->lack = ht_lack() ? HT_COPY_LACKS_SPACE : HT_COPY_LACKS_TABLES;
    k->lack_bytes = bytes;
}

/*
 * Objects and chunks for the content, with space and log bytes reserved. ids grows no more. Makes all or none. In a
 * transaction, so no other thread makes or deletes a published object. Releases the lock in between: chunks that are
 * written meanwhile are asked for again when they are shared.
 */
static int make_objects(struct ht_keep *w) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_copy *k = w->k;
    struct ht_store *s = k->s;
    struct ht_scope *sc = ht_scope_find(s, k->to, true);
    uint64_t objects = 0, made = 0, made_chunks = 0;
    struct ht_slice slice = HT_SLICE_RESTING;
    struct need n = {0};

    assert(k->to); /* names have made its directory */
    for (size_t i = 0; i < k->count; i++) {
        struct ht_obj *o = object_of(s, k->ids[i].from);
        if (!o)
            continue;
        objects++;
        count_chunks(o, &n, &slice);
        ht_obj_put_locked(o);
        ht_slice_next(s, &slice);
    }
    size_t reserved = log_bytes(objects, n.chunks);
    k->bytes += reserved + n.pieces_bytes;
    if (!sc)
        return -ENOMEM;
    sc->frozen = !k->clone;
    int rc = ht_journal_reserve(s->journal, reserved, false);
    if (rc)
        return rc;
    if (n.pieces_bytes && !ht_journal_has_space_for_pieces(s->journal, n.pieces_bytes, true))
        rc = -ENOSPC;
    uint64_t reserve = HT_MUTANT("kept-unreserved") ? 0 : n.reserve_blocks;
    if (!rc) {
        rc = ht_alloc_reserve(s->alloc, reserve);
        lacks_space(k, rc, reserve * HT_BLOCK_BYTES);
    }
    if (rc) {
        settle_log(k, reserved, 0);
        return rc;
    }
    w->reserved_blocks = reserve;
    for (size_t i = 0; !rc && i < k->count; i++) {
        struct ht_obj *o = object_of(s, k->ids[i].from);
        if (!o)
            continue;
        rc = make_object(o, k->ids[i].to, sc, &slice, &made_chunks);
        k->lack = rc == -ENOSPC ? HT_COPY_LACKS_TABLES : k->lack;
        made += ht_obj_find_locked(s, k->ids[i].to) != NULL;
        ht_obj_put_locked(o);
        ht_slice_next(s, &slice);
    }
    settle_log(k, reserved, log_bytes(made, made_chunks));
    return rc;
}

/* ------------------------------------------------------------- publication */

/* The reserve for the next rewrite of a chunk that becomes shared comes from that of the copy. */
static void reserve_rewrite(struct ht_keep *w, struct ht_obj *o, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    ht_obj_count_shared(o, ref, 1);
    uint64_t n = ht_min_u64(ht_rewrite_reserve_missing(o), ht_ref_blocks(ref)), own = ht_min_u64(n, w->reserved_blocks);
    if (!n)
        return;
    struct ht_obj_extra *x = ht_obj_extra(o);
    w->reserved_blocks -= own;
    x->rewrite_reserve_left += own;
    if (n > own && !HT_MUTANT("kept-unreserved") && ht_alloc_reserve(s->alloc, n - own) == 0) /* written meanwhile */
        x->rewrite_reserve_left += n - own;
}

/* The copy becomes an owner of the published bytes of c. */
static int share_chunk(struct ht_keep *w, struct ht_obj *o, struct ht_chunk *c, struct ht_obj *copy,
                       struct ht_chunk *to) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_ref ref;
    int rc = ht_ref_copy(&ref, &c->pub);

    if (rc)
        return rc;
    if (ht_ref_holds(&c->pub)) {
        rc = HT_MUTANT("kept-owner") ? 0 : ht_refcount_add(s, &c->pub, true);
        if (rc) {
            ht_ref_forget(&ref);
            return rc;
        }
        if (!c->pub.shared)
            reserve_rewrite(w, o, &c->pub);
        c->pub.shared = 1;
        c->cur.shared |= c->flags & HT_CH_SHARE ? 1 : 0;
        ref.shared = 1;
        copy->stored_blocks += ht_ref_blocks(&ref);
        ht_obj_count_shared(copy, &ref, 1);
        ht_obj_count_cold(copy, &ref, 1);
        ht_ref_log_reserve_pieces(s, &ref);
    }
    to->pub = ref;
    to->flags |= HT_CH_PUB;
    to->generation = c->generation;
    s->objects.chunks++;
    s->objects.lost_chunks += ht_ref_lost(&ref);
    return 0;
}

/* The place of the chunk in the copy; made now if a write was faster than the count. */
static int chunk_in_copy(struct ht_obj *copy, uint64_t index, struct ht_chunk **out) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = copy->s;
    struct ht_chunk *c = ht_chunk_make(copy, index);

    if (!c)
        return -ENOMEM;
    if (!(c->flags & HT_CH_LOG_RESERVED)) {
        int rc = ht_journal_reserve(s->journal, HT_CHUNK_LOG_BYTES, true);
        (void)rc;
        ht_chunk_set_log_reserved(copy, c);
    }
    *out = c;
    return 0;
}

/* Chunks that were counted, and hold nothing. */
static void trim_copy(struct ht_obj *copy, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_chunk_for_each(c, copy, index) {
        if (!(c->flags & HT_CH_PUB)) {
            ht_chunk_drop_log_reserve(copy, c);
            ht_chunk_trim(copy, index);
        }
        ht_slice_next(copy->s, slice);
    }
}

static int share_object(struct ht_keep *w, struct ht_obj *o, struct ht_obj *copy, struct ht_slice *slice)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *to = NULL;
    int rc = 0;

    copy->size = copy->pub_size = o->pub_size;
    ht_chunk_for_each(c, o, index) {
        bool published = c->flags & HT_CH_PUB;
        if (rc)
            break;
        if (published)
            rc = chunk_in_copy(copy, index, &to);
        if (published && !rc)
            rc = share_chunk(w, o, c, copy, to);
        if (published && !rc)
            ht_chunk_note_busy(copy, to, index);
        ht_slice_next(o->s, slice);
    }
    if (!rc)
        trim_copy(copy, slice);
    return rc;
}

static int share_objects(struct ht_keep *w) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->k->s;
    struct ht_slice slice = HT_SLICE_RESTING;
    int rc = 0;

    for (size_t i = 0; !rc && i < w->k->count; i++) {
        struct ht_obj *o = ht_obj_find_locked(s, w->k->ids[i].from);
        struct ht_obj *copy = ht_obj_find_locked(s, w->k->ids[i].to);
        if (!o || !copy)
            continue;
        o->refs++;
        rc = share_object(w, o, copy, &slice);
        ht_obj_put_locked(o);
        ht_slice_next(s, &slice);
    }
    return rc;
}

/* Nothing fails here. The object is in memory from now on because the log has it. */
static void put_object(struct ht_obj *o, struct ht_tx *tx, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    o->published = true;
    ht_record_object(&tx->records, o, o->pub_size);
    ht_chunk_for_each(c, o, index) {
        if (c->flags & HT_CH_PUB)
            ht_record_chunk(&tx->records, o, index, c, &c->pub);
        ht_slice_next(o->s, slice);
    }
    HT_VERIFY(ht_obj_verify(o));
    ht_obj_put_locked(o);
}

static void put_objects(struct ht_keep *w, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->k->s;
    size_t count = HT_MUTANT("kept-half") ? w->k->count / 2 : w->k->count;
    struct ht_slice slice = HT_SLICE_RESTING;

    for (size_t i = 0; i < count; i++) {
        struct ht_obj *o = ht_obj_find_locked(s, w->k->ids[i].to);
        if (o)
            put_object(o, tx, &slice);
        ht_slice_next(s, &slice);
    }
    ht_alloc_unreserve(s->alloc, w->reserved_blocks);
    w->reserved_blocks = 0;
}

/* Space for the next rewrite of a clone's objects, which will share all that they hold. */
static int reserve_objects(struct ht_keep *w)
{
    int rc = 0;

    for (size_t i = 0; !rc && i < w->k->count; i++) {
        const struct ht_copy_id *id = &w->k->ids[i];
        struct ht_obj *o = id->reserve_bytes && !HT_MUTANT("clone-unreserved") ? ht_obj_get(w->k->s, id->to) : NULL;
        rc = o && id->used_bytes ? ht_obj_set_used(o, id->used_bytes) : 0;
        if (o && !rc)
            rc = ht_obj_rewrite_reserve(o, id->reserve_bytes);
        lacks_space(w->k, rc, id->reserve_bytes);
        ht_obj_put(o);
    }
    return rc;
}

/* ------------------------------------------------------------------- whole */

static void drop_participants(struct ht_copy *k, unsigned count)
{
    const struct ht_txn *t = k->s->txn;

    for (unsigned i = count; i > 0; i--)
        if (t->participant[i - 1].copy_dropped)
            t->participant[i - 1].copy_dropped(t->participant[i - 1].ctx, k);
}

void ht_keep_drop(struct ht_keep *w)
{
    struct ht_store *s = w->k->s;

    if (!w->made)
        return;
    ht_store_lock(s);
    drop_objects(w);
    ht_store_unlock(s);
    drop_participants(w->k, s->txn->participants);
    forget_numbers(w->k);
    w->made = false;
}

int ht_keep_make(struct ht_keep *w)
{
    struct ht_copy *k = w->k;
    struct ht_store *s = k->s;
    const struct ht_txn *t = s->txn;
    unsigned i = 0;
    int rc = 0;

    k->bytes = 0;
    k->to = 0;
    k->lack = HT_COPY_LACKS_LOG; /* until something else is missing */
    for (; !rc && i < t->participants; i++)
        rc = t->participant[i].copy ? t->participant[i].copy(t->participant[i].ctx, k) : 0;
    if (rc) {
        drop_participants(k, i - 1);
        forget_numbers(k);
        return rc;
    }
    w->made = true;
    rc = ht_store_locked(s, make_objects(w));
    if (!rc)
        rc = reserve_objects(w);
    if (rc)
        ht_keep_drop(w);
    return rc;
}

int ht_keep_put(struct ht_keep *w, struct ht_tx *tx)
{
    struct ht_copy *k = w->k;
    struct ht_store *s = k->s;

    int rc = ht_store_locked(s, share_objects(w));
    if (rc) {
        ht_keep_drop(w);
        return rc;
    }
    ht_participant_for_each(c, s, copied)
        c->copied(c->ctx, k, tx);
    ht_store_lock(s);
    put_objects(w, tx);
    ht_store_unlock(s);
    for (size_t i = 0; i < k->expired_count; i++)
        ht_scope_end(s, k->expired[i], HT_SCOPE_DELETED, tx);
    forget_numbers(k);
    w->made = false;
    return 0;
}

/* ------------------------------------------------------------------- words */

static void explain_log(const struct ht_copy *k, char *text, size_t cap)
{
    struct ht_journal_stats st;
    char most[32], left[32];

    ht_journal_stats(k->s->journal, &st);
    uint64_t used = ht_min_u64(st.reserved_bytes, st.reserve_limit_bytes);
    ht_format_size(st.reserve_limit_bytes, most, sizeof(most));
    ht_format_size(st.reserve_limit_bytes - used, left, sizeof(left));
    snprintf(
        text, cap,
        "the log has room for %s of records, and %s are left, which is too little for a copy; forget kept steps, or make a "
        "store with a larger log (mkfs.hitrain --log-size=)",
        most, left);
}

void ht_copy_explain(const struct ht_copy *k, char *text, size_t cap)
{
    char bytes[32];

    if (k->error != -ENOSPC || !k->s)
        snprintf(text, cap, "%s", strerror(-k->error));
    else if (k->lack == HT_COPY_LACKS_LOG)
        explain_log(k, text, cap);
    else if (k->lack == HT_COPY_LACKS_SPACE)
        snprintf(text, cap,
                 "the devices lack %s of space for rewrites of what is shared then; forget kept steps, or delete files",
                 ht_format_size(k->lack_bytes, bytes, sizeof(bytes)));
    else
        snprintf(text, cap,
                 "tables of sparse files or of models have all the memory that they may; delete some, or make a store "
                 "with a larger log (mkfs.hitrain --log-size=)");
}

/* ------------------------------------------------------------------ clones */

/* -EAGAIN: nothing was made, and the log has too little room now: begin again with k->bytes. */
static int copy_in_tx(struct ht_keep *w, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_TX)
{
    struct ht_store *s = w->k->s;
    int rc = ht_keep_make(w);

    if (rc)
        return rc;
    if (!ht_journal_try_space(s->journal, w->k->bytes))
        rc = -EAGAIN;
    else
        rc = ht_tx_expect(tx, w->k->bytes);
    if (!rc)
        return ht_keep_put(w, tx);
    ht_keep_drop(w);
    return rc;
}

static int try_copy(struct ht_keep *w, uint64_t *out_lsn)
{
    struct ht_tx *tx;
    int rc = ht_tx_begin(w->k->s, w->k->bytes, &tx);

    if (rc)
        return rc;
    rc = copy_in_tx(w, tx);
    int closed = ht_tx_commit(tx, out_lsn);
    return rc ? rc : closed;
}

int ht_scope_clone(struct ht_store *s, uint64_t scope, struct ht_copy *k, uint64_t *out_lsn)
{
    struct ht_keep w = {.k = k};

    k->s = s;
    k->scope = scope;
    k->bytes = 0;
    int rc = try_copy(&w, out_lsn);
    for (unsigned tries = 1; rc == -EAGAIN; tries++)
        rc = tries < HT_KEEP_TRIES_MAX ? try_copy(&w, out_lsn) : -ENOSPC;
    k->error = rc;
    return rc;
}
