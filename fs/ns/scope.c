/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scope.c - sets of inodes, as everything below a directory; and the scope of their content,
 * which moves between scopes.
 *
 * The store moves an object only while all its content is published, and writers take no transaction: a write may come
 * between moving an object there and, because another was busy, moving it back. Such an object stays in a scope that is
 * not its file's, and a crash may find it so. It is whole there, but no commit would publish it: the functions below
 * find files whose content is in another scope and bring it home.
 */
#include "fs/ns/pending.h"

#include "tiering/base/event.h"

enum { TRIES_MAX = 64, MOVE_BYTES = 4096 };

/* --------------------------------------------------------------- members */

int ht_ns_members_add(struct ht_ns_members *m, struct ht_ns_inode *i)
{
    if ((i->flags & HT_NS_MARKED) != 0)
        return 0;
    if (ht_array_grow((void **)&m->inodes, &m->cap, m->count + 1, sizeof(struct ht_ns_inode *)) != 0)
        return -ENOMEM;
    i->flags |= HT_NS_MARKED;
    m->inodes[m->count++] = i;
    return 0;
}

void ht_ns_members_free(struct ht_ns_members *m)
{
    for (size_t n = 0; n < m->count; n++)
        m->inodes[n]->flags &= (uint8_t)~HT_NS_MARKED;
    free(m->inodes);
}

/* ------------------------------------------------------ below a directory */

static int add_children(struct ht_ns *ns, struct ht_ns_members *m, const struct ht_ns_dir *d, struct ht_slice *slice)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    for (uint32_t s = 0; rc == 0 && s < d->slot_count; s++) {
        struct ht_ns_entry *e = ht_ns_dir_entry(d, s);
        if (e)
            rc = ht_ns_members_add(m, e->inode);
        ht_ns_slice_next(ns, slice);
    }
    return rc;
}

int ht_ns_collect_tree(struct ht_ns *ns, struct ht_ns_members *m, struct ht_ns_inode *top, struct ht_slice *slice)
{
    int rc = ht_ns_members_add(m, top);

    for (size_t n = 0; rc == 0 && n < m->count; n++) {
        if (ht_ns_is_dir(m->inodes[n]))
            rc = add_children(ns, m, m->inodes[n]->u.dir, slice);
        ht_ns_slice_next(ns, slice);
    }
    return rc;
}

const struct ht_ns_entry *ht_ns_tree_next(struct ht_ns *ns, struct ht_ns_tree_walk *w)
{
    const struct ht_ns_inode *i;

    while ((i = ht_ns_inode_live(ns, w->dir)) && ht_ns_is_dir(i)) {
        const struct ht_ns_dir *d = i->u.dir;
        const struct ht_ns_entry *e;
        uint32_t s = ht_ns_dir_seek(d, w->cookie);
        while (s < d->slot_count && !ht_ns_dir_entry(d, s))
            s++;
        if (s < d->slot_count) {
            e = ht_ns_dir_entry(d, s);
            w->dir = ht_ns_is_dir(e->inode) ? e->inode->ino : w->dir;
            w->cookie = ht_ns_is_dir(e->inode) ? 0 : e->cookie;
            return e;
        }
        if (w->dir == w->top || !d->self)
            break;
        w->cookie = d->self->cookie;
        w->dir = d->self->dir->ino;
    }
    return NULL;
}

/* ---------------------------------------------------------------- moving */

static int move_object(struct ht_ns_op *op, const struct ht_ns_inode *i, uint64_t scope, uint64_t *out_busy)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj *obj = S_ISREG(i->cur.mode) ? ht_obj_get(op->ns->store, i->ino) : NULL;

    if (!obj)
        return 0;
    ht_obj_publish(obj, op->tx);
    int rc = ht_obj_set_scope(obj, scope, op->tx);
    ht_obj_put(obj);
    if (rc == -EBUSY)
        *out_busy = i->ino;
    return rc;
}

int ht_ns_scope_move(struct ht_ns_op *op, const struct ht_ns_members *m, uint64_t from, uint64_t to, uint64_t *out_busy)
{
    size_t n = 0;
    int rc = 0;

    while (rc == 0 && n < m->count)
        rc = move_object(op, m->inodes[n++], to, out_busy);
    if (rc == 0)
        return 0;
    for (n--; n > 0; n--) {
        uint64_t kept;
        int error = move_object(op, m->inodes[n - 1], from, &kept);
        (void)error;
    }
    return rc;
}

/* --------------------------------------------------------- stray content */

static bool is_stray(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj_stat os;

    if (!S_ISREG(i->cur.mode) || (i->flags & (HT_NS_GHOST | HT_NS_STALE)) != 0)
        return false;
    struct ht_obj *obj = ht_obj_get(ns->store, i->ino);
    if (!obj)
        return false;
    ht_obj_stat(obj, &os);
    ht_obj_put(obj);
    return os.scope != ht_ns_root(i)->ino;
}

static int bring_home_locked(struct ht_ns_op *op, uint64_t ino) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_live(op->ns, ino);
    uint64_t busy;

    return i && is_stray(op->ns, i) ? move_object(op, i, ht_ns_root(i)->ino, &busy) : 0;
}

static int try_bring_home(struct ht_ns *ns, struct ht_obj *obj, uint64_t ino)
{
    struct ht_ns_op op;
    int rc = ht_ns_op_begin(ns, MOVE_BYTES + ht_obj_pending_bytes(obj), &op);

    if (rc != 0)
        return rc;
    return ht_ns_op_end(&op, bring_home_locked(&op, ino));
}

/*
 * A file with unpublished content is synced first. The others do not wait for the log, or a mount with many such files
 * would take long.
 */
static int bring_home(struct ht_ns *ns, uint64_t ino)
{
    struct ht_obj *obj = ht_obj_get(ns->store, ino);
    int rc = obj ? try_bring_home(ns, obj, ino) : 0;

    for (int tries = 0; rc == -EBUSY && tries < TRIES_MAX; tries++) {
        rc = ht_obj_sync(obj);
        if (rc == 0)
            rc = try_bring_home(ns, obj, ino);
    }
    ht_obj_put(obj);
    return rc;
}

int ht_ns_scope_settle(struct ht_ns *ns, int rc)
{
    uint64_t *strays = NULL;
    size_t count = 0;
    int error = ht_ns_inode_collect(ns, is_stray, &strays, &count);

    for (size_t n = 0; n < count; n++) {
        int one = bring_home(ns, strays[n]);
        const struct ht_event_about about = {.id = strays[n], .error = one};
        if (one != 0)
            ht_event(HT_EVENT_COMMIT_FAILED, &about,
                     "its content is outside its model root: %s; it will be put right at the next mount",
                     strerror(-one));
        if (error == 0)
            error = one;
    }
    free(strays);
    return rc != 0 ? rc : error;
}
