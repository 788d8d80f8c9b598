/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pending.c - current and published: the edges of the state machines drawn in ns_priv.h that single changes take, and
 * the way back of all changes of a root.
 *
 * Outside roots a change is put into the log in its own transaction; below a root it makes shadows and NEW and GONE
 * entries, which publish.c turns into CLEAN ones, or an abort takes back. Memory for them is reserved before anything
 * changes, so that no function here fails but ht_ns_reserve.
 *
 * An abort: NEW entries vanish, GONE ones come back, inodes have their published attributes again. Inodes that were
 * never published are gone, or STALE while they have references. Nothing is put into the log, which never knew them. No
 * memory is needed. The hook that learns of stale caches runs without the lock. The transaction is still open, so no
 * names change and no inode leaves memory: the entries and shadows themselves describe the pending changes, and are
 * freed after that.
 *
 * All but ht_ns_report_stale and ht_ns_abort run with ns.lock held for writing.
 */
#include "fs/ns/pending.h"

enum { ENTRIES_CAP_START = 64 };

/* --------------------------------------------------------------- reserve */

static int reserve_entries(struct ht_ns *ns, struct ht_ns_root *root, uint32_t count) HT_REQUIRES(HT_LOCK_NAMES)
{
    uint64_t want = (uint64_t)root->entry_count + count, cap = root->entry_cap;

    if (want <= cap)
        return 0;
    if (cap < ENTRIES_CAP_START)
        cap = ENTRIES_CAP_START;
    while (cap < want)
        cap *= 2;
    if (cap > UINT32_MAX / 2)
        return -ENOSPC;
    struct ht_ns_entry **p = realloc(root->entries, cap * sizeof(struct ht_ns_entry *));
    if (!p)
        return -ENOMEM;
    ns->meta_bytes += (cap - root->entry_cap) * sizeof(struct ht_ns_entry *);
    root->entries = p;
    root->entry_cap = (uint32_t)cap;
    return 0;
}

int ht_ns_reserve(struct ht_ns *ns, struct ht_ns_root *root, uint32_t shadows, uint32_t entries)
{
    int rc = ht_ns_shadow_reserve(ns, shadows);

    return rc || root->ino == 0 ? rc : reserve_entries(ns, root, entries);
}

int ht_ns_find_to_change(struct ht_ns *ns, uint64_t ino, struct ht_ns_inode **out)
{
    *out = ht_ns_inode_live(ns, ino);
    if (!*out)
        return -ESTALE;
    return ht_ns_root(*out)->frozen ? -EROFS : ht_ns_reserve(ns, ht_ns_root(*out), 1, 0);
}

int ht_ns_new_name(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name, size_t len,
                   struct ht_ns_entry **out)
{
    int rc = ht_ns_reserve(ns, ht_ns_root(dir), 2, 1);

    if (rc == 0)
        rc = ht_ns_dir_reserve(ns, dir->u.dir, 1);
    return rc == 0 ? ht_ns_entry_new(ns, name, len, out) : rc;
}

/* ------------------------------------------------------------ attributes */

void ht_ns_attr_edit(struct ht_ns_op *op, struct ht_ns_inode *i)
{
    if (ht_ns_pending(i))
        ht_ns_shadow_take(op->ns, i);
}

void ht_ns_attr_put(struct ht_ns_op *op, struct ht_ns_inode *i)
{
    if (ht_ns_pending(i))
        return;
    ht_ns_put_inode(op->tx, i, &i->cur);
    i->flags |= HT_NS_PUBLISHED;
    ht_ns_shadow_drop(op->ns, i);
}

/*
 * A name in dir that leads, or led, to inode has changed. Outside roots the record of the name carries the time, so the
 * times that it sets are published with it.
 */
