/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.c - making and removing names: mknod, mkdir, symlink, tmpfile, link, unlink, rmdir.
 *
 * Each is one operation (op.c): everything that can fail comes before the first change. A regular file gets its object
 * with its inode, in the same transaction, so that opening it never needs room. Removing needs none either.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

enum { CHANGE_BYTES = 1024, ORPHAN_BYTES = 128 };

/* Whether a name may be made in dir. */
static int check_parent(const struct ht_ns_inode *dir) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (!dir)
        return -ESTALE;
    if (!ht_ns_is_dir(dir))
        return -ENOTDIR;
    if (ht_ns_frozen(dir))
        return -EROFS;
    return dir->links == 0 && dir->ino != HT_NS_ROOT_INO ? -ENOENT : 0;
}

int ht_ns_find_dir(struct ht_ns *ns, uint64_t ino, const char *name, struct ht_ns_inode **out)
{
    struct ht_ns_inode *dir = ht_ns_inode_live(ns, ino);
    int rc = check_parent(dir);

    if (rc == 0 && name && strlen(name) > HT_NAME_BYTES_MAX)
        rc = -ENAMETOOLONG;
    if (rc == 0 && name && !ht_ns_name_valid(name, strlen(name)))
        rc = -EINVAL;
    if (rc == 0)
        *out = dir;
    return rc;
}

/* ---------------------------------------------------------------- making */

struct making {
    uint64_t parent;
    const char *name; /* NULL: none */
    mode_t mode;
    uint32_t rdev;
    const char *target;
    struct ht_cred cred;
};

/* A new inode inherits these from its directory, except for attributes. */
static void inherit_fields(struct ht_ns_inode *i, const struct ht_ns_inode *dir, const struct making *m, int64_t now)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_ns_attr *a = &i->cur;

    a->uid = m->cred.uid;
    a->gid = m->cred.gid;
    if ((dir->cur.mode & S_ISGID) != 0) {
        a->gid = dir->cur.gid;
        if (S_ISDIR(m->mode))
            a->mode |= S_ISGID;
    }
    a->atime_ns = a->mtime_ns = a->ctime_ns = now;
    if (S_ISREG(m->mode) || S_ISDIR(m->mode)) {
        a->dtype = dir->cur.dtype;
        a->grad_dtype = dir->cur.grad_dtype;
        a->obj_class = dir->cur.obj_class;
    }
}

static int give_xattr(struct ht_ns *ns, struct ht_ns_inode *i, const char *name, const struct ht_ns_xattr *from,
                      struct ht_ns_xattr **out) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = ht_ns_xattr_new(ns, name, strlen(name), ht_ns_xattr_value(from), from->value_len, out);

    if (rc == 0) {
        (*out)->next = i->xattrs;
        i->xattrs = *out;
    }
    return rc;
}

/* The directory's default list becomes the new file's list, and its subdirectories' default; else the umask counts. */
static int inherit_acl(struct ht_ns *ns, struct ht_ns_inode *i, const struct ht_ns_inode *dir, const struct making *m)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_xattr *d = ht_ns_xattr_find(dir, HT_NS_ACL_DEFAULT, strlen(HT_NS_ACL_DEFAULT));
    struct ht_ns_xattr *x;

    if (S_ISLNK(m->mode))
        return 0;
    if (!d) {
        i->cur.mode &= (uint16_t) ~(m->cred.umask & 0777);
        return 0;
    }
    int rc = give_xattr(ns, i, HT_NS_ACL_ACCESS, d, &x);
    if (rc != 0)
        return rc;
    i->cur.mode = (uint16_t)ht_ns_acl_inherit(x->data + x->name_len + 1, x->value_len, i->cur.mode);
    if (ht_ns_acl_is_plain(ht_ns_xattr_value(x), x->value_len))
        ht_ns_xattr_remove(ns, i, x);
    return S_ISDIR(m->mode) ? give_xattr(ns, i, HT_NS_ACL_DEFAULT, d, &x) : 0;
}

/* Attributes that are bytes under a name. */
static int inherit_xattrs(struct ht_ns *ns, struct ht_ns_inode *i, const struct ht_ns_inode *dir)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    static const char *const names[] = {HT_XATTR_PREFIX "tier", HT_XATTR_PREFIX "compress",
                                        HT_XATTR_PREFIX "passthrough"};
    bool takes = S_ISREG(i->cur.mode) || ht_ns_is_dir(i);
    int rc = 0;

    for (size_t n = 0; takes && rc == 0 && n < HT_ARRAY_SIZE(names); n++) {
        const struct ht_ns_xattr *from = ht_ns_xattr_find(dir, names[n], strlen(names[n]));
        struct ht_ns_xattr *x;
        if (from)
            rc = give_xattr(ns, i, names[n], from, &x);
    }
    return rc;
}

