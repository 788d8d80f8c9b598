/* SPDX-License-Identifier: Apache-2.0 */
/*
 * passthrough.c - passthrough files: the kernel maps the memory of their images.
 *
 * Readers read that memory without a request. Writers' calls come here as ever (direct I/O), and show in it at once.
 * Mappings are of the memory itself, so a trainer has the very pages that updates go into.
 *
 *   ordinary --first open, wanted, possible--> active --FORGET--> ordinary
 *
 * The kernel refuses to mix: while one open of an inode is passed through all must be, to the same memory. A mapping
 * lives on after RELEASE, and keeps the inode: FORGET says that no process has the pages any more. After the last
 * RELEASE the daemon provokes it by dropping the file's names from the kernel's cache, a moment later
 * (passthrough_closed.c).
 *
 * If anything prevents this, the file is opened in the ordinary way, and that is counted. Reasons are no privilege, an
 * old kernel, the share of memory used up, or bytes that cannot be read.
 *
 * Lock: passthrough.lock, a leaf. An entry of the table that is busy belongs to one thread, which may wait for I/O;
 * other openers of the same file wait for it.
 */
#include "fs/fuse/passthrough_priv.h"

#include <linux/capability.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

/* ------------------------------------------------------------------- which */

/*
 * Passthrough is worth it for content that is read whole in every step, and for files that their owner wants in memory.
 * Where the DRAM tier lends the memory, others may have no use for it, and rely on reads that wait for updates: so the
 * opener asks. An inode has one mode while it is open, so a file that is open in the ordinary way stays ordinary. An
 * open with O_DIRECT wants a device's bytes in a buffer of its own, and nothing kept in memory.
 */
bool ht_passthrough_wanted(const struct ht_passthrough_case *c)
{
    return (c->asked || (!c->lent && (c->parameter || c->pinned))) && c->bytes && !c->direct && !c->opens && !c->frozen;
}

bool ht_passthrough_may_store(int flags)
{
    return (flags & O_ACCMODE) == O_RDWR;
}

bool ht_passthrough_may_resize(bool stores, uint64_t from_bytes, uint64_t to_bytes)
{
    return !stores || to_bytes >= from_bytes;
}

/* ------------------------------------------------------------------- table */

static struct ht_list *bucket(struct ht_fuse *f, uint64_t ino)
{
    return &f->passthrough.files[ino * 0x9e3779b97f4a7c15ull >> 56];
}
static_assert(HT_PASSTHROUGH_BUCKETS == 256, "eight bits");

struct ht_passthrough_file *ht_passthrough_file_find(struct ht_fuse *f, uint64_t ino)
{
    ht_list_for_each_entry(e, bucket(f, ino), struct ht_passthrough_file, link)
        if (e->ino == ino)
            return e;
    return NULL;
}

struct ht_passthrough_file *ht_passthrough_file_get(struct ht_fuse *f, uint64_t ino)
{
    struct ht_passthrough_file *e = ht_passthrough_file_find(f, ino);

    if (e)
        return e;
    e = calloc(1, sizeof(*e));
    if (!e)
        return NULL;
    e->ino = ino;
    ht_list_init(&e->closed_link);
    ht_list_add_tail(bucket(f, ino), &e->link);
    return e;
}

struct ht_passthrough_file *ht_passthrough_file_enter(struct ht_fuse *f, uint64_t ino, unsigned more)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *e = ht_passthrough_file_get(f, ino);
    if (e) {
        e->waiting++;
        while (e->busy)
            ht_cond_wait(&f->passthrough.idle, ht_fuse_passthrough_lock(f));
        e->waiting--;
        e->busy = true;
        e->others = e->opens;
        e->opens += more;
        if (more)
            ht_list_del(&e->closed_link);
    }
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    return e;
}

void ht_passthrough_file_free_if_unused(struct ht_passthrough_file *e)
{
    if (e->opens || e->waiting || e->lookups || e->busy || e->active)
        return;
    ht_list_del(&e->link);
    free(e->name);
    free(e);
}

