/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy.c - copies of a model root: kept steps, their end, and model roots made from them (tiering/api/keep.h).
 *
 * The copy gets inodes, names and attributes as they are when the transaction has begun: from then on until its end no
 * other thread changes any of them. Only times may still change, by threads that read and write: these are taken when
 * the commit has published them. Until that moment nothing leads to the copy, and the log does not know it. Its inodes
 * are STALE until then, so that no number leads to them either.
 *
 * At the end of a kept step its inodes go at once; those in use are stale until the last reference.
 *
 * ns.lock held for writing, inside a transaction. Loops over the files release it now and then (ht_ns_slice_next).
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"
#include "tiering/api/background.h"
#include "tiering/base/event.h"

/* One at a time, as transactions are. */
struct ht_ns_copying {
    struct ht_ns_members from; /* in the order of their depth; the first is the model root's directory */
    struct ht_ns_inode **to;
    struct ht_ns_root *root;  /* of the copy */
    struct ht_ns_entry *name; /* of a clone; NULL: a kept step */
    struct ht_ns_kept about;
    bool reserved; /* the record of the kept step */
    struct ht_slice slice;
};

/* ------------------------------------------------------------------ inodes */

static int copy_xattrs(struct ht_ns *ns, const struct ht_ns_inode *from, struct ht_ns_inode *to)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    for (const struct ht_ns_xattr *x = from->xattrs; x; x = x->next) {
        struct ht_ns_xattr *y;
        if (x->state == HT_NS_GONE || ht_ns_is_note(x->data, x->name_len))
            continue;
        int rc = ht_ns_xattr_new(ns, x->data, x->name_len, ht_ns_xattr_value(x), x->value_len, &y);
        if (rc != 0)
            return rc;
        y->state = HT_NS_CLEAN;
        y->next = to->xattrs;
        to->xattrs = y;
    }
    return 0;
}

static int copy_inode(struct ht_ns *ns, struct ht_copy *k, const struct ht_ns_inode *from, struct ht_ns_inode **out)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    uint64_t ino = ht_copy_add(k, from->ino);
    struct ht_ns_inode *i;
    int rc = ino != 0 ? ht_ns_inode_new(ns, ino, from->cur.mode, &i) : -ENOMEM;

    if (rc != 0)
        return rc;
    *out = i;
    i->cur = from->cur;
    i->flags |= HT_NS_STALE;
    ht_ns_inode_set_root(ns, i, ns->copying->root);
    if (S_ISCHR(from->cur.mode) || S_ISBLK(from->cur.mode))
        i->u.rdev = from->u.rdev;
    if (S_ISLNK(from->cur.mode))
        rc = ht_ns_inode_set_target(ns, i, from->u.target, strlen(from->u.target));
    if (rc == 0)
        rc = copy_xattrs(ns, from, i);
    k->bytes += ht_ns_inode_log_bytes(i);
    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next)
        k->bytes += ht_ns_xattr_log_bytes(x);
    return rc;
}

/* Memory for all. Large pieces take a while, so the lock is released. */
static int expect_inodes(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;

    ht_rwlock_unlock(ht_ns_lock(ns));
    c->to = calloc(c->from.count, sizeof(*c->to));
    int rc = c->to ? ht_copy_expect(k, c->from.count) : -ENOMEM;
    ht_rwlock_wrlock(ht_ns_lock(ns));
    return rc;
}

/* Others' files get no names of who clones. */
static bool is_allowed(const struct ht_copy *k, const struct ht_ns_inode *from) HT_REQUIRES(HT_LOCK_NAMES)
{
    return !k->clone || k->clone->uid == 0 || from->cur.uid == k->clone->uid;
}

static int copy_inodes(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;
    int rc = expect_inodes(ns, k);

    for (size_t n = 0; rc == 0 && n < c->from.count; n++) {
        rc = is_allowed(k, c->from.inodes[n]) ? copy_inode(ns, k, c->from.inodes[n], &c->to[n]) : -EPERM;
        ht_ns_slice_next(ns, &c->slice);
    }
    return rc;
}