static int fill_inode(struct ht_ns_op *op, struct ht_ns_inode *i, const struct ht_ns_inode *dir, const struct making *m,
                      struct ht_obj **out_obj) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    inherit_fields(i, dir, m, op->now_ns);
    ht_ns_inode_set_root(op->ns, i, ht_ns_root(dir));
    if (S_ISCHR(m->mode) || S_ISBLK(m->mode))
        i->u.rdev = m->rdev;
    if (m->target)
        rc = ht_ns_inode_set_target(op->ns, i, m->target, strlen(m->target));
    if (rc == 0)
        rc = inherit_acl(op->ns, i, dir, m);
    if (rc == 0)
        rc = inherit_xattrs(op->ns, i, dir);
    if (rc == 0 && S_ISREG(m->mode))
        rc = ht_ns_content(op->ns, i, out_obj);
    return rc;
}

/* An inode without a name yet, and its content if it is a regular file. */
static int make_inode(struct ht_ns_op *op, const struct ht_ns_inode *dir, const struct making *m,
                      struct ht_ns_inode **out, struct ht_obj **out_obj) HT_REQUIRES(HT_LOCK_NAMES)
{
    uint64_t ino = ht_store_new_id(op->ns->store);
    struct ht_ns_inode *i;
    int rc = ino != 0 ? ht_ns_inode_new(op->ns, ino, m->mode, &i) : -ENOSPC;

    if (rc != 0)
        return rc;
    rc = fill_inode(op, i, dir, m, out_obj);
    if (rc != 0)
        ht_ns_inode_free(op->ns, i);
    else
        *out = i;
    return rc;
}

/* The new inode becomes pending below a root, or goes into the log. */
static void announce(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_obj *obj) HT_REQUIRES(HT_LOCK_NAMES)
{
    bool pending = ht_ns_pending(i);

    ht_ns_attr_edit(op, i);
    ht_ns_attr_put(op, i);
    if (!pending && S_ISLNK(i->cur.mode))
        ht_ns_put_target(op->tx, i);
    for (struct ht_ns_xattr *x = i->xattrs; x; x = x->next) {
        x->state = pending ? HT_NS_NEW : HT_NS_CLEAN;
        if (!pending)
            ht_ns_put_xattr(op->tx, HT_REC_NS_XATTR, i->ino, x, 0);
    }
    if (!pending && obj)
        ht_obj_publish(obj, op->tx);
    ht_obj_put(obj);
}

static int make_locked(struct ht_ns_op *op, const struct making *m, struct stat *out_st) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir, *i;
    struct ht_ns_entry *e = NULL;
    struct ht_obj *obj = NULL;
    size_t len = m->name ? strlen(m->name) : 0;
    int rc = ht_ns_find_dir(op->ns, m->parent, m->name, &dir);

    if (rc == 0 && m->name && ht_ns_entry_find(op->ns, dir, m->name, len))
        rc = -EEXIST;
    if (rc == 0)
        rc = m->name ? ht_ns_new_name(op->ns, dir, m->name, len, &e) : ht_ns_reserve(op->ns, ht_ns_root(dir), 1, 0);
    if (rc != 0)
        return rc;
    rc = make_inode(op, dir, m, &i, &obj);
    if (rc != 0) {
        if (e)
            ht_ns_entry_free(op->ns, e);
        return rc;
    }
    i->flags |= e ? 0 : HT_NS_UNNAMED;
    announce(op, i, obj);
    if (e)
        ht_ns_entry_add(op, e, dir, i, NULL);
    atomic_fetch_add_explicit(&i->lookups, 1, memory_order_relaxed);
    ht_ns_fill_stat(op->ns, i, out_st);
    return 0;
}

int ht_ns_make_whiteout(struct ht_ns_op *op, const struct ht_ns_inode *dir, struct ht_cred cred,
                        struct ht_ns_inode **out)
{
    const struct making m = {.mode = S_IFCHR, .cred = cred};
    struct ht_obj *obj = NULL;
    int rc = make_inode(op, dir, &m, out, &obj);

    if (rc == 0)
        announce(op, *out, obj);
    return rc;
}

/*
 * A program that ignores errors of writing may check those of creating the file. A tensor's first byte needs a whole
 * chunk. Space that was given up and is not published yet (a truncated file) becomes free by a commit.
 */