/* No other FORGET follows. */
static void forget_file(struct ht_fuse *f, struct ht_passthrough_file *e) HT_REQUIRES(HT_LOCK_PASSTHROUGH)
{
    bool closed = e->active && !e->opens;

    e->forgotten = false;
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    if (closed && !ht_ns_known(f->ns, e->ino))
        ht_passthrough_file_deactivate(f, e);
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
}

void ht_passthrough_file_leave(struct ht_fuse *f, struct ht_passthrough_file *e)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    while (e->forgotten)
        forget_file(f, e);
    e->busy = false;
    pthread_cond_broadcast(&f->passthrough.idle);
    ht_passthrough_file_free_if_unused(e);
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
}

/* -------------------------------------------------------------------- open */

static bool has_value(struct ht_fuse *f, uint64_t ino, const char *name, const char *value)
{
    char is[8];
    ssize_t len = ht_ns_getxattr(f->ns, ino, name, is, sizeof(is));

    return len == (ssize_t)strlen(value) && memcmp(is, value, (size_t)len) == 0;
}

static bool owns(struct ht_fuse *f, uint64_t ino, uint32_t user)
{
    struct stat st;

    return ht_ns_getattr(f->ns, ino, &st) == 0 && st.st_uid == user;
}

/* O_ASYNC (HT_OPEN_PASSED) changes what others may do: who may set the attribute or owns the mount is heard. */
static bool asks(struct ht_fuse *f, uint64_t ino, int flags, uint32_t user)
{
    if (flags & HT_OPEN_PASSED && (!user || owns(f, ino, user) || owns(f, HT_NS_ROOT_INO, user)))
        return true;
    return has_value(f, ino, HT_XATTR_PREFIX "passthrough", "on");
}

bool ht_passthrough_may_be(struct ht_fuse *f, uint64_t ino, int flags, uint32_t user)
{
    return f->passthrough.share_bytes && (!f->passthrough.lent || asks(f, ino, flags, user));
}

static bool wanted(struct ht_fuse *f, const struct ht_passthrough_file *e, struct ht_obj *obj, int flags, bool asked)
{
    const struct ht_passthrough_case c = {
        .parameter = ht_ctl_param(f->ctl, e->ino) != 0,
        .pinned = has_value(f, e->ino, HT_XATTR_PREFIX "pin", "dram"),
        .direct = flags & O_DIRECT,
        .asked = asked,
        .lent = f->passthrough.lent,
        .frozen = ht_ns_is_frozen(f->ns, e->ino),
        .bytes = ht_obj_size(obj),
        .opens = e->others,
    };

    return ht_passthrough_wanted(&c);
}

/* Files that were closed a moment ago make room, unless it is larger than all of the share. */
static int open_memory(struct ht_fuse *f, struct ht_obj *obj, uint32_t user, int *out_fd)
{
    int rc;

    if (ht_obj_size(obj) > f->passthrough.share_bytes)
        return -ENOSPC;
    do {
        rc = ht_obj_shm_open_for(obj, user, out_fd);
    } while ((rc == -ENOSPC && ht_passthrough_closed_end_one(f, NULL)) ||
             (rc == -EDQUOT && ht_passthrough_closed_end_one(f, &user)));
    return rc;
}

int ht_passthrough_file_begin(fuse_req_t req, struct ht_passthrough_file *e, struct ht_obj *obj, bool stores)
{
    struct ht_fuse *f = ht_fuse_of(req);
    uint32_t user = fuse_req_ctx(req)->uid;
    int fd, rc = f->passthrough.on ? open_memory(f, obj, user, &fd) : -EOPNOTSUPP;

    if (rc)
        return rc;
    rc = stores ? ht_obj_shm_expect_stores(obj) : 0;
    e->backing = rc ? 0 : fuse_passthrough_open(req, fd);
    if (rc == 0 && e->backing <= 0) {
        f->passthrough.on = false; /* it would go wrong each time */
        rc = -EOPNOTSUPP;
    }
    if (rc) {
        ht_obj_shm_close(obj);
        return rc;
    }
    e->obj = obj;
    e->user = user;
    e->fd = fd;
    e->active = true;
    e->stores = stores;
    return 0;
}

