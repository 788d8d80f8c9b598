/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy.c - copies of a model root: kept steps, and model roots made from them (tiering/api/keep.h).
 *
 * The copy gets inodes, names and attributes as they are when the transaction has begun: from then on until its end no
 * other thread changes any of them. Only times may still change, by threads that read and write: these are taken when
 * the commit has published them. Until that moment nothing leads to the copy, and the log does not know it. Its inodes
 * are STALE until then, so that no number leads to them either.
 *
 * ns.lock held for writing, inside a transaction. Loops over the files release it now and then (fs/ns/op.h).
 */
#include "fs/ns/content.h"
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"
#include "fs/ns/scope.h"
#include "fs/ns/shadow.h"
#include "fs/ns/tree.h"
#include "tiering/api/background.h"

/* One at a time, as transactions are. */
struct ht_ns_copying {
    struct ht_ns_members from; /* in the order of their depth; the first is the model root's directory */
    struct ht_ns_inode **to;
    struct ht_ns_root *root;  /* of the copy */
    struct ht_ns_entry *name; /* of a clone; NULL: a kept step */
    struct ht_ns_kept about;
    bool reserved; /* the record of the kept step */
    struct ht_slice slice;
};

/* ------------------------------------------------------------------ inodes */

static int copy_xattrs(struct ht_ns *ns, const struct ht_ns_inode *from, struct ht_ns_inode *to)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    for (const struct ht_ns_xattr *x = from->xattrs; x; x = x->next) {
        struct ht_ns_xattr *y;
        if (x->state == HT_NS_GONE || ht_ns_is_note(x->data, x->name_len))
            continue;
        int rc = ht_ns_xattr_new(ns, x->data, x->name_len, ht_ns_xattr_value(x), x->value_len, &y);
        if (rc != 0)
            return rc;
        y->state = HT_NS_CLEAN;
        y->next = to->xattrs;
        to->xattrs = y;
    }
    return 0;
}

static size_t record_bytes(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    size_t bytes = ht_ns_inode_log_bytes(i);

    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next)
        bytes += ht_ns_xattr_log_bytes(x);
    return bytes;
}

static int copy_inode(struct ht_ns *ns, struct ht_copy *k, const struct ht_ns_inode *from, struct ht_ns_inode **out)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    uint64_t ino = ht_copy_add(k, from->ino);
    struct ht_ns_inode *i;
    int rc = ino != 0 ? ht_ns_inode_new(ns, ino, from->cur.mode, &i) : -ENOMEM;

    if (rc != 0)
        return rc;
    *out = i;
    i->cur = from->cur;
    i->flags |= HT_NS_STALE;
    ht_ns_inode_set_root(ns, i, ns->copying->root);
    if (S_ISCHR(from->cur.mode) || S_ISBLK(from->cur.mode))
        i->u.rdev = from->u.rdev;
    if (S_ISLNK(from->cur.mode))
        rc = ht_ns_inode_set_target(ns, i, from->u.target, strlen(from->u.target));
    if (rc == 0)
        rc = copy_xattrs(ns, from, i);
    k->bytes += record_bytes(i);
    return rc;
}

/* Memory for all. Large pieces take a while, so the lock is released. */
static int expect_inodes(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;

    ht_rwlock_unlock(ht_ns_lock(ns));
    c->to = calloc(c->from.count, sizeof(*c->to));
    int rc = c->to ? ht_copy_expect(k, c->from.count) : -ENOMEM;
    ht_rwlock_wrlock(ht_ns_lock(ns));
    return rc;
}

/* Others' files get no names of who clones. */
static bool is_allowed(const struct ht_copy *k, const struct ht_ns_inode *from) HT_REQUIRES(HT_LOCK_NAMES)
{
    return !k->clone || k->clone->uid == 0 || from->cur.uid == k->clone->uid;
}

static int copy_inodes(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;
    int rc = expect_inodes(ns, k);

    for (size_t n = 0; rc == 0 && n < c->from.count; n++) {
        rc = is_allowed(k, c->from.inodes[n]) ? copy_inode(ns, k, c->from.inodes[n], &c->to[n]) : -EPERM;
        ht_ns_slice_next(ns, &c->slice);
    }
    return rc;
}

/* ------------------------------------------------------------------- names */

static int copy_entry(struct ht_ns *ns, struct ht_copy *k, const struct ht_ns_entry *from, struct ht_ns_inode *dir)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_find(ns, ht_copy_of(k, from->inode->ino));
    struct ht_ns_entry *e;
    int rc = ht_ns_dir_reserve(ns, dir->u.dir, 1);

    if (rc == 0)
        rc = ht_ns_entry_new(ns, from->name, from->len, &e);
    if (rc != 0)
        return rc;
    e->state = HT_NS_CLEAN;
    ht_ns_dir_append(dir->u.dir, e);
    ht_ns_entry_insert(ns, e, dir, i);
    ht_ns_entry_count(e, 1);
    k->bytes += ht_ns_entry_log_bytes(e);
    return 0;
}

