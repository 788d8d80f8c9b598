/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint.c - re-emits all published metadata, so that the older log can be forgotten.
 *
 * Normal records continue between the slices; a later record wins. Only published values are emitted: pending changes
 * of a scope come with its commit, or never.
 */

#include "tiering/base/event.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/data/data.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

enum {
    SLICE_BYTES = 64 << 10,
    RECORD_BYTES_MAX = 72 << 10, /* bytes by which a slice may be longer: an attribute, the longest of all records */
};

struct emission {
    struct ht_store *s;
    uint64_t *oids; /* objects that existed at the begin mark; newer ones are in the normal records */
    size_t count, next;
    uint64_t chunk; /* of the object being emitted */
};

/* Releases the lock in between. */
static void emit_object(struct emission *e, struct ht_obj *o, struct ht_buf *b, struct ht_slice *slice)
    HT_REQUIRES(HT_LOCK_STORE)
{
    if (e->chunk == 0)
        ht_record_object(b, o, HT_MUTANT("pending-emitted") ? o->size : o->pub_size);
    ht_chunk_for_each_from(c, o, e->chunk) {
        if (b->len >= SLICE_BYTES)
            return;
        if (c->flags & HT_CH_PUB)
            ht_record_chunk(b, o, e->chunk, c, HT_MUTANT("pending-emitted") ? ht_chunk_ref(c) : &c->pub);
        ht_slice_next(e->s, slice);
    }
    e->chunk = 0;
    e->next++;
}

/*
 * The transaction of a slice, with memory for it: a later failure would end the log. The permit comes before, for
 * others wait for the transaction. It is for its records, not for the frame, which another thread may write. Callers
 * would soon wait for the room of a log that is short: there the slice waits for no permit. -ENOMEM.
 */
static int begin_slice(struct ht_store *s) HT_ACQUIRE_IF_0(HT_LOCK_TX) HT_NO_THREAD_SAFETY_ANALYSIS
{
    const struct ht_permit_request r = {
        .dev = s->dev[s->layout.log_device[0]],
        .direction = HT_DIRECTION_WRITE,
        .good = HT_GATE_LOG_ROOM,
        .bytes = SLICE_BYTES,
    };
    struct ht_permit permit;

    if (!ht_journal_is_short(s->journal)) {
        ht_permit_get(&s->gate, &r, &permit);
        ht_permit_put(&permit);
    }
    ht_mutex_lock(&s->tx_lock);
    int rc = ht_tx_expect(&s->txn->tx, SLICE_BYTES + RECORD_BYTES_MAX);
    if (rc)
        ht_mutex_unlock(&s->tx_lock);
    return rc;
}

/* One slice in one transaction. The transaction lock keeps publications out until its end. */
static int emit_objects_slice(struct emission *e)
{
    struct ht_slice slice = {0};
    struct ht_store *s = e->s;
    int rc = begin_slice(s);

    if (rc)
        return rc;
    struct ht_buf *b = &s->txn->tx.records;
    ht_store_lock(s);
    while (e->next < e->count && b->len < SLICE_BYTES) {
        struct ht_obj *o = ht_obj_find_locked(s, e->oids[e->next]);
        if (o && o->published && !o->dead) {
            o->refs++;
            emit_object(e, o, b, &slice);
            ht_obj_put_locked(o);
        } else {
            e->next++;
            e->chunk = 0;
        }
        ht_slice_next(s, &slice);
    }
    ht_store_unlock(s);
    return ht_tx_commit(&s->txn->tx, NULL);
}

static int emit_ids(struct ht_store *s)
{
    int rc = begin_slice(s);

    if (rc)
        return rc;
    ht_record_ids(&s->txn->tx.records, ht_max_u64(s->txn->ids_logged, s->txn->next_id));
    const struct ht_vault vault = ht_store_locked(s, s->vault);
    if (vault.known)
        ht_tx_put_vault(&s->txn->tx, &vault);
    return ht_tx_commit(&s->txn->tx, NULL);
}

static int emit_participant(struct ht_store *s, const struct ht_participant *c)
{
    uint64_t cursor = 0;
    int more = 1;

    while (more > 0) {
        int rc = begin_slice(s);
        if (rc)
            return rc;
        more = c->emit(c->ctx, &s->txn->tx, &cursor, SLICE_BYTES);
        rc = ht_tx_commit(&s->txn->tx, NULL);
        if (rc)
            return rc;
    }
    return more;
}

/*
 * Not undone when it fails: the start that it names is durable on all copies that are written, and nothing before it is
 * overwritten until release.
 */
static int set_start(struct ht_store *s, const struct ht_journal_start *start)
{
    enum ht_io_class was = ht_io_class_set(HT_IO_URGENT); /* others wait for the lock, and for the room */

    ht_mutex_lock(ht_super_mutex(s));
    s->sb.start_pos = start->pos;
    s->sb.start_seq = start->seq;
    s->sb.start_chain = start->chain;
    s->sb.durable_seq = start->durable_seq;
    int rc = HT_MUTANT("log-reuse") ? 0 : ht_store_write_super(s);
    ht_mutex_unlock(ht_super_mutex(s));
    (void)ht_io_class_set(was);
    return rc;
}

int ht_store_checkpoint(struct ht_store *s)
{
    struct emission e = {.s = s};
    int rc = ht_journal_checkpoint_begin(s->journal), unnamed = 0;

    if (rc)
        return rc;
    rc = ht_store_oids(s, &e.oids, &e.count);
    if (!rc)
        rc = emit_ids(s);
    while (!rc && e.next < e.count)
        rc = emit_objects_slice(&e);
    ht_participant_for_each(c, s, emit)
        rc = rc ? rc : emit_participant(s, c);
    free(e.oids);
    struct ht_journal_start start;
    if (!rc)
        rc = ht_journal_checkpoint_end(s->journal, &start);
    if (!rc) {
        rc = unnamed = set_start(s, &start);
        if (!rc)
            ht_journal_checkpoint_release(s->journal, &start);
    }
    if (rc) {
        struct ht_event_about about = {.error = rc};
        ht_journal_checkpoint_give_up(s->journal, unnamed);
        ht_event(HT_EVENT_CHECKPOINT_FAILED, &about,
                 "log checkpoint failed: %s; the log keeps growing until it can be repeated", strerror(-rc));
    }
    return rc;
}
