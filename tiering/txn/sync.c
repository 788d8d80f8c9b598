/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sync.c - the dirty images of an object or a scope to devices, and a flush: what comes before their publication.
 * Of one object also that, in a transaction of its own.
 *
 * engine/writeback.c cleans images to make room; data/write_batch.c says how images are written.
 */

#include "tiering/api/object.h"
#include "tiering/api/tx.h"
#include "tiering/object/context.h"
#include "tiering/data/flush.h"
#include "tiering/data/write_batch.h"
#include "tiering/shm/shm.h"
#include "tiering/txn/txn.h"

int ht_obj_writeback(struct ht_obj *o)
{
    struct ht_store *s = o->s;

    if (o->obj_class == HT_CLASS_SCRATCH) /* goes to a device only when memory is short */
        return 0;
    int found = ht_obj_shm_scan(o);
    struct ht_write_batch *w = ht_write_batch_open(s);
    if (!w)
        return -ENOMEM;
    ht_store_lock(s);
    ht_write_batch_range(w, o, 0, UINT64_MAX);
    int rc = ht_write_batch_close(w);
    if (!rc)
        rc = o->error ? o->error : found;
    if (!o->lost)
        o->error = 0;
    ht_store_unlock(s);
    return rc;
}

int ht_obj_writeback_flushed(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct ht_rounds r = HT_ROUNDS_OF(o);
    int rc;

    do {
        ht_rounds_next(s, &r);
        rc = ht_obj_writeback(o);
        if (rc)
            break;
        rc = ht_flush_written(s, &r);
    } while (rc == -EAGAIN);
    return rc;
}

static int write_scope(struct ht_store *s, uint64_t scope, bool rest)
{
    struct ht_write_batch *w = ht_write_batch_open(s);

    if (!w)
        return -ENOMEM;
    struct ht_slice slice = {0};
    struct ht_obj **objs;
    size_t count;
    ht_store_lock(s);
    int rc = ht_scope_collect(s, scope, &objs, &count);
    for (size_t i = 0; !rc && i < count; i++, ht_slice_next(s, &slice))
        if ((!scope || !w->error) && !(rest && objs[i]->extra->derived)) /* a model root is published whole, or not */
            ht_write_batch_range(w, objs[i], 0, UINT64_MAX);
    int wrc = ht_write_batch_close(w);
    for (size_t i = 0; !rc && i < count; i++, ht_slice_next(s, &slice)) {
        /* A commit of a root reports failures since the last one. Outside, fsync and close of the file do. */
        if (scope && objs[i]->error && !wrc)
            wrc = objs[i]->error;
        if (scope && !objs[i]->lost)
            objs[i]->error = 0;
        ht_obj_put_locked(objs[i]);
    }
    ht_store_unlock(s);
    if (!rc)
        free(objs);
    return rc ? rc : wrc;
}

int ht_scope_write(struct ht_store *s, uint64_t scope, bool rest)
{
    struct ht_rounds r = {.scope = scope, .of_scope = true, .rest = rest};
    int rc, flushed;

    do {
        ht_rounds_next(s, &r);
        rc = write_scope(s, scope, rest);
        flushed = ht_flush_written(s, &r);
    } while (!rc && flushed == -EAGAIN);
    return rc ? rc : flushed;
}

int ht_scope_scan_and_write(struct ht_store *s, uint64_t scope, bool rest)
{
    int found = ht_shm_scan_scope(s, scope), rc = ht_scope_write(s, scope, rest);

    return found ? found : rc;
}

int ht_scope_writeback(struct ht_store *s, uint64_t scope)
{
    return ht_scope_scan_and_write(s, scope, false);
}

/* ------------------------------------------------------------------- sync */

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
