/* SPDX-License-Identifier: Apache-2.0 */
/*
 * publish.c - publishes the pending changes of a model root: all (commit), or those of one file (fsync). Outside of
 * model roots only times are pending, and a commit publishes as many as the log has room for.
 *
 * Commit of a model root: first every GONE entry, then every NEW one (one name may have both), then inodes. The records
 * of one call are one group of the log, so their order matters only where two name the same thing.
 *
 * One file: its inode and the names that lead to it. Publishing a name takes everything along that keeps the published
 * tree whole:
 *
 *  - the directories above it;
 *  - the end of the inode's other published names (or a moved directory would have two);
 *  - the names of an inode that loses a published one to it (or a crash would lose a file that was only renamed);
 *  - with the end of a removed directory that of the names in it.
 *
 * The closure, the set of inodes whose names must be published with it, is found before anything changes. Only the
 * commit of an open step publishes the content that the step has changed. The optimizer therefore checks the whole
 * closure, and lets no step begin during the publication.
 *
 * fsync always puts a record of its own. The log is in order, so when this record is durable, all earlier ones are, of
 * any thread: the names of this file, and the content that a background commit has just published.
 *
 * All but those that take part in a commit or an fsync run with ns.lock held for writing, inside a transaction. Content
 * is published without the lock, and long loops release it now and then (ht_ns_slice_next).
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

/* ----------------------------------------------------------- single things */

static void publish_xattrs(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    for (struct ht_ns_xattr *x = i->xattrs, *next; x; x = next) {
        next = x->next;
        if (x->state != HT_NS_GONE)
            continue;
        ht_ns_put_xattr(tx, HT_REC_NS_XATTR_DEL, i->ino, x, 0);
        ht_ns_xattr_remove(ns, i, x);
    }
    for (struct ht_ns_xattr *x = i->xattrs; x; x = x->next) {
        if (x->state == HT_NS_NEW)
            ht_ns_put_xattr(tx, HT_REC_NS_XATTR, i->ino, x, 0);
        x->state = HT_NS_CLEAN;
    }
}

static void publish_inode(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    ht_ns_put_inode(tx, i, &i->cur);
    if ((i->flags & HT_NS_PUBLISHED) == 0 && S_ISLNK(i->cur.mode))
        ht_ns_put_target(tx, i);
    publish_xattrs(ns, i, tx);
    i->flags |= HT_NS_PUBLISHED;
    ht_ns_shadow_drop(ns, i);
}

/* Removes a GONE entry from memory; the caller puts the record. */
static void forget_gone(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    e->dir->u.dir->gone--;
    ht_ns_entry_undirty(ht_ns_root(e->dir), e);
    ht_ns_entry_remove(ns, e);
    ht_ns_entry_free(ns, e);
}

static void publish_gone(struct ht_ns *ns, struct ht_ns_entry *e, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    ht_ns_put_entry(tx, HT_REC_NS_ENTRY_DEL, e, 0);
    forget_gone(ns, e);
}

static void publish_new(struct ht_ns *ns, struct ht_ns_entry *e, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_entry *twin = ht_ns_entry_find_gone(ns, e->dir, e->name, e->len);

    ht_ns_put_entry(tx, HT_REC_NS_ENTRY, e, 0);
    e->state = HT_NS_CLEAN;
    ht_ns_entry_undirty(ht_ns_root(e->dir), e);
    if (twin)
        forget_gone(ns, twin);
}

/* --------------------------------------------------------- a whole root */

/* Removal moves the last pending entry into the place of the removed one: going down from the end meets each once. */
static void publish_entries(struct ht_ns *ns, struct ht_ns_root *root, struct ht_tx *tx, struct ht_slice *slice)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    for (uint32_t n = root->entry_count; n > 0; n--, ht_ns_slice_next(ns, slice))
        if (root->entries[n - 1]->state == HT_NS_GONE)
            publish_gone(ns, root->entries[n - 1], tx);
    for (; root->entry_count > 0; ht_ns_slice_next(ns, slice))
        publish_new(ns, root->entries[root->entry_count - 1], tx);
}