/* ------------------------------------------------------------------- names */

static int copy_entry(struct ht_ns *ns, struct ht_copy *k, const struct ht_ns_entry *from, struct ht_ns_inode *dir)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_find(ns, ht_copy_of(k, from->inode->ino));
    struct ht_ns_entry *e;
    int rc = ht_ns_dir_reserve(ns, dir->u.dir, 1);

    if (rc == 0)
        rc = ht_ns_entry_new(ns, from->name, from->len, &e);
    if (rc != 0)
        return rc;
    e->state = HT_NS_CLEAN;
    ht_ns_dir_append(dir->u.dir, e);
    ht_ns_entry_insert(ns, e, dir, i);
    ht_ns_entry_count(e, 1);
    k->bytes += ht_ns_entry_log_bytes(e);
    return 0;
}

static int copy_dir(struct ht_ns *ns, struct ht_copy *k, const struct ht_ns_inode *from, struct ht_ns_inode *to)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_dir *d = from->u.dir;
    int rc = 0;

    for (uint32_t s = 0; rc == 0 && s < d->slot_count; s++) {
        const struct ht_ns_entry *e = ht_ns_dir_entry(d, s);
        if (e)
            rc = copy_entry(ns, k, e, to);
        ht_ns_slice_next(ns, &ns->copying->slice);
    }
    return rc;
}

static int copy_names(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;
    int rc = 0;

    for (size_t n = 0; rc == 0 && n < c->from.count; n++) {
        if (ht_ns_is_dir(c->from.inodes[n]))
            rc = copy_dir(ns, k, c->from.inodes[n], c->to[n]);
        ht_ns_slice_next(ns, &c->slice);
    }
    return rc;
}

/* --------------------------------------------------- the end of a kept step */

/* Beside its own, a file has the records of its object and its state. */
enum { END_BYTES = 4096, MEMBER_BYTES = 8 * (HT_RECORD_HEADER_BYTES + 8) };

/* Bytes of the records that end it. Releases the lock in between. */
static int end_bytes(struct ht_ns *ns, uint64_t ino, size_t *out_bytes) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_tree_walk w = {.top = ino, .dir = ino};
    const struct ht_ns_entry *e;
    size_t bytes = END_BYTES + MEMBER_BYTES;
    struct ht_slice slice = {0};

    if (!ht_ns_inode_live(ns, ino))
        return -ESTALE;
    while ((e = ht_ns_tree_next(ns, &w))) {
        bytes += MEMBER_BYTES + ht_ns_entry_log_bytes(e);
        ht_ns_slice_next(ns, &slice);
    }
    *out_bytes = bytes;
    return 0;
}

/* Its names, its content and itself. Files that are open stay readable until the last close. */
static void end_member(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_obj *obj = S_ISREG(i->cur.mode) ? ht_obj_get(ns->store, i->ino) : NULL;

    if (obj)
        ht_obj_delete(obj, tx);
    ht_obj_put(obj);
    ht_ns_put_inode_del(tx, i->ino);
    i->flags &= (uint8_t) ~(HT_NS_PUBLISHED | HT_NS_FROZEN | HT_NS_MODEL_ROOT);
    i->flags |= HT_NS_STALE;
    if (ht_ns_unused(i))
        ht_ns_inode_free(ns, i);
    else
        ht_ns_inode_set_root(ns, i, &ns->outside);
}

/* tx NULL: none is in the log. */
static void end_names(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    while (i->names) {
        struct ht_ns_entry *e = i->names;
        if (tx)
            ht_ns_put_entry(tx, HT_REC_NS_ENTRY_DEL, e, 0);
        ht_ns_dir_remove(ns, e->dir->u.dir, e);
        ht_ns_entry_count(e, -1);
        ht_ns_entry_remove(ns, e);
        ht_ns_entry_free(ns, e);
    }
}

/*
 * Collecting the tree needs memory, which its end cannot wait for: takes an inode from the end of a directory each.
 * Releases the lock in between. The transaction keeps the directories, which have names until they are empty.
 */
