/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns.c - the life of names: registering with the store, start, references of the kernel and of open files.
 *
 * The thread that releases the last reference deletes the inode, in a transaction of its own. If there can be no
 * transaction (the log has failed), the inode stays, and the next mount deletes it.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"
#include "tiering/base/dump.h"

#include "tiering/base/event.h"

enum { REAP_BYTES = 1024, USUAL_NAME_BYTES = 32, ROOT_MODE = S_IFDIR | 0755 };

/* ------------------------------------------------------------------ life */

static int init(struct ht_ns *ns)
{
    HT_UNSHARED(HT_LOCK_NAMES);
    int rc = ht_random(&ns->salt, sizeof(ns->salt));

    ht_list_init(&ns->roots);
    ht_list_init(&ns->outside.shadows);
    ht_list_init(&ns->free_shadows);
    ht_list_init(&ns->kept);
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

static uint64_t meta_bytes(void *ctx)
{
    const struct ht_ns *ns = ctx;

    HT_UNSHARED(HT_LOCK_NAMES);
    return ns->meta_bytes;
}

static void free_ns(void *p)
{
    struct ht_ns *ns = p;

    HT_UNSHARED(HT_LOCK_NAMES);
    ht_ns_tables_free(ns);
    ht_list_for_each_entry_safe(x, &ns->kept, struct ht_ns_kept_step, link)
        free(x);
    ht_list_for_each_entry_safe(r, &ns->roots, struct ht_ns_root, link) {
        free(r->entries);
        free(r);
    }
    ht_list_for_each_entry_safe(r, &ns->free_shadows, struct ht_ns_shadow, link)
        free(r);
    for (size_t n = 0; n < ns->problems_kept; n++)
        free(ns->problems[n].text);
    free(ns->problems);
    ht_rwlock_destroy(&ns->lock);
    free(ns);
}

static int make_ns(struct ht_store *s, const void *setup, void **out)
{
    const struct ht_ns_setup *u = setup;
    struct ht_ns *ns = calloc(1, sizeof(*ns));
    struct ht_participant client = {
        .type_first = HT_REC_NS_FIRST,
        .type_last = HT_REC_NS_KEPT_DEL,
        .ctx = ns,
        .replay = ht_ns_replay,
        .replayed = ht_ns_replayed,
        .emit = ht_ns_emit,
        .pending_bytes = ht_ns_pending_bytes,
        .publish = ht_ns_publish,
        .abort = ht_ns_abort,
        .ended = ht_ns_ended,
        .could_give = ht_ns_kept_could_give,
        .give_up = ht_ns_kept_give_up,
        .copy = ht_ns_copy,
        .copied = ht_ns_copied,
        .copy_dropped = ht_ns_copy_dropped,
        .meta_bytes = meta_bytes,
    };
    int rc;

    if (!ns)
        return -ENOMEM;
    ns->store = s;
    ns->root_uid = u->root_uid;
    ns->root_gid = u->root_gid;
    if (u->hooks)
        ns->hooks = *u->hooks;
    rc = init(ns);
    if (rc != 0) {
        free(ns);
        return rc;
    }
    rc = ht_store_register(s, &client);
    if (rc != 0)
        free_ns(ns);
    else
        *out = ns;
    return rc;
}

/* ----------------------------------------------------------------- start */

void ht_ns_publish_root_dir(struct ht_ns_op *op)
{
    struct ht_ns_inode *i = ht_ns_inode_find(op->ns, HT_NS_ROOT_INO);

    if ((i->flags & HT_NS_PUBLISHED) == 0)
        ht_ns_attr_put(op, i);
}

static bool is_unused(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ht_ns_unused(i);
}

/* The inode, if it still has no references, and the changes that may be published with it. */
static int reap(struct ht_ns *ns, uint64_t ino)
{
    struct ht_ns_op op;
    int rc = ht_ns_op_begin(ns, REAP_BYTES + ht_scope_pending_bytes(ns->store, ino), &op);

    if (rc != 0)
        return rc;
    struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);
    if (i && ht_ns_unused(i)) {
        rc = ht_ns_reserve(ns, ht_ns_root(i), 1, 0);
        if (rc == 0)
            ht_ns_inode_release(&op, i);
    }
    return ht_ns_op_end(&op, rc);
}

static int reap_all(struct ht_ns *ns)
{
    uint64_t *inos = NULL;
    size_t count = 0;
    int rc = ht_ns_inode_collect(ns, is_unused, &inos, &count);

    for (size_t n = 0; rc == 0 && n < count; n++)
        rc = reap(ns, inos[n]);
    free(inos);
    return rc;
}