static void publish_ghost(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_obj *obj = S_ISREG(i->cur.mode) ? ht_obj_get(ns->store, i->ino) : NULL;

    /* The object is deleted already, unless an abort brought it back: then again. */
    if (obj) {
        ht_obj_delete(obj, tx);
        ht_obj_put(obj);
    }
    ht_ns_put_inode_del(tx, i->ino);
    ht_ns_inode_free(ns, i);
}

/*
 * Open orphans are published as well, because their content is: a mount deletes both. Where the lock is released in
 * between, only times change. Those of inodes that have no shadow at the beginning come with the next publication.
 */
void ht_ns_root_publish(struct ht_ns *ns, struct ht_ns_root *root, struct ht_tx *tx)
{
    struct ht_ns_shadow_walk w;
    const struct ht_ns_shadow *s;
    struct ht_slice slice = {0};

    root->whole = false;
    publish_entries(ns, root, tx, &slice);
    ht_ns_shadow_walk_begin(ns, &w, &root->shadows);
    for (; (s = ht_ns_shadow_walk_next(&w)); ht_ns_slice_next(ns, &slice)) {
        struct ht_ns_inode *i = s->inode;
        if ((i->flags & HT_NS_GHOST) != 0)
            publish_ghost(ns, i, tx);
        else
            publish_inode(ns, i, tx);
    }
    ht_ns_shadow_walk_end(ns, &w);
}

static size_t inode_pending_bytes(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    size_t bytes = ht_ns_inode_log_bytes(i);

    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next)
        if (x->state != HT_NS_CLEAN)
            bytes += ht_ns_xattr_log_bytes(x);
    return bytes;
}

/* ------------------------------------------------------- outside of roots */

/*
 * How much one commit may put of the times outside of model roots, so that it leaves room in the log for others. The
 * rest comes with the next commit.
 */
static size_t times_limit(struct ht_ns *ns)
{
    enum { LIMIT_MIN = 16 << 10, SHARE_OF_FREE_LOG = 16 };
    struct ht_store_stats st;

    ht_store_stats(ns->store, &st);
    if (st.log.used_bytes >= st.log.log_bytes)
        return LIMIT_MIN;
    return (size_t)ht_max_u64((st.log.log_bytes - st.log.used_bytes) / SHARE_OF_FREE_LOG, LIMIT_MIN);
}

/* Of inodes on the list; at most about so many bytes. Releases the lock in between. */
static size_t shadows_bytes(struct ht_ns *ns, struct ht_list *shadows, size_t limit) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_shadow_walk w;
    const struct ht_ns_shadow *s;
    struct ht_slice slice = {0};
    size_t bytes = 0;

    ht_ns_shadow_walk_begin(ns, &w, shadows);
    for (; bytes < limit && (s = ht_ns_shadow_walk_next(&w)); ht_ns_slice_next(ns, &slice))
        bytes += inode_pending_bytes(s->inode);
    ht_ns_shadow_walk_end(ns, &w);
    return bytes;
}

/* Counts as shadows_bytes did. Times that were touched since, also by reads of other threads, come later. */
static void publish_times(struct ht_ns *ns, size_t bytes, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_list *shadows = &ns->outside.shadows;
    struct ht_slice slice = {0};

    for (; !ht_list_empty(shadows) && bytes > 0; ht_ns_slice_next(ns, &slice)) {
        struct ht_ns_inode *i = ht_list_entry(shadows->next, struct ht_ns_shadow, link)->inode;
        bytes -= ht_min_u64(bytes, inode_pending_bytes(i));
        ht_ns_put_inode(tx, i, &i->cur);
        ht_ns_shadow_drop(ns, i);
    }
}

/* ------------------------------------------------------ part in a commit */

bool ht_ns_is_changed(struct ht_ns *ns, uint64_t ino)
{
    ht_rwlock_rdlock(ht_ns_lock(ns));
    struct ht_ns_root *root = ht_ns_root_find(ns, ino);
    bool changed = root && (root->entry_count > 0 || !ht_list_empty(&root->shadows));
    ht_rwlock_unlock(ht_ns_lock(ns));
    return changed;
}