/* An opener that did not ask keeps the order of its reads with updates. */
static void use_memory(const struct ht_passthrough_file *e, struct fuse_file_info *fi, bool in_order)
{
    bool calls = fi->direct_io || (fi->flags & O_ACCMODE) != O_RDONLY || in_order;

    fi->backing_id = e->backing;
    fi->direct_io = calls;
    fi->parallel_direct_writes = calls;
}

static void trace(struct ht_fuse *f, const struct ht_open *o, enum ht_trace_op op, const struct ht_trace_mark *mark)
{
    ht_trace_end(ht_store_trace(f->store), mark, op, o->ino, 0, ht_obj_size(o->obj));
}

/* The first open of an active file, which was closed a moment ago, or is still mapped: is it to be as before? */
static void look_again(fuse_req_t req, struct ht_passthrough_file *e, struct ht_obj *obj,
                       const struct fuse_file_info *fi, bool asked)
{
    struct ht_fuse *f = ht_fuse_of(req);

    if (e->obj != obj || e->user != fuse_req_ctx(req)->uid || !wanted(f, e, obj, fi->flags, asked))
        (void)ht_passthrough_file_end(f, e);
    else if (e->stores && !ht_passthrough_may_store(fi->flags) && ht_passthrough_file_is_free(f, e)) {
        ht_obj_shm_expect_no_stores(e->obj);
        e->stores = false;
    }
}

int ht_passthrough_open(fuse_req_t req, struct ht_open *o, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    bool stores = ht_passthrough_may_store(fi->flags);
    struct ht_trace_mark mark = ht_trace_begin();
    int rc = 0;

    if (!f->passthrough.share_bytes)
        return 0;
    struct ht_passthrough_file *e = ht_passthrough_file_enter(f, o->ino, 1);
    if (!e)
        return -ENOMEM;
    o->passthrough = e;
    bool asked = asks(f, o->ino, fi->flags, fuse_req_ctx(req)->uid);
    if (e->active && !e->others)
        look_again(req, e, o->obj, fi, asked);
    if (!e->active && wanted(f, e, o->obj, fi->flags, asked) && ht_passthrough_file_begin(req, e, o->obj, stores))
        f->traffic->passthrough_fallbacks++;
    if (e->active && stores && !e->stores) {
        rc = ht_obj_shm_expect_stores(e->obj);
        e->stores = rc == 0;
        if (rc && ht_passthrough_file_end(f, e)) { /* nobody has it: as if this were the first open */
            f->traffic->passthrough_fallbacks++;
            rc = 0;
        }
    }
    if (e->active && rc == 0) {
        use_memory(e, fi, f->passthrough.lent && !asked);
        f->traffic->passthrough_opens++;
        trace(f, o, HT_TRACE_OPEN, &mark);
    }
    ht_passthrough_file_leave(f, e);
    return rc;
}

/* The entry of a file that is not active; busy, so that it stays so. */
static struct ht_passthrough_file *take_ordinary(struct ht_fuse *f, uint64_t ino)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *e = ht_passthrough_file_get(f, ino);
    if (e && (e->busy || e->active))
        e = NULL;
    if (e) {
        e->busy = true;
        e->others = e->opens;
    }
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    return e;
}

bool ht_passthrough_prefetch(void *fuse, uint64_t ino, struct ht_obj *obj)
{
    struct ht_fuse *f = fuse;
    struct ht_passthrough_file *e = f->passthrough.on ? take_ordinary(f, ino) : NULL;
    int fd;

    if (!e)
        return false;
    bool done = wanted(f, e, obj, 0, asks(f, ino, 0, 0)) && open_memory(f, obj, 0, &fd) == 0;
    if (done)
        ht_obj_shm_close(obj);
    ht_passthrough_file_leave(f, e);
    return done;
}

