/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tx.c - the state of txn/: an open transaction, its end, and what the log announces before: numbers, and features.
 * There is one transaction at a time, so that memory and log change in the same order. begin.c begins it.
 */

#include "tiering/base/event.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/data/data.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"

enum { FIRST_ID = 2 };

int ht_txn_setup(struct ht_store *s)
{
    struct ht_txn *t = calloc(1, sizeof(*t));

    if (!t)
        return -ENOMEM;
    t->tx.s = s;
    ht_list_init(&t->tx.deleted);
    t->next_id = FIRST_ID;
    s->txn = t;
    return 0;
}

void ht_txn_teardown(struct ht_store *s)
{
    struct ht_txn *t = s->txn;

    if (!t)
        return;
    ht_buf_free(&t->tx.records);
    free(t->conflicts);
    free(t);
}

int ht_txn_add_participant(struct ht_store *s, const struct ht_participant *participant)
{
    if (s->txn->participants == HT_TXN_PARTICIPANTS_MAX)
        return -EBUSY;
    s->txn->participant[s->txn->participants++] = *participant;
    return 0;
}

void ht_txn_stats(const struct ht_store *s, struct ht_store_stats *out)
{
    out->next_id = s->txn->next_id;
    out->working_bytes += s->txn->records_bytes;
}

/* ----------------------------------------------------------- transactions */

void ht_tx_log_failed(struct ht_store *s, int error)
{
    struct ht_event_about about = {.error = error};

    if (!atomic_exchange(&s->failed, true))
        ht_event(HT_EVENT_READ_ONLY, &about,
                 "the metadata log cannot be written: %s; the store is read-only from now on", strerror(-error));
}

/*
 * Room for changes during a publication in slices: as much as the records take, or as much as the log has room for.
 */
static size_t space_again(struct ht_store *s, size_t bytes)
{
    enum { BYTES_MAX = 64 << 20, PART_MAX = 8, ONE_SLICE_BYTES = 16 << 10 };
    size_t again = ht_min_u64(bytes, BYTES_MAX), least = again / PART_MAX;

    if (bytes <= ONE_SLICE_BYTES)
        return 0;
    while (again > least && !ht_journal_try_space(s->journal, bytes + again))
        again /= 2;
    return again > least ? again : 0;
}

static int reserve_memory(struct ht_tx *tx, size_t bytes)
{
    enum { SLACK_BYTES = 8 << 10 }; /* callers ask for about as much as they put */
    int rc;

    rc = ht_buf_reserve(&tx->records, bytes + SLACK_BYTES);
    if (!rc)
        rc = ht_journal_prepare(tx->s->journal, bytes + SLACK_BYTES);
    if (rc)
        ht_buf_reset(&tx->records);
    return rc;
}

/* A transaction that cannot be appended closes the log, so memory is reserved before anything changes. */
int ht_tx_expect(struct ht_tx *tx, size_t bytes)
{
    size_t again = space_again(tx->s, bytes);

    assert(tx->records.len == 0);
    int rc = reserve_memory(tx, bytes + again);
    if (rc && again) {
        again = 0;
        rc = reserve_memory(tx, bytes);
    }
    tx->expected_bytes = bytes;
    tx->again_bytes = again / 2; /* a chunk's second record, and as much aside */
    return rc;
}

struct ht_buf *ht_tx_records(struct ht_tx *tx)
{
    return &tx->records;
}

/*
 * The frees of the transaction wait for lsn. When the log has failed (lsn 0) the space is never free again in this
 * mount. True: objects are to be freed.
 */
static bool queue_frees(struct ht_tx *tx, uint64_t lsn)
{
    struct ht_store *s = tx->s;
    struct ht_slice slice = HT_SLICE_RESTING;

    ht_store_lock(s);
    ht_deferred_frees_logged(s, lsn, &slice);
    s->frees.tx_count++;
    s->txn->records_bytes = tx->records.cap;
    pthread_cond_broadcast(&s->waits.settled);
    while (!ht_list_empty(&tx->deleted)) {
        struct ht_obj *o = ht_list_entry(tx->deleted.next, struct ht_obj, touched);
        o->published = o->meta_dirty = false;
        o->dead = true;
        o->delete_lsn = lsn ? lsn : UINT64_MAX;
        ht_list_del(&o->touched);
        ht_obj_put_locked(o);
        ht_slice_next(s, &slice);
    }
    /* The frame may have become durable before its frees were listed. */
    ht_deferred_frees_durable(s, ht_journal_durable(s->journal));
    bool ended = !ht_list_empty(&s->objects.ending);
    ht_wake_for_compact(s);
    struct ht_trash trash = ht_trash_take(s);
    ht_store_unlock(s);
    ht_trash_empty(&trash);
    return ended;
}

