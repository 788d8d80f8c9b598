/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roots.c - model roots: the set of roots, making a root of a directory, and the reverse.
 *
 * The root of an inode follows from its directories. So making a root changes one inode in the log, and the scope of
 * every object below. An object can move into a root's scope only while all its content is published. The caller writes
 * content back with no lock held, tries again when a writer was faster, and gives up after some tries (-EBUSY). Objects
 * can always move out of a root's scope, so ending a root is never refused once the transaction has records.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

enum { TRIES_MAX = 8, OBJECT_MOVE_BYTES = 64, ROOT_BYTES = 4096 };

static const char config_name[] = HT_XATTR_PREFIX "optimizer";

/* ------------------------------------------------------------------ list */

struct ht_ns_root *ht_ns_root_find(struct ht_ns *ns, uint64_t ino)
{
    const struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);

    return i && ino != 0 && ht_ns_root(i)->ino == ino ? ht_ns_root(i) : NULL;
}

struct ht_ns_root *ht_ns_root_new(struct ht_ns *ns, uint64_t ino)
{
    struct ht_ns_root *r = calloc(1, sizeof(*r));

    if (!r)
        return NULL;
    r->ino = ino;
    ht_list_init(&r->shadows);
    ht_list_add_tail(&ns->roots, &r->link);
    ns->meta_bytes += sizeof(*r);
    return r;
}

static void leave(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_ns_root *root) HT_REQUIRES(HT_LOCK_NAMES)
{
    if (i && ht_ns_root(i) == root)
        ht_ns_inode_set_root(ns, i, &ns->outside);
}

/* The directory first: mostly it is the last member. */
void ht_ns_root_free(struct ht_ns *ns, struct ht_ns_root *root)
{
    struct ht_slice slice = {0};
    uint64_t cursor = 0;

    leave(ns, ht_ns_inode_find(ns, root->ino), root);
    for (; root->members > 0; ht_ns_slice_next(ns, &slice))
        for (struct ht_ns_inode *i = ht_ns_inode_scan(ns, &cursor); i; i = ht_ns_inode_next(i))
            leave(ns, i, root);
    ht_ns_root_free_empty(ns, root);
}

void ht_ns_root_free_empty(struct ht_ns *ns, struct ht_ns_root *root)
{
    ht_list_del(&root->link);
    ns->meta_bytes -= sizeof(*root) + (uint64_t)root->entry_cap * sizeof(struct ht_ns_entry *);
    free(root->entries);
    free(root);
}

int ht_ns_roots(struct ht_ns *ns, int (*fn)(void *ctx, uint64_t ino), void *ctx)
{
    uint64_t *inos;
    size_t count = 0;
    int rc = 0;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    ht_list_for_each(p, &ns->roots)
        count++;
    inos = malloc((count + 1) * sizeof(*inos));
    count = 0;
    if (inos)
        ht_list_for_each_entry(r, &ns->roots, const struct ht_ns_root, link)
            if (!r->frozen)
                inos[count++] = r->ino;
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (!inos)
        return -ENOMEM;
    for (size_t n = 0; rc == 0 && n < count; n++)
        rc = fn(ctx, inos[n]);
    free(inos);
    return rc;
}

/* ------------------------------------------------------- inodes of a tree */

/* Members are in the order of their depth: all directories above the first foreign one are the claimant's. */
static int check_owners(const struct ht_ns_members *m, struct ht_ns_claimant *by) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    size_t n = 0;

    if (!by || by->uid == 0)
        return 0;
    while (n < m->count && m->inodes[n]->cur.uid == by->uid)
        n++;
    if (n == m->count)
        return 0;
    by->foreign = m->inodes[n]->ino;
    return -EPERM;
}

/* A root below: -EINVAL. A name outside the tree, of which all members are marked: -EBUSY. */
static int check_tree(const struct ht_ns_members *m) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    for (size_t n = 0; n < m->count; n++) {
        const struct ht_ns_inode *i = m->inodes[n];
        if ((i->flags & HT_NS_MODEL_ROOT) != 0)
            return -EINVAL;
        /* bounded: HT_LINKS_MAX names */
        for (struct ht_ns_entry *e = ht_ns_is_dir(i) ? NULL : i->names; e; e = e->name_next)
            if ((e->dir->flags & HT_NS_MARKED) == 0)
                return -EBUSY;
    }
    return 0;
}

/* --------------------------------------------------------- make a root */

struct root_change {
    uint64_t ino;
    const char *config;
    int (*also)(void *ctx, struct ht_tx *tx);
    void *ctx;
    struct ht_ns_claimant *by;
    uint64_t busy; /* out: the object that was not ready */
};