static int copy_dir(struct ht_ns *ns, struct ht_copy *k, const struct ht_ns_inode *from, struct ht_ns_inode *to)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_dir *d = from->u.dir;
    int rc = 0;

    for (uint32_t s = 0; rc == 0 && s < d->slot_count; s++) {
        const struct ht_ns_entry *e = ht_ns_dir_entry(d, s);
        if (e)
            rc = copy_entry(ns, k, e, to);
        ht_ns_slice_next(ns, &ns->copying->slice);
    }
    return rc;
}

static int copy_names(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;
    int rc = 0;

    for (size_t n = 0; rc == 0 && n < c->from.count; n++) {
        if (ht_ns_is_dir(c->from.inodes[n]))
            rc = copy_dir(ns, k, c->from.inodes[n], c->to[n]);
        ht_ns_slice_next(ns, &c->slice);
    }
    return rc;
}

/* -------------------------------------------------------------- kept steps */

/* Those that end because this one is kept: one of the same step, and the oldest beyond those that may stay. */
static int expire(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    uint32_t left = k->retain > 1 ? k->retain - 1 : 0;
    int rc = 0;

    for (struct ht_list *p = ns->kept.prev; rc == 0 && p != &ns->kept; p = p->prev) { /* from the newest down */
        const struct ht_ns_kept *x = &ht_list_entry(p, struct ht_ns_kept_step, link)->about;
        bool numbered = strspn(x->name, "0123456789") == strlen(x->name);
        size_t bytes;
        if (x->root != k->scope)
            continue;
        bool same = strcmp(x->name, ns->copying->about.name) == 0;
        if (same && !numbered)
            return -EEXIST;
        bool held = ht_list_entry(p, struct ht_ns_kept_step, link)->holds > 0;
        bool beyond = numbered && !k->name && k->retain != 0 && left == 0 && !held;
        left -= numbered && !same && left > 0 ? 1 : 0;
        if (!same && !beyond)
            continue;
        rc = ht_ns_kept_end_bytes(ns, x->ino, &bytes);
        if (rc == 0)
            rc = ht_copy_expire(k, x->ino, bytes);
    }
    return rc;
}

static int describe_kept(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_kept *about = &ns->copying->about;

    *about = (struct ht_ns_kept){.root = k->scope, .step = k->step, .time_ns = ht_ns_now()};
    if (k->name)
        snprintf(about->name, sizeof(about->name), "%s", k->name);
    else
        snprintf(about->name, sizeof(about->name), "%llu", (unsigned long long)k->step);
    int rc = ht_store_log_reserve(ns->store, ht_ns_kept_log_bytes(about));
    if (rc != 0)
        return rc;
    ns->copying->reserved = true;
    k->bytes += ht_ns_kept_log_bytes(about);
    return expire(ns, k);
}

/* ------------------------------------------------------------------ clones */

/* The name of the clone, outside of model roots. */
static int name_copy(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir;
    size_t len = strlen(k->clone->name);
    int rc = ht_ns_find_dir(ns, k->clone->parent, k->clone->name, &dir);

    if (rc == 0 && ht_ns_pending(dir))
        rc = -EINVAL;
    if (rc == 0 && ht_ns_entry_find(ns, dir, k->clone->name, len))
        rc = -EEXIST;
    if (rc == 0)
        rc = ht_ns_reserve(ns, ht_ns_root(dir), 2, 0);
    if (rc == 0)
        rc = ht_ns_dir_reserve(ns, dir->u.dir, 1);
    if (rc == 0)
        rc = ht_ns_entry_new(ns, k->clone->name, len, &ns->copying->name);
    if (rc == 0)
        k->bytes += ht_ns_entry_log_bytes(ns->copying->name);
    return rc;
}

/* ------------------------------------------------------------------- whole */

/* Frees what a copy in the making had beside its inodes and names; no lock held. */
static void free_copying(struct ht_ns_copying *c)
{
    free(c->from.inodes);
    free(c->to);
    free(c);
}

static void drop_names(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    while (i && i->names) {
        struct ht_ns_entry *e = i->names;
        ht_ns_dir_remove(ns, e->dir->u.dir, e);
        ht_ns_entry_remove(ns, e);
        ht_ns_entry_free(ns, e);
    }
}

/* The caller frees it without the lock. */
static struct ht_ns_copying *drop_copy(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;

    for (size_t n = c->to ? c->from.count : 0; n > 0; n--, ht_ns_slice_next(ns, &c->slice))
        drop_names(ns, c->to[n - 1]);
    for (size_t n = 0; c->to && n < c->from.count; n++, ht_ns_slice_next(ns, &c->slice))
        if (c->to[n])
            ht_ns_inode_free(ns, c->to[n]);
    if (c->name)
        ht_ns_entry_free(ns, c->name);
    if (c->reserved)
        ht_store_log_unreserve(ns->store, ht_ns_kept_log_bytes(&c->about));
    if (c->root)
        ht_ns_root_free_empty(ns, c->root);
    ns->copying = NULL;
    return c;
}