static void stamp(struct ht_ns_op *op, struct ht_ns_inode *dir, struct ht_ns_inode *inode) HT_REQUIRES(HT_LOCK_NAMES)
{
    bool pending = ht_ns_pending(dir);

    if (pending) {
        ht_ns_shadow_take(op->ns, dir);
        ht_ns_shadow_take(op->ns, inode);
    }
    dir->cur.mtime_ns = dir->cur.ctime_ns = inode->cur.ctime_ns = op->now_ns;
    if (pending)
        return;
    if (ht_ns_shadow(dir))
        ht_ns_shadow(dir)->published.mtime_ns = ht_ns_shadow(dir)->published.ctime_ns = op->now_ns;
    if (ht_ns_shadow(inode))
        ht_ns_shadow(inode)->published.ctime_ns = op->now_ns;
}

/* --------------------------------------------------------------- entries */

static void make_dirty(struct ht_ns_root *root, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    if (e->dirty != 0)
        return;
    assert(root->entry_count < root->entry_cap);
    root->entries[root->entry_count++] = e;
    e->dirty = root->entry_count;
}

void ht_ns_entry_undirty(struct ht_ns_root *root, struct ht_ns_entry *e)
{
    if (e->dirty == 0)
        return;
    struct ht_ns_entry *last = root->entries[--root->entry_count];
    root->entries[e->dirty - 1] = last;
    last->dirty = e->dirty;
    e->dirty = 0;
}

void ht_ns_entry_count(struct ht_ns_entry *e, int by)
{
    e->inode->links = (uint16_t)(e->inode->links + by);
    if (!ht_ns_is_dir(e->inode))
        return;
    e->dir->u.dir->subdirs += (uint32_t)by;
    if (by > 0)
        e->inode->u.dir->self = e;
    else if (e->inode->u.dir->self == e)
        e->inode->u.dir->self = NULL;
}

/* The entry is not current any more; its slot was handed over or freed. */
static void end_entry(struct ht_ns_op *op, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_root *root = ht_ns_root(e->dir);

    ht_ns_entry_count(e, -1);
    if (e->state == HT_NS_CLEAN && root->ino != 0) {
        e->state = HT_NS_GONE;
        make_dirty(root, e);
        return;
    }
    ht_ns_entry_undirty(root, e);
    ht_ns_entry_remove(op->ns, e);
    ht_ns_entry_free(op->ns, e);
}

void ht_ns_entry_add(struct ht_ns_op *op, struct ht_ns_entry *e, struct ht_ns_inode *dir, struct ht_ns_inode *inode,
                     struct ht_ns_entry *old)
{
    stamp(op, dir, inode);
    if (old) {
        stamp(op, dir, old->inode);
        ht_ns_dir_take_over(dir->u.dir, old, e);
        if (old->state == HT_NS_CLEAN && ht_ns_pending(dir))
            dir->u.dir->gone++;
        end_entry(op, old);
    } else {
        ht_ns_dir_append(dir->u.dir, e);
    }
    ht_ns_entry_insert(op->ns, e, dir, inode);
    ht_ns_entry_count(e, 1);
    if (ht_ns_pending(dir)) {
        e->state = HT_NS_NEW;
        make_dirty(ht_ns_root(dir), e);
    } else {
        e->state = HT_NS_CLEAN;
        ht_ns_put_entry(op->tx, HT_REC_NS_ENTRY, e, op->now_ns);
    }
}

void ht_ns_entry_drop(struct ht_ns_op *op, struct ht_ns_entry *e)
{
    stamp(op, e->dir, e->inode);
    if (!ht_ns_pending(e->dir))
        ht_ns_put_entry(op->tx, HT_REC_NS_ENTRY_DEL, e, op->now_ns);
    /* A GONE entry keeps room in its directory: counted before the slot is freed, so that the array does not shrink. */
    if (e->state == HT_NS_CLEAN && ht_ns_pending(e->dir))
        e->dir->u.dir->gone++;
    ht_ns_dir_remove(op->ns, e->dir->u.dir, e);
    end_entry(op, e);
}

