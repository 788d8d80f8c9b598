/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shadow.c - the published attributes of inodes that differ from them: their memory, and whose they are.
 *
 * Shadows are recycled: steady work allocates none.
 */
#include "fs/ns/ns_priv.h"
#include "fs/ns/shadow.h"

enum { FREE_SHADOWS_MAX = 4096 };

int ht_ns_shadow_reserve(struct ht_ns *ns, uint32_t count)
{
    while (ns->free_shadow_count < count) {
        struct ht_ns_shadow *s = malloc(sizeof(*s));
        if (!s)
            return -ENOMEM;
        ht_list_add_tail(&ns->free_shadows, &s->link);
        ns->free_shadow_count++;
        ns->meta_bytes += sizeof(*s);
    }
    return 0;
}

void ht_ns_shadow_set(struct ht_ns_inode *i, struct ht_ns_shadow *s)
{
    struct ht_ns_root *root = ht_ns_root(i);

    if (s)
        s->root = root;
    i->home = s ? (uintptr_t)s | 1 : (uintptr_t)root;
}

void ht_ns_shadow_take(struct ht_ns *ns, struct ht_ns_inode *i)
{
    if (ht_ns_shadow(i))
        return;
    assert(ns->free_shadow_count > 0);
    struct ht_ns_shadow *s = ht_list_entry(ns->free_shadows.next, struct ht_ns_shadow, link);
    ht_list_del(&s->link);
    ns->free_shadow_count--;
    s->inode = i;
    s->published = i->cur;
    s->xattrs = false;
    ht_ns_shadow_set(i, s);
    ht_list_add_tail(&s->root->shadows, &s->link);
}

void ht_ns_shadow_drop(struct ht_ns *ns, struct ht_ns_inode *i)
{
    struct ht_ns_shadow *s = ht_ns_shadow(i);

    if (!s)
        return;
    ht_ns_shadow_set(i, NULL);
    ht_ns_shadow_recycle(ns, s);
}

void ht_ns_shadow_recycle(struct ht_ns *ns, struct ht_ns_shadow *s)
{
    ht_ns_shadow_leave(ns, s);
    if (ns->free_shadow_count >= FREE_SHADOWS_MAX) {
        ns->meta_bytes -= sizeof(*s);
        free(s);
        return;
    }
    ht_list_add_tail(&ns->free_shadows, &s->link);
    ns->free_shadow_count++;
}

void ht_ns_inode_set_root(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_ns_root *root)
{
    struct ht_ns_shadow *s = ht_ns_shadow(i);

    ht_ns_root(i)->members--;
    root->members++;
    if (!s) {
        i->home = (uintptr_t)root;
        return;
    }
    s->root = root;
    ht_ns_shadow_leave(ns, s);
    ht_list_add_tail(&root->shadows, &s->link);
}

/* -------------------------------------------------------------------- walk */

void ht_ns_shadow_walk_begin(struct ht_ns *ns, struct ht_ns_shadow_walk *w, struct ht_list *list)
{
    *w = (struct ht_ns_shadow_walk){.next = ns->shadow_walks};
    ns->shadow_walks = w;
    if (ht_list_empty(list))
        return;
    w->at = list->next;
    w->last = list->prev;
}

struct ht_ns_shadow *ht_ns_shadow_walk_next(struct ht_ns_shadow_walk *w)
{
    struct ht_list *at = w->at;

    if (!at)
        return NULL;
    w->at = at == w->last ? NULL : at->next;
    return ht_list_entry(at, struct ht_ns_shadow, link);
}

void ht_ns_shadow_walk_end(struct ht_ns *ns, struct ht_ns_shadow_walk *w)
{
    ht_chain_remove(&ns->shadow_walks, w, next);
}

/* A walk that would come to it next goes past it. */
void ht_ns_shadow_leave(struct ht_ns *ns, struct ht_ns_shadow *s)
{
    for (struct ht_ns_shadow_walk *w = ns->shadow_walks; w; w = w->next) {
        if (w->at == &s->link)
            w->at = w->at == w->last ? NULL : w->at->next;
        else if (w->last == &s->link)
            w->last = s->link.prev;
    }
    ht_list_del(&s->link);
}