static void end_below(struct ht_ns *ns, struct ht_ns_inode *top, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir = top;
    struct ht_slice slice = {0};

    for (; dir != top || dir->u.dir->live > 0; ht_ns_slice_next(ns, &slice)) {
        const struct ht_ns_dir *d = dir->u.dir;
        if (d->live == 0) {
            struct ht_ns_inode *above = d->self->dir;
            end_names(ns, dir, tx);
            end_member(ns, dir, tx);
            dir = above;
            continue;
        }
        struct ht_ns_inode *i = ht_ns_dir_last_entry(d)->inode;
        if (ht_ns_is_dir(i)) {
            dir = i;
            continue;
        }
        end_names(ns, i, tx);
        end_member(ns, i, tx);
    }
}

void ht_ns_ended(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx)
{
    struct ht_ns *ns = ctx;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_kept_step *x = ht_ns_kept_step(ns, scope);
    if (x) {
        struct ht_ns_inode *top = ht_ns_inode_find(ns, scope);
        struct ht_ns_root *root = ht_ns_root(top);
        struct ht_ns_record r = {.type = HT_REC_NS_KEPT_DEL, .ino = scope};
        ht_ns_record_encode(ht_tx_records(tx), &r);
        ht_store_log_unreserve(ns->store, ht_ns_kept_log_bytes(&x->about));
        ht_ns_kept_remove(ns, x); /* first: nobody finds half of a step */
        end_below(ns, top, tx);
        end_member(ns, top, tx);
        ht_ns_root_free_empty(ns, root);
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
}

int ht_ns_kept_forget(struct ht_ns *ns, uint64_t root, const char *name)
{
    struct ht_ns_kept about;
    uint64_t lsn;
    size_t bytes;
    int rc = ht_ns_kept_find(ns, root, name, &about);

    if (rc != 0)
        return rc;
    ht_rwlock_wrlock(ht_ns_lock(ns));
    rc = end_bytes(ns, about.ino, &bytes);
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (rc == 0)
        rc = ht_kept_end(ns->store, about.ino, bytes, &lsn);
    return rc == 0 ? ht_store_sync(ns->store, lsn) : rc;
}

/* -------------------------------------------------------------- a full store */

/* The oldest step that a vault has and nobody holds, with a higher number than after, and its own bytes. */
static uint64_t next_archived(struct ht_ns *ns, uint64_t after, struct ht_ns_kept *out)
{
    char job[HT_KEPT_NAME_MAX + 1];
    uint64_t stored_bytes, own_bytes = 0;

    do {
        bool found = false;
        ht_rwlock_rdlock(ht_ns_lock(ns));
        ht_list_for_each_entry(x, &ns->kept, const struct ht_ns_kept_step, link) {
            found = x->about.ino > after && x->holds == 0;
            if (found) {
                *out = x->about;
                break;
            }
        }
        ht_rwlock_unlock(ht_ns_lock(ns));
        if (!found)
            return 0;
        after = out->ino;
        if (ht_ns_kept_archived(ns, out->ino, job) == 0 &&
            ht_store_scope_space(ns->store, out->ino, &stored_bytes, &own_bytes) != 0)
            own_bytes = 0;
    } while (own_bytes == 0);
    return own_bytes;
}

uint64_t ht_ns_kept_could_give(void *ctx)
{
    struct ht_ns_kept about = {0};
    uint64_t bytes = 0;

    for (uint64_t own; (own = next_archived(ctx, about.ino, &about)) > 0;)
        bytes += own;
    return bytes;
}

uint64_t ht_ns_kept_give_up(void *ctx, uint64_t bytes)
{
    struct ht_ns *ns = ctx;
    struct ht_ns_kept about = {0};
    uint64_t given = 0;

    for (uint64_t own; given < bytes && (own = next_archived(ns, about.ino, &about)) > 0;) {
        if (ht_ns_kept_forget(ns, about.root, about.name) != 0)
            continue;
        ht_event(HT_EVENT_KEPT_GIVEN_UP, NULL, "the store is full: kept step %s is in a vault, and goes from here",
                 about.name);
        given += own;
    }
    return given;
}

/* ----------------------------------------------------- beginning a kept step */

/* Those that end because this one is kept: one of the same step, and the oldest beyond those that may stay. */
static int expire(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    uint32_t left = k->retain > 1 ? k->retain - 1 : 0;
    int rc = 0;

    for (struct ht_list *p = ns->kept.prev; rc == 0 && p != &ns->kept; p = p->prev) { /* from the newest down */
        const struct ht_ns_kept *x = &ht_list_entry(p, struct ht_ns_kept_step, link)->about;
        bool numbered = strspn(x->name, "0123456789") == strlen(x->name);
        size_t bytes;
        if (x->root != k->scope)
            continue;
        bool same = strcmp(x->name, ns->copying->about.name) == 0;
        if (same && !numbered)
            return -EEXIST;
        bool held = ht_list_entry(p, struct ht_ns_kept_step, link)->holds > 0;
        bool beyond = numbered && !k->name && k->retain != 0 && left == 0 && !held;
        left -= numbered && !same && left > 0 ? 1 : 0;
        if (!same && !beyond)
            continue;
        rc = end_bytes(ns, x->ino, &bytes);
        if (rc == 0)
            rc = ht_copy_expire(k, x->ino, bytes);
    }
    return rc;
}

static int describe_kept(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_kept *about = &ns->copying->about;

    *about = (struct ht_ns_kept){.root = k->scope, .step = k->step, .time_ns = ht_ns_now()};
    if (k->name)
        snprintf(about->name, sizeof(about->name), "%s", k->name);
    else
        snprintf(about->name, sizeof(about->name), "%llu", (unsigned long long)k->step);
    int rc = ht_store_log_reserve(ns->store, ht_ns_kept_log_bytes(about));
    if (rc != 0)
        return rc;
    ns->copying->reserved = true;
    k->bytes += ht_ns_kept_log_bytes(about);
    return expire(ns, k);
}

/* ------------------------------------------------------------------ clones */

/* The name of the clone, outside of model roots. */
static int name_copy(struct ht_ns *ns, struct ht_copy *k) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir;
    size_t len = strlen(k->clone->name);
    int rc = ht_ns_find_dir(ns, k->clone->parent, k->clone->name, &dir);

    if (rc == 0 && ht_ns_pending(dir))
        rc = -EINVAL;
    if (rc == 0 && ht_ns_entry_find(ns, dir, k->clone->name, len))
        rc = -EEXIST;
    if (rc == 0)
        rc = ht_ns_reserve(ns, ht_ns_root(dir), 2, 0);
    if (rc == 0)
        rc = ht_ns_dir_reserve(ns, dir->u.dir, 1);
    if (rc == 0)
        rc = ht_ns_entry_new(ns, k->clone->name, len, &ns->copying->name);
    if (rc == 0)
        k->bytes += ht_ns_entry_log_bytes(ns->copying->name);
    return rc;
}

