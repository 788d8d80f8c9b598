/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rollback.c - names and attributes of a model root become those of a kept step.
 *
 * All changes are pending, as if programs had made them: the next publication of the root publishes all, and an abort
 * takes all back. Until then none is published alone (root.whole). Content comes later (optim/step/rollback.c).
 *
 *   1. match    each inode of the kept step and the living one that has one of its names, if they are of one kind
 *   2. make     inodes for those without a match
 *   3. names    end those that the kept step does not have, or not for that inode; add the missing ones
 *   4. attributes, and times last
 *
 * So files that are still there keep their number: open files and mappings show the step. Everything happens in one
 * transaction, in which no other thread changes names. Step 3 releases the lock where a deletion calls the hook, and
 * all loops over the files release it now and then (ht_ns_slice_next). So readers of names may see both meanwhile.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

/* An inode of the kept step, and the one that becomes it. */
struct match {
    struct ht_ns_inode *from, *to;
};

struct rollback {
    struct ht_ns_op op;
    struct ht_ns_root *root;
    struct ht_ns_inode *top;
    struct match *matches; /* in the order of their depth; the first is the directory of the root */
    struct match **sorted; /* the same by number of from */
    size_t count;
    struct ht_slice slice;
};

static void next_step(struct rollback *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    ht_ns_slice_next(r->op.ns, &r->slice);
}

/* Ends with the first error. */
static int each(struct rollback *r, int (*fn)(struct rollback *r, struct match *m)) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    for (size_t n = 0; rc == 0 && n < r->count; n++, next_step(r))
        rc = fn(r, &r->matches[n]);
    return rc;
}

/* ------------------------------------------------------------------- match */

static int compare(const void *a, const void *b)
{
    uint64_t x = (*(struct match *const *)a)->from->ino, y = (*(struct match *const *)b)->from->ino;

    return x < y ? -1 : x > y;
}

static struct match *match_of(const struct rollback *r, const struct ht_ns_inode *from)
{
    size_t at = 0;

    HT_PARTITION_POINT(at, r->count, i, r->sorted[i]->from->ino < from->ino);
    return r->sorted[at];
}

/* Of its content; 0: there is none. */
static uint32_t chunk_bytes(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj *obj = ht_obj_get(ns->store, i->ino);
    uint32_t bytes = obj ? ht_obj_chunk_bytes(obj) : 0;

    ht_obj_put(obj);
    return bytes;
}

static bool one_content(struct ht_ns *ns, const struct ht_ns_inode *a, const struct ht_ns_inode *b)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    uint32_t x = chunk_bytes(ns, a), y = chunk_bytes(ns, b);

    return a->cur.obj_class == b->cur.obj_class && a->cur.dtype == b->cur.dtype && (x == y || x == 0 || y == 0);
}

/* May a become b? Chunk size and class of content stay for the life of a file. */
static bool one_kind(struct ht_ns *ns, const struct ht_ns_inode *a, const struct ht_ns_inode *b)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if ((a->cur.mode & S_IFMT) != (b->cur.mode & S_IFMT))
        return false;
    if (S_ISREG(a->cur.mode))
        return one_content(ns, a, b);
    if (S_ISLNK(a->cur.mode))
        return strcmp(a->u.target, b->u.target) == 0;
    return S_ISCHR(a->cur.mode) || S_ISBLK(a->cur.mode) ? a->u.rdev == b->u.rdev : true;
}

/* Each living inode becomes one inode of the step at most. */
static void match_children(struct rollback *r, const struct match *dir) HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_dir *d = dir->from->u.dir;

    for (uint32_t s = 0; s < d->slot_count; s++, next_step(r)) {
        const struct ht_ns_entry *e = ht_ns_dir_entry(d, s);
        struct match *m = e ? match_of(r, e->inode) : NULL;
        const struct ht_ns_entry *living = m && !m->to ? ht_ns_entry_find(r->op.ns, dir->to, e->name, e->len) : NULL;
        if (!living || (living->inode->flags & HT_NS_MARKED) != 0 || !one_kind(r->op.ns, living->inode, e->inode))
            continue;
        m->to = living->inode;
        m->to->flags |= HT_NS_MARKED;
    }
}

