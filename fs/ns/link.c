/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link.c - after replay: checks whether the records fit together, and links them up.
 *
 * Directories get their order, counts and model roots are derived, log bytes reserved. A contradiction is a problem:
 * the entry is taken out, so that all code may rely on the invariants in ns_priv.h, and remembered for fsck. A mount
 * for writing is then refused; a read-only one shows the whole part.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

#include <ctype.h>
#include <stdarg.h>
#include "tiering/base/log.h"

enum { PROBLEM_TEXT_BYTES = 512, PROBLEMS_REPORTED_MAX = 10, ROOT_MODE = S_IFDIR | 0755 };
typedef unsigned long long ull;

/* Remembers a problem. */
static HT_PRINTF(3, 4) void note_problem(struct ht_ns *ns, const char *code, const char *fmt, ...)
    HT_REQUIRES(HT_LOCK_NAMES)
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
    if (!p)
        return;
    ns->problems = p;
    p[ns->problems_kept] = (struct ht_ns_problem){code, strdup(text)};
    if (p[ns->problems_kept].text)
        ns->problems_kept++;
}

/* A name fit for a terminal. */
static const char *shown(const struct ht_ns_entry *e, char buf[HT_NAME_BYTES_MAX + 1]) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    for (size_t n = 0; n <= e->len; n++)
        buf[n] = (char)(e->name[n] == '\0' || isprint((unsigned char)e->name[n]) ? e->name[n] : '?');
    return buf;
}

/* --------------------------------------------------------------- entries */

static bool is_published(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return (i->flags & HT_NS_PUBLISHED) != 0;
}

static void take_out(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    if (is_published(e->inode) && e->inode->ino != HT_NS_ROOT_INO)
        e->inode->flags |= HT_NS_VICTIM;
    ht_ns_entry_remove(ns, e);
    ht_ns_entry_free(ns, e);
}

/* The name was linked up already. */
static void unlink_entry(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    ht_ns_dir_remove(ns, e->dir->u.dir, e);
    ht_ns_entry_count(e, -1);
    take_out(ns, e);
}

/* NULL: nothing is wrong with it. */
static const char *entry_problem(const struct ht_ns_entry *e, const char **out_text) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *i = e->inode;

    if (!is_published(e->dir) || !ht_ns_is_dir(e->dir)) {
        *out_text = "is in something that is no directory";
        return "NS-PARENT";
    }
    if (!is_published(i)) {
        *out_text = "names an inode that does not exist";
        return "NS-DANGLING";
    }
    if (i->ino == HT_NS_ROOT_INO || (ht_ns_is_dir(i) && i->links > 0)) {
        *out_text = "is a second name of a directory";
        return "NS-DIRECTORY-NAMES";
    }
    *out_text = "is one name too many";
    return i->links >= HT_LINKS_MAX ? "NS-LINKS" : NULL;
}

static int link_entry(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    char name[HT_NAME_BYTES_MAX + 1];
    const char *text, *code = entry_problem(e, &text);

    if (code) {
        note_problem(ns, code, "name \"%s\" in inode %llu, of inode %llu, %s", shown(e, name), (ull)e->dir->ino,
                     (ull)e->inode->ino, text);
        take_out(ns, e);
        return 0;
    }
    int rc = ht_ns_dir_reserve(ns, e->dir->u.dir, 1);
    if (rc != 0)
        return rc;
    ht_ns_dir_append(e->dir->u.dir, e);
    ht_ns_entry_count(e, 1);
    return 0;
}

static int link_names(void *ctx, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    /* bounded: HT_LINKS_MAX names */
    for (struct ht_ns_entry *e = i->names, *next; rc == 0 && e; e = next) {
        next = e->name_next;
        rc = link_entry(ctx, e);
    }
    return rc;
}

/* ---------------------------------------------------------------- inodes */

static const char lost_target[] = "(lost)";

