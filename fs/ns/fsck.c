/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsck.c - what fsck asks of names: checks, and new names in lost+found.
 *
 * Checks report the problems found when linking up, then every invariant of ns_priv.h in memory. In a healthy program
 * the second part finds nothing; tests call it after each step.
 *
 * lost+found is for inodes that have lost their names, when fsck repairs. Each new name is a transaction of its own, of
 * the usual kind: when a repair is cut short, the next one finds the rest. A name is the number: #17, or #17.1 if there
 * is one already. If the whole store is one model, lost+found is in it, and its new entries are published at once:
 * nothing else is pending while fsck repairs.
 */
#include "fs/ns/pending.h"

enum { LOST_FOUND_BYTES = 1024, FOLDER_MODE = 0700, FILE_MODE = S_IFREG | 0600 };
typedef unsigned long long ull;

/* ---------------------------------------------------------------- checks */

struct checking {
    struct ht_ns *ns;
    void (*report)(void *ctx, const char *code, const char *text);
    void *ctx;
    size_t found;
    uint64_t inodes, entries, xattrs;
};

static void expect(struct checking *c, const struct ht_ns_inode *i, bool ok, const char *what)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    char path[512], text[768];

    if (ok)
        return;
    ht_ns_path_locked(c->ns, i, path, sizeof(path));
    snprintf(text, sizeof(text), "/%s (inode %llu): %s", path, (ull)i->ino, what);
    c->report(c->ctx, "ns-inconsistent", text);
    c->found++;
}

static bool is_in_place(const struct ht_ns_entry *e) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_dir *d = e->dir->u.dir;
    uint32_t slot = ht_ns_dir_seek(d, e->cookie - 1);

    return slot < d->slot_count && ht_ns_dir_entry(d, slot) == e;
}

static void check_entry(struct checking *c, const struct ht_ns_entry *e) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *i = e->inode;
    bool pending = ht_ns_pending(e->dir);

    c->entries++;
    expect(c, i, e->state == HT_NS_CLEAN || pending, "a name outside model roots is not published");
    expect(c, i, (e->dirty != 0) == (e->state != HT_NS_CLEAN), "a pending name is not on its root's list");
    if (e->dirty != 0 && pending)
        expect(c, i, e->dirty <= ht_ns_root(e->dir)->entry_count && ht_ns_root(e->dir)->entries[e->dirty - 1] == e,
               "a pending name is at another place of its root's list");
    if (e->state != HT_NS_NEW)
        expect(c, i, (i->flags & e->dir->flags & HT_NS_PUBLISHED) != 0, "a published name of something that is not");
    if (ht_ns_current(e))
        expect(c, i, is_in_place(e), "a name is not in its place in the directory");
    if (ht_ns_current(e) && (i->flags & HT_NS_MODEL_ROOT) == 0)
        expect(c, i, ht_ns_root(i) == ht_ns_root(e->dir), "it belongs to another model root than its directory");
}

static void check_names(struct checking *c, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    uint32_t current = 0;

    /* bounded: HT_LINKS_MAX names */
    for (const struct ht_ns_entry *e = i->names; e; e = e->name_next) {
        check_entry(c, e);
        current += ht_ns_current(e) ? 1 : 0;
        if (ht_ns_current(e) && ht_ns_is_dir(i))
            expect(c, i, i->u.dir->self == e, "a directory does not know its name");
    }
    expect(c, i, current == i->links, "its links are miscounted");
    expect(c, i, !ht_ns_is_dir(i) || (current <= 1 && (current == 1) == (i->u.dir->self != NULL)),
           "a directory has not exactly one name");
}

static void check_dir(struct checking *c, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_dir *d = i->u.dir;
    uint32_t live = 0, subdirs = 0;
    uint64_t last = 0;

    for (uint32_t s = 0; s < d->slot_count; s++) {
        const struct ht_ns_entry *e = ht_ns_dir_entry(d, s);
        if (!e)
            continue;
        expect(c, i, e->dir == i && e->cookie > last, "the order of its entries is broken");
        last = e->cookie;
        live++;
        subdirs += ht_ns_is_dir(e->inode) ? 1 : 0;
    }
    expect(c, i, live == d->live && subdirs == d->subdirs, "its entries are miscounted");
    expect(c, i, (uint64_t)d->live + d->gone <= d->slot_cap, "it has no room for what an abort brings back");
}