/* -------------------------------------------------------------- deletion */

/* Deletes its content: at once, or with the publication of its scope. */
static void delete_content(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj *obj = ht_obj_get(op->ns->store, i->ino);
    int rc = 0;

    if (!obj)
        return;
    /*
     * An orphan of a model root that a mount has found, or whose root has ended: it is deleted with the inode, and not
     * with that scope.
     */
    if (!ht_ns_pending(i))
        rc = ht_obj_set_scope(obj, 0, op->tx);
    (void)rc; /* an object that the log does not know is deleted at once, in any scope */
    ht_obj_delete(obj, op->tx);
    ht_obj_put(obj);
}

/* Nothing is left below the root, except orphans; its pending changes must not stay pending for ever. */
static void end_root(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_root *root = ht_ns_root_find(op->ns, i->ino);

    op->ended_scope = i->ino;
    if (!root)
        return;
    ht_ns_root_publish(op->ns, root, op->tx);
    ht_ns_root_free(op->ns, root);
    i->flags &= (uint8_t)~HT_NS_MODEL_ROOT;
}

void ht_ns_inode_release(struct ht_ns_op *op, struct ht_ns_inode *i)
{
    if (!ht_ns_unused(i))
        return;
    if ((i->flags & HT_NS_STALE) == 0) {
        assert(op->deleted_count < HT_ARRAY_SIZE(op->deleted));
        op->deleted_pending[op->deleted_count] = ht_ns_pending(i);
        op->deleted[op->deleted_count++] = i->ino;
        if (S_ISREG(i->cur.mode))
            delete_content(op, i);
        if ((i->flags & HT_NS_MODEL_ROOT) != 0)
            end_root(op, i);
    }
    if ((i->flags & HT_NS_PUBLISHED) != 0 && ht_ns_pending(i)) {
        ht_ns_shadow_take(op->ns, i);
        i->flags |= HT_NS_GHOST;
        return;
    }
    if ((i->flags & HT_NS_PUBLISHED) != 0)
        ht_ns_put_inode_del(op->tx, i->ino);
    ht_ns_inode_free(op->ns, i);
}

/* ------------------------------------------------------------------- abort */

/* A taken-back name hands its slot to the entry it had replaced: a walk sees one entry of that name. */
static void take_back_new(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_dir *d = e->dir->u.dir;
    struct ht_ns_entry *twin = ht_ns_entry_find_gone(ns, e->dir, e->name, e->len);

    ht_ns_entry_count(e, -1);
    if (twin) {
        ht_ns_dir_take_over(d, e, twin);
        twin->state = HT_NS_CLEAN;
        d->gone--;
    } else {
        ht_ns_dir_remove(ns, d, e);
    }
    ht_ns_entry_remove(ns, e);
}

/* NEW entries stay NEW, unhooked, for the invalidation; all others are CLEAN afterwards. */
static void revert_entries(struct ht_ns *ns, struct ht_ns_root *root) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_entry **entries = root->entries;

    for (uint32_t n = 0; n < root->entry_count; n++)
        if (entries[n]->state == HT_NS_NEW)
            take_back_new(ns, entries[n]);
    for (uint32_t n = 0; n < root->entry_count; n++) {
        if (entries[n]->state == HT_NS_GONE) {
            entries[n]->dir->u.dir->gone--;
            entries[n]->state = HT_NS_CLEAN;
            ht_ns_dir_append(entries[n]->dir->u.dir, entries[n]);
        }
        if (entries[n]->state == HT_NS_CLEAN)
            ht_ns_entry_count(entries[n], 1);
        entries[n]->dirty = 0;
    }
    root->entry_count = 0;
}

static void revert_xattrs(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    for (struct ht_ns_xattr *x = i->xattrs, *next; x; x = next) {
        next = x->next;
        if (x->state == HT_NS_NEW)
            ht_ns_xattr_remove(ns, i, x);
        else
            x->state = HT_NS_CLEAN;
    }
}