static int start_ns(void *p)
{
    struct ht_ns *ns = p;
    struct ht_ns_op op;

    if (ht_store_read_only(ns->store))
        return 0;
    int rc = ht_ns_op_begin(ns, REAP_BYTES, &op);
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
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_ns_inode *dir = ht_ns_inode_live(ns, parent);
    size_t len = strlen(name);

    if (!dir)
        return -ESTALE;
    if (!ht_ns_is_dir(dir))
        return -ENOTDIR;
    if (len > HT_NAME_BYTES_MAX)
        return -ENAMETOOLONG;
    struct ht_ns_entry *e = ht_ns_entry_find(ns, dir, name, len);
    if (!e)
        return -ENOENT;
    atomic_fetch_add_explicit(&e->inode->lookups, 1, memory_order_relaxed);
    ht_ns_fill_stat(ns, e->inode, out_st);
    return 0;
}

int ht_ns_lookup(struct ht_ns *ns, uint64_t parent, const char *name, struct stat *out_st)
{
    ht_rwlock_rdlock(ht_ns_lock(ns));
    int rc = lookup_locked(ns, parent, name, out_st);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}

static int lookup_ino_locked(struct ht_ns *ns, uint64_t ino, bool up, struct stat *out_st)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_live(ns, ino);

    if (i && up)
        i = ht_ns_is_dir(i) && i->u.dir->self ? i->u.dir->self->dir : NULL;
    if (!i || (i->links == 0 && i->opens == 0 && i->ino != HT_NS_ROOT_INO && (i->flags & HT_NS_FROZEN) == 0))
        return -ESTALE;
    atomic_fetch_add_explicit(&i->lookups, 1, memory_order_relaxed);
    ht_ns_fill_stat(ns, i, out_st);
    return 0;
}

int ht_ns_lookup_ino(struct ht_ns *ns, uint64_t ino, bool up, struct stat *out_st)
{
    ht_rwlock_rdlock(ht_ns_lock(ns));
    int rc = lookup_ino_locked(ns, ino, up, out_st);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}

int ht_ns_kept_lookup(struct ht_ns *ns, uint64_t root, const char *name, struct stat *out_st)
{
    int rc = -ENOENT;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    const struct ht_ns_kept_step *x = ht_ns_kept_named(ns, root, name);
    if (x)
        rc = ht_ns_getattr_locked(ns, x->about.ino, true, out_st);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}

static void reap_or_notify(struct ht_ns *ns, uint64_t ino)
{
    int rc = reap(ns, ino);
    const struct ht_event_about about = {.id = ino, .error = rc};

    if (rc != 0 && rc != -EROFS)
        ht_event(HT_EVENT_DELETE_FAILED, &about,
                 "inode %llu is unused and could not be deleted: %s; the next mount will", (unsigned long long)ino,
                 strerror(-rc));
}

/* Drops n counts. More than there are is a caller's mistake, which must not wrap. True when nothing is left. */
static bool drop_lookups(struct ht_ns_inode *i, uint64_t n) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
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
    ht_rwlock_rdlock(ht_ns_lock(ns));
    struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);
    bool unused = i && drop_lookups(i, n);
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (unused)
        reap_or_notify(ns, ino);
}

enum ht_ns_life ht_ns_life(struct ht_ns *ns, uint64_t ino)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    enum ht_ns_life life = !i                                               ? HT_NS_DELETED
        : i->links == 0 && (i->flags & (HT_NS_UNNAMED | HT_NS_FROZEN)) == 0 ? HT_NS_ORPHAN
                                                                            : HT_NS_NAMED;

    ht_rwlock_unlock(ht_ns_lock(ns));
    return life;
}

bool ht_ns_known(struct ht_ns *ns, uint64_t ino)
{
    ht_rwlock_rdlock(ht_ns_lock(ns));
    const struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);
    bool known = i && atomic_load_explicit(&i->lookups, memory_order_acquire) > 0;
    ht_rwlock_unlock(ht_ns_lock(ns));
    return known;
}

bool ht_ns_link_at(struct ht_ns *ns, uint64_t ino, unsigned i, uint64_t *out_parent, char *name)
{
    ht_rwlock_rdlock(ht_ns_lock(ns));
    const struct ht_ns_inode *inode = ht_ns_inode_find(ns, ino);
    const struct ht_ns_entry *e = inode ? inode->names : NULL;
    /* bounded: HT_LINKS_MAX names */
    while (e && (!ht_ns_current(e) || i-- > 0))
        e = e->name_next;
    if (e) {
        *out_parent = e->dir->ino;
        memcpy(name, e->name, (size_t)e->len + 1);
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    return e != NULL;
}

static int open_locked(struct ht_ns *ns, uint64_t ino, struct ht_obj **out_obj) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_ns_inode *i = ht_ns_inode_live(ns, ino);
    int rc = 0;

    if (!i)
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
    ht_rwlock_wrlock(ht_ns_lock(ns));
    int rc = open_locked(ns, ino, out_obj);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}

