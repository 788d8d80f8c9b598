/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link.c - after replay: check what the records say about each other, and link it up.
 *
 * Directories get their order, counts and model roots are derived, log bytes claimed. What does not fit together is a
 * problem: taken out, so that all code may rely on the invariants in ns_priv.h, and remembered for fsck. A store that
 * is to be written is refused then; read-only shows what is whole.
 */
#include "fs/ns/ns_priv.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "tiering/base/log.h"

enum { PROBLEM_TEXT_BYTES = 512, PROBLEMS_TOLD_MAX = 10, ROOT_MODE = S_IFDIR | 0755 };
typedef unsigned long long ull;

void ht_ns_problem(struct ht_ns *ns, const char *code, const char *fmt, ...)
{
    char text[PROBLEM_TEXT_BYTES];
    struct ht_ns_problem *p;
    va_list args;

    ns->problem_count++;
    if (ns->problems_kept == HT_NS_PROBLEMS_KEPT_MAX)
        return;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    p = realloc(ns->problems, (ns->problems_kept + 1) * sizeof(*p));
    if (p == NULL)
        return;
    ns->problems = p;
    p[ns->problems_kept] = (struct ht_ns_problem){code, strdup(text)};
    if (p[ns->problems_kept].text != NULL)
        ns->problems_kept++;
}

/* A name fit for a terminal. */
static const char *shown(const struct ht_ns_entry *e, char buf[HT_NAME_BYTES_MAX + 1])
{
    for (size_t n = 0; n <= e->len; n++)
        buf[n] = (char)(e->name[n] == '\0' || isprint((unsigned char)e->name[n]) ? e->name[n] : '?');
    return buf;
}

/* --------------------------------------------------------------- entries */

static bool is_published(const struct ht_ns_inode *i)
{
    return (i->flags & HT_NS_PUBLISHED) != 0;
}

/* NULL: nothing is wrong with it. */
static const char *entry_problem(const struct ht_ns_entry *e, const char **out_text)
{
    const struct ht_ns_inode *i = e->inode;

    if (!is_published(e->dir) || !ht_ns_is_dir(e->dir)) {
        *out_text = "is in something that is no directory";
        return "ns-parent";
    }
    if (!is_published(i)) {
        *out_text = "names an inode that does not exist";
        return "ns-dangling";
    }
    if (i->ino == HT_NS_ROOT_INO || (ht_ns_is_dir(i) && i->links > 0)) {
        *out_text = "is a second name of a directory";
        return "ns-directory-names";
    }
    *out_text = "is one name too many";
    return i->links >= HT_LINKS_MAX ? "ns-links" : NULL;
}

static int link_entry(struct ht_ns *ns, struct ht_ns_entry *e)
{
    char name[HT_NAME_BYTES_MAX + 1];
    const char *text, *code = entry_problem(e, &text);
    int rc;

    if (code != NULL) {
        ht_ns_problem(ns, code, "name \"%s\" in inode %llu, of inode %llu, %s", shown(e, name), (ull)e->dir->ino,
                      (ull)e->inode->ino, text);
        ht_ns_entry_remove(ns, e);
        ht_ns_entry_free(ns, e);
        return 0;
    }
    rc = ht_ns_dir_reserve(ns, e->dir->u.dir, 1);
    if (rc != 0)
        return rc;
    ht_ns_dir_append(e->dir->u.dir, e);
    ht_ns_entry_count(e, 1);
    return 0;
}

static int link_names(void *ctx, struct ht_ns_inode *i)
{
    int rc = 0;

    for (struct ht_ns_entry *e = i->names, *next; rc == 0 && e != NULL; e = next) {
        next = e->name_next;
        rc = link_entry(ctx, e);
    }
    return rc;
}

/* ---------------------------------------------------------------- inodes */

/* No entry names, or is in, an inode without a record any more. */
static int sweep(void *ctx, struct ht_ns_inode *i)
{
    struct ht_ns *ns = ctx;

    i->opens = 0; /* counted entries during replay */
    if (!is_published(i)) {
        if (i->xattrs != NULL)
            ht_ns_problem(ns, "ns-attributes", "extended attributes of inode %llu, which does not exist", (ull)i->ino);
        ht_ns_inode_free(ns, i);
        return 0;
    }
    if (!S_ISLNK(i->cur.mode) || i->u.target != NULL)
        return 0;
    ht_ns_problem(ns, "ns-target", "symbolic link of inode %llu has no target", (ull)i->ino);
    return ht_ns_inode_set_target(ns, i, "", 0);
}

/* A new store has none yet: it is published by ht_ns_start. */
static int make_root_dir(struct ht_ns *ns)
{
    struct ht_ns_inode *i;
    int rc;

    if (ns->inode_count > 0)
        ht_ns_problem(ns, "ns-root", "the root directory is missing");
    rc = ht_ns_inode_new(ns, HT_NS_ROOT_INO, ROOT_MODE, &i);
    if (rc != 0)
        return rc;
    i->cur.uid = ns->root_uid;
    i->cur.gid = ns->root_gid;
    i->cur.atime_ns = i->cur.mtime_ns = i->cur.ctime_ns = ht_ns_now();
    return 0;
}