/* Publishes names and attributes of the members; then they join the other root's list of pending changes. */
static void change_members(struct ht_ns_op *op, const struct ht_ns_members *m, struct ht_ns_root *to)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    for (size_t n = 0; n < m->count; n++) {
        struct ht_ns_inode *i = m->inodes[n];
        if (ht_ns_shadow(i)) {
            ht_ns_put_inode(op->tx, i, &i->cur);
            ht_ns_shadow_drop(op->ns, i);
        }
        ht_ns_inode_set_root(op->ns, i, to);
    }
}

static int check_new_root(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (!i)
        return -ESTALE;
    if (!ht_ns_is_dir(i))
        return -ENOTDIR;
    if (ht_ns_pending(i))
        return -EINVAL;
    return i->links == 0 && i->ino != HT_NS_ROOT_INO ? -ENOENT : 0;
}

/* While the transaction is open no thread changes names, so the members stay the same without the lock. */
static int call_also(struct ht_ns_op *op, const struct root_change *c) HT_REQUIRES(HT_LOCK_NAMES)
{
    if (!c->also)
        return 0;
    ht_ns_op_unlock(op);
    int rc = c->also(c->ctx, op->tx);
    ht_ns_op_lock(op);
    return rc;
}

static void take_config(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_xattr *x = ht_ns_xattr_find(i, config_name, strlen(config_name));

    if (x)
        ht_ns_xattr_drop(op, i, x, op->now_ns);
    i->flags &= (uint8_t)~HT_NS_MODEL_ROOT;
    ht_ns_attr_put(op, i);
}

/* The change itself: all members are outside while their records are put, so these are published at once. */
static int turn_into_root(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_ns_members *m, struct root_change *c)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_xattr *config;
    int rc = ht_ns_xattr_new(op->ns, config_name, strlen(config_name), c->config, strlen(c->config), &config);

    if (rc != 0)
        return rc;
    struct ht_ns_root *root = ht_ns_root_new(op->ns, i->ino);
    rc = !root ? -ENOMEM : ht_ns_scope_move(op, m, 0, i->ino, &c->busy);
    if (rc != 0) {
        ht_ns_xattr_free(op->ns, config);
        if (root)
            ht_ns_root_free(op->ns, root);
        return rc;
    }
    ht_ns_xattr_install(op, i, config, op->now_ns);
    i->flags |= HT_NS_MODEL_ROOT;
    ht_ns_root_paths(op->ns, i);
    ht_ns_attr_put(op, i);
    change_members(op, m, root);
    rc = call_also(op, c);
    if (rc == 0)
        return 0;
    ht_ns_root_publish(op->ns, root, op->tx); /* times touched since */
    ht_ns_root_free(op->ns, root);
    take_config(op, i);
    (void)!ht_ns_scope_move(op, m, i->ino, 0, &c->busy); /* scope.c brings home content that a writer kept */
    return rc;
}

static int make_locked(struct ht_ns_op *op, struct root_change *c) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_live(op->ns, c->ino);
    struct ht_ns_members m = {0};
    struct ht_slice slice = {0};
    int rc = check_new_root(i);

    if (rc == 0)
        rc = ht_ns_reserve(op->ns, ht_ns_root(i), 2, 0);
    if (rc == 0)
        rc = ht_ns_collect_tree(op->ns, &m, i, &slice);
    if (rc == 0)
        rc = check_owners(&m, c->by);
    if (rc == 0)
        rc = check_tree(&m);
    if (rc == 0)
        rc = turn_into_root(op, i, &m, c);
    ht_ns_members_free(&m);
    return rc;
}

