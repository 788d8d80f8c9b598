/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sync.c - fsync of one inode.
 *
 * fsync always puts a record of its own. The log is in order, so when this record is durable, all earlier ones are, of
 * any thread: the names of this file, and the content that a background commit has just published.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

enum { SYNC_BYTES = 1024 };

struct syncing {
    uint64_t ino;
    struct ht_obj *obj; /* content to be made durable, or NULL */
    bool nothing;       /* it has no name to be found by, or nothing can be unpublished: a read-only mount */
    uint64_t root;      /* 0: none */
    size_t bytes;
};

/* An inode that never had a name may get one after this: that name must then lead to the synced content. */
static bool is_deleted(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return i->links == 0 && i->ino != HT_NS_ROOT_INO && (i->flags & HT_NS_UNNAMED) == 0;
}

static int inspect(struct ht_ns *ns, struct syncing *s) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *i = ht_ns_inode_live(ns, s->ino);
    struct ht_obj_stat os = {0};

    if (!i)
        return -ESTALE;
    if (S_ISREG(i->cur.mode) && i->cur.obj_class != HT_CLASS_SCRATCH)
        s->obj = ht_obj_get(ns->store, i->ino);
    if (s->obj)
        ht_obj_stat(s->obj, &os);
    s->nothing = is_deleted(i) || ht_ns_frozen(i) ||
        (ht_store_read_only(ns->store) && !ht_store_failed(ns->store) && !ht_ns_shadow(i) && !os.unpublished);
    s->root = ht_ns_root(i)->ino;
    return 0;
}

/* Memory for what became unpublished since the transaction was begun: counted without the lock of names. */
static int expect_content(struct ht_ns_op *op, const struct syncing *s) HT_REQUIRES(HT_LOCK_TX)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    if (!s->obj)
        return 0;
    ht_ns_op_unlock(op);
    int rc = ht_tx_expect(op->tx, s->bytes + ht_obj_pending_bytes(s->obj));
    ht_ns_op_lock(op);
    return rc;
}

static int sync_locked(struct ht_ns_op *op, const struct syncing *s) HT_REQUIRES(HT_LOCK_TX) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = expect_content(op, s);
    struct ht_ns_inode *i = ht_ns_inode_live(op->ns, s->ino);

    if (rc != 0 || !i)
        return rc != 0 ? rc : -ESTALE;
    if (is_deleted(i))
        return 0; /* unlinked by another thread */
    if (ht_ns_pending(i))
        return ht_ns_publish_alone(op, i);
    ht_ns_attr_put(op, i);
    if (s->obj)
        ht_ns_op_publish(op, s->obj);
    return 0;
}

static int sync_in_tx(struct ht_ns *ns, const struct syncing *s, struct ht_rounds *rounds)
{
    size_t content_bytes = s->obj ? ht_obj_pending_bytes(s->obj) : 0;
    struct ht_ns_op op;
    int rc = ht_ns_op_begin_round(ns, s->bytes + content_bytes, rounds, &op);

    if (rc == 0)
        rc = ht_ns_op_end(&op, sync_locked(&op, s));
    return rc != 0 ? rc : ht_store_sync(ns->store, op.lsn);
}

static int write_and_sync(struct ht_ns *ns, const struct syncing *s)
{
    struct ht_rounds rounds = HT_ROUNDS_OF(s->obj);
    int rc;

    do {
        ht_rounds_next(ns->store, &rounds);
        rc = s->obj ? ht_obj_writeback_flushed(s->obj) : 0;
        if (rc == 0 && s->obj && s->root == 0)
            rc = ht_obj_publish_ahead(s->obj);
        if (rc == 0)
            rc = sync_in_tx(ns, s, &rounds);
    } while (rc == -EAGAIN);
    return rc;
}

int ht_ns_fsync(struct ht_ns *ns, uint64_t ino)
{
    struct syncing s = {.ino = ino};

    ht_rwlock_rdlock(ht_ns_lock(ns));
    int rc = inspect(ns, &s);
    ht_rwlock_unlock(ht_ns_lock(ns));
    s.bytes = SYNC_BYTES + (s.root != 0 && !s.nothing ? ht_ns_pending_bytes(ns, s.root) : 0);
    if (rc == 0 && !s.nothing)
        rc = write_and_sync(ns, &s);
    ht_obj_put(s.obj);
    return rc;
}