/* Outside of a transaction names come and go between two slices, and so may the root. */
static size_t root_bytes(struct ht_ns *ns, uint64_t scope) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_root *root = ht_ns_root_find(ns, scope);
    struct ht_slice slice = {0};
    size_t bytes = 0;

    for (uint32_t n = 0; root && n < root->entry_count; n++) {
        bytes += ht_ns_entry_log_bytes(root->entries[n]);
        ht_ns_slice_next(ns, &slice);
        root = ht_ns_root_find(ns, scope);
    }
    return root ? bytes + shadows_bytes(ns, &root->shadows, SIZE_MAX) : 0;
}

size_t ht_ns_pending_bytes(void *ctx, uint64_t scope)
{
    struct ht_ns *ns = ctx;
    size_t limit = scope == 0 ? times_limit(ns) : 0, bytes;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    bytes = scope == 0 ? shadows_bytes(ns, &ns->outside.shadows, limit) : root_bytes(ns, scope);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return bytes;
}

void ht_ns_publish(void *ctx, uint64_t scope, size_t expected_bytes, struct ht_tx *tx)
{
    struct ht_ns *ns = ctx;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_root *root = ht_ns_root_find(ns, scope);
    if (root)
        ht_ns_root_publish(ns, root, tx);
    else if (scope == 0) /* a scope that is no model root has nothing */
        publish_times(ns, expected_bytes, tx);
    ht_rwlock_unlock(ht_ns_lock(ns));
}

/* ------------------------------------------------------------- one file */

/* For a deleted file only the name that it loses counts, not its others: the rest of its deletion stays pending. */
static int closure_add(struct ht_ns_members *c, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    return i->links == 0 && !ht_ns_is_dir(i) ? 0 : ht_ns_members_add(c, i);
}

static bool is_removed_dir(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ht_ns_is_dir(i) && i->links == 0 && ht_ns_pending(i) && (i->flags & HT_NS_MODEL_ROOT) == 0;
}

struct alone {
    struct ht_ns_op *op;
    struct ht_ns_inode *inode;
    struct ht_ns_members closure;
    struct ht_slice slice;
};

/* Adds the inodes that became known or unknown in a directory. */
static int closure_add_children(struct alone *a, struct ht_ns_inode *dir) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    for (uint32_t n = 0; rc == 0 && n < ht_ns_root(dir)->entry_count; n++, ht_ns_slice_next(a->op->ns, &a->slice))
        if (ht_ns_root(dir)->entries[n]->dir == dir)
            rc = closure_add(&a->closure, ht_ns_root(dir)->entries[n]->inode);
    return rc;
}

/*
 * Adds the inodes that must come along with the names of i: a removed directory is emptied with its publication, or the
 * rest of its content could not be reached. The name of the model root itself is not pending on it.
 */
static int closure_follow(struct alone *a, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_members *c = &a->closure;
    int rc = is_removed_dir(i) ? closure_add_children(a, i) : 0;

    /* bounded: HT_LINKS_MAX names */
    for (struct ht_ns_entry *e = i->names; rc == 0 && e; e = e->name_next) {
        if (!ht_ns_current(e) || !ht_ns_pending(e->dir))
            continue;
        rc = closure_add(c, e->dir);
        struct ht_ns_entry *twin =
            e->state == HT_NS_NEW ? ht_ns_entry_find_gone(a->op->ns, e->dir, e->name, e->len) : NULL;
        if (rc == 0 && twin)
            rc = closure_add(c, twin->inode);
    }
    return rc;
}

static int closure_find(struct alone *a) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = ht_ns_members_add(&a->closure, a->inode);

    if (rc == 0 && ht_ns_is_dir(a->inode))
        rc = closure_add_children(a, a->inode);
    for (size_t n = 0; rc == 0 && n < a->closure.count; n++, ht_ns_slice_next(a->op->ns, &a->slice))
        rc = closure_follow(a, a->closure.inodes[n]);
    return rc;
}

