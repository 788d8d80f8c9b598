/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commit.c - publishes a scope as a whole, or restores its published state.
 *
 * A scope is one model root, or with number 0 everything outside of model roots. Names, the optimizer and objects each
 * keep unpublished changes in memory. A commit collects all of that in one transaction; no other file knows the
 * participants. They come in the order in which they registered (names, then the optimizer). Objects come last, because
 * a participant may delete some.
 *
 *   a commit                                                  what a crash right after it leaves
 *   1. writes back dirty images, and flushes                  the commit before; the new space is free again
 *   2. begins the transaction                                 the same
 *   3. participants and objects put their records into it    the same: the records are only in memory
 *   4. appends the transaction to the log                     the commit before, or this one if its frame is durable
 *   5. waits until the frame is durable                       this commit
 *
 * If a flush failed between 1 and 2, both are repeated. For a model root step 5 is the caller's (ht_store_sync): from
 * step 4 on it may change the scope, and the next commit publishes these changes.
 *
 * An abort puts nothing into the log. So a crash during an abort leaves the last commit, as the abort itself does.
 *
 * Lock order: transaction > names > optimizer > store. This file holds only the transaction when it calls a
 * participant, which takes its own lock. So between the participants nothing else is published or aborted.
 */

#include "tiering/base/activity.h"
#include "tiering/base/mutant.h"
#include "tiering/base/verify.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/object/space.h"
#include "tiering/shm/shm.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

/* With less room than this for new content the log is full. */
enum { LOG_ROOM_BYTES = 64 * HT_CHUNK_LOG_BYTES };

/* All in one, and those of each participant. */
static size_t pending_bytes(struct ht_store *s, uint64_t scope, bool rest, size_t out_of_each[HT_TXN_PARTICIPANTS_MAX])
{
    const struct ht_txn *t = s->txn;
    size_t bytes = ht_scope_pending_object_bytes(s, scope, rest);

    for (unsigned i = 0; i < t->participants; i++) {
        const struct ht_participant *c = &t->participant[i];
        out_of_each[i] = c->pending_bytes ? c->pending_bytes(c->ctx, scope) : 0;
        bytes += out_of_each[i];
    }
    return bytes;
}

size_t ht_scope_pending_bytes(struct ht_store *s, uint64_t scope)
{
    size_t of_each[HT_TXN_PARTICIPANTS_MAX];

    return pending_bytes(s, scope, false, of_each);
}

/*
 * The mutant: what participants have put becomes durable without the objects. After an error no transaction is open.
 * Clang cannot follow a lock that is released and taken again.
 */
static int tear(struct ht_store *s, uint64_t scope, struct ht_tx **tx) HT_RELEASE(HT_LOCK_TX)
    HT_ACQUIRE_IF_0(HT_LOCK_TX) HT_NO_THREAD_SAFETY_ANALYSIS
{
    uint64_t lsn;
    int rc = ht_tx_commit(*tx, &lsn);

    rc = rc ? rc : ht_store_sync(s, lsn);
    return rc ? rc : ht_tx_begin(s, ht_scope_pending_bytes(s, scope), tx);
}

/* Without the copy, unless the commit needs it. */
static int refuse_copy(struct ht_keep *w, int error)
{
    w->k->error = error;
    return w->k->must ? error : 0;
}

static bool wanted(const struct ht_keep *w)
{
    return w->k && !w->k->error;
}

/* bytes: of the commit's own records. -EAGAIN: the log has too little room for both now: begin again. */
static int make_copy(struct ht_keep *w, size_t bytes) HT_REQUIRES(HT_LOCK_TX)
{
    if (!wanted(w))
        return 0;
    int rc = ht_keep_make(w);
    if (!rc && !ht_journal_try_space(w->k->s->journal, bytes + w->k->bytes)) {
        ht_keep_drop(w);
        rc = ++w->tries < HT_KEEP_TRIES_MAX ? -EAGAIN : -ENOSPC;
    }
    return !rc || rc == -EAGAIN ? rc : refuse_copy(w, rc);
}

