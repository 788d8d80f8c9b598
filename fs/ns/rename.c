/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rename.c - moving, replacing and exchanging names, each in one transaction.
 *
 * A file that takes another's place brings its data: dirty bytes are written before the transaction and published in
 * it, so that no crash finds the new name with the content of neither. Below a root that comes with the commit. Writing
 * back waits, so it is done with no lock held; the renamed file is looked up again afterwards.
 *
 * A whiteout is a character device 0:0, which overlayfs takes for the absence of the lower name. It takes the old
 * name's place in the same transaction.
 */
#include "fs/ns/pending.h"

enum { RENAME_BYTES = 2048, WHITEOUT_BYTES = 1024 };

struct renaming {
    uint64_t parent, new_parent;
    const char *name, *new_name;
    unsigned flags;
    const struct ht_cred *whiteout; /* the owner of a whiteout that is left under the old name, or NULL */
    /* found under the lock */
    struct ht_ns_inode *dir, *new_dir;
    struct ht_ns_entry *from, *to; /* to: NULL where nothing is replaced */
};

static int find_names(struct ht_ns *ns, struct renaming *r) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    int rc = ht_ns_find_dir(ns, r->parent, r->name, &r->dir);

    if (rc == 0)
        rc = ht_ns_find_dir(ns, r->new_parent, r->new_name, &r->new_dir);
    if (rc != 0)
        return rc;
    r->from = ht_ns_entry_find(ns, r->dir, r->name, strlen(r->name));
    r->to = ht_ns_entry_find(ns, r->new_dir, r->new_name, strlen(r->new_name));
    return !r->from ? -ENOENT : 0;
}

/* ------------------------------------------------------------ data first */

/* Content of a durable regular file outside roots that has something unpublished, or NULL. */
static struct ht_obj *unpublished_content(struct ht_ns *ns, const struct ht_ns_inode *i)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj_stat os;

    if (!S_ISREG(i->cur.mode) || ht_ns_pending(i) || i->cur.obj_class == HT_CLASS_SCRATCH)
        return NULL;
    struct ht_obj *obj = ht_obj_get(ns->store, i->ino);
    if (!obj)
        return NULL;
    ht_obj_stat(obj, &os);
    if (os.unpublished)
        return obj;
    ht_obj_put(obj);
    return NULL;
}

static int write_back(struct ht_obj *obj, size_t *bytes)
{
    if (!obj)
        return 0;
    int rc = ht_obj_writeback(obj);
    if (rc == 0)
        rc = ht_obj_publish_ahead(obj);
    *bytes += ht_obj_pending_bytes(obj);
    ht_obj_put(obj);
    return rc;
}

/* Only if something is replaced: the operation itself reports errors of the names. */
static int write_back_data(struct ht_ns *ns, struct renaming *r, size_t *bytes)
{
    struct ht_obj *a = NULL, *b = NULL;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    if (find_names(ns, r) == 0 && r->to && (r->flags & RENAME_NOREPLACE) == 0) {
        a = unpublished_content(ns, r->from->inode);
        b = (r->flags & RENAME_EXCHANGE) != 0 ? unpublished_content(ns, r->to->inode) : NULL;
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    int rc = write_back(a, bytes);
    int error = write_back(b, bytes);
    return rc != 0 ? rc : error;
}

static void publish_data(struct ht_ns_op *op, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj *obj = unpublished_content(op->ns, i);

    if (!obj)
        return;
    ht_ns_op_publish(op, obj);
    ht_obj_put(obj);
}

/* ---------------------------------------------------------------- checks */

/*
 * Would the directory end up inside itself? Directories may be a million deep. The transaction keeps them where they
 * are.
 */
static bool goes_into_itself(struct ht_ns *ns, const struct ht_ns_entry *e, const struct ht_ns_inode *new_dir)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *i = new_dir;
    struct ht_slice slice = {0};

    if (!ht_ns_is_dir(e->inode))
        return false;
    for (; i != e->inode && i->u.dir->self; ht_ns_slice_next(ns, &slice))
        i = i->u.dir->self->dir;
    return i == e->inode;
}

static int check_replaced(struct ht_ns *ns, const struct renaming *r) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    bool dir = ht_ns_is_dir(r->from->inode);

    if (!r->to)
        return 0;
    if ((r->flags & RENAME_NOREPLACE) != 0)
        return -EEXIST;
    if (r->to->inode == r->from->inode)
        return 0;
    if (dir != ht_ns_is_dir(r->to->inode))
        return dir ? -ENOTDIR : -EISDIR;
    return dir ? ht_ns_check_removable(ns, r->to->inode, true) : 0;
}

static int check_rename(struct ht_ns *ns, const struct renaming *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    bool exchange = (r->flags & RENAME_EXCHANGE) != 0;

    if (exchange && !r->to)
        return -ENOENT;
    if (ht_ns_root(r->dir) != ht_ns_root(r->new_dir))
        return -EXDEV;
    if (goes_into_itself(ns, r->from, r->new_dir) || (exchange && goes_into_itself(ns, r->to, r->dir)))
        return -EINVAL;
    return exchange ? 0 : check_replaced(ns, r);
}

/* --------------------------------------------------------------- changes */

static bool report_file(const struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return S_ISREG(i->cur.mode) && ns->hooks.renamed(ns->hooks.ctx, i->ino);
}

