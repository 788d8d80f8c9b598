/* SPDX-License-Identifier: Apache-2.0 */
/* tx.c - transactions: one at a time, so that memory and log change in the same order. */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/store/store_priv.h"

/* Told once: everything that is tried afterwards is refused. */
static void log_failed(struct ht_store *s, int error)
{
    struct ht_event_about about = {.error = error};
    if (!atomic_exchange(&s->failed, true))
        ht_event(HT_EVENT_READ_ONLY, &about,
                 "the metadata log cannot be written: %s; the store is read-only from now on", strerror(-error));
}

/* Without a compaction thread the one who needs room makes it. */
static int compact_if_full(struct ht_store *s, size_t bytes)
{
    struct ht_journal_stats st;
    ht_journal_stats(s->journal, &st);
    bool full = st.used_bytes + bytes > st.log_bytes / 2 || !ht_journal_try_room(s->journal, bytes);
    return full ? ht_store_compact(s) : 0;
}

/* A log that failed while nobody waited for it, in a compaction say, is told by the first one who needs it. */
static int no_room(struct ht_store *s, int error)
{
    if (ht_journal_failed(s->journal))
        log_failed(s, error);
    return error;
}

/*
 * Before anything is changed, for afterwards there is no way back: a transaction that cannot be appended closes the log. What callers
 * ask for is about what they put.
 */
static int reserve_memory(struct ht_tx *tx, size_t bytes)
{
    enum { SLACK_BYTES = 8 << 10 };
    int rc = ht_buf_reserve(&tx->records, bytes + SLACK_BYTES);
    if (!rc)
        rc = ht_journal_prepare(tx->s->journal, bytes + SLACK_BYTES);
    if (rc)
        ht_buf_reset(&tx->records);
    return rc;
}

int ht_tx_begin(struct ht_store *s, size_t bytes, struct ht_tx **out_tx)
{
    if (s->opts.read_only || s->failed)
        return -EROFS;
    for (;;) {
        int rc = s->opts.no_threads ? compact_if_full(s, bytes) : 0;
        if (!rc)
            rc = ht_journal_wait_room(s->journal, bytes);
        if (rc)
            return no_room(s, rc);
        ht_mutex_lock(&s->tx_lock);
        if (ht_journal_try_room(s->journal, bytes))
            break;
        ht_mutex_unlock(&s->tx_lock); /* somebody else took the room meanwhile */
    }
    assert(s->tx.records.len == 0 && s->tx.frees.count == 0 && ht_list_empty(&s->tx.deleted));
    int rc = reserve_memory(&s->tx, bytes);
    if (rc) {
        ht_mutex_unlock(&s->tx_lock);
        return rc;
    }
    *out_tx = &s->tx;
    return 0;
}

int ht_tx_begin_round(struct ht_store *s, size_t bytes, struct ht_rounds *r, struct ht_tx **out_tx)
{
    int rc = ht_tx_begin(s, bytes, out_tx);
    if (rc)
        return rc;
    ht_store_lock(s);
    bool holds = ht_round_holds(s, r) && !ht_flush_has_failed(s);
    ht_store_unlock(s);
    s->tx.whole = holds;
    if (holds)
        return 0;
    rc = ht_tx_commit(*out_tx, NULL); /* of nothing */
    return rc ? rc : ht_round_failed(r);
}

int ht_tx_expect(struct ht_tx *tx, size_t bytes)
{
    assert(tx->records.len == 0);
    return reserve_memory(tx, bytes);
}

struct ht_buf *ht_tx_records(struct ht_tx *tx)
{
    return &tx->records;
}

/* What the transaction freed waits for lsn. When the log has failed (lsn 0) it is never free again in this mount. */
static void settle_frees(struct ht_tx *tx, uint64_t lsn)
{
    struct ht_store *s = tx->s;
    ht_store_lock(s);
    for (size_t i = 0; i < tx->frees.count; i++) {
        struct ht_limbo *item = &tx->frees.items[(tx->frees.head + i) % tx->frees.cap];
        if (lsn && ht_limbo_push(&s->limbo, lsn, &item->ref) == 0)
            continue;
        ht_alloc_limbo_sub(s->alloc, ht_ref_countable(s, &item->ref));
        ht_ref_forget(&item->ref);
    }
    s->tx_count++;
    s->records_bytes = tx->records.cap;
    pthread_cond_broadcast(&s->settled);
    tx->frees.count = tx->frees.head = 0;
    while (!ht_list_empty(&tx->deleted)) {
        struct ht_obj *o = ht_list_entry(tx->deleted.next, struct ht_obj, touched);
        o->published = o->meta_dirty = false;
        o->dead = true;
        o->delete_lsn = lsn ? lsn : UINT64_MAX;
        ht_list_del(&o->touched);
        ht_obj_put_locked(o);
    }
    /* The frame may have become durable before its frees were listed. */
    ht_limbo_durable(s, ht_journal_durable(s->journal));
    ht_store_unlock(s);
}