/* The transaction of a commit, with room for a copy if it can be had. */
static int begin(struct ht_store *s, struct ht_rounds *rounds, struct ht_keep *w, struct ht_tx **out_tx)
    HT_ACQUIRE_IF_0(HT_LOCK_TX) HT_NO_THREAD_SAFETY_ANALYSIS
{
    size_t of_each[HT_TXN_PARTICIPANTS_MAX], bytes = pending_bytes(s, rounds->scope, rounds->rest, of_each);

    if (wanted(w)) {
        int rc = ht_tx_begin_round(s, bytes + w->k->bytes, rounds, out_tx);
        if (rc != -ENOSPC)
            return rc;
        rc = refuse_copy(w, rc);
        if (rc)
            return rc;
    }
    return ht_tx_begin_round(s, bytes, rounds, out_tx);
}

/* Makes the copy and has memory for all records. An error: nothing was made. Refusals of a copy are none. */
static int prepare(struct ht_store *s, const struct ht_rounds *rounds, struct ht_keep *w, struct ht_tx *tx,
                   size_t out_of_each[HT_TXN_PARTICIPANTS_MAX]) HT_REQUIRES(HT_LOCK_TX)
{
    uint64_t before = ht_scope_found_bytes(s, rounds->scope);
    /* It may have grown while this thread waited, and counted chunks change while others are counted. */
    size_t bytes = pending_bytes(s, rounds->scope, rounds->rest, out_of_each);

    tx->found_bytes = ht_scope_found_bytes(s, rounds->scope);
    bytes += tx->found_bytes - before;
    int rc = make_copy(w, bytes);
    if (rc)
        return rc;
    rc = ht_tx_expect(tx, bytes + (w->made ? w->k->bytes : 0));
    if (w->made)
        tx->again_bytes /= 2; /* one more record in the copy */
    if (!rc && rounds->rest && ht_scope_edited(s, rounds->scope))
        rc = -EBUSY;
    if (rc)
        ht_keep_drop(w);
    return rc;
}

/*
 * Everything unpublished of the rounds' scope into one transaction, with the copy that w is for, if any. -EAGAIN:
 * nothing; begin the next round.
 */
static int publish(struct ht_store *s, struct ht_rounds *rounds, struct ht_keep *w, uint64_t *out_lsn)
{
    uint64_t scope = rounds->scope;
    size_t expected[HT_TXN_PARTICIPANTS_MAX];
    struct ht_tx *tx;
    int rc = begin(s, rounds, w, &tx);

    if (rc)
        return rc;
    rc = prepare(s, rounds, w, tx, expected);
    if (rc) {
        int closed = ht_tx_commit(tx, NULL); /* of nothing */
        return closed ? closed : rc;
    }
    ht_participant_for_each(c, s, publish)
        c->publish(c->ctx, scope, expected[c - s->txn->participant], tx);
    if (HT_MUTANT("torn-commit")) {
        rc = tear(s, scope, &tx);
        if (rc)
            return rc;
    }
    ht_scope_publish(s, scope, rounds->rest, tx);
    if (w->made)
        w->k->error = ht_keep_put(w, tx);
    return ht_tx_commit(tx, out_lsn);
}

static int commit(struct ht_store *s, struct ht_rounds rounds, struct ht_keep *w, uint64_t *out_lsn)
{
    int rc;

    do {
        ht_rounds_next(s, &rounds);
        rc = ht_scope_scan_and_write(s, rounds.scope, rounds.rest);
        if (!rc)
            rc = publish(s, &rounds, w, out_lsn);
    } while (rc == -EAGAIN);
    return rc;
}

int ht_scope_commit(struct ht_store *s, uint64_t scope, uint64_t *out_lsn)
{
    struct ht_keep none = {0};

    return commit(s, HT_ROUNDS_OF_SCOPE(scope), &none, out_lsn);
}

int ht_scope_commit_copying(struct ht_store *s, uint64_t scope, struct ht_copy *k, uint64_t *out_lsn)
{
    struct ht_keep w = {.k = k};

    k->s = s;
    k->scope = scope;
    k->bytes = 0;
    k->error = ht_store_need_features(s, HT_FEAT_REFUSE_KEPT);
    if (k->error && k->must)
        return k->error;
    return commit(s, HT_ROUNDS_OF_SCOPE(scope), &w, out_lsn);
}

int ht_scope_commit_rest(struct ht_store *s, uint64_t scope, uint64_t *out_lsn)
{
    struct ht_keep none = {0};

    if (ht_scope_edited(s, scope)) /* asked again in the transaction */
        return -EBUSY;
    return commit(s, HT_ROUNDS_OF_REST(scope), &none, out_lsn);
}