/* ------------------------------------------------------------------- whole */

/* Frees what a copy in the making had beside its inodes and names; no lock held. */
static void free_copying(struct ht_ns_copying *c)
{
    free(c->from.inodes);
    free(c->to);
    free(c);
}

/* The caller frees it without the lock. */
static struct ht_ns_copying *drop_copy(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;

    for (size_t n = c->to ? c->from.count : 0; n > 0; n--, ht_ns_slice_next(ns, &c->slice))
        if (c->to[n - 1])
            end_names(ns, c->to[n - 1], NULL);
    for (size_t n = 0; c->to && n < c->from.count; n++, ht_ns_slice_next(ns, &c->slice))
        if (c->to[n])
            ht_ns_inode_free(ns, c->to[n]);
    if (c->name)
        ht_ns_entry_free(ns, c->name);
    if (c->reserved)
        ht_store_log_unreserve(ns->store, ht_ns_kept_log_bytes(&c->about));
    if (c->root)
        ht_ns_root_free_empty(ns, c->root);
    ns->copying = NULL;
    return c;
}

static int make_copy(struct ht_ns *ns, struct ht_copy *k, struct ht_ns_inode *top) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_copying *c = ns->copying;
    int rc = ht_ns_collect_tree(ns, &c->from, top, &c->slice);

    /* The flag is for the walk alone. The transaction keeps the members in memory. */
    for (size_t n = 0; n < c->from.count; n++, ht_ns_slice_next(ns, &ns->copying->slice))
        c->from.inodes[n]->flags &= (uint8_t)~HT_NS_MARKED;
    if (rc == 0) {
        c->root = ht_ns_root_new(ns, 0);
        rc = c->root ? 0 : -ENOMEM;
    }
    if (rc != 0)
        return rc;
    c->root->frozen = true;
    rc = copy_inodes(ns, k);
    if (rc == 0)
        rc = copy_names(ns, k);
    if (rc == 0)
        rc = k->clone ? name_copy(ns, k) : describe_kept(ns, k);
    if (rc != 0)
        return rc;
    c->about.ino = c->root->ino = k->to = c->to[0]->ino;
    return k->clone ? 0 : ht_ns_kept_add(ns, &c->about);
}

