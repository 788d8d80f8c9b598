/* SPDX-License-Identifier: Apache-2.0 */
/*
 * abort.c - takes back everything pending on a model root.
 *
 * NEW entries vanish, GONE ones come back, inodes have their published attributes again. Inodes that were never
 * published are gone, or STALE while they have references. Nothing is put into the log, which never knew them. No
 * memory is needed.
 *
 * The hook that learns of stale caches runs without the lock. The transaction is still open, so no names change and no
 * inode leaves memory: the entries and shadows themselves describe the pending changes, and are freed after that.
 */
#include "fs/ns/content.h"
#include "fs/ns/pending.h"
#include "fs/ns/shadow.h"

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