static int check_room(struct ht_ns *ns, uint64_t parent)
{
    const struct ht_ns_inode *dir = ht_ns_read_begin(ns, parent);
    uint32_t bytes = dir ? ht_ns_chunk_bytes(ns, dir) : 0;

    ht_rwlock_unlock(ht_ns_lock(ns));
    for (bool again = false; !ht_store_has_space(ns->store, bytes); again = true)
        if (ht_store_make_space(ns->store, again) != 0)
            return -ENOSPC;
    return 0;
}

static int make_named(struct ht_ns *ns, const struct making *m, struct stat *out_st)
{
    struct ht_ns_op op;
    size_t target_bytes = m->target ? strlen(m->target) : 0;
    int rc = S_ISREG(m->mode) ? check_room(ns, m->parent) : 0, made;

    if (rc != 0)
        return rc;
    rc = ht_ns_op_begin(ns, CHANGE_BYTES + target_bytes, &op);
    if (rc != 0)
        return rc;
    made = make_locked(&op, m, out_st);
    rc = ht_ns_op_end(&op, made);
    if (rc != 0 && made == 0)
        ht_ns_forget(ns, out_st->st_ino, 1); /* the log has failed: the caller gets nothing */
    return rc;
}

int ht_ns_mknod(struct ht_ns *ns, uint64_t parent, const char *name, mode_t mode, dev_t rdev, struct ht_cred cred,
                struct stat *out_st)
{
    struct making m = {.parent = parent, .name = name, .mode = mode, .cred = cred};

    if ((mode & S_IFMT) == 0)
        m.mode |= S_IFREG;
    if (!ht_ns_type_valid(m.mode & S_IFMT) || S_ISDIR(m.mode) || S_ISLNK(m.mode) || (m.mode & ~(S_IFMT | 07777u)) != 0)
        return -EINVAL;
    if (S_ISCHR(m.mode) || S_ISBLK(m.mode)) {
        if (rdev > UINT32_MAX)
            return -EINVAL;
        m.rdev = (uint32_t)rdev;
    }
    return make_named(ns, &m, out_st);
}

int ht_ns_mkdir(struct ht_ns *ns, uint64_t parent, const char *name, mode_t mode, struct ht_cred cred,
                struct stat *out_st)
{
    struct making m = {.parent = parent, .name = name, .mode = S_IFDIR | (mode & 07777), .cred = cred};

    return make_named(ns, &m, out_st);
}

int ht_ns_symlink(struct ht_ns *ns, uint64_t parent, const char *name, const char *target, struct ht_cred cred,
                  struct stat *out_st)
{
    struct making m = {.parent = parent, .name = name, .mode = S_IFLNK | 0777, .target = target, .cred = cred};
    size_t len = strlen(target);

    if (len == 0)
        return -ENOENT;
    return len > HT_SYMLINK_BYTES_MAX ? -ENAMETOOLONG : make_named(ns, &m, out_st);
}

int ht_ns_tmpfile(struct ht_ns *ns, uint64_t dir, mode_t mode, struct ht_cred cred, struct stat *out_st)
{
    struct making m = {.parent = dir, .mode = S_IFREG | (mode & 07777), .cred = cred};

    return make_named(ns, &m, out_st);
}

ssize_t ht_ns_readlink(struct ht_ns *ns, uint64_t ino, char *buf, size_t cap)
{
    ssize_t n = -ESTALE;
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);

    if (i && !S_ISLNK(i->cur.mode)) {
        n = -EINVAL;
    } else if (i) {
        n = (ssize_t)ht_min_u64(strlen(i->u.target), cap);
        memcpy(buf, i->u.target, (size_t)n);
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    return n;
}

/* --------------------------------------------------------------- linking */

static int check_link(const struct ht_ns_inode *i, const struct ht_ns_inode *dir) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (!i)
        return -ESTALE;
    if (ht_ns_is_dir(i))
        return -EPERM;
    if (i->links == 0 && (i->flags & HT_NS_UNNAMED) == 0)
        return -ENOENT;
    if (ht_ns_root(i) != ht_ns_root(dir))
        return -EXDEV;
    return i->links >= HT_LINKS_MAX ? -EMLINK : 0;
}

static int link_locked(struct ht_ns_op *op, uint64_t ino, uint64_t parent, const char *name, struct stat *out_st)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir, *i = ht_ns_inode_live(op->ns, ino);
    struct ht_ns_entry *e;
    size_t len = strlen(name);
    int rc = ht_ns_find_dir(op->ns, parent, name, &dir);

    if (rc == 0 && ht_ns_entry_find(op->ns, dir, name, len))
        rc = -EEXIST;
    if (rc == 0)
        rc = check_link(i, dir);
    if (rc == 0)
        rc = ht_ns_new_name(op->ns, dir, name, len, &e);
    if (rc != 0)
        return rc;
    ht_ns_entry_add(op, e, dir, i, NULL);
    ht_ns_report_renamed(op->ns, i);
    i->flags &= (uint8_t)~HT_NS_UNNAMED;
    atomic_fetch_add_explicit(&i->lookups, 1, memory_order_relaxed);
    ht_ns_fill_stat(op->ns, i, out_st);
    return 0;
}

