/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/ns/tree.h"

#include "fs/ns/ns_priv.h"
#include "fs/ns/scope.h"

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

const struct ht_ns_inode *ht_ns_first_foreign(const struct ht_ns_members *m, uint32_t uid)
{
    for (size_t n = 0; uid != 0 && n < m->count; n++)
        if (m->inodes[n]->cur.uid != uid)
            return m->inodes[n];
    return NULL;
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
