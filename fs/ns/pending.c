/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pending.c - current and published: the edges of the state machines drawn in ns_priv.h that single changes take.
 *
 * Outside roots a change is put into the log in its own transaction; below a root it makes shadows and NEW and GONE
 * entries, which publish.c turns into CLEAN ones or takes back. Memory for them is reserved before anything changes,
 * so that no function here fails but ht_ns_reserve.
 * ns.lock held for writing.
 */
#include "fs/ns/ns_priv.h"
#include "fs/ns/pending.h"
#include "fs/ns/shadow.h"

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