static void check_xattrs(struct checking *c, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    bool dirty = false;

    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next) {
        c->xattrs++;
        dirty |= x->state != HT_NS_CLEAN;
    }
    expect(c, i, !dirty || (ht_ns_shadow(i) && ht_ns_shadow(i)->xattrs), "a pending attribute is on no list");
}

static int check_inode(void *ctx, struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct checking *c = ctx;

    c->inodes++;
    check_names(c, i);
    check_xattrs(c, i);
    if (ht_ns_is_dir(i))
        check_dir(c, i);
    expect(c, i, !ht_ns_shadow(i) || ht_ns_shadow(i)->inode == i, "its pending state is another's");
    if ((i->flags & (HT_NS_PUBLISHED | HT_NS_STALE)) == 0 && i->ino != HT_NS_ROOT_INO)
        expect(c, i, ht_ns_pending(i) && ht_ns_shadow(i), "it is not in the log and not pending");
    if ((i->flags & HT_NS_GHOST) != 0)
        expect(c, i, i->links == 0 && ht_ns_shadow(i), "it is deleted and has a name");
    return 0;
}

size_t ht_ns_check(struct ht_ns *ns, void (*report)(void *ctx, const char *code, const char *text), void *ctx)
{
    struct checking c = {.ns = ns, .report = report, .ctx = ctx};

    ht_rwlock_rdlock(ht_ns_lock(ns));
    for (size_t n = 0; n < ns->problems_kept; n++)
        report(ctx, ns->problems[n].code, ns->problems[n].text);
    c.found = ns->problem_count;
    (void)!ht_ns_inode_each(ns, check_inode, &c);
    if (c.inodes != ns->inodes.count || c.entries != ns->entry_count || c.xattrs != ns->xattr_count) {
        report(ctx, "ns-inconsistent", "inodes, names or attributes are miscounted");
        c.found++;
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    return c.found;
}

/* ------------------------------------------------- lost+found: its folder */

/* n-th name of the kind. */
static void name_of(char name[HT_NAME_BYTES_MAX + 1], const char *stem, unsigned n)
{
    if (n == 0)
        snprintf(name, HT_NAME_BYTES_MAX + 1, "%s", stem);
    else
        snprintf(name, HT_NAME_BYTES_MAX + 1, "%s.%u", stem, n);
}

/* The model root of inodes without a model of their own; usually there is none. */
static struct ht_ns_root *home_of(struct ht_ns *ns) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ht_ns_root(ht_ns_inode_find(ns, HT_NS_ROOT_INO));
}

static int end(struct ht_ns_op *op, int rc) HT_RELEASE(HT_LOCK_TX) HT_RELEASE(HT_LOCK_NAMES)
{
    struct ht_ns_root *home = home_of(op->ns);

    if (rc == 0 && home->ino != 0)
        ht_ns_root_publish(op->ns, home, op->tx);
    return ht_ns_op_end(op, rc);
}

static int publish_root_dir(struct ht_ns *ns)
{
    struct ht_ns_op op;
    int rc = ht_ns_op_begin(ns, LOST_FOUND_BYTES, &op);

    if (rc != 0)
        return rc;
    ht_ns_publish_root_dir(&op);
    return end(&op, 0);
}

/* No model of its own. */
static bool is_folder(struct ht_ns *ns, uint64_t ino)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    bool is = i && ht_ns_is_dir(i) && ht_ns_root(i) == home_of(ns);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return is;
}

static int make_folder(struct ht_ns *ns, const char *name, struct stat *out_st)
{
    const struct ht_cred nobody = {0};
    int rc = publish_root_dir(ns);

    if (rc == 0)
        rc = ht_ns_mkdir(ns, HT_NS_ROOT_INO, name, FOLDER_MODE, nobody, out_st);
    return rc == 0 ? publish_root_dir(ns) : rc;
}