/* ----------------------------------------------------------------- ahead */

/*
 * Chunks of a file outside of model roots need not be published at one moment. So those of a large one are, before its
 * own transaction, in others of this size, each durable before the next one: threads that want one wait for little.
 */
enum { PART_BYTES = 1 << 20, PART_CHUNKS = PART_BYTES / HT_CHUNK_LOG_BYTES };

static bool is_large(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    return o->unpublished > PART_CHUNKS && o->obj_class != HT_CLASS_SCRATCH;
}

int ht_obj_publish_ahead(struct ht_obj *o)
{
    uint64_t index = 0, lsn;
    struct ht_tx *tx;
    int rc = 0;

    bool more = ht_store_locked(o->s, is_large(o));
    while (!rc && more) {
        rc = ht_tx_begin(o->s, PART_BYTES + HT_RECORD_BYTES_MAX, &tx);
        if (rc)
            return rc;
        more = ht_obj_publish_part(o, &index, PART_BYTES, tx);
        rc = ht_tx_commit(tx, &lsn);
        rc = rc ? rc : ht_store_sync(o->s, lsn);
    }
    return rc;
}

static int publish_all_ahead(struct ht_store *s)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    struct ht_touched_walk w;
    struct ht_obj *o;
    int rc = 0;

    ht_store_lock(s);
    ht_touched_walk_begin(&w, s, 0);
    while (!rc && (o = ht_touched_walk_next(&w))) {
        if (is_large(o)) {
            ht_store_unlock(s);
            rc = ht_obj_publish_ahead(o);
            ht_store_lock(s);
        }
        ht_obj_put_locked(o);
        ht_slice_next(s, &slice);
    }
    ht_touched_walk_end(&w);
    ht_store_unlock(s);
    return rc;
}

/* -------------------------------------------------------- outside of roots */

/* Files outside of model roots do not depend on each other: what could be written becomes published. */
int ht_txn_commit_outside(struct ht_store *s, int found)
{
    struct ht_rounds rounds = HT_ROUNDS_OF_SCOPE(0);
    struct ht_keep none = {0};
    int rc, written;

    do {
        ht_rounds_next(s, &rounds);
        written = ht_scope_write(s, 0, false);
        rc = written == -EROFS ? -EROFS : publish_all_ahead(s);
        rc = rc ? rc : publish(s, &rounds, &none, NULL);
    } while (rc == -EAGAIN);
    ht_obj_wait_ended(s); /* the space of deleted files counts as free afterwards */
    if (!rc)
        rc = ht_store_sync(s, s->frees.last_lsn);
    return rc ? rc : written ? written : found;
}

int ht_store_commit(struct ht_store *s)
{
    return ht_txn_commit_outside(s, ht_shm_scan_scope(s, 0));
}

uint64_t ht_store_could_give(struct ht_store *s)
{
    uint64_t bytes = 0;

    ht_participant_for_each(c, s, could_give)
        bytes += c->could_give(c->ctx);
    return bytes;
}

/* Nothing that a participant can give up is in the log. */
int ht_store_make_space(struct ht_store *s, bool again)
{
    uint64_t lack = ht_lack_take(), given = 0;

    if (!again)
        return ht_store_commit(s);
    if (HT_MUTANT("give-up-unasked"))
        lack = UINT64_MAX;
    else if (!lack || lack > ht_store_could_give(s))
        return -ENOSPC;
    if (ht_journal_lacks_room(s->journal, LOG_ROOM_BYTES))
        return -ENOSPC;
    ht_participant_for_each(c, s, give_up)
        given += given < lack ? c->give_up(c->ctx, lack - given) : 0;
    ht_obj_wait_ended(s);
    return given ? 0 : -ENOSPC;
}

/* -------------------------------------------------------------------- end */

int ht_kept_end(struct ht_store *s, uint64_t kept, size_t bytes, uint64_t *out_lsn)
{
    struct ht_tx *tx;
    int rc = ht_tx_begin(s, bytes, &tx);

    if (rc)
        return rc;
    ht_scope_end(s, kept, HT_SCOPE_DELETED, tx);
    return ht_tx_commit(tx, out_lsn);
}

/* ------------------------------------------------------------------ abort */