/* From here on no entry names, or is in, an inode without a record. */
static int sweep(void *ctx, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns *ns = ctx;

    i->opens = 0; /* counted entries during replay */
    if (!is_published(i) && i->ino != HT_NS_ROOT_INO) {
        if (i->xattrs)
            note_problem(ns, "NS-ATTRIBUTES", "extended attributes of inode %llu, which does not exist", (ull)i->ino);
        ht_ns_inode_free(ns, i);
        return 0;
    }
    if (!S_ISLNK(i->cur.mode) || i->u.target)
        return 0;
    note_problem(ns, "NS-TARGET", "symbolic link of inode %llu has no target", (ull)i->ino);
    return ht_ns_inode_set_target(ns, i, lost_target, strlen(lost_target));
}

static void init_root_dir(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    i->cur.uid = ns->root_uid;
    i->cur.gid = ns->root_gid;
    i->cur.atime_ns = i->cur.mtime_ns = i->cur.ctime_ns = ht_ns_now();
}

/* Inode 1 has no record, or one that makes it something else: it becomes a directory, for the names in it. */
static int mend_root_dir(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    note_problem(ns, "NS-ROOT", is_published(i) ? "inode 1 is not a directory" : "the root directory is missing");
    ht_ns_inode_drop_payload(ns, i);
    int rc = ht_ns_inode_set_mode(ns, i, ROOT_MODE);
    init_root_dir(ns, i);
    i->flags |= HT_NS_PUBLISHED;
    return rc;
}

/* A new store has none yet: it is published by the start. */
static int find_root_dir(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_find(ns, HT_NS_ROOT_INO);
    bool blank = ns->inodes.count == 0;

    if (i)
        return is_published(i) && ht_ns_is_dir(i) ? 0 : mend_root_dir(ns, i);
    int rc = ht_ns_inode_new(ns, HT_NS_ROOT_INO, ROOT_MODE, &i);
    if (rc == 0 && !blank)
        return mend_root_dir(ns, i);
    if (rc == 0)
        init_root_dir(ns, i);
    return rc;
}

/* ----------------------------------------------------------- reachability */

/* The model root for a child of dir (NULL: without one); a model root begins its own. */
static int child_root(struct ht_ns *ns, const struct ht_ns_inode *dir, struct ht_ns_inode *child,
                      struct ht_ns_root **out) HT_REQUIRES(HT_LOCK_NAMES)
{
    *out = dir ? ht_ns_root(dir) : &ns->outside;
    if ((child->flags & HT_NS_MODEL_ROOT) == 0)
        return 0;
    if (*out != &ns->outside) {
        note_problem(ns, "NS-NESTED-ROOT", "model root of inode %llu is below that of inode %llu", (ull)child->ino,
                     (ull)(*out)->ino);
        child->flags &= (uint8_t)~HT_NS_MODEL_ROOT;
        return 0;
    }
    *out = ht_ns_root_new(ns, child->ino);
    if (*out)
        ht_ns_root_paths(ns, child);
    return *out ? 0 : -ENOMEM;
}

static int reach(struct ht_ns *ns, struct ht_ns_members *found, const struct ht_ns_inode *dir,
                 struct ht_ns_inode *child) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_root *root;
    int rc = child_root(ns, dir, child, &root);

    if (rc != 0)
        return rc;
    ht_ns_inode_set_root(ns, child, root);
    return ht_ns_members_add(found, child);
}

/*
 * The model root with which the content of a file is published; without content, the root where the file was reached
 * first.
 */
static uint64_t scope_of(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj *obj = S_ISREG(i->cur.mode) ? ht_obj_get(ns->store, i->ino) : NULL;
    struct ht_obj_stat st = {.scope = ht_ns_root(i)->ino};

    if (obj)
        ht_obj_stat(obj, &st);
    ht_obj_put(obj);
    return st.scope;
}

/* The file belongs to the root of e: drops its names elsewhere, as far as they were reached. */
static void move_to(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = e->inode;

    /* bounded: HT_LINKS_MAX names */
    for (struct ht_ns_entry *n = i->names, *next; n; n = next) {
        next = n->name_next;
        if ((n->dir->flags & HT_NS_MARKED) != 0 && ht_ns_root(n->dir) != ht_ns_root(e->dir))
            unlink_entry(ns, n);
    }
    ht_ns_inode_set_root(ns, i, ht_ns_root(e->dir));
}

