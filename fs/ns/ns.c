/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns.c - the life of names: registering with the store, start, references of the kernel and of open files.
 *
 * Inodes that nothing refers to any more are deleted by whoever let go last, in a transaction of their own. When that
 * cannot be had (the log has failed) they stay, and the next mount deletes them.
 */
#include "fs/ns/ns_priv.h"

#include <stdlib.h>
#include "tiering/base/event.h"

enum { REAP_BYTES = 1024, USUAL_NAME_BYTES = 32, ROOT_MODE = S_IFDIR | 0755 };

/* ------------------------------------------------------------------ life */

static int init(struct ht_ns *ns)
{
    int rc = ht_random(&ns->salt, sizeof(ns->salt));

    ht_list_init(&ns->roots);
    ht_list_init(&ns->outside.shadows);
    ht_list_init(&ns->free_shadows);
    ns->replaying = true;
    if (rc == 0)
        rc = ht_rwlock_init(&ns->lock, HT_LOCK_NAMES); /* no reader takes it twice */
    if (rc != 0)
        return rc;
    rc = ht_ns_tables_init(ns);
    if (rc != 0)
        ht_rwlock_destroy(&ns->lock);
    return rc;
}

int ht_ns_new(struct ht_store *s, const struct ht_ns_hooks *hooks, uint32_t root_uid, uint32_t root_gid,
              struct ht_ns **out)
{
    struct ht_ns *ns = calloc(1, sizeof(*ns));
    struct ht_meta_client client = {HT_REC_NS_FIRST, HT_REC_NS_LAST, ns,         ht_ns_replay,
                                    ht_ns_replayed,  ht_ns_emit,     ht_ns_flush};
    int rc;

    if (ns == NULL)
        return -ENOMEM;
    ns->store = s;
    ns->root_uid = root_uid;
    ns->root_gid = root_gid;
    if (hooks != NULL)
        ns->hooks = *hooks;
    rc = init(ns);
    if (rc != 0) {
        free(ns);
        return rc;
    }
    rc = ht_store_register(s, &client);
    if (rc != 0)
        ht_ns_free(ns);
    else
        *out = ns;
    return rc;
}

static void free_list(struct ht_list *shadows)
{
    ht_list_for_each_safe(p, next, shadows)
        free(ht_list_entry(p, struct ht_ns_shadow, link));
}

void ht_ns_free(struct ht_ns *ns)
{
    if (ns == NULL)
        return;
    ht_ns_tables_free(ns);
    ht_list_for_each_safe(p, next, &ns->roots) {
        struct ht_ns_root *r = ht_list_entry(p, struct ht_ns_root, link);
        free(r->entries);
        free(r);
    }
    free_list(&ns->free_shadows);
    for (size_t n = 0; n < ns->problems_kept; n++)
        free(ns->problems[n].text);
    free(ns->problems);
    ht_rwlock_destroy(&ns->lock);
    free(ns);
}

/* ----------------------------------------------------------------- start */

void ht_ns_publish_root_dir(struct ht_ns_op *op)
{
    struct ht_ns_inode *i = ht_ns_inode_find(op->ns, HT_NS_ROOT_INO);

    if ((i->flags & HT_NS_PUBLISHED) == 0)
        ht_ns_attr_put(op, i);
}

struct unused {
    uint64_t inos[256];
    size_t count;
};

static int add_unused(void *ctx, struct ht_ns_inode *i)
{
    struct unused *u = ctx;

    if (ht_ns_unused(i))
        u->inos[u->count++] = i->ino;
    return u->count == HT_ARRAY_SIZE(u->inos) ? 1 : 0;
}