/* Those that are GONE, or NEW. */
static void publish_names(struct ht_ns *ns, struct ht_ns_inode *i, enum ht_ns_state state, struct ht_tx *tx)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    /* bounded: HT_LINKS_MAX names */
    for (struct ht_ns_entry *e = i->names, *next; e; e = next) {
        next = e->name_next;
        if (e->state == state)
            (state == HT_NS_GONE ? publish_gone : publish_new)(ns, e, tx);
    }
}

/* Names that a directory lost. */
static void publish_children_gone(struct alone *a, struct ht_ns_inode *dir) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_root *root = ht_ns_root(dir);

    for (uint32_t n = root->entry_count; n > 0; n--, ht_ns_slice_next(a->op->ns, &a->slice))
        if (root->entries[n - 1]->state == HT_NS_GONE && root->entries[n - 1]->dir == dir)
            publish_gone(a->op->ns, root->entries[n - 1], a->op->tx);
}

static void publish_closure(struct alone *a) HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_members *c = &a->closure;
    struct ht_ns *ns = a->op->ns;
    struct ht_tx *tx = a->op->tx;

    for (size_t n = 0; n < c->count; n++, ht_ns_slice_next(ns, &a->slice)) {
        publish_names(ns, c->inodes[n], HT_NS_GONE, tx);
        if (c->inodes[n] == a->inode ? ht_ns_is_dir(a->inode) : is_removed_dir(c->inodes[n]))
            publish_children_gone(a, c->inodes[n]);
    }
    for (size_t n = 0; n < c->count; n++, ht_ns_slice_next(ns, &a->slice)) {
        publish_names(ns, c->inodes[n], HT_NS_NEW, tx);
        if ((c->inodes[n]->flags & HT_NS_PUBLISHED) == 0)
            publish_inode(ns, c->inodes[n], tx);
    }
    publish_inode(ns, a->inode, tx);
}

/*
 * The files whose content comes along. An inode that is not in the log yet is published with the content that is on
 * devices, so that it has some.
 */
static size_t list_contents(const struct alone *a, uint64_t *inos) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    size_t count = 0;

    for (size_t n = 0; n < a->closure.count; n++) {
        const struct ht_ns_inode *i = a->closure.inodes[n];
        if (S_ISREG(i->cur.mode) && (i == a->inode || (i->flags & HT_NS_PUBLISHED) == 0))
            inos[count++] = i->ino;
    }
    return count;
}

/* A large file has a record for each of a million chunks, so the lock is released. */
static void publish_contents(struct ht_ns_op *op, const uint64_t *inos, size_t count) HT_REQUIRES(HT_LOCK_NAMES)
{
    ht_ns_op_unlock(op);
    for (size_t n = 0; n < count; n++) {
        struct ht_obj *obj = ht_obj_get(op->ns->store, inos[n]);
        if (obj)
            ht_obj_publish(obj, op->tx);
        ht_obj_put(obj);
    }
    ht_ns_op_lock(op);
}

static int publish_if_quiet(struct alone *a) HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_hooks *hooks = &a->op->ns->hooks;
    uint64_t *inos = calloc(a->closure.count, sizeof(*inos)), root = ht_ns_root(a->inode)->ino;
    size_t count = inos ? list_contents(a, inos) : 0;
    int rc = !inos ? -ENOMEM : hooks->publish_alone ? hooks->publish_alone(hooks->ctx, root, inos, count) : 0;

    if (rc == 0) {
        publish_closure(a);
        publish_contents(a->op, inos, count);
        if (hooks->published_alone)
            hooks->published_alone(hooks->ctx, root);
    }
    free(inos);
    return rc;
}

/*
 * Below a root: the inode, its content and the names that lead to it; of a directory also its entries. -ENOMEM, or
 * -EBUSY as ht_ns_fsync: nothing was done.
 */
static int publish_alone(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct alone a = {.op = op, .inode = i};
    int rc = ht_ns_root(i)->whole ? -EBUSY : closure_find(&a);

    if (rc == 0)
        rc = publish_if_quiet(&a);
    ht_ns_members_free(&a.closure);
    return rc;
}

/* ----------------------------------------------------------------- fsync */

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
        return publish_alone(op, i);
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