/* lost+found, made if needed; if that name is something else, lost+found.1 and so on. */
static int find_folder(struct ht_ns *ns, uint64_t *out_ino)
{
    char name[HT_NAME_BYTES_MAX + 1];
    struct stat st;

    for (unsigned n = 0;; n++) {
        name_of(name, "lost+found", n);
        int rc = ht_ns_lookup(ns, HT_NS_ROOT_INO, name, &st);
        if (rc == -ENOENT)
            rc = make_folder(ns, name, &st);
        if (rc != 0)
            return rc;
        *out_ino = st.st_ino;
        ht_ns_forget(ns, st.st_ino, 1);
        if (is_folder(ns, st.st_ino))
            return 0;
    }
}

/* A name for the inode in the folder. */
static int put_into(struct ht_ns_op *op, uint64_t folder, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir = ht_ns_inode_live(op->ns, folder);
    char stem[32], name[HT_NAME_BYTES_MAX + 1];
    struct ht_ns_entry *e;
    unsigned n = 0;
    int rc = dir ? 0 : -ESTALE;

    snprintf(stem, sizeof(stem), "#%llu", (ull)i->ino);
    do
        name_of(name, stem, n++);
    while (rc == 0 && ht_ns_entry_find(op->ns, dir, name, strlen(name)));
    if (rc == 0)
        rc = ht_ns_new_name(op->ns, dir, name, strlen(name), &e);
    if (rc == 0)
        ht_ns_entry_add(op, e, dir, i, NULL);
    return rc;
}

/* ----------------------------------------------------- lost+found: inodes */

static bool is_victim(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return (i->flags & HT_NS_VICTIM) != 0 && i->links == 0;
}

bool ht_ns_is_in_lost_found(struct ht_ns *ns, uint64_t ino)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    bool is_in_lost_found = i && is_victim(ns, i);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return is_in_lost_found;
}

static int reconnect(struct ht_ns *ns, uint64_t folder, uint64_t ino)
{
    struct ht_ns_op op;
    int rc = ht_ns_op_begin(ns, LOST_FOUND_BYTES, &op);

    if (rc != 0)
        return rc;
    return end(&op, put_into(&op, folder, ht_ns_inode_find(ns, ino)));
}

int ht_ns_reconnect(struct ht_ns *ns)
{
    uint64_t *victims = NULL, folder;
    size_t count = 0;
    int rc = ht_ns_inode_collect(ns, is_victim, &victims, &count);

    if (rc == 0 && count > 0)
        rc = find_folder(ns, &folder);
    for (size_t n = 0; rc == 0 && n < count; n++)
        rc = reconnect(ns, folder, victims[n]);
    free(victims);
    return rc;
}

/* ---------------------------------------------------- lost+found: objects */

static int add_locked(struct ht_ns_op *op, uint64_t folder, uint64_t oid) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_obj *obj = ht_obj_get(op->ns->store, oid);
    struct ht_ns_root *home = home_of(op->ns);
    struct ht_ns_inode *i = NULL;
    struct ht_obj_stat st;
    int rc = !obj ? -ENOENT : ht_ns_inode_find(op->ns, oid) ? -EEXIST : 0;

    if (rc == 0)
        rc = ht_ns_inode_new(op->ns, oid, FILE_MODE, &i);
    if (rc == 0) {
        ht_ns_inode_set_root(op->ns, i, home);
        i->cur.atime_ns = i->cur.mtime_ns = i->cur.ctime_ns = op->now_ns;
        ht_obj_stat(obj, &st);
        if (st.scope != home->ino)
            rc = ht_obj_set_scope(obj, home->ino, op->tx);
    }
    if (rc == 0)
        rc = put_into(op, folder, i);
    if (rc == 0)
        ht_ns_attr_put(op, i);
    else if (i)
        ht_ns_inode_free(op->ns, i);
    ht_obj_put(obj);
    return rc;
}

int ht_ns_lost_found_add(struct ht_ns *ns, uint64_t oid)
{
    struct ht_ns_op op;
    uint64_t folder;
    int rc = find_folder(ns, &folder);

    if (rc != 0)
        return rc;
    rc = ht_ns_op_begin(ns, LOST_FOUND_BYTES, &op);
    if (rc != 0)
        return rc;
    return end(&op, add_locked(&op, folder, oid));
}