/* ----------------------------------------------------------- reachability */

/* The root that a child of dir belongs to; a model root begins its own. */
static int child_root(struct ht_ns *ns, const struct ht_ns_inode *dir, struct ht_ns_inode *child,
                      struct ht_ns_root **out)
{
    *out = dir != NULL ? dir->root : &ns->outside;
    if ((child->flags & HT_NS_MODEL_ROOT) == 0)
        return 0;
    if (*out != &ns->outside) {
        ht_ns_problem(ns, "ns-nested-root", "model root of inode %llu is below that of inode %llu", (ull)child->ino,
                      (ull)(*out)->ino);
        child->flags &= (uint8_t)~HT_NS_MODEL_ROOT;
        return 0;
    }
    *out = ht_ns_root_new(ns, child->ino);
    return *out != NULL ? 0 : -ENOMEM;
}

static int reach(struct ht_ns *ns, struct ht_ns_members *found, const struct ht_ns_inode *dir,
                 struct ht_ns_inode *child)
{
    struct ht_ns_root *root;
    int rc;

    if ((child->flags & HT_NS_MARKED) != 0) { /* another name of a file */
        if (child->root != dir->root)
            ht_ns_problem(ns, "ns-link-across-root", "inode %llu has names in and outside of a model root",
                          (ull)child->ino);
        return 0;
    }
    rc = child_root(ns, dir, child, &root);
    if (rc != 0)
        return rc;
    ht_ns_inode_set_root(ns, child, root);
    return ht_ns_members_add(found, child);
}

static int reach_children(struct ht_ns *ns, struct ht_ns_members *found, const struct ht_ns_inode *dir)
{
    const struct ht_ns_dir *d = dir->u.dir;
    int rc = 0;

    for (uint32_t s = 0; rc == 0 && s < d->slot_count; s++)
        rc = reach(ns, found, dir, ht_ns_dir_entry(d, s)->inode);
    return rc;
}

static int report_unreached(void *ctx, struct ht_ns_inode *i)
{
    if ((i->flags & HT_NS_MARKED) == 0 && i->links > 0)
        ht_ns_problem(ctx, "ns-unreachable", "inode %llu has a name but cannot be reached from the root directory",
                      (ull)i->ino);
    return 0;
}

static int find_reachable(struct ht_ns *ns)
{
    struct ht_ns_members found = {0};
    int rc = reach(ns, &found, NULL, ht_ns_inode_find(ns, HT_NS_ROOT_INO));

    for (size_t n = 0; rc == 0 && n < found.count; n++)
        if (ht_ns_is_dir(found.inodes[n]))
            rc = reach_children(ns, &found, found.inodes[n]);
    if (rc == 0)
        rc = ht_ns_inode_each(ns, report_unreached, ns);
    ht_ns_members_free(&found);
    return rc;
}

/* ----------------------------------------------------------------- whole */

static int add_claims(void *ctx, struct ht_ns_inode *i)
{
    uint64_t *bytes = ctx;

    *bytes += ht_ns_inode_claim(i);
    for (const struct ht_ns_xattr *x = i->xattrs; x != NULL; x = x->next)
        *bytes += ht_ns_xattr_claim(x);
    for (const struct ht_ns_entry *e = i->names; e != NULL; e = e->name_next)
        *bytes += ht_ns_entry_claim(e);
    return 0;
}

static int claim_all(struct ht_ns *ns)
{
    uint64_t bytes = 0;
    int rc = ht_ns_inode_each(ns, add_claims, &bytes);

    ht_store_claim_force(ns->store, bytes);
    ns->replaying = false;
    return rc;
}

static int link_up(struct ht_ns *ns)
{
    const struct ht_ns_inode *root;
    int rc = ht_ns_inode_each(ns, link_names, ns);

    if (rc == 0)
        rc = ht_ns_inode_each(ns, sweep, ns);
    root = ht_ns_inode_find(ns, HT_NS_ROOT_INO);
    if (rc == 0 && root == NULL)
        rc = make_root_dir(ns);
    if (rc == 0 && root != NULL && !ht_ns_is_dir(root)) {
        ht_error("names: inode %d is not a directory; run hitrain-fsck", HT_NS_ROOT_INO);
        return -EUCLEAN;
    }
    if (rc == 0)
        rc = find_reachable(ns);
    return rc == 0 ? claim_all(ns) : rc;
}

static int refuse(const struct ht_ns *ns)
{
    for (size_t n = 0; n < ns->problems_kept && n < PROBLEMS_TOLD_MAX; n++)
        ht_error("names: %s (%s)", ns->problems[n].text, ns->problems[n].code);
    ht_error("names: %zu problems; the store can be mounted read-only; run hitrain-fsck", ns->problem_count);
    return -EUCLEAN;
}

int ht_ns_replayed(void *ctx)
{
    struct ht_ns *ns = ctx;
    int rc;

    ht_rwlock_wrlock(&ns->lock);
    rc = link_up(ns);
    ht_rwlock_unlock(&ns->lock);
    return rc == 0 && ns->problem_count > 0 && !ht_store_read_only(ns->store) ? refuse(ns) : rc;
}
