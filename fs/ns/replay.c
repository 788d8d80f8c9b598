/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay.c - building names from the records of the log, one by one; and a checkpoint of the log, which is the reverse.
 *
 * A record may name an inode of which the INODE record comes later (checkpoint emits in any order, between normal
 * records): such an inode is in memory without HT_NS_PUBLISHED. It goes when nothing names it any more; in the end
 * there must be none (link.c). Until then directories have no slots and no links are counted: opens counts the
 * entries that name an inode as their parent.
 *
 * Replay is single-threaded; the lock is held all the same, for the checks of tools.
 *
 * A checkpoint puts everything published once more, in slices. Changes between slices come
 * with their own, later records.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

#include <linux/limits.h>

static struct ht_ns_inode *find_or_make(struct ht_ns *ns, uint64_t ino) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);

    if (!i && ht_ns_inode_new(ns, ino, 0, &i) != 0)
        return NULL;
    ht_store_saw_id(ns->store, ino);
    return i;
}

static void forget_if_idle(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    bool has_target = S_ISLNK(i->cur.mode) && i->u.target;

    if ((i->flags & HT_NS_PUBLISHED) == 0 && !i->names && i->opens == 0 && !i->xattrs && !has_target)
        ht_ns_inode_free(ns, i);
}

/* ---------------------------------------------------------------- inodes */

/* An inode stays of the type that it was made with. A target may have come first. */
static int replay_inode(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = find_or_make(ns, r->ino);
    uint16_t type = r->attr.mode & S_IFMT;

    if (!i)
        return -ENOMEM;
    if (i->cur.mode != 0 && (i->cur.mode & S_IFMT) != type)
        return -EUCLEAN;
    if (ht_ns_inode_set_mode(ns, i, r->attr.mode) != 0)
        return -ENOMEM;
    i->cur = r->attr;
    if (type == S_IFCHR || type == S_IFBLK)
        i->u.rdev = r->rdev;
    i->flags &= (uint8_t) ~(HT_NS_MODEL_ROOT | HT_NS_FROZEN);
    i->flags |= HT_NS_PUBLISHED | (r->model_root ? HT_NS_MODEL_ROOT : 0) | (r->frozen ? HT_NS_FROZEN : 0);
    return 0;
}

static int replay_target(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = find_or_make(ns, r->ino);

    if (!i)
        return -ENOMEM;
    if (i->cur.mode == 0)
        i->cur.mode = S_IFLNK;
    if (!S_ISLNK(i->cur.mode))
        return -EUCLEAN;
    if (i->u.target) {
        ns->meta_bytes -= strlen(i->u.target) + 1;
        free(i->u.target);
        i->u.target = NULL;
    }
    return ht_ns_inode_set_target(ns, i, r->value, r->value_len);
}

static int replay_inode_del(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_find(ns, r->ino);

    ht_store_saw_id(ns->store, r->ino);
    if (!i)
        return 0;
    i->flags &= (uint8_t) ~(HT_NS_PUBLISHED | HT_NS_MODEL_ROOT | HT_NS_FROZEN);
    while (i->xattrs)
        ht_ns_xattr_remove(ns, i, i->xattrs);
    if (!i->names && i->opens == 0)
        ht_ns_inode_free(ns, i);
    return 0;
}

/* --------------------------------------------------------------- entries */

static void drop_entry(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir = e->dir, *inode = e->inode;

    ht_ns_entry_remove(ns, e);
    ht_ns_entry_free(ns, e);
    dir->opens--;
    forget_if_idle(ns, inode);
    if (dir != inode)
        forget_if_idle(ns, dir);
}

static void stamp(struct ht_ns_inode *dir, struct ht_ns_inode *inode, int64_t time_ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    if (time_ns == 0)
        return;
    dir->cur.mtime_ns = dir->cur.ctime_ns = time_ns;
    inode->cur.ctime_ns = time_ns;
}

static int replay_entry(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir = find_or_make(ns, r->parent), *inode = find_or_make(ns, r->ino);
    struct ht_ns_entry *old, *e;

    if (!dir || !inode)
        return -ENOMEM;
    if (dir->opens == UINT32_MAX || (inode->cur.mode != 0 && (inode->cur.mode & S_IFMT) != r->entry_type))
        return -EUCLEAN;
    if (ht_ns_entry_new(ns, r->name, r->name_len, &e) != 0)
        return -ENOMEM;
    if (inode->cur.mode == 0)
        inode->cur.mode = r->entry_type; /* its INODE record must say the same */
    old = ht_ns_entry_find(ns, dir, r->name, r->name_len);
    ht_ns_entry_insert(ns, e, dir, inode);
    dir->opens++;
    stamp(dir, inode, r->time_ns);
    if (old) {
        stamp(dir, old->inode, r->time_ns);
        drop_entry(ns, old);
    }
    return 0;
}

static int replay_entry_del(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir = ht_ns_inode_find(ns, r->parent);
    struct ht_ns_entry *e = dir ? ht_ns_entry_find(ns, dir, r->name, r->name_len) : NULL;

    if (e) {
        stamp(dir, e->inode, r->time_ns);
        drop_entry(ns, e);
    } else if (dir) {
        stamp(dir, dir, r->time_ns);
    }
    return 0;
}

/* ------------------------------------------------- extended attributes */

static bool is_name(const struct ht_ns_record *r, const char *name)
{
    return strlen(name) == r->name_len && memcmp(name, r->name, r->name_len) == 0;
}