/* The inode, if still nothing refers to it, and what may be published with it. */
static int reap(struct ht_ns *ns, uint64_t ino)
{
    struct ht_ns_inode *i;
    struct ht_ns_op op;
    size_t bytes = REAP_BYTES + ht_ns_root_pending_bytes(ns, ino) + ht_scope_pending_bytes(ns->store, ino);
    int rc = ht_ns_op_begin(ns, bytes, &op);

    if (rc != 0)
        return rc;
    i = ht_ns_inode_find(ns, ino);
    if (i != NULL && ht_ns_unused(i)) {
        rc = ht_ns_reserve(ns, ht_ns_root(i), 1, 0);
        if (rc == 0)
            ht_ns_inode_release(&op, i);
    }
    return ht_ns_op_end(&op, rc);
}

static int reap_all(struct ht_ns *ns)
{
    struct unused u;
    int rc = 0;

    do {
        u.count = 0;
        ht_rwlock_rdlock(&ns->lock);
        ht_ns_inode_each(ns, add_unused, &u);
        ht_rwlock_unlock(&ns->lock);
        for (size_t n = 0; rc == 0 && n < u.count; n++)
            rc = reap(ns, u.inos[n]);
    } while (rc == 0 && u.count == HT_ARRAY_SIZE(u.inos));
    return rc;
}

int ht_ns_start(struct ht_ns *ns)
{
    struct ht_ns_op op;
    int rc;

    if (ht_store_read_only(ns->store))
        return 0;
    rc = ht_ns_op_begin(ns, REAP_BYTES, &op);
    if (rc != 0)
        return rc;
    ht_ns_publish_root_dir(&op);
    rc = ht_ns_op_end(&op, 0);
    if (rc == 0)
        rc = reap_all(ns);
    return ht_ns_scope_settle(ns, rc);
}

/* ------------------------------------------------------------ references */

static int lookup_locked(struct ht_ns *ns, uint64_t parent, const char *name, struct stat *out_st)
{
    struct ht_ns_inode *dir = ht_ns_inode_live(ns, parent);
    struct ht_ns_entry *e;
    size_t len = strlen(name);

    if (dir == NULL)
        return -ESTALE;
    if (!ht_ns_is_dir(dir))
        return -ENOTDIR;
    if (len > HT_NAME_BYTES_MAX)
        return -ENAMETOOLONG;
    e = ht_ns_entry_find(ns, dir, name, len);
    if (e == NULL)
        return -ENOENT;
    atomic_fetch_add_explicit(&e->inode->lookups, 1, memory_order_relaxed);
    ht_ns_fill_stat(ns, e->inode, out_st);
    return 0;
}

int ht_ns_lookup(struct ht_ns *ns, uint64_t parent, const char *name, struct stat *out_st)
{
    int rc;

    ht_rwlock_rdlock(&ns->lock);
    rc = lookup_locked(ns, parent, name, out_st);
    ht_rwlock_unlock(&ns->lock);
    return rc;
}

static int lookup_ino_locked(struct ht_ns *ns, uint64_t ino, bool up, struct stat *out_st)
{
    struct ht_ns_inode *i = ht_ns_inode_live(ns, ino);

    if (i != NULL && up)
        i = ht_ns_is_dir(i) && i->u.dir->self != NULL ? i->u.dir->self->dir : NULL;
    if (i == NULL || (i->links == 0 && i->opens == 0 && i->ino != HT_NS_ROOT_INO))
        return -ESTALE;
    atomic_fetch_add_explicit(&i->lookups, 1, memory_order_relaxed);
    ht_ns_fill_stat(ns, i, out_st);
    return 0;
}

int ht_ns_lookup_ino(struct ht_ns *ns, uint64_t ino, bool up, struct stat *out_st)
{
    int rc;

    ht_rwlock_rdlock(&ns->lock);
    rc = lookup_ino_locked(ns, ino, up, out_st);
    ht_rwlock_unlock(&ns->lock);
    return rc;
}

static void reap_or_tell(struct ht_ns *ns, uint64_t ino)
{
    int rc = reap(ns, ino);
    const struct ht_event_about about = {.id = ino, .error = rc};

    if (rc != 0 && rc != -EROFS)
        ht_event(HT_EVENT_DELETE_FAILED, &about,
                 "inode %llu is in use by nobody and could not be deleted: %s; the next mount will",
                 (unsigned long long)ino, strerror(-rc));
}

