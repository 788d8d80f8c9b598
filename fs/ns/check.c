/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - the checks of fsck on names: the problems found when linking up, then every invariant of ns_priv.h in
 * memory. In a healthy program the second part finds nothing; tests call it after each step.
 */
#include "fs/ns/ns_priv.h"

typedef unsigned long long ull;

struct checking {
    struct ht_ns *ns;
    void (*report)(void *ctx, const char *code, const char *text);
    void *ctx;
    size_t found;
    uint64_t inodes, entries, xattrs;
};

static void found(struct checking *c, const struct ht_ns_inode *i, const char *what) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    char path[512], text[768];

    ht_ns_path_locked(c->ns, i, path, sizeof(path));
    snprintf(text, sizeof(text), "/%s (inode %llu): %s", path, (ull)i->ino, what);
    c->report(c->ctx, "ns-inconsistent", text);
    c->found++;
}

static void expect(struct checking *c, const struct ht_ns_inode *i, bool ok, const char *what)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (!ok)
        found(c, i, what);
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
    if (c.inodes != ns->inode_count || c.entries != ns->entry_count || c.xattrs != ns->xattr_count) {
        report(ctx, "ns-inconsistent", "inodes, names or attributes are miscounted");
        c.found++;
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    return c.found;
}