int ht_ns_link(struct ht_ns *ns, uint64_t ino, uint64_t parent, const char *name, struct stat *out_st)
{
    struct ht_ns_op op;
    int rc = ht_ns_op_begin(ns, CHANGE_BYTES, &op), linked;

    if (rc != 0)
        return rc;
    linked = link_locked(&op, ino, parent, name, out_st);
    rc = ht_ns_op_end(&op, linked);
    if (rc != 0 && linked == 0)
        ht_ns_forget(ns, ino, 1);
    return rc;
}

/* -------------------------------------------------------------- removing */

int ht_ns_check_removable(struct ht_ns *ns, const struct ht_ns_inode *i, bool want_dir)
{
    if (!want_dir)
        return ht_ns_is_dir(i) ? -EISDIR : 0;
    if (!ht_ns_is_dir(i))
        return -ENOTDIR;
    if (i->u.dir->live > 0)
        return -ENOTEMPTY;
    return (i->flags & HT_NS_MODEL_ROOT) != 0 && ht_ns_has_kept(ns, i->ino) ? -EBUSY : 0;
}

/* A model root is about to lose its name: the pending changes below, all deletions, would stay pending for ever. */
void ht_ns_settle_root(struct ht_ns_op *op, struct ht_ns_inode *i)
{
    if ((i->flags & HT_NS_MODEL_ROOT) == 0)
        return;
    ht_ns_root_publish(op->ns, ht_ns_root(i), op->tx);
    op->ended_scope = i->ino;
}

/* The hook's log bytes for each file of the root that only open descriptors hold; it has no others. */
size_t ht_ns_settle_bytes(struct ht_ns *ns, uint64_t parent, const char *name)
{
    struct ht_ns_inode *dir;
    struct ht_ns_entry *e = NULL;
    uint64_t scope = 0;
    size_t bytes = 0;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    if (ht_ns_find_dir(ns, parent, name, &dir) == 0)
        e = ht_ns_entry_find(ns, dir, name, strlen(name));
    if (e && (e->inode->flags & HT_NS_MODEL_ROOT) != 0 && e->inode->u.dir->live == 0) {
        scope = e->inode->ino;
        bytes = ht_ns_root(e->inode)->members * ORPHAN_BYTES;
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    return bytes + (scope != 0 ? ht_scope_pending_bytes(ns->store, scope) : 0);
}

static int remove_locked(struct ht_ns_op *op, uint64_t parent, const char *name, bool want_dir)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir, *i;
    int rc = ht_ns_find_dir(op->ns, parent, name, &dir);

    if (rc != 0)
        return rc;
    struct ht_ns_entry *e = ht_ns_entry_find(op->ns, dir, name, strlen(name));
    if (!e)
        return -ENOENT;
    i = e->inode;
    rc = ht_ns_check_removable(op->ns, i, want_dir);
    if (rc == 0)
        rc = ht_ns_reserve(op->ns, ht_ns_root(dir), 3, 1);
    if (rc != 0)
        return rc;
    ht_ns_settle_root(op, i);                          /* cannot go back any more, and releases the lock */
    rc = ht_ns_reserve(op->ns, ht_ns_root(dir), 3, 1); /* other threads may have used it */
    if (rc != 0) {
        op->ended_scope = 0;
        return rc;
    }
    ht_ns_entry_drop(op, e);
    ht_ns_inode_release(op, i);
    return 0;
}

static int remove_name(struct ht_ns *ns, uint64_t parent, const char *name, bool want_dir)
{
    size_t bytes = CHANGE_BYTES + (want_dir ? ht_ns_settle_bytes(ns, parent, name) : 0);
    struct ht_ns_op op;
    int rc = ht_ns_op_begin(ns, bytes, &op);

    if (rc != 0)
        return rc;
    return ht_ns_op_end(&op, remove_locked(&op, parent, name, want_dir));
}

int ht_ns_unlink(struct ht_ns *ns, uint64_t parent, const char *name)
{
    return remove_name(ns, parent, name, false);
}

int ht_ns_rmdir(struct ht_ns *ns, uint64_t parent, const char *name)
{
    return remove_name(ns, parent, name, true);
}
