/* SPDX-License-Identifier: Apache-2.0 */
/*
 * begin.c - when a transaction may begin: the log has room for it, and no failed flush has given up what it is to
 * publish.
 */

#include "tiering/base/activity.h"
#include "tiering/object/context.h"
#include "tiering/data/flush.h"
#include "tiering/txn/txn_priv.h"

/*
 * Without a checkpoint thread the caller makes the room that it needs. -ENOSPC: a checkpoint makes none, and another
 * one would not.
 */
static int checkpoint_if_full(struct ht_store *s, size_t bytes)
{
    struct ht_journal_stats st;

    ht_journal_stats(s->journal, &st);
    if (st.used_bytes + bytes <= st.log_bytes / 2 && ht_journal_try_space(s->journal, bytes))
        return 0;
    int rc = ht_store_checkpoint(s);
    return rc ? rc : ht_journal_try_space(s->journal, bytes) ? 0 : -ENOSPC;
}

/* The transaction's lock stays with the transaction: clang cannot follow it. */
int ht_tx_begin(struct ht_store *s, size_t bytes, struct ht_tx **out_tx) HT_NO_THREAD_SAFETY_ANALYSIS
{
    if (ht_is_read_only(s))
        return -EROFS;
    for (;;) {
        int rc = s->opts.no_threads ? checkpoint_if_full(s, bytes) : 0;
        if (!rc)
            rc = ht_journal_wait_space(s->journal, bytes);
        /* The first caller that needs the log reports a failure that no caller saw, as one in a checkpoint. */
        if (rc && ht_journal_failed(s->journal))
            ht_tx_log_failed(s, rc);
        if (rc)
            return rc;
        ht_activity_wait("the transaction", 0);
        ht_mutex_lock(&s->tx_lock);
        ht_activity_go_on();
        if (ht_journal_try_space(s->journal, bytes))
            break;
        ht_mutex_unlock(&s->tx_lock); /* another thread took the room */
    }
    assert(s->txn->tx.records.len == 0 && !s->frees.open.first && ht_list_empty(&s->txn->tx.deleted));
    int rc = ht_tx_expect(&s->txn->tx, bytes);
    if (rc) {
        ht_mutex_unlock(&s->tx_lock);
        return rc;
    }
    *out_tx = &s->txn->tx;
    return 0;
}

int ht_tx_begin_round(struct ht_store *s, size_t bytes, struct ht_rounds *r, struct ht_tx **out_tx)
{
    int rc = ht_tx_begin(s, bytes, out_tx);

    if (rc)
        return rc;
    int checked = ht_store_locked(s, ht_round_check(s, r));
    s->txn->tx.whole = !checked;
    if (!checked)
        return 0;
    rc = ht_tx_commit(*out_tx, NULL); /* of nothing */
    return rc ? rc : checked;
}