/* Restores the published state of one chunk. Releases the lock while it waits for the chunk. */
static void abort_chunk(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    ht_chunk_lock_exclusive(o, c, index);
    ht_chunk_prealloc_drop(o, c, 0);
    struct ht_chunk_before was = ht_chunk_before(c);
    bool newer = was.unpublished || (c->flags & HT_CH_BAD) || ht_obj_is_volatile(o) ||
        (c->slot != HT_SLOT_NONE && ht_arena_image(s->arena, c->slot)->dirty);
    if (newer) {
        ht_image_revert(o, c, index);
        ht_chunk_drop_cur(o, c);
        c->flags &= (uint8_t)~HT_CH_BAD;
        c->generation++;
        o->version++;
        ht_chunk_note_unpublished(o, c, index, was);
    }
    ht_chunk_unlock_exclusive(o, c, index);
}

static void abort_object(struct ht_obj *o, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE)
{
    o->vanished = !o->published; /* first: a concurrent reader sees that the object is gone, and not its remains */
    ht_chunk_for_each(c, o, index) {
        if (ht_chunk_in_use(c))
            abort_chunk(o, c, index);
        ht_slice_next(o->s, slice);
    }
    o->error = 0;
    o->lost = false;
    o->meta_dirty = false;
    if (o->extra->edited && !o->extra->may_be_dirty)
        ht_obj_extra(o)->edited = false;
    if (o->published) {
        ht_shm_regrow(o, o->pub_size);
        o->size = o->pub_size;
        o->deleted = false;
        ht_obj_untouch_if_idle(o); /* not when another thread wrote to it again */
        HT_VERIFY(ht_obj_verify(o));
        return;
    }
    o->dead = true;
    o->deleted = true;
    if (!ht_list_empty(&o->touched)) {
        ht_obj_untouch(o);
        ht_obj_put_locked(o);
    }
}

/* Releases the lock in between. */
static void shut_out_changes(struct ht_store *s, struct ht_scope *sc) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_scope_hold(sc);
    sc->aborts++;
    sc->aborting = true;
    ht_activity_wait("changes below model root", sc->id);
    while (sc->changing)
        ht_store_wait(s, &s->waits.settled, 0);
    ht_activity_go_on();
}

/*
 * Restores the published content and sizes of the scope's objects; rest: without derived ones. Waits for chunks. Needs
 * no memory: the caller has restored the names already, and must get through.
 */
static void abort_objects(struct ht_store *s, uint64_t scope, bool rest)
{
    struct ht_slice slice = HT_SLICE_RESTING;
    struct ht_touched_walk w;
    struct ht_obj *o;

    ht_store_lock(s);
    ht_shm_for_each_stored(s, scope, ht_obj_touch);
    struct ht_scope *sc = ht_scope_find(s, scope, false);
    if (sc)
        shut_out_changes(s, sc);
    ht_touched_walk_begin(&w, s, scope);
    while ((o = ht_touched_walk_next(&w))) {
        if (!rest || !o->extra->derived)
            abort_object(o, &slice);
        ht_obj_put_locked(o);
        ht_slice_next(s, &slice);
    }
    ht_touched_walk_end(&w);
    if (sc) {
        sc->aborting = false;
        pthread_cond_broadcast(&s->waits.settled);
        ht_scope_let_go(s, sc);
    }
    ht_store_unlock(s);
}

static int abort_scope(struct ht_store *s, uint64_t scope, bool rest)
{
    struct ht_tx *tx;

    assert(scope);
    int rc = ht_tx_begin(s, 0, &tx);
    if (rc)
        return rc;
    bool edited = rest && ht_scope_edited(s, scope);
    if (!edited) {
        ht_participant_for_each(c, s, abort)
            c->abort(c->ctx, scope);
        /* Still inside the transaction, so that no thread makes an object between the names and the content. */
        abort_objects(s, scope, rest);
    }
    rc = ht_tx_commit(tx, NULL);
    return rc ? rc : edited ? -EBUSY : 0;
}

int ht_scope_abort(struct ht_store *s, uint64_t scope)
{
    return abort_scope(s, scope, false);
}

int ht_scope_abort_rest(struct ht_store *s, uint64_t scope)
{
    /* Stores of programs are changes, too. */
    return ht_shm_scan_scope(s, scope) ? -EBUSY : abort_scope(s, scope, true);
}