static void match_all(struct rollback *r) HT_REQUIRES(HT_LOCK_NAMES)
{
    r->matches[0].to = r->top;
    for (size_t n = 0; n < r->count; n++, next_step(r))
        if (r->matches[n].to && ht_ns_is_dir(r->matches[n].from))
            match_children(r, &r->matches[n]);
    for (size_t n = 0; n < r->count; n++, next_step(r))
        if (r->matches[n].to)
            r->matches[n].to->flags &= (uint8_t)~HT_NS_MARKED;
}

static int list_step(struct rollback *r, struct ht_ns_inode *kept) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_members m = {0};
    int rc = ht_ns_collect_tree(r->op.ns, &m, kept, &r->slice);

    for (size_t n = 0; n < m.count; n++, next_step(r))
        m.inodes[n]->flags &= (uint8_t)~HT_NS_MARKED;
    ht_ns_op_unlock(&r->op); /* sorting takes a while */
    if (rc == 0) {
        r->matches = calloc(m.count, sizeof(*r->matches));
        r->sorted = calloc(m.count, sizeof(*r->sorted));
        rc = r->matches && r->sorted ? 0 : -ENOMEM;
        r->count = rc == 0 ? m.count : 0;
    }
    for (size_t n = 0; rc == 0 && n < m.count; n++) {
        r->matches[n].from = m.inodes[n];
        r->sorted[n] = &r->matches[n];
    }
    free(m.inodes);
    if (rc == 0)
        qsort(r->sorted, r->count, sizeof(struct match *), compare);
    ht_ns_op_lock(&r->op);
    return rc;
}

/* -------------------------------------------------------------------- make */

/* Content with chunks as in the kept step. */
static int make_content(struct ht_ns *ns, const struct match *m) HT_REQUIRES(HT_LOCK_NAMES)
{
    uint32_t bytes = chunk_bytes(ns, m->from);
    struct ht_obj *obj = NULL;
    int rc = ht_ns_content(ns, m->to, &obj);

    if (rc == 0 && bytes != 0 && bytes != ht_obj_chunk_bytes(obj))
        rc = ht_obj_set_chunk_bytes(obj, bytes);
    ht_obj_put(obj);
    return rc;
}

static int make_missing(struct rollback *r, struct match *m) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns *ns = r->op.ns;

    if (m->to)
        return 0;
    uint64_t ino = ht_store_new_id(ns->store);
    int rc = ino != 0 ? ht_ns_reserve(ns, r->root, 1, 0) : -ENOSPC;
    if (rc == 0)
        rc = ht_ns_inode_new(ns, ino, m->from->cur.mode, &m->to);
    if (rc != 0)
        return rc;
    m->to->cur = m->from->cur;
    ht_ns_inode_set_root(ns, m->to, r->root);
    if (S_ISCHR(m->to->cur.mode) || S_ISBLK(m->to->cur.mode))
        m->to->u.rdev = m->from->u.rdev;
    if (S_ISLNK(m->to->cur.mode))
        rc = ht_ns_inode_set_target(ns, m->to, m->from->u.target, strlen(m->from->u.target));
    if (rc == 0 && S_ISREG(m->to->cur.mode))
        rc = make_content(ns, m);
    if (rc != 0) {
        ht_ns_inode_free(ns, m->to);
        m->to = NULL;
        return rc;
    }
    ht_ns_attr_edit(&r->op, m->to);
    return 0;
}

/* ------------------------------------------------------------------- names */

