/* SPDX-License-Identifier: Apache-2.0 */
/*
 * op.c - the frame of a change of names, and its records in the log.
 *
 * A change is: begin (transaction, then the lock), check and reserve, change memory and put records, end (unlock, call
 * the hook for inodes that went, end the scope of a root that went, append). Nothing in between waits. After the
 * reservation nothing can fail.
 */
#include "fs/ns/pending.h"

/* Clang cannot follow a lock that only one result keeps. */
int ht_ns_op_begin_round(struct ht_ns *ns, size_t bytes, struct ht_rounds *rounds,
                         struct ht_ns_op *op) HT_NO_THREAD_SAFETY_ANALYSIS
{
    struct ht_tx *tx;
    int rc = rounds ? ht_tx_begin_round(ns->store, bytes, rounds, &tx) : ht_tx_begin(ns->store, bytes, &tx);

    if (rc != 0)
        return rc;
    *op = (struct ht_ns_op){.ns = ns, .tx = tx, .now_ns = ht_ns_now()};
    ht_rwlock_wrlock(ht_ns_lock(ns));
    return 0;
}

int ht_ns_op_begin(struct ht_ns *ns, size_t bytes, struct ht_ns_op *op) HT_NO_THREAD_SAFETY_ANALYSIS
{
    return ht_ns_op_begin_round(ns, bytes, NULL, op);
}

void ht_ns_op_publish(struct ht_ns_op *op, struct ht_obj *obj)
{
    assert(op->content_count < HT_ARRAY_SIZE(op->content));
    op->content[op->content_count++] = ht_obj_ref(obj);
}

void ht_ns_op_unlock(struct ht_ns_op *op)
{
    unsigned count = op->deleted_count;

    op->deleted_count = 0;
    ht_rwlock_unlock(ht_ns_lock(op->ns));
    for (unsigned i = 0; i < op->content_count; i++) {
        ht_obj_publish(op->content[i], op->tx);
        ht_obj_put(op->content[i]);
    }
    op->content_count = 0;
    for (unsigned i = 0; i < count && op->ns->hooks.deleted; i++)
        op->ns->hooks.deleted(op->ns->hooks.ctx, op->deleted[i], op->deleted_pending[i], op->tx);
    if (op->ended_scope != 0)
        ht_scope_end(op->ns->store, op->ended_scope, HT_SCOPE_DELETED, op->tx);
    op->ended_scope = 0;
}

void ht_ns_op_lock(struct ht_ns_op *op)
{
    ht_rwlock_wrlock(ht_ns_lock(op->ns));
}

int ht_ns_op_end(struct ht_ns_op *op, int rc)
{
    ht_ns_op_unlock(op);
    int error = ht_tx_commit(op->tx, &op->lsn);
    return rc != 0 ? rc : error;
}

/* ---------------------------------------------------------------- slices */

/* Readers need no help: the lock goes to those that wait for it. */
static bool has_writer(const void *lock)
{
    return ht_rwlock_writer(lock);
}

void ht_ns_slice_next(struct ht_ns *ns, struct ht_slice *slice)
{
    uint64_t took_ns;

    ht_lock_step();
    if (!ht_slice_is_over(slice, &took_ns))
        return;
    bool wanted = ht_rwlock_is_wanted_by_writer(ht_ns_lock(ns));
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (wanted)
        ht_slice_let_in(has_writer, ht_ns_lock(ns), took_ns);
    ht_rwlock_wrlock(ht_ns_lock(ns));
    ht_slice_begin_next(slice);
}

/* --------------------------------------------------------------- records */

void ht_ns_put_inode(struct ht_tx *tx, const struct ht_ns_inode *i, const struct ht_ns_attr *attr)
{
    struct ht_ns_record r = {.type = HT_REC_NS_INODE,
                             .ino = i->ino,
                             .attr = *attr,
                             .model_root = (i->flags & HT_NS_MODEL_ROOT) != 0,
                             .frozen = (i->flags & HT_NS_FROZEN) != 0};

    if (S_ISCHR(attr->mode) || S_ISBLK(attr->mode))
        r.rdev = i->u.rdev;
    ht_ns_record_encode(ht_tx_records(tx), &r);
}

void ht_ns_put_inode_del(struct ht_tx *tx, uint64_t ino)
{
    struct ht_ns_record r = {.type = HT_REC_NS_INODE_DEL, .ino = ino};

    ht_ns_record_encode(ht_tx_records(tx), &r);
}

void ht_ns_put_target(struct ht_tx *tx, const struct ht_ns_inode *i)
{
    struct ht_ns_record r = {
        .type = HT_REC_NS_TARGET, .ino = i->ino, .value = i->u.target, .value_len = (uint32_t)strlen(i->u.target)};

    ht_ns_record_encode(ht_tx_records(tx), &r);
}

void ht_ns_put_entry(struct ht_tx *tx, enum ht_ns_record_type type, const struct ht_ns_entry *e, int64_t time_ns)
{
    struct ht_ns_record r = {.type = (uint16_t)type,
                             .ino = e->inode->ino,
                             .parent = e->dir->ino,
                             .time_ns = time_ns,
                             .entry_type = e->inode->cur.mode & S_IFMT,
                             .name = e->name,
                             .name_len = e->len};

    ht_ns_record_encode(ht_tx_records(tx), &r);
}

void ht_ns_put_xattr(struct ht_tx *tx, enum ht_ns_record_type type, uint64_t ino, const struct ht_ns_xattr *x,
                     int64_t time_ns)
{
    struct ht_ns_record r = {.type = (uint16_t)type,
                             .ino = ino,
                             .time_ns = time_ns,
                             .name = x->data,
                             .name_len = x->name_len,
                             .value = ht_ns_xattr_value(x),
                             .value_len = x->value_len};

    ht_ns_record_encode(ht_tx_records(tx), &r);
}

void ht_ns_put_published(struct ht_tx *tx, const struct ht_ns_inode *i)
{
    ht_ns_put_inode(tx, i, ht_ns_published_attr(i));
    if (S_ISLNK(i->cur.mode))
        ht_ns_put_target(tx, i);
    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next)
        if (x->state != HT_NS_NEW)
            ht_ns_put_xattr(tx, HT_REC_NS_XATTR, i->ino, x, 0);
    /* bounded: HT_LINKS_MAX names */
    for (const struct ht_ns_entry *e = i->names; e; e = e->name_next)
        if (e->state != HT_NS_NEW)
            ht_ns_put_entry(tx, HT_REC_NS_ENTRY, e, 0);
}
