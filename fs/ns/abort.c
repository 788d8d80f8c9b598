/* SPDX-License-Identifier: Apache-2.0 */
/*
 * abort.c - everything pending on a model root is taken back.
 *
 * NEW entries vanish, GONE ones come back, inodes have their published attributes again; inodes that were never
 * published are gone, or STALE while somebody refers to them. Nothing is put into the log: it never knew. No memory is
 * needed.
 *
 * Who caches names or attributes is told without the lock. The transaction is open meanwhile, so no names change and
 * no inode leaves memory: what was pending can be told from the entries and shadows themselves, freed after that.
 */
#include "fs/ns/ns_priv.h"

#include <stdlib.h>

typedef void (*told_fn)(void *ctx, uint64_t ino, uint64_t parent, const char *name);

/* A name that is taken back hands its slot to the one it had replaced: of that name a walk sees one. */
static void take_back_new(struct ht_ns *ns, struct ht_ns_entry *e)
{
    struct ht_ns_dir *d = e->dir->u.dir;
    struct ht_ns_entry *twin = ht_ns_entry_find_gone(ns, e->dir, e->name, e->len);

    ht_ns_entry_count(e, -1);
    if (twin != NULL) {
        ht_ns_dir_take_over(d, e, twin);
        twin->state = HT_NS_CLEAN;
        d->gone--;
    } else {
        ht_ns_dir_remove(ns, d, e);
    }
    ht_ns_entry_remove(ns, e);
}

static void bring_back_gone(struct ht_ns_entry *e)
{
    e->dir->u.dir->gone--;
    e->state = HT_NS_CLEAN;
    ht_ns_dir_append(e->dir->u.dir, e);
}

/* NEW ones stay NEW, unhooked, for telling of them; all others are CLEAN afterwards. */
static void revert_entries(struct ht_ns *ns, struct ht_ns_root *root)
{
    struct ht_ns_entry **entries = root->entries;

    for (uint32_t n = 0; n < root->entry_count; n++)
        if (entries[n]->state == HT_NS_NEW)
            take_back_new(ns, entries[n]);
    for (uint32_t n = 0; n < root->entry_count; n++) {
        if (entries[n]->state == HT_NS_GONE)
            bring_back_gone(entries[n]);
        if (entries[n]->state == HT_NS_CLEAN)
            ht_ns_entry_count(entries[n], 1);
        entries[n]->dirty = 0;
    }
    root->entry_count = 0;
}

static void revert_xattrs(struct ht_ns *ns, struct ht_ns_inode *i)
{
    for (struct ht_ns_xattr *x = i->xattrs, *next; x != NULL; x = next) {
        next = x->next;
        if (x->state == HT_NS_NEW) {
            ht_ns_xattr_remove(i, x);
            ht_ns_xattr_free(ns, x);
        } else {
            x->state = HT_NS_CLEAN;
        }
    }
}

/*
 * The inode loses its shadow s, which stays on the abort's own list for the telling. One that was deleted and has lost
 * its published names to an fsync stays deleted, and keeps it for the next publication.
 */
static void revert_inode(struct ht_ns *ns, struct ht_ns_shadow *s)
{
    struct ht_ns_inode *i = s->inode;

    ht_ns_shadow_set(i, NULL);
    revert_xattrs(ns, i);
    if ((i->flags & HT_NS_PUBLISHED) == 0) {
        i->flags |= HT_NS_STALE;
        return;
    }
    i->cur = s->published;
    i->flags &= (uint8_t)~HT_NS_GHOST;
    if (ht_ns_unused(i)) {
        i->flags |= HT_NS_GHOST;
        ht_ns_shadow_set(i, s);
        ht_list_del(&s->link);
        ht_list_add_tail(&s->root->shadows, &s->link);
    }
}

static void take_list(struct ht_list *from, struct ht_list *to)
{
    ht_list_init(to);
    while (!ht_list_empty(from)) {
        struct ht_list *first = from->next;
        ht_list_del(first);
        ht_list_add_tail(to, first);
    }
}

static void tell(struct ht_ns_root *root, uint32_t entry_count, struct ht_list *shadows, told_fn fn, void *ctx)
{
    for (uint32_t n = 0; n < entry_count; n++) {
        struct ht_ns_entry *e = root->entries[n];
        fn(ctx, e->inode->ino, e->dir->ino, e->name);
    }
    ht_list_for_each(p, shadows)
        fn(ctx, ht_list_entry(p, struct ht_ns_shadow, link)->ino, 0, NULL);
}

/* What was only kept for the telling. */
static void clean_up(struct ht_ns *ns, struct ht_ns_root *root, uint32_t entry_count, struct ht_list *shadows)
{
    for (uint32_t n = 0; n < entry_count; n++)
        if (root->entries[n]->state == HT_NS_NEW)
            ht_ns_entry_free(ns, root->entries[n]);
    ht_list_for_each_safe(p, next, shadows) {
        struct ht_ns_shadow *s = ht_list_entry(p, struct ht_ns_shadow, link);
        if ((s->inode->flags & HT_NS_STALE) != 0 && ht_ns_unused(s->inode))
            ht_ns_inode_free(ns, s->inode);
        ht_ns_shadow_recycle(ns, s);
    }
}

void ht_ns_root_abort(struct ht_ns *ns, uint64_t ino, told_fn fn, void *ctx)
{
    struct ht_ns_root *root;
    struct ht_list shadows;
    uint32_t entry_count;

    ht_rwlock_wrlock(&ns->lock);
    root = ht_ns_root_find(ns, ino);
    if (root == NULL) {
        ht_rwlock_unlock(&ns->lock);
        return;
    }
    entry_count = root->entry_count;
    revert_entries(ns, root);
    take_list(&root->shadows, &shadows);
    ht_list_for_each_safe(p, next, &shadows)
        revert_inode(ns, ht_list_entry(p, struct ht_ns_shadow, link));
    ht_rwlock_unlock(&ns->lock);
    if (fn != NULL)
        tell(root, entry_count, &shadows, fn, ctx);
    ht_rwlock_wrlock(&ns->lock);
    clean_up(ns, root, entry_count, &shadows);
    ht_rwlock_unlock(&ns->lock);
}