/* A reached file may have further names only in the root with which its content is published. */
static int reach_again(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    if (ht_ns_is_dir(e->inode) || ht_ns_root(e->inode) == ht_ns_root(e->dir))
        return 0;
    note_problem(ns, "NS-LINK-ACROSS-ROOT", "inode %llu has names in and outside of a model root", (ull)e->inode->ino);
    if (scope_of(ns, e->inode) == ht_ns_root(e->dir)->ino)
        move_to(ns, e);
    else
        unlink_entry(ns, e);
    return 0;
}

/* From the last slot down: taking a name out may make the array shorter. */
static int reach_children(struct ht_ns *ns, struct ht_ns_members *found, const struct ht_ns_inode *dir)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_dir *d = dir->u.dir;
    int rc = 0;

    for (uint32_t s = d->slot_count; rc == 0 && s > 0; s--) {
        struct ht_ns_entry *e = s <= d->slot_count ? ht_ns_dir_entry(d, s - 1) : NULL;
        if (e)
            rc = (e->inode->flags & HT_NS_MARKED) != 0 ? reach_again(ns, e) : reach(ns, found, dir, e->inode);
    }
    return rc;
}

/* Reaches everything below the members from number first on. */
static int reach_below(struct ht_ns *ns, struct ht_ns_members *found, size_t first) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    for (size_t n = first; rc == 0 && n < found->count; n++)
        if (ht_ns_is_dir(found->inodes[n]))
            rc = reach_children(ns, found, found->inodes[n]);
    return rc;
}

/*
 * The names above it form a circle: finds one directory in the circle. A second walk that is twice as fast meets the
 * first one there.
 */
static struct ht_ns_inode *on_circle(struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_ns_inode *slow = i, *fast = i;

    do {
        slow = slow->names->dir;
        fast = fast->names->dir->names->dir;
    } while (slow != fast);
    return slow;
}

/*
 * Reaches inodes that names lead to, but not from the root directory. Such an inode counts as if it were in the root
 * directory: a repair brings it there.
 */
static int reach_stray(struct ht_ns *ns, struct ht_ns_members *found, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    size_t first = found->count;

    if (i->links > 0) {
        i = on_circle(i);
        note_problem(ns, "NS-UNREACHABLE", "directory inode %llu is below itself", (ull)i->ino);
        unlink_entry(ns, i->u.dir->self);
    } else if (ht_ns_is_dir(i) && i->u.dir->live > 0 && (i->flags & HT_NS_VICTIM) == 0) {
        note_problem(ns, "NS-UNREACHABLE", "directory inode %llu has no name, but there are names in it", (ull)i->ino);
    }
    i->flags |= HT_NS_VICTIM;
    int rc = reach(ns, found, ht_ns_inode_find(ns, HT_NS_ROOT_INO), i);
    return rc == 0 ? reach_below(ns, found, first) : rc;
}

struct strays {
    struct ht_ns *ns;
    struct ht_ns_members *found;
    bool tops; /* only inodes without names: those below are reached from there */
};

static bool is_top(const struct strays *s, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (i->links > 0 || i->ino == HT_NS_ROOT_INO)
        return false;
    /* If records were left out, the record that named it may be among them. */
    return (i->flags & HT_NS_VICTIM) != 0 || (ht_ns_is_dir(i) && i->u.dir->live > 0) ||
        ht_store_log_report(s->ns->store)->left_out > 0;
}

static int find_stray(void *ctx, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct strays *s = ctx;

    if ((i->flags & HT_NS_MARKED) != 0 || (s->tops ? !is_top(s, i) : i->links == 0))
        return 0;
    return reach_stray(s->ns, s->found, i);
}

static int each(struct ht_ns *ns, int (*fn)(void *ctx, struct ht_ns_inode *i), void *ctx)
{
    return (ht_store_leaves_out(ns->store) ? ht_ns_inode_each_sorted : ht_ns_inode_each)(ns, fn, ctx);
}

/* NULL: nothing is wrong with it. */
static const char *kept_problem(struct ht_ns *ns, const struct ht_ns_kept_step *x) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *i = ht_ns_inode_find(ns, x->about.ino), *of = ht_ns_inode_find(ns, x->about.root);

    if (!i || (i->flags & HT_NS_FROZEN) == 0)
        return "has no frozen directory";
    if (i->links > 0)
        return "has a directory with a name";
    return !of || (of->flags & (HT_NS_MODEL_ROOT | HT_NS_FROZEN)) != HT_NS_MODEL_ROOT ? "is of no model root" : NULL;
}