/* Ends one name, and its inode if that was the last one. The hook runs without the lock. */
static int end_name(struct rollback *r, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = e->inode;
    int rc = ht_ns_reserve(r->op.ns, r->root, 3, 1);

    if (rc != 0)
        return rc;
    ht_ns_entry_drop(&r->op, e);
    ht_ns_inode_release(&r->op, i);
    if (r->op.deleted_count > 0) {
        ht_ns_op_unlock(&r->op);
        ht_ns_op_lock(&r->op);
    }
    return 0;
}

/* The name and, of a directory, everything below it. */
static int end_tree(struct rollback *r, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    while (rc == 0 && ht_ns_is_dir(e->inode) && e->inode->u.dir->live > 0) {
        struct ht_ns_entry *below = ht_ns_dir_last_entry(e->inode->u.dir);
        while (ht_ns_is_dir(below->inode) && below->inode->u.dir->live > 0)
            below = ht_ns_dir_last_entry(below->inode->u.dir);
        rc = end_name(r, below);
    }
    return rc == 0 ? end_name(r, e) : rc;
}

/* From the last slot down: taking a name out may make the array shorter. */
static int end_names(struct rollback *r, struct match *dir) HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_dir *d = ht_ns_is_dir(dir->to) ? dir->to->u.dir : NULL;
    int rc = 0;

    for (uint32_t s = d ? d->slot_count : 0; rc == 0 && s > 0; s--, next_step(r)) {
        struct ht_ns_entry *e = s <= d->slot_count ? ht_ns_dir_entry(d, s - 1) : NULL;
        const struct ht_ns_entry *kept = e ? ht_ns_entry_find(r->op.ns, dir->from, e->name, e->len) : NULL;
        if (e && !(kept && match_of(r, kept->inode)->to == e->inode))
            rc = end_tree(r, e);
    }
    return rc;
}

static int add_name(struct rollback *r, const struct match *dir, const struct ht_ns_entry *kept)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_entry *e;
    int rc = ht_ns_new_name(r->op.ns, dir->to, kept->name, kept->len, &e);

    if (rc == 0)
        ht_ns_entry_add(&r->op, e, dir->to, match_of(r, kept->inode)->to, NULL);
    return rc;
}

static int add_names(struct rollback *r, struct match *dir) HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_dir *d = ht_ns_is_dir(dir->from) ? dir->from->u.dir : NULL;
    int rc = 0;

    for (uint32_t s = 0; d && rc == 0 && s < d->slot_count; s++, next_step(r)) {
        const struct ht_ns_entry *e = ht_ns_dir_entry(d, s);
        if (e && !ht_ns_entry_find(r->op.ns, dir->to, e->name, e->len))
            rc = add_name(r, dir, e);
    }
    return rc;
}

/* -------------------------------------------------------------- attributes */

static bool same_value(const struct ht_ns_xattr *a, const struct ht_ns_xattr *b)
{
    return a && b && a->value_len == b->value_len &&
        memcmp(ht_ns_xattr_value(a), ht_ns_xattr_value(b), a->value_len) == 0;
}

static void end_xattrs(struct rollback *r, const struct match *m) HT_REQUIRES(HT_LOCK_NAMES)
{
    for (struct ht_ns_xattr *x = m->to->xattrs, *next; x; x = next) {
        next = x->next;
        if (x->state != HT_NS_GONE && !ht_ns_xattr_find(m->from, x->data, x->name_len))
            ht_ns_xattr_drop(&r->op, m->to, x, 0);
    }
}

static int change_attributes(struct rollback *r, struct match *m) HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = ht_ns_reserve(r->op.ns, r->root, 1, 0);

    if (rc != 0)
        return rc;
    ht_ns_attr_edit(&r->op, m->to);
    end_xattrs(r, m);
    for (const struct ht_ns_xattr *x = m->from->xattrs; rc == 0 && x; x = x->next) {
        struct ht_ns_xattr *now;
        if (ht_ns_is_note(x->data, x->name_len) || same_value(x, ht_ns_xattr_find(m->to, x->data, x->name_len)))
            continue;
        rc = ht_ns_xattr_new(r->op.ns, x->data, x->name_len, ht_ns_xattr_value(x), x->value_len, &now);
        if (rc == 0)
            ht_ns_xattr_install(&r->op, m->to, now, 0);
    }
    m->to->cur = m->from->cur;
    ht_ns_content_changed(r->op.ns, m->to);
    return rc;
}