bool ht_passthrough_is_active(const struct ht_open *o)
{
    return o->passthrough && o->passthrough->active;
}

bool ht_passthrough_has(struct ht_fuse *f, uint64_t ino)
{
    struct ht_passthrough_file *e = f->passthrough.share_bytes ? ht_passthrough_file_enter(f, ino, 0) : NULL;
    bool active = e && e->active;

    if (e)
        ht_passthrough_file_leave(f, e);
    return active;
}

/* ------------------------------------------------------------ close, forget */

static void job_drop_names(struct ht_job *job)
{
    struct ht_ctl_cache *cache = &job->fuse->cache;
    char name[HT_NAME_BYTES_MAX + 1];
    uint64_t parent;

    for (unsigned i = 0; ht_ns_link_at(job->fuse->ns, job->ino, i, &parent, name); i++)
        cache->drop_name(cache->ctx, parent, name);
}

static void submit_drop(struct ht_fuse *f, uint64_t ino, void (*drop)(struct ht_job *job))
{
    struct ht_job *job = ht_job_new(f, NULL, drop);

    if (!job)
        return;
    job->ino = ino;
    ht_job_submit(job, HT_LANE_NAMES, ht_job_key(f, ino));
}

void ht_passthrough_drop_names(struct ht_fuse *f, uint64_t ino)
{
    if (f->mounted)
        submit_drop(f, ino, job_drop_names);
}

void ht_passthrough_file_close(struct ht_fuse *f, struct ht_passthrough_file *e, bool stays,
                               void (*drop)(struct ht_job *job))
{
    uint64_t ino = e->ino;

    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    e->opens--;
    bool last = !e->opens && e->active && f->mounted;
    bool keep = last && stays && f->passthrough.keeps_closed;
    if (keep)
        ht_passthrough_closed_add(f, e);
    ht_passthrough_file_free_if_unused(e);
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    if (last && !keep)
        submit_drop(f, ino, drop);
}

void ht_passthrough_close(struct ht_fuse *f, struct ht_open *o)
{
    struct ht_trace_mark mark = ht_trace_begin();

    if (!o->passthrough)
        return;
    if (ht_passthrough_is_active(o))
        trace(f, o, HT_TRACE_CLOSE, &mark);
    ht_passthrough_file_close(f, o->passthrough, true, job_drop_names);
}

/* No open is left. If the file is active, the caller takes the entry. */
static struct ht_passthrough_file *take_closed(struct ht_fuse *f, uint64_t ino)
{
    ht_mutex_lock(ht_fuse_passthrough_lock(f));
    struct ht_passthrough_file *e = ht_passthrough_file_find(f, ino);
    if (e && e->busy)
        e->forgotten = true; /* its owner looks at that */
    if (e && (e->busy || e->opens || !e->active))
        e = NULL;
    if (e)
        e->busy = true;
    ht_mutex_unlock(ht_fuse_passthrough_lock(f));
    return e;
}

void ht_passthrough_forget(fuse_req_t req, uint64_t ino)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_passthrough_file *e = f->passthrough.share_bytes ? take_closed(f, ino) : NULL;

    if (!e)
        return;
    if (!ht_ns_known(f->ns, ino))
        ht_passthrough_file_deactivate(f, e);
    ht_passthrough_file_leave(f, e);
}

/* -------------------------------------------------------------------- size */

/*
 * A file without opens is ordinary then, unless a mapping is left. If the kernel does not say whether one is, the file
 * is refused, too, and the names that the job drops may be all that keeps the pages: the next call succeeds.
 */