/*
 * "user.a" and its NUL; and the attributes beyond the bounds of setxattr: access lists, the optimizer's words and the
 * digest of a kept step.
 */
enum { SHORTEST_NAME_BYTES = 7, BESIDE = 4 };

/* The most that one inode can have. A log with more was never written by hitrain, and would take long to replay. */
static bool xattr_fits(const struct ht_ns_inode *i, const struct ht_ns_record *r) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    uint64_t bytes = (uint64_t)r->name_len + r->value_len, listed = ht_max_u64(r->name_len + 1, SHORTEST_NAME_BYTES);

    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next) {
        if (is_name(r, x->data) && x->name_len == r->name_len)
            continue;
        bytes += (uint64_t)x->name_len + x->value_len;
        listed += ht_max_u64((uint64_t)x->name_len + 1, SHORTEST_NAME_BYTES);
    }
    return bytes <= HT_XATTR_INODE_BYTES_MAX + BESIDE * (uint64_t)HT_XATTR_VALUE_BYTES_MAX &&
        listed <= XATTR_LIST_MAX + BESIDE * (uint64_t)HT_XATTR_NAME_BYTES_MAX;
}

static int replay_xattr(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = find_or_make(ns, r->ino);
    struct ht_ns_xattr *x;

    if ((is_name(r, HT_NS_ACL_ACCESS) || is_name(r, HT_NS_ACL_DEFAULT)) && !ht_ns_acl_valid(r->value, r->value_len))
        return -EUCLEAN;
    if (i && !xattr_fits(i, r))
        return -EUCLEAN;
    if (!i || ht_ns_xattr_new(ns, r->name, r->name_len, r->value, r->value_len, &x) != 0)
        return -ENOMEM;
    ht_ns_xattr_remove(ns, i, ht_ns_xattr_find(i, r->name, r->name_len));
    x->next = i->xattrs;
    i->xattrs = x;
    if (r->time_ns != 0)
        i->cur.ctime_ns = r->time_ns;
    return 0;
}

static int replay_xattr_del(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_find(ns, r->ino);
    struct ht_ns_xattr *x = i ? ht_ns_xattr_find(i, r->name, r->name_len) : NULL;

    if (i && r->time_ns != 0)
        i->cur.ctime_ns = r->time_ns;
    if (x) {
        ht_ns_xattr_remove(ns, i, x);
        forget_if_idle(ns, i);
    }
    return 0;
}

/* ------------------------------------------------------------ kept steps */

/* Its directory may come later, or never: link.c looks. */
static int replay_kept(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_kept about = {.ino = r->ino, .root = r->root, .step = r->step, .time_ns = r->time_ns};

    memcpy(about.name, r->name, r->name_len);
    ht_store_saw_id(ns->store, r->ino);
    ht_store_saw_id(ns->store, r->root);
    return ht_ns_kept_add(ns, &about);
}

static int replay_kept_del(struct ht_ns *ns, const struct ht_ns_record *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_kept_step *x = ht_ns_kept_step(ns, r->ino);

    if (x)
        ht_ns_kept_remove(ns, x);
    return 0;
}

/* ------------------------------------------------------------------- all */

static int (*const replay[])(struct ht_ns *ns, const struct ht_ns_record *r) = {
    [HT_REC_NS_INODE - HT_REC_NS_FIRST] = replay_inode,
    [HT_REC_NS_INODE_DEL - HT_REC_NS_FIRST] = replay_inode_del,
    [HT_REC_NS_ENTRY - HT_REC_NS_FIRST] = replay_entry,
    [HT_REC_NS_ENTRY_DEL - HT_REC_NS_FIRST] = replay_entry_del,
    [HT_REC_NS_XATTR - HT_REC_NS_FIRST] = replay_xattr,
    [HT_REC_NS_XATTR_DEL - HT_REC_NS_FIRST] = replay_xattr_del,
    [HT_REC_NS_TARGET - HT_REC_NS_FIRST] = replay_target,
    [HT_REC_NS_KEPT - HT_REC_NS_FIRST] = replay_kept,
    [HT_REC_NS_KEPT_DEL - HT_REC_NS_FIRST] = replay_kept_del,
};

int ht_ns_replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    struct ht_ns *ns = ctx;
    struct ht_ns_record r;
    int rc = ht_ns_record_decode(type, payload, len, &r);

    if (rc == 0) {
        ht_rwlock_wrlock(ht_ns_lock(ns));
        rc = replay[type - HT_REC_NS_FIRST](ns, &r);
        ht_rwlock_unlock(ht_ns_lock(ns));
    }
    return rc;
}

/* ------------------------------------------------------------ checkpoint */

static void emit_inode(struct ht_ns *ns, const struct ht_ns_inode *i, struct ht_tx *tx)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if ((i->flags & HT_NS_PUBLISHED) == 0)
        return;
    ht_ns_put_published(tx, i);
    const struct ht_ns_kept_step *kept = (i->flags & HT_NS_FROZEN) != 0 ? ht_ns_kept_step(ns, i->ino) : NULL;
    if (kept)
        ht_ns_put_kept(tx, &kept->about);
}

int ht_ns_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes)
{
    struct ht_ns *ns = ctx;
    struct ht_buf *records = ht_tx_records(tx);
    size_t end = records->len + max_bytes;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    do {
        for (struct ht_ns_inode *i = ht_ns_inode_scan(ns, cursor); i; i = ht_ns_inode_next(i))
            emit_inode(ns, i, tx);
    } while (*cursor != 0 && records->len < end && records->err == 0);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return *cursor != 0 ? 1 : 0;
}
