/* SPDX-License-Identifier: Apache-2.0 */
/* sync.c - makes one object durable: writeback, a transaction of its own, and a wait for the log. */
#include "tiering/api/object.h"
#include "tiering/api/tx.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"

/*
 * Writes back, flushes, and opens a transaction; once more when a part was given up in between. Clang cannot follow a
 * lock that only the last round takes.
 */
static int begin_sync(struct ht_obj *o, struct ht_tx **out_tx) HT_ACQUIRE_IF_0(HT_LOCK_TX) HT_NO_THREAD_SAFETY_ANALYSIS
{
    struct ht_rounds rounds = HT_ROUNDS_OF(o);
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
    /* This object's changes may be in a transaction that another thread appended. */
    return rc ? rc : ht_store_sync(s, lsn ? lsn : s->frees.last_lsn);
}