/* ------------------------------------------------------------------- whole */

/* Regular files, by the number in the kept step. */
static int list_files(struct rollback *r, struct ht_copy_id **out, size_t *out_count) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_copy_id *ids = calloc(r->count, sizeof(*ids));
    size_t count = 0;

    if (!ids)
        return -ENOMEM;
    for (size_t n = 0; n < r->count; n++, next_step(r))
        if (S_ISREG(r->sorted[n]->from->cur.mode))
            ids[count++] = (struct ht_copy_id){.from = r->sorted[n]->from->ino, .to = r->sorted[n]->to->ino};
    *out = ids;
    *out_count = count;
    return 0;
}

/* The caller takes back nothing of others, and nothing that others get. */
static int check_owners(struct rollback *r, uint32_t uid) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_tree_walk living = {.top = r->top->ino, .dir = r->top->ino};
    const struct ht_ns_entry *e;
    int rc = uid == 0 || r->top->cur.uid == uid ? 0 : -EPERM;

    for (; rc == 0 && uid != 0 && (e = ht_ns_tree_next(r->op.ns, &living)); next_step(r))
        rc = e->inode->cur.uid == uid ? 0 : -EPERM;
    for (size_t n = 0; rc == 0 && uid != 0 && n < r->count; n++, next_step(r))
        rc = r->matches[n].from->cur.uid == uid ? 0 : -EPERM;
    return rc;
}

static int change_tree(struct rollback *r, uint64_t kept, uint32_t uid) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *from = ht_ns_inode_live(r->op.ns, kept);

    if (!from || !ht_ns_kept_step(r->op.ns, kept) || !r->top || (r->top->flags & HT_NS_MODEL_ROOT) == 0)
        return -ESTALE;
    r->root = ht_ns_root(r->top);
    r->root->whole = true;
    int rc = list_step(r, from);
    if (rc == 0)
        rc = check_owners(r, uid);
    if (rc == 0) {
        match_all(r);
        rc = each(r, make_missing);
    }
    if (rc == 0)
        rc = each(r, end_names);
    if (rc == 0)
        rc = each(r, add_names);
    return rc == 0 ? each(r, change_attributes) : rc;
}

/*
 * Without the lock, but in the transaction. Other inodes of the root get pending times at any moment, so its list of
 * these is not for us.
 */
static void report_stale(const struct rollback *r) HT_NO_THREAD_SAFETY_ANALYSIS
{
    const struct ht_ns_hooks *hooks = &r->op.ns->hooks;
    struct ht_list none;

    ht_list_init(&none);
    ht_ns_report_stale(hooks, r->root, r->root->entry_count, &none);
    for (size_t n = 0; hooks->stale && n < r->count; n++)
        if (r->matches[n].to)
            hooks->stale(hooks->ctx, r->matches[n].to->ino, 0, NULL);
}

int ht_ns_rollback(struct ht_ns *ns, uint64_t root, uint64_t kept, uint32_t uid, struct ht_copy_id **out,
                   size_t *out_count)
{
    struct rollback r = {0};
    int rc = ht_ns_op_begin(ns, 0, &r.op);

    if (rc != 0)
        return rc;
    r.top = ht_ns_inode_live(ns, root);
    rc = change_tree(&r, kept, uid);
    if (rc == 0)
        rc = list_files(&r, out, out_count);
    ht_ns_op_unlock(&r.op);
    if (r.root)
        report_stale(&r);
    ht_ns_op_lock(&r.op);
    free(r.matches);
    free(r.sorted);
    rc = ht_ns_op_end(&r.op, rc);
    if (rc != 0) {
        free(*out);
        *out = NULL;
    }
    return rc;
}