/*
 * A number that was given out is in file handles and caches, also when nothing that bears it reached the log before a crash:
 * the log names numbers far ahead of those given out, and the next mount begins there.
 */
enum { IDS_AHEAD = 1 << 20 };

void ht_tx_reserve_ids(struct ht_tx *tx)
{
    struct ht_store *s = tx->s;
    uint64_t next = s->next_id;
    if (s->ids_logged >= ht_min_u64(next + IDS_AHEAD / 2, HT_ID_MAX))
        return;
    s->ids_logged = ht_min_u64(next + IDS_AHEAD, HT_ID_MAX);
    ht_record_ids(&tx->records, s->ids_logged);
}

int ht_tx_commit(struct ht_tx *tx, uint64_t *out_lsn)
{
    struct ht_store *s = tx->s;
    uint64_t lsn = 0;
    int rc = tx->records.err;
    if (!rc && tx->records.len)
        ht_tx_reserve_ids(tx);
    if (!rc && tx->records.len)
        rc = ht_journal_append(s->journal, &tx->records, &lsn);
    if (rc) {
        log_failed(s, rc);
    } else if (lsn) {
        s->last_lsn = lsn;
    }
    settle_frees(tx, rc ? 0 : lsn);
    ht_buf_reset(&tx->records);
    tx->whole = false;
    ht_mutex_unlock(&s->tx_lock);
    if (out_lsn)
        *out_lsn = rc ? 0 : lsn;
    return rc;
}

int ht_store_sync(struct ht_store *s, uint64_t lsn)
{
    if (!lsn)
        return 0;
    int rc = ht_journal_sync(s->journal, lsn);
    if (rc) {
        log_failed(s, rc);
        return rc;
    }
    ht_store_lock(s);
    s->commits++;
    ht_store_unlock(s);
    return 0;
}

int ht_store_claim(struct ht_store *s, uint64_t bytes)
{
    return ht_journal_claim(s->journal, bytes, false);
}

void ht_store_claim_force(struct ht_store *s, uint64_t bytes)
{
    int rc = ht_journal_claim(s->journal, bytes, true);
    (void)rc;
}

void ht_store_unclaim(struct ht_store *s, uint64_t bytes)
{
    ht_journal_unclaim(s->journal, bytes);
}

uint64_t ht_store_new_id(struct ht_store *s)
{
    uint64_t id = s->next_id;
    do {
        if (id >= HT_ID_MAX)
            return 0;
    } while (!atomic_compare_exchange_weak(&s->next_id, &id, id + 1));
    return id;
}

void ht_store_saw_id(struct ht_store *s, uint64_t id)
{
    if (id >= s->next_id)
        s->next_id = ht_min_u64(id + 1, HT_ID_MAX);
}

/* Written back, flushed, and in an open transaction; once more when some of it was given up in between. */
static int begin_sync(struct ht_obj *o, struct ht_tx **out_tx)
{
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    int rc;
    do {
        ht_rounds_next(o->s, &rounds);
        rc = ht_obj_writeback_flushed(o);
        if (!rc)
            rc = ht_tx_begin_round(o->s, ht_obj_pending_bytes(o), &rounds, out_tx);
    } while (rc == -EAGAIN);
    return rc;
}

int ht_obj_sync(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct ht_tx *tx;
    int rc = begin_sync(o, &tx);
    if (rc)
        return rc;
    uint64_t lsn;
    int expected = ht_tx_expect(tx, ht_obj_pending_bytes(o));
    if (!expected)
        ht_obj_publish(o, tx);
    rc = ht_tx_commit(tx, &lsn);
    rc = expected ? expected : rc;
    /* What this object needs may be in a transaction that somebody else appended. */
    return rc ? rc : ht_store_sync(s, lsn ? lsn : s->last_lsn);
}