/*
 * The inode loses its shadow s, which stays on the abort's own list for the invalidation. A deleted inode that lost its
 * published names to an fsync stays deleted, and keeps the shadow for the next publication.
 */
static void revert_inode(struct ht_ns *ns, struct ht_ns_shadow *s) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = s->inode;

    ht_ns_shadow_set(i, NULL);
    revert_xattrs(ns, i);
    if ((i->flags & HT_NS_PUBLISHED) != 0)
        i->cur = s->published;
    ht_ns_content_changed(ns, i);
    if ((i->flags & HT_NS_PUBLISHED) == 0) {
        i->flags |= HT_NS_STALE;
        return;
    }
    i->flags &= (uint8_t)~HT_NS_GHOST;
    if (ht_ns_unused(i)) {
        i->flags |= HT_NS_GHOST;
        ht_ns_shadow_set(i, s);
        ht_list_del(&s->link);
        ht_list_add_tail(&s->root->shadows, &s->link);
    }
}

static void take_list(struct ht_ns *ns, struct ht_list *from, struct ht_list *to) HT_REQUIRES(HT_LOCK_NAMES)
{
    ht_list_init(to);
    while (!ht_list_empty(from)) {
        struct ht_ns_shadow *first = ht_list_entry(from->next, struct ht_ns_shadow, link);
        ht_ns_shadow_leave(ns, first);
        ht_list_add_tail(to, &first->link);
    }
}

/* Needs no lock, because the open transaction keeps names and inodes as they are. */
void ht_ns_report_stale(const struct ht_ns_hooks *hooks, struct ht_ns_root *root, uint32_t entry_count,
                        struct ht_list *shadows) HT_NO_THREAD_SAFETY_ANALYSIS
{
    if (!hooks->stale)
        return;
    for (uint32_t n = 0; n < entry_count; n++) {
        struct ht_ns_entry *e = root->entries[n];
        hooks->stale(hooks->ctx, e->inode->ino, e->dir->ino, e->name);
    }
    ht_list_for_each(p, shadows)
        hooks->stale(hooks->ctx, ht_list_entry(p, struct ht_ns_shadow, link)->inode->ino, 0, NULL);
}

/* Frees the entries and shadows that were kept for the invalidation. */
static void clean_up(struct ht_ns *ns, struct ht_ns_root *root, uint32_t entry_count, struct ht_list *shadows)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    for (uint32_t n = 0; n < entry_count; n++)
        if (root->entries[n]->state == HT_NS_NEW)
            ht_ns_entry_free(ns, root->entries[n]);
    ht_list_for_each_entry_safe(s, shadows, struct ht_ns_shadow, link) {
        if ((s->inode->flags & HT_NS_STALE) != 0 && ht_ns_unused(s->inode))
            ht_ns_inode_free(ns, s->inode);
        ht_ns_shadow_recycle(ns, s);
    }
}

void ht_ns_abort(void *ctx, uint64_t scope)
{
    struct ht_ns *ns = ctx;
    struct ht_list shadows;
    uint32_t entry_count;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_root *root = ht_ns_root_find(ns, scope);
    if (!root) {
        ht_rwlock_unlock(ht_ns_lock(ns));
        return;
    }
    entry_count = root->entry_count;
    root->whole = false;
    revert_entries(ns, root);
    take_list(ns, &root->shadows, &shadows);
    ht_list_for_each_safe(p, next, &shadows)
        revert_inode(ns, ht_list_entry(p, struct ht_ns_shadow, link));
    ht_rwlock_unlock(ht_ns_lock(ns));
    ht_ns_report_stale(&ns->hooks, root, entry_count, &shadows);
    ht_rwlock_wrlock(ht_ns_lock(ns));
    clean_up(ns, root, entry_count, &shadows);
    ht_rwlock_unlock(ht_ns_lock(ns));
}