static int make_copy(struct ht_ns *ns, struct ht_copy *k, struct ht_ns_inode *top) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;
    int rc = ht_ns_collect_tree(ns, &c->from, top, &c->slice);

    /* The flag is for the walk alone. The transaction keeps the members in memory. */
    for (size_t n = 0; n < c->from.count; n++, ht_ns_slice_next(ns, &ns->copying->slice))
        c->from.inodes[n]->flags &= (uint8_t)~HT_NS_MARKED;
    if (rc == 0) {
        c->root = ht_ns_root_new(ns, 0);
        rc = c->root ? 0 : -ENOMEM;
    }
    if (rc != 0)
        return rc;
    c->root->frozen = true;
    rc = copy_inodes(ns, k);
    if (rc == 0)
        rc = copy_names(ns, k);
    if (rc == 0)
        rc = k->clone ? name_copy(ns, k) : describe_kept(ns, k);
    if (rc != 0)
        return rc;
    c->about.ino = c->root->ino = k->to = c->to[0]->ino;
    return k->clone ? 0 : ht_ns_kept_add(ns, &c->about);
}

int ht_ns_copy(void *ctx, struct ht_copy *k)
{
    struct ht_ns *ns = ctx;
    struct ht_ns_copying *dropped = NULL;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_inode *top = ht_ns_inode_live(ns, k->scope);
    ns->copying = calloc(1, sizeof(*ns->copying));
    int rc = !ns->copying ? -ENOMEM : !top || (top->flags & HT_NS_MODEL_ROOT) == 0 ? -ESTALE : make_copy(ns, k, top);
    if (rc != 0 && ns->copying)
        dropped = drop_copy(ns);
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (dropped)
        free_copying(dropped);
    return rc;
}

void ht_ns_copy_dropped(void *ctx, struct ht_copy *k)
{
    struct ht_ns *ns = ctx;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_kept_step *x = ht_ns_kept_step(ns, k->to);
    if (x)
        ht_ns_kept_remove(ns, x);
    struct ht_ns_copying *dropped = drop_copy(ns);
    ht_rwlock_unlock(ht_ns_lock(ns));
    free_copying(dropped);
}

/* With the published times of the inode that it is a copy of. */
static void put_inode(struct ht_tx *tx, const struct ht_ns_inode *from, struct ht_ns_inode *i)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    i->cur = *ht_ns_published_attr(from);
    ht_ns_put_inode(tx, i, &i->cur);
    if (S_ISLNK(i->cur.mode))
        ht_ns_put_target(tx, i);
    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next)
        ht_ns_put_xattr(tx, HT_REC_NS_XATTR, i->ino, x, 0);
    /* bounded: HT_LINKS_MAX names */
    for (const struct ht_ns_entry *e = i->names; e; e = e->name_next)
        ht_ns_put_entry(tx, HT_REC_NS_ENTRY, e, 0);
}

/* From now on numbers lead to it. */
static void settle(struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    i->flags |= HT_NS_PUBLISHED;
    i->flags &= (uint8_t)~HT_NS_STALE;
}

/* The clone appears under its name. */
static void put_name(struct ht_ns *ns, struct ht_copy *k, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_op op = {.ns = ns, .tx = tx, .now_ns = ht_ns_now()};
    struct ht_ns_copying *c = ns->copying;

    c->root->frozen = false;
    ht_ns_entry_add(&op, c->name, ht_ns_inode_find(ns, k->clone->parent), c->to[0], NULL);
    c->name = NULL;
}

void ht_ns_copied(void *ctx, struct ht_copy *k, struct ht_tx *tx)
{
    struct ht_ns *ns = ctx;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_copying *c = ns->copying;
    c->to[0]->flags |= HT_NS_MODEL_ROOT | (k->clone ? 0 : HT_NS_FROZEN);
    for (size_t n = 0; n < c->from.count; n++, ht_ns_slice_next(ns, &c->slice))
        put_inode(tx, c->from.inodes[n], c->to[n]);
    for (size_t n = c->from.count; n > 1; n--, ht_ns_slice_next(ns, &c->slice))
        settle(c->to[n - 1]);
    settle(c->to[0]); /* last: names lead to the others from here */
    if (k->clone) {
        ht_ns_root_paths(ns, c->to[0]);
        put_name(ns, k, tx);
    } else {
        ht_ns_put_kept(tx, &c->about);
        ht_store_wake_digest(ns->store);
    }
    ns->copying = NULL;
    ht_rwlock_unlock(ht_ns_lock(ns));
    free_copying(c);
}