/* Drop n counts; more than there are is a caller's mistake that must not wrap. True when nothing is left. */
static bool drop_lookups(struct ht_ns_inode *i, uint64_t n)
{
    uint64_t had = atomic_load_explicit(&i->lookups, memory_order_relaxed), left;

    do {
        left = had > n ? had - n : 0;
    } while (
        !atomic_compare_exchange_weak_explicit(&i->lookups, &had, left, memory_order_acq_rel, memory_order_relaxed));
    return ht_ns_unused(i);
}

void ht_ns_forget(struct ht_ns *ns, uint64_t ino, uint64_t n)
{
    struct ht_ns_inode *i;
    bool unused;

    ht_rwlock_rdlock(&ns->lock);
    i = ht_ns_inode_find(ns, ino);
    unused = i != NULL && drop_lookups(i, n);
    ht_rwlock_unlock(&ns->lock);
    if (unused)
        reap_or_tell(ns, ino);
}

enum ht_ns_life ht_ns_life(struct ht_ns *ns, uint64_t ino)
{
    const struct ht_ns_inode *i;
    enum ht_ns_life life;

    ht_rwlock_rdlock(&ns->lock);
    i = ht_ns_inode_live(ns, ino);
    life = i == NULL ? HT_NS_DELETED : i->links == 0 && (i->flags & HT_NS_UNNAMED) == 0 ? HT_NS_ORPHAN : HT_NS_NAMED;
    ht_rwlock_unlock(&ns->lock);
    return life;
}

bool ht_ns_known(struct ht_ns *ns, uint64_t ino)
{
    const struct ht_ns_inode *i;
    bool known;

    ht_rwlock_rdlock(&ns->lock);
    i = ht_ns_inode_find(ns, ino);
    known = i != NULL && atomic_load_explicit(&i->lookups, memory_order_acquire) > 0;
    ht_rwlock_unlock(&ns->lock);
    return known;
}

bool ht_ns_link_at(struct ht_ns *ns, uint64_t ino, unsigned i, uint64_t *out_parent, char *name)
{
    const struct ht_ns_inode *inode;
    const struct ht_ns_entry *e;

    ht_rwlock_rdlock(&ns->lock);
    inode = ht_ns_inode_find(ns, ino);
    e = inode != NULL ? inode->names : NULL;
    while (e != NULL && (!ht_ns_current(e) || i-- > 0))
        e = e->name_next;
    if (e != NULL) {
        *out_parent = e->dir->ino;
        memcpy(name, e->name, (size_t)e->len + 1);
    }
    ht_rwlock_unlock(&ns->lock);
    return e != NULL;
}

static int open_locked(struct ht_ns *ns, uint64_t ino, struct ht_obj **out_obj)
{
    struct ht_ns_inode *i = ht_ns_inode_live(ns, ino);
    int rc = 0;

    if (i == NULL)
        return -ESTALE;
    if (!S_ISREG(i->cur.mode))
        return ht_ns_is_dir(i) ? -EISDIR : -EINVAL;
    if (i->opens == 0)
        rc = ht_ns_content(ns, i, &i->u.obj);
    if (rc != 0)
        return rc;
    i->opens++;
    *out_obj = i->u.obj;
    return 0;
}

int ht_ns_open(struct ht_ns *ns, uint64_t ino, struct ht_obj **out_obj)
{
    int rc;

    ht_rwlock_wrlock(&ns->lock);
    rc = open_locked(ns, ino, out_obj);
    ht_rwlock_unlock(&ns->lock);
    return rc;
}

