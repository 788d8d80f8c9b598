/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sync.c - fsync of one inode, and the commit timer's flush of times.
 *
 * fsync always puts a record of its own: the log is in order, so when that is durable everything is that was appended
 * before, by whomever: the names of this file, and what a background commit has just published of its content.
 */
#include "fs/ns/ns_priv.h"

enum { SYNC_BYTES = 1024 };

struct syncing {
    uint64_t ino;
    struct ht_obj *obj; /* content to be made durable, or NULL */
    bool nothing;       /* it has no name to be found by, or nothing can be unpublished: a read-only mount */
    size_t bytes;
};

/* One that never had a name may get one after this: then that must lead to what was synced. */
static bool is_deleted(const struct ht_ns_inode *i)
{
    return i->links == 0 && i->ino != HT_NS_ROOT_INO && (i->flags & HT_NS_UNNAMED) == 0;
}

static int look(struct ht_ns *ns, struct syncing *s)
{
    const struct ht_ns_inode *i = ht_ns_inode_live(ns, s->ino);
    struct ht_obj_stat os = {0};

    if (i == NULL)
        return -ESTALE;
    if (S_ISREG(i->cur.mode) && i->cur.obj_class != HT_CLASS_SCRATCH)
        s->obj = ht_obj_get(ns->store, i->ino);
    if (s->obj != NULL)
        ht_obj_stat(s->obj, &os);
    s->nothing = is_deleted(i) ||
        (ht_store_read_only(ns->store) && !ht_store_failed(ns->store) && ht_ns_shadow(i) == NULL && !os.unpublished);
    s->bytes = SYNC_BYTES + (ht_ns_pending(i) ? ht_ns_root_pending_bytes_locked(ht_ns_root(i)) : 0);
    return 0;
}

static int sync_locked(struct ht_ns_op *op, const struct syncing *s)
{
    struct ht_ns_inode *i = ht_ns_inode_live(op->ns, s->ino);

    if (i == NULL)
        return -ESTALE;
    if (is_deleted(i))
        return 0; /* unlinked meanwhile */
    int rc = ht_tx_expect(op->tx, s->bytes + (s->obj != NULL ? ht_obj_pending_bytes(s->obj) : 0));
    if (rc != 0)
        return rc;
    if (ht_ns_pending(i))
        return ht_ns_publish_alone(op, i, s->obj);
    ht_ns_attr_put(op, i);
    if (s->obj != NULL)
        ht_obj_publish(s->obj, op->tx);
    return 0;
}

static int sync_in_tx(struct ht_ns *ns, const struct syncing *s, struct ht_rounds *rounds)
{
    size_t content_bytes = s->obj != NULL ? ht_obj_pending_bytes(s->obj) : 0;
    struct ht_ns_op op;
    int rc = ht_ns_op_begin_round(ns, s->bytes + content_bytes, rounds, &op);

    if (rc == 0)
        rc = ht_ns_op_end(&op, sync_locked(&op, s));
    return rc != 0 ? rc : ht_store_sync(ns->store, op.lsn);
}

static int write_and_sync(struct ht_ns *ns, const struct syncing *s)
{
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    int rc;

    do {
        ht_rounds_next(ns->store, &rounds);
        rc = s->obj != NULL ? ht_obj_writeback_flushed(s->obj) : 0;
        if (rc == 0)
            rc = sync_in_tx(ns, s, &rounds);
    } while (rc == -EAGAIN);
    return rc;
}

int ht_ns_fsync(struct ht_ns *ns, uint64_t ino)
{
    struct syncing s = {.ino = ino};
    int rc;

    ht_rwlock_rdlock(&ns->lock);
    rc = look(ns, &s);
    ht_rwlock_unlock(&ns->lock);
    if (rc == 0 && !s.nothing)
        rc = write_and_sync(ns, &s);
    ht_obj_put(s.obj);
    return rc;
}

/* ----------------------------------------------------------------- flush */

/*
 * How much the transaction of a commit may grow by times: the store could not ask for room for them. What does not fit
 * comes with the next one.
 */
static size_t flush_limit(struct ht_ns *ns)
{
    enum { LIMIT_MIN = 16 << 10, SHARE_OF_FREE_LOG = 16 };
    struct ht_store_stats st;

    ht_store_stats(ns->store, &st);
    if (st.log.used_bytes >= st.log.log_bytes)
        return LIMIT_MIN;
    return (size_t)ht_max_u64((st.log.log_bytes - st.log.used_bytes) / SHARE_OF_FREE_LOG, LIMIT_MIN);
}

void ht_ns_flush(void *ctx, struct ht_tx *tx)
{
    struct ht_ns *ns = ctx;
    struct ht_list *shadows = &ns->outside.shadows;
    size_t end = ht_tx_records(tx)->len + flush_limit(ns);

    ht_rwlock_wrlock(&ns->lock);
    while (!ht_list_empty(shadows) && ht_tx_records(tx)->len < end) {
        struct ht_ns_inode *i = ht_list_entry(shadows->next, struct ht_ns_shadow, link)->inode;
        ht_ns_put_inode(tx, i, &i->cur);
        ht_ns_shadow_drop(ns, i);
    }
    ht_rwlock_unlock(&ns->lock);
}