int ht_passthrough_resize_begin(struct ht_fuse *f, uint64_t ino, uint64_t bytes, struct ht_passthrough_file **out)
{
    struct ht_passthrough_file *e = f->passthrough.share_bytes ? ht_passthrough_file_enter(f, ino, 0) : NULL;
    struct stat st;

    *out = NULL;
    if (!e)
        return f->passthrough.share_bytes ? -ENOMEM : 0;
    (void)ht_passthrough_file_end(f, e);
    int rc = ht_ns_getattr(f->ns, ino, &st);
    if (rc == 0 && !ht_passthrough_may_resize(e->active && e->stores, (uint64_t)st.st_size, bytes))
        rc = -EBUSY;
    if (rc == -EBUSY && !e->others)
        submit_drop(f, ino, job_drop_names);
    if (rc)
        ht_passthrough_file_leave(f, e);
    else
        *out = e;
    return rc;
}

void ht_passthrough_resize_end(struct ht_fuse *f, struct ht_passthrough_file *e)
{
    if (e)
        ht_passthrough_file_leave(f, e);
}

/* -------------------------------------------------------------------- life */

static bool is_permitted(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];

    return syscall(SYS_capget, &head, data) == 0 && (data[0].effective >> CAP_SYS_ADMIN & 1);
}

/* Linux 6.9 */
static bool is_in_kernel(void)
{
    struct utsname u;
    unsigned major, minor;

    return uname(&u) == 0 && sscanf(u.release, "%u.%u", &major, &minor) == 2 && major * 1000 + minor >= 6009;
}

bool ht_fuse_may_pass(void)
{
    return is_permitted() && is_in_kernel();
}

void ht_passthrough_init(struct ht_fuse *f)
{
    struct ht_store_stats st;

    ht_mutex_init(&f->passthrough.lock, HT_LOCK_PASSTHROUGH);
    pthread_cond_init(&f->passthrough.idle, NULL);
    ht_cond_init(&f->passthrough.closed_changed);
    ht_list_init(&f->passthrough.closed);
    ht_list_init(&f->passthrough.mapped);
    for (unsigned i = 0; i < HT_PASSTHROUGH_BUCKETS; i++)
        ht_list_init(&f->passthrough.files[i]);
    ht_store_stats(f->store, &st);
    f->passthrough.share_bytes = st.shm_bytes_max;
    f->passthrough.lent = st.shm_bytes_max > st.shm_bytes;
}

void ht_passthrough_negotiate(struct ht_fuse *f, struct fuse_conn_info *conn)
{
    if (!f->passthrough.share_bytes)
        return;
    if (!is_permitted()) {
        ht_info("passthrough is off: the daemon lacks CAP_SYS_ADMIN (mount as root)");
        return;
    }
    f->passthrough.on = fuse_set_feature_flag(conn, FUSE_CAP_PASSTHROUGH);
    if (!f->passthrough.on && f->passthrough.lent) {
        f->passthrough.share_bytes = 0; /* nobody named it */
        return;
    }
    if (!f->passthrough.on) {
        ht_info("passthrough is off: this kernel has none (Linux 6.9 with CONFIG_FUSE_PASSTHROUGH)");
        return;
    }
    conn->max_backing_stack_depth = 0; /* memory is on no other file system, and the mount may be a layer of one */
    ht_passthrough_closed_start(f);
}

void ht_passthrough_finish(struct ht_fuse *f)
{
    HT_UNSHARED(HT_LOCK_PASSTHROUGH);
    for (unsigned i = 0; i < HT_PASSTHROUGH_BUCKETS; i++) {
        ht_list_for_each_entry_safe(e, &f->passthrough.files[i], struct ht_passthrough_file, link) {
            if (e->active)
                ht_obj_shm_close(e->obj);
            if (e->active && ht_hidden_match(e->ino))
                ht_obj_put(e->obj); /* a window: gone with the mount */
            ht_list_del(&e->closed_link);
            ht_list_del(&e->link);
            free(e->name);
            free(e);
        }
    }
}