void ht_ns_close(struct ht_ns *ns, uint64_t ino)
{
    struct ht_ns_inode *i;
    struct ht_obj *obj = NULL;
    bool unused = false;

    ht_rwlock_wrlock(&ns->lock);
    i = ht_ns_inode_find(ns, ino);
    if (i != NULL && S_ISREG(i->cur.mode) && i->opens > 0 && --i->opens == 0) {
        obj = i->u.obj;
        i->u.obj = NULL;
        unused = ht_ns_unused(i);
    }
    ht_rwlock_unlock(&ns->lock);
    ht_obj_put(obj);
    if (unused)
        reap_or_tell(ns, ino);
}

/* ----------------------------------------------------------------- words */

int ht_ns_tensor(struct ht_ns *ns, uint64_t ino, struct ht_ns_tensor *out)
{
    const struct ht_ns_inode *i;

    ht_rwlock_rdlock(&ns->lock);
    i = ht_ns_inode_live(ns, ino);
    if (i != NULL)
        *out = (struct ht_ns_tensor){.root = ht_ns_root(i)->ino,
                                     .is_root = (i->flags & HT_NS_MODEL_ROOT) != 0,
                                     .dtype = i->cur.dtype,
                                     .grad_dtype = i->cur.grad_dtype,
                                     .obj_class = i->cur.obj_class};
    ht_rwlock_unlock(&ns->lock);
    return i != NULL ? 0 : -ESTALE;
}

/* A current one; of a file that has none, the one that it had. */
static const struct ht_ns_entry *name_of(const struct ht_ns_inode *i)
{
    const struct ht_ns_entry *e = ht_ns_is_dir(i) ? i->u.dir->self : i->names;

    while (e != NULL && !ht_ns_current(e) && i->links > 0)
        e = e->name_next;
    return e;
}

/* Written from the end of buf towards its start; what does not fit is missing at the front. */
void ht_ns_path_locked(struct ht_ns *ns, const struct ht_ns_inode *i, char *buf, size_t cap)
{
    size_t at = cap - 1;
    const struct ht_ns_entry *e;

    (void)ns;
    buf[at] = '\0';
    while (i->ino != HT_NS_ROOT_INO) {
        e = name_of(i);
        if (e == NULL || (size_t)e->len + 1 > at)
            break;
        if (buf[at] != '\0')
            buf[--at] = '/';
        at -= e->len;
        memcpy(buf + at, e->name, e->len);
        i = e->dir;
    }
    memmove(buf, buf + at, cap - at);
}

static void mark_deleted(char *path, size_t cap)
{
    static const char mark[] = " (deleted)";
    size_t len = strlen(path);

    if (cap - len >= sizeof(mark))
        memcpy(path + len, mark, sizeof(mark));
}

void ht_ns_path(struct ht_ns *ns, uint64_t ino, char *buf, size_t cap)
{
    const struct ht_ns_inode *i;

    if (cap == 0)
        return;
    buf[0] = '\0';
    ht_rwlock_rdlock(&ns->lock);
    i = ht_ns_inode_find(ns, ino);
    if (i != NULL)
        ht_ns_path_locked(ns, i, buf, cap);
    if (i != NULL && buf[0] != '\0' && i->links == 0)
        mark_deleted(buf, cap);
    ht_rwlock_unlock(&ns->lock);
}

static uint64_t file_claim_bytes(void)
{
    const struct ht_ns_inode file = {.cur.mode = S_IFREG};
    const struct ht_ns_entry name = {.len = USUAL_NAME_BYTES};

    return ht_ns_inode_claim(&file) + ht_ns_entry_claim(&name) + ht_obj_claim_bytes();
}

void ht_ns_stats(struct ht_ns *ns, struct ht_ns_stats *out)
{
    ht_rwlock_rdlock(&ns->lock);
    *out = (struct ht_ns_stats){.inodes = ns->inode_count,
                                .entries = ns->entry_count,
                                .xattrs = ns->xattr_count,
                                .meta_bytes = ns->meta_bytes,
                                .file_claim_bytes = file_claim_bytes()};
    ht_rwlock_unlock(&ns->lock);
}
