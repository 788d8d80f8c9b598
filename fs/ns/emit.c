/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emit.c - checkpoint of the log: everything published, once more, in slices.
 *
 * Per inode: its attributes, target, attributes by name, and the names that lead to it, all as published. Changes
 * between slices come with their own, later records.
 */
#include "fs/ns/kept.h"

static void emit_inode(struct ht_ns *ns, const struct ht_ns_inode *i, struct ht_tx *tx)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if ((i->flags & HT_NS_PUBLISHED) == 0)
        return;
    ht_ns_put_inode(tx, i, ht_ns_published_attr(i));
    if (S_ISLNK(i->cur.mode))
        ht_ns_put_target(tx, i);
    const struct ht_ns_kept_step *kept = (i->flags & HT_NS_FROZEN) != 0 ? ht_ns_kept_step(ns, i->ino) : NULL;
    if (kept)
        ht_ns_put_kept(tx, &kept->about);
    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next)
        if (x->state != HT_NS_NEW)
            ht_ns_put_xattr(tx, HT_REC_NS_XATTR, i->ino, x, 0);
    /* bounded: HT_LINKS_MAX names */
    for (const struct ht_ns_entry *e = i->names; e; e = e->name_next)
        if (e->state != HT_NS_NEW)
            ht_ns_put_entry(tx, HT_REC_NS_ENTRY, e, 0);
}

int ht_ns_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes)
{
    struct ht_ns *ns = ctx;
    struct ht_buf *records = ht_tx_records(tx);
    size_t end = records->len + max_bytes;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    do {
        for (struct ht_ns_inode *i = ht_ns_inode_scan(ns, cursor); i; i = i->hash_next)
            emit_inode(ns, i, tx);
    } while (*cursor != 0 && records->len < end && records->err == 0);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return *cursor != 0 ? 1 : 0;
}