int ht_ns_copy(void *ctx, struct ht_copy *k)
{
    struct ht_ns *ns = ctx;
    struct ht_ns_copying *dropped = NULL;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_inode *top = ht_ns_inode_live(ns, k->scope);
    ns->copying = calloc(1, sizeof(*ns->copying));
    int rc = !ns->copying ? -ENOMEM : !top || (top->flags & HT_NS_MODEL_ROOT) == 0 ? -ESTALE : make_copy(ns, k, top);
    if (rc != 0 && ns->copying)
        dropped = drop_copy(ns);
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (dropped)
        free_copying(dropped);
    return rc;
}

void ht_ns_copy_dropped(void *ctx, struct ht_copy *k)
{
    struct ht_ns *ns = ctx;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_kept_step *x = ht_ns_kept_step(ns, k->to);
    if (x)
        ht_ns_kept_remove(ns, x);
    struct ht_ns_copying *dropped = drop_copy(ns);
    ht_rwlock_unlock(ht_ns_lock(ns));
    free_copying(dropped);
}

/* From now on numbers lead to it. */
static void settle(struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    i->flags |= HT_NS_PUBLISHED;
    i->flags &= (uint8_t)~HT_NS_STALE;
}

/* The clone appears under its name. */
static void put_name(struct ht_ns *ns, struct ht_copy *k, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_op op = {.ns = ns, .tx = tx, .now_ns = ht_ns_now()};
    struct ht_ns_copying *c = ns->copying;

    c->root->frozen = false;
    ht_ns_entry_add(&op, c->name, ht_ns_inode_find(ns, k->clone->parent), c->to[0], NULL);
    c->name = NULL;
}

void ht_ns_copied(void *ctx, struct ht_copy *k, struct ht_tx *tx)
{
    struct ht_ns *ns = ctx;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_copying *c = ns->copying;
    c->to[0]->flags |= HT_NS_MODEL_ROOT | (k->clone ? 0 : HT_NS_FROZEN);
    for (size_t n = 0; n < c->from.count; n++, ht_ns_slice_next(ns, &c->slice)) {
        c->to[n]->cur = *ht_ns_published_attr(c->from.inodes[n]); /* with its published times */
        ht_ns_put_published(tx, c->to[n]);
    }
    for (size_t n = c->from.count; n > 1; n--, ht_ns_slice_next(ns, &c->slice))
        settle(c->to[n - 1]);
    settle(c->to[0]); /* last: names lead to the others from here */
    if (k->clone) {
        ht_ns_root_paths(ns, c->to[0]);
        put_name(ns, k, tx);
    } else {
        ht_ns_put_kept(tx, &c->about);
        ht_store_wake_digest(ns->store);
    }
    ns->copying = NULL;
    ht_rwlock_unlock(ht_ns_lock(ns));
    free_copying(c);
}