void ht_ns_close(struct ht_ns *ns, uint64_t ino)
{
    struct ht_obj *obj = NULL;
    bool unused = false;

    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);
    if (i && S_ISREG(i->cur.mode) && i->opens > 0 && --i->opens == 0) {
        obj = i->u.obj;
        i->u.obj = NULL;
        unused = ht_ns_unused(i);
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    ht_obj_put(obj);
    if (unused)
        reap_or_notify(ns, ino);
}

/* ----------------------------------------------------------------- words */

int ht_ns_tensor(struct ht_ns *ns, uint64_t ino, struct ht_ns_tensor *out)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);

    if (i)
        *out = (struct ht_ns_tensor){.root = ht_ns_root(i)->ino,
                                     .is_root = (i->flags & HT_NS_MODEL_ROOT) != 0,
                                     .dtype = i->cur.dtype,
                                     .grad_dtype = i->cur.grad_dtype,
                                     .obj_class = i->cur.obj_class};
    ht_rwlock_unlock(ht_ns_lock(ns));
    return i ? 0 : -ESTALE;
}

bool ht_ns_is_frozen(struct ht_ns *ns, uint64_t ino)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    bool frozen = i && ht_ns_frozen(i);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return frozen;
}

/* The path of a kept step begins at its model root. */
static const struct ht_ns_inode *put_kept(struct ht_ns *ns, const struct ht_ns_inode *i, char *buf, size_t *at)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_kept_step *x = (i->flags & HT_NS_FROZEN) != 0 ? ht_ns_kept_step(ns, i->ino) : NULL;
    char text[sizeof(HT_CTL_DIR "/snap/") + HT_KEPT_NAME_MAX];
    int len = x ? snprintf(text, sizeof(text), HT_CTL_DIR "/snap/%s", x->about.name) : 0;

    if (!x || (size_t)len + 1 > *at)
        return NULL;
    if (buf[*at] != '\0')
        buf[--*at] = '/';
    *at -= (size_t)len;
    memcpy(buf + *at, text, (size_t)len);
    return ht_ns_inode_find(ns, x->about.root);
}

/* Written from the end of buf towards its start; a path that is too long is cut at the front. */
void ht_ns_path_locked(struct ht_ns *ns, const struct ht_ns_inode *i, char *buf, size_t cap)
{
    size_t at = cap - 1;
    const struct ht_ns_entry *e;

    buf[at] = '\0';
    while (i && i->ino != HT_NS_ROOT_INO) {
        if ((i->flags & HT_NS_FROZEN) != 0) {
            i = put_kept(ns, i, buf, &at);
            continue;
        }
        e = ht_ns_name_of(i);
        if (!e || (size_t)e->len + 1 > at)
            break;
        if (buf[at] != '\0')
            buf[--at] = '/';
        at -= e->len;
        memcpy(buf + at, e->name, e->len);
        i = e->dir;
    }
    memmove(buf, buf + at, cap - at);
}

void ht_ns_path(struct ht_ns *ns, uint64_t ino, char *buf, size_t cap)
{
    static const char deleted[] = " (deleted)";

    if (cap == 0)
        return;
    buf[0] = '\0';
    ht_rwlock_rdlock(ht_ns_lock(ns));
    const struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);
    if (i)
        ht_ns_path_locked(ns, i, buf, cap);
    size_t len = strlen(buf);
    if (len > 0 && i->links == 0 && (i->flags & HT_NS_FROZEN) == 0 && cap - len >= sizeof(deleted))
        memcpy(buf + len, deleted, sizeof(deleted));
    ht_rwlock_unlock(ht_ns_lock(ns));
}

bool ht_ns_dump_path(struct ht_ns *ns, struct ht_dump *d, uint64_t ino)
{
    char path[512] = "";

    if (!ht_dump_rdlock(d, ht_ns_lock(ns), "names"))
        return false;
    const struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);
    if (i)
        ht_ns_path_locked(ns, i, path, sizeof(path));
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (i) {
        ht_dump_put(d, "  %llu /", (unsigned long long)ino);
        ht_dump_name(d, path);
        ht_dump_put(d, "\n");
    }
    return true;
}

static uint64_t file_log_bytes(void) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode file = {.cur.mode = S_IFREG};
    const struct ht_ns_entry name = {.len = USUAL_NAME_BYTES};

    return ht_ns_inode_log_bytes(&file) + ht_ns_entry_log_bytes(&name) + ht_obj_log_bytes();
}

void ht_ns_stats(struct ht_ns *ns, struct ht_ns_stats *out)
{
    ht_rwlock_rdlock(ht_ns_lock(ns));
    *out = (struct ht_ns_stats){.inodes = ns->inodes.count,
                                .entries = ns->entry_count,
                                .xattrs = ns->xattr_count,
                                .meta_bytes = ns->meta_bytes,
                                .file_log_bytes = file_log_bytes()};
    ht_rwlock_unlock(ht_ns_lock(ns));
}

const struct ht_participant_type ht_participant_ns = {.make = make_ns, .start = start_ns, .free = free_ns};