static int reach_kept(struct ht_ns *ns, struct ht_ns_members *found, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    size_t first = found->count;
    int rc = reach(ns, found, NULL, i);

    if (rc != 0)
        return rc;
    ht_ns_root(i)->frozen = true;
    rc = ht_scope_freeze(ns->store, i->ino);
    return rc == 0 ? reach_below(ns, found, first) : rc;
}

static int find_kept(struct ht_ns *ns, struct ht_ns_members *found) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    ht_list_for_each_entry_safe(x, &ns->kept, struct ht_ns_kept_step, link) {
        const char *text = kept_problem(ns, x);
        if (text) {
            note_problem(ns, "NS-KEPT", "kept step \"%s\" of inode %llu, in inode %llu, %s", x->about.name,
                         (ull)x->about.root, (ull)x->about.ino, text);
            ht_ns_kept_remove(ns, x);
        } else if (rc == 0) {
            rc = reach_kept(ns, found, ht_ns_inode_find(ns, x->about.ino));
        }
    }
    return rc;
}

/* It is a directory like others then: a stray one, if it has no name. */
static int thaw_unknown(void *ctx, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns *ns = ctx;

    if ((i->flags & HT_NS_FROZEN) == 0 || ht_ns_kept_step(ns, i->ino))
        return 0;
    note_problem(ns, "NS-KEPT", "directory inode %llu is that of a kept step, but no record says so", (ull)i->ino);
    i->flags &= (uint8_t)~HT_NS_FROZEN;
    i->flags |= HT_NS_VICTIM;
    return 0;
}

static int find_reachable(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_members found = {0};
    struct strays s = {ns, &found, true};
    int rc = reach(ns, &found, NULL, ht_ns_inode_find(ns, HT_NS_ROOT_INO));

    if (rc == 0)
        rc = reach_below(ns, &found, 0);
    if (rc == 0)
        rc = find_kept(ns, &found);
    if (rc == 0)
        rc = each(ns, thaw_unknown, ns);
    if (rc == 0)
        rc = each(ns, find_stray, &s);
    s.tops = false;
    if (rc == 0)
        rc = each(ns, find_stray, &s);
    ht_ns_members_free(&found);
    return rc;
}

/* ----------------------------------------------------------------- whole */

static int add_log_bytes(void *ctx, struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    uint64_t *bytes = ctx;

    *bytes += ht_ns_inode_log_bytes(i);
    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next)
        *bytes += ht_ns_xattr_log_bytes(x);
    /* bounded: HT_LINKS_MAX names */
    for (const struct ht_ns_entry *e = i->names; e; e = e->name_next)
        *bytes += ht_ns_entry_log_bytes(e);
    return 0;
}

static int reserve_all(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    uint64_t bytes = 0;
    int rc = ht_ns_inode_each(ns, add_log_bytes, &bytes);

    ht_list_for_each(p, &ns->kept)
        bytes += ht_ns_kept_log_bytes(&ht_list_entry(p, struct ht_ns_kept_step, link)->about);
    ht_store_log_reserve_force(ns->store, bytes);
    ns->replaying = false;
    return rc;
}

static int link_up(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = find_root_dir(ns);

    if (rc == 0)
        rc = each(ns, link_names, ns);
    if (rc == 0)
        rc = each(ns, sweep, ns);
    if (rc == 0)
        rc = find_reachable(ns);
    return rc == 0 ? reserve_all(ns) : rc;
}

static int refuse(const struct ht_ns *ns) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    for (size_t n = 0; n < ns->problems_kept && n < PROBLEMS_REPORTED_MAX; n++)
        ht_error("names: %s (%s)", ns->problems[n].text, ns->problems[n].code);
    ht_error("names: %zu problems; the store can be mounted read-only; run hitrain-fsck", ns->problem_count);
    return -EUCLEAN;
}

int ht_ns_replayed(void *ctx)
{
    struct ht_ns *ns = ctx;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    int rc = link_up(ns);
    if (rc == 0 && ns->problem_count != 0 && !ht_store_read_only(ns->store) && !ht_store_leaves_out(ns->store))
        rc = refuse(ns);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}