/* An estimate, before the transaction, of the log bytes for moving everything at and below ino. */
static int tree_bytes(struct ht_ns *ns, uint64_t ino, size_t *out_bytes)
{
    struct ht_ns_tree_walk w = {.top = ino, .dir = ino};
    struct ht_slice slice = {0};
    uint64_t members = 1, most;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    most = ns->entry_count; /* names that others move meanwhile are met again */
    const struct ht_ns_inode *i = ht_ns_inode_live(ns, ino);
    int rc = !i ? -ESTALE : !ht_ns_is_dir(i) ? -ENOTDIR : 0;
    while (rc == 0 && members <= most && ht_ns_tree_next(ns, &w)) {
        members++;
        ht_ns_slice_next(ns, &slice);
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    *out_bytes = ROOT_BYTES + members * (OBJECT_MOVE_BYTES + HT_NS_INODE_RECORD_BYTES);
    return rc;
}

int ht_ns_root_make(struct ht_ns *ns, uint64_t ino, const char *config, struct ht_ns_claimant *by,
                    int (*also_in_tx)(void *ctx, struct ht_tx *tx), void *ctx)
{
    int rc = strlen(config) > HT_XATTR_VALUE_BYTES_MAX ? -E2BIG : -EBUSY;

    for (int tries = 0; rc == -EBUSY && tries < TRIES_MAX; tries++) {
        struct root_change c = {.ino = ino, .config = config, .also = also_in_tx, .ctx = ctx, .by = by};
        struct ht_ns_op op;
        size_t bytes;
        rc = ht_store_commit(ns->store);
        if (rc == 0)
            rc = tree_bytes(ns, ino, &bytes);
        if (rc != 0)
            continue;
        rc = ht_ns_op_begin(ns, bytes + strlen(config), &op);
        if (rc == 0)
            rc = ht_ns_op_end(&op, make_locked(&op, &c));
        if (rc == 0)
            rc = ht_store_sync(ns->store, op.lsn);
        if (rc == -EBUSY && c.busy == 0)
            break; /* a hard link that leaves the tree */
    }
    return ht_ns_scope_settle(ns, rc);
}

/* ------------------------------------------------------- unmake a root */

struct root_members {
    struct ht_ns_members m;
    const struct ht_ns_root *root;
};

/* Includes orphans that are open. Deleted inodes go with the publication. */
static int add_root_member(void *ctx, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct root_members *r = ctx;
    bool gone = (i->flags & (HT_NS_STALE | HT_NS_GHOST)) != 0;

    return ht_ns_root(i) == r->root && !gone ? ht_ns_members_add(&r->m, i) : 0;
}

/*
 * Nothing here can fail. The files have left the scope when it ends. While the transaction is open no thread changes
 * names, so the inode stays without the lock.
 */
static void turn_into_directory(struct ht_ns_op *op, struct ht_ns_inode *i, const struct ht_ns_members *m)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    uint64_t scope = i->ino, busy;

    ht_ns_root_publish(op->ns, ht_ns_root(i), op->tx);
    /* An object may always move out of all scopes, even while another thread writes to it. */
    int rc = ht_ns_scope_move(op, m, scope, 0, &busy);
    assert(rc == 0);
    (void)rc;
    ht_ns_op_unlock(op);
    ht_scope_end(op->ns->store, scope, HT_SCOPE_DISSOLVED, op->tx);
    ht_ns_op_lock(op);
    ht_ns_root_publish(op->ns, ht_ns_root(i), op->tx); /* times touched since */
    ht_ns_root_free(op->ns, ht_ns_root(i));
    take_config(op, i);
}

/* Everything that can be refused comes before the first record. */
static int unmake_locked(struct ht_ns_op *op, uint64_t ino) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_live(op->ns, ino);
    struct root_members r = {0};
    int rc = !i ? -ESTALE : (i->flags & HT_NS_MODEL_ROOT) == 0 ? -EINVAL : ht_ns_reserve(op->ns, ht_ns_root(i), 2, 0);

    if (rc == 0 && (ht_ns_frozen(i) || ht_ns_has_kept(op->ns, ino)))
        rc = ht_ns_frozen(i) ? -EROFS : -EBUSY;
    if (rc != 0)
        return rc;
    r.root = ht_ns_root(i);
    rc = ht_ns_inode_each(op->ns, add_root_member, &r);
    if (rc == 0)
        turn_into_directory(op, i, &r.m);
    ht_ns_members_free(&r.m);
    return rc;
}

/* The records that move files, and those that delete the state of parameters. */
static size_t unmake_bytes(struct ht_ns *ns, uint64_t ino)
{
    size_t bytes = 0;

    (void)!tree_bytes(ns, ino, &bytes); /* the operation reports it */
    return 2 * bytes + ht_scope_pending_bytes(ns->store, ino);
}

static int unmake(struct ht_ns *ns, uint64_t ino, struct ht_ns_op *op)
{
    struct ht_rounds rounds = HT_ROUNDS_OF_SCOPE(ino);
    int rc;

    do {
        ht_rounds_next(ns->store, &rounds);
        rc = ht_scope_writeback(ns->store, ino);
        if (rc != 0)
            continue;
        rc = ht_ns_op_begin_round(ns, unmake_bytes(ns, ino), &rounds, op);
        if (rc == 0)
            return ht_ns_op_end(op, unmake_locked(op, ino));
    } while (rc == -EAGAIN);
    return rc;
}

int ht_ns_root_unmake(struct ht_ns *ns, uint64_t ino)
{
    struct ht_ns_op op;
    int rc = unmake(ns, ino, &op);

    if (rc == 0)
        rc = ht_store_sync(ns->store, op.lsn);
    return ht_ns_scope_settle(ns, rc);
}