/*
 * Numbers that were given out are in file handles and caches, even if no record with them reached the log before a
 * crash. So the log names numbers far ahead of those given out, and the next mount begins there.
 */
enum { IDS_AHEAD = 1 << 20 };

void ht_tx_reserve_ids(struct ht_tx *tx)
{
    struct ht_store *s = tx->s;
    uint64_t next = s->txn->next_id;

    if (s->txn->ids_logged >= ht_min_u64(next + IDS_AHEAD / 2, HT_ID_MAX))
        return;
    s->txn->ids_logged = ht_min_u64(next + IDS_AHEAD, HT_ID_MAX);
    ht_record_ids(&tx->records, s->txn->ids_logged);
}

/* As ht_tx_begin. */
int ht_tx_commit(struct ht_tx *tx, uint64_t *out_lsn) HT_NO_THREAD_SAFETY_ANALYSIS
{
    struct ht_store *s = tx->s;
    uint64_t lsn = 0;
    int rc = tx->records.err;

    if (!rc && tx->records.len)
        ht_tx_reserve_ids(tx);
    if (!rc && tx->records.len)
        rc = ht_journal_append(s->journal, &tx->records, &lsn);
    if (rc) {
        ht_tx_log_failed(s, rc);
    } else if (lsn) {
        s->frees.last_lsn = lsn;
    }
    bool ended = queue_frees(tx, rc ? 0 : lsn);
    ht_buf_reset(&tx->records);
    tx->whole = false;
    tx->again_bytes = 0;
    tx->found_bytes = 0;
    ht_mutex_unlock(&s->tx_lock);
    if (ended)
        ht_obj_free_ended(s);
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
        ht_tx_log_failed(s, rc);
        return rc;
    }
    ht_store_lock(s);
    s->counts.commits++;
    ht_store_unlock(s);
    return 0;
}

int ht_store_log_reserve(struct ht_store *s, uint64_t bytes)
{
    return ht_journal_reserve(s->journal, bytes, false);
}

void ht_store_log_reserve_force(struct ht_store *s, uint64_t bytes)
{
    int rc = ht_journal_reserve(s->journal, bytes, true);

    (void)rc;
}

void ht_store_log_unreserve(struct ht_store *s, uint64_t bytes)
{
    ht_journal_unreserve(s->journal, bytes);
}

uint64_t ht_store_new_id(struct ht_store *s)
{
    uint64_t id = s->txn->next_id;

    do {
        if (id >= HT_ID_MAX)
            return 0;
    } while (!atomic_compare_exchange_weak(&s->txn->next_id, &id, id + 1));
    return id;
}

void ht_store_saw_id(struct ht_store *s, uint64_t id)
{
    if (id >= s->txn->next_id)
        s->txn->next_id = ht_min_u64(id + 1, HT_ID_MAX);
}

/* --------------------------------------------------------------- features */

/*
 * Bits of feat_refuse keep away programs that do not know what the log is about to name. So they are durable before the
 * first such record.
 */
int ht_store_need_features(struct ht_store *s, uint64_t bits)
{
    bool frames = bits & HT_FEAT_REFUSE_PLANES;
    int rc = frames ? ht_data_need_decoder(s) : 0;

    if (rc)
        return rc;
    ht_mutex_lock(ht_super_mutex(s));
    uint64_t missing = bits & ~s->sb.feat_refuse;
    if (missing) {
        s->sb.feat_refuse |= missing;
        rc = HT_MUTANT("feature-late") ? 0 : ht_store_write_super(s);
        if (rc) /* the next call writes them again */
            s->sb.feat_refuse &= ~missing;
    }
    ht_mutex_unlock(ht_super_mutex(s));
    if (!rc && frames)
        ht_write_frames_durable(s);
    return rc;
}