void ht_ns_report_renamed(struct ht_ns *ns, const struct ht_ns_inode *top)
{
    struct ht_ns_tree_walk w = {.top = top->ino, .dir = top->ino};
    const struct ht_ns_entry *e;

    if (!ns->hooks.renamed || ht_ns_root(top)->ino == 0 || (top->flags & HT_NS_MODEL_ROOT) != 0)
        return;
    bool done = report_file(ns, top);
    while (!done && (e = ht_ns_tree_next(ns, &w)))
        done = report_file(ns, e->inode);
}

/* Room for each side of the change, as ht_ns_entry_add and _drop want it. */
static int reserve(struct ht_ns *ns, const struct renaming *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = ht_ns_reserve(ns, ht_ns_root(r->dir), 8, 4);

    if (rc == 0)
        rc = ht_ns_dir_reserve(ns, r->dir->u.dir, 2);
    if (rc == 0)
        rc = ht_ns_dir_reserve(ns, r->new_dir->u.dir, 2);
    return rc;
}

/* Nothing changes except that the whiteout's inode exists. */
static int make_whiteout(struct ht_ns_op *op, const struct renaming *r, struct ht_ns_entry **out_entry,
                         struct ht_ns_inode **out) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = ht_ns_entry_new(op->ns, r->name, strlen(r->name), out_entry);

    if (rc != 0)
        return rc;
    rc = ht_ns_make_whiteout(op, r->dir, *r->whiteout, out);
    if (rc != 0)
        ht_ns_entry_free(op->ns, *out_entry);
    return rc;
}

static int move(struct ht_ns_op *op, struct renaming *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *moved = r->from->inode, *replaced = r->to ? r->to->inode : NULL;
    struct ht_ns_inode *whiteout = NULL;
    struct ht_ns_entry *e, *at_from;
    int rc = ht_ns_entry_new(op->ns, r->new_name, strlen(r->new_name), &e);

    if (rc != 0)
        return rc;
    rc = reserve(op->ns, r);
    if (rc == 0 && replaced) {
        ht_ns_settle_root(op, replaced); /* cannot go back any more, and releases the lock: others may use the room */
        rc = reserve(op->ns, r);
    }
    if (rc == 0 && r->whiteout)
        rc = make_whiteout(op, r, &at_from, &whiteout);
    if (rc != 0) {
        op->ended_scope = 0;
        ht_ns_entry_free(op->ns, e);
        return rc;
    }
    if (whiteout)
        ht_ns_entry_add(op, at_from, r->dir, whiteout, r->from);
    else
        ht_ns_entry_drop(op, r->from);
    ht_ns_entry_add(op, e, r->new_dir, moved, r->to);
    ht_ns_report_renamed(op->ns, moved);
    if (replaced) {
        publish_data(op, moved);
        ht_ns_inode_release(op, replaced);
    }
    return 0;
}

/* Both names stay, so each keeps its place in its directory. */
static int exchange(struct ht_ns_op *op, struct renaming *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *a = r->from->inode, *b = r->to->inode;
    struct ht_ns_entry *at_from, *at_to;
    int rc = reserve(op->ns, r);

    if (rc == 0)
        rc = ht_ns_entry_new(op->ns, r->name, strlen(r->name), &at_from);
    if (rc != 0)
        return rc;
    rc = ht_ns_entry_new(op->ns, r->new_name, strlen(r->new_name), &at_to);
    if (rc != 0) {
        ht_ns_entry_free(op->ns, at_from);
        return rc;
    }
    ht_ns_entry_add(op, at_from, r->dir, b, r->from);
    ht_ns_entry_add(op, at_to, r->new_dir, a, r->to);
    ht_ns_report_renamed(op->ns, a);
    ht_ns_report_renamed(op->ns, b);
    publish_data(op, a);
    publish_data(op, b);
    return 0;
}

static int rename_locked(struct ht_ns_op *op, struct renaming *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = find_names(op->ns, r);

    if (rc == 0)
        rc = check_rename(op->ns, r);
    /* Two names of one inode: POSIX wants nothing to happen. */
    if (rc != 0 || (r->to && r->to->inode == r->from->inode))
        return rc;
    return (r->flags & RENAME_EXCHANGE) != 0 ? exchange(op, r) : move(op, r);
}

static int rename_names(struct ht_ns *ns, struct renaming *r)
{
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    struct ht_ns_op op;
    int rc;

    do {
        size_t bytes = RENAME_BYTES + (r->whiteout ? WHITEOUT_BYTES : 0);
        ht_rounds_next(ns->store, &rounds);
        rc = write_back_data(ns, r, &bytes);
        bytes += ht_ns_settle_bytes(ns, r->new_parent, r->new_name);
        if (rc != 0)
            continue;
        rc = ht_ns_op_begin_round(ns, bytes, &rounds, &op);
        if (rc == 0)
            return ht_ns_op_end(&op, rename_locked(&op, r));
    } while (rc == -EAGAIN);
    return rc;
}

int ht_ns_rename(struct ht_ns *ns, uint64_t parent, const char *name, uint64_t new_parent, const char *new_name,
                 unsigned flags, const struct ht_cred *whiteout)
{
    struct renaming r = {.parent = parent,
                         .new_parent = new_parent,
                         .name = name,
                         .new_name = new_name,
                         .flags = flags,
                         .whiteout = whiteout};
    bool one_of_two = flags == RENAME_NOREPLACE || (flags == RENAME_EXCHANGE && !whiteout);

    return flags == 0 || one_of_two ? rename_names(ns, &r) : -EINVAL;
}
