/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout.c - files whose pages the kernel has: passthrough to the memory of their images.
 *
 * Readers read that memory without a request. Writers' calls come here as ever (direct I/O), and show in it at once. Mappings are of the
 * memory itself, so a trainer has the very pages that updates go into.
 *
 *   ordinary --first open, wanted, possible--> out --FORGET--> ordinary
 *
 * The kernel refuses to mix: while one open of an inode is passed through all must be, to the same memory. A mapping lives on after
 * RELEASE, and keeps the inode: only FORGET says that nobody has the pages any more. After the last RELEASE it is provoked by
 * dropping the file's names from the kernel's cache.
 *
 * Whatever is in the way (no privilege, an old kernel, the share of memory used up, bytes that cannot be read), the file is
 * opened in the ordinary way, and that is counted.
 *
 * Lock: handout.lock, a leaf. An entry that is busy belongs to one thread, which may wait for I/O; other openers of the
 * same file wait for it.
 */
#include "fs/fuse/handout_policy.h"
#include "fs/fuse/handout_priv.h"

#include <linux/capability.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ------------------------------------------------------------------- table */

static struct ht_list *bucket(struct ht_fuse *f, uint64_t ino)
{
    return &f->handout.files[ino * 0x9e3779b97f4a7c15ull >> 56];
}
static_assert(HT_HANDOUT_BUCKETS == 256, "eight bits");

struct ht_handed_file *ht_handed_find(struct ht_fuse *f, uint64_t ino)
{
    ht_list_for_each(p, bucket(f, ino)) {
        struct ht_handed_file *e = ht_list_entry(p, struct ht_handed_file, link);

        if (e->ino == ino)
            return e;
    }
    return NULL;
}

struct ht_handed_file *ht_handed_make(struct ht_fuse *f, uint64_t ino)
{
    struct ht_handed_file *e = calloc(1, sizeof(*e));

    if (!e)
        return NULL;
    e->ino = ino;
    ht_list_add_tail(bucket(f, ino), &e->link);
    return e;
}

struct ht_handed_file *ht_handed_enter(struct ht_fuse *f, uint64_t ino)
{
    struct ht_handed_file *e;

    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, ino);
    if (!e)
        e = ht_handed_make(f, ino);
    if (e) {
        e->waiting++;
        while (e->busy)
            ht_cond_wait(&f->handout.idle, &f->handout.lock);
        e->waiting--;
        e->busy = true;
        e->others = e->opens++;
    }
    ht_mutex_unlock(&f->handout.lock);
    return e;
}

void ht_handed_free_if_unused(struct ht_handed_file *e)
{
    if (e->opens || e->waiting || e->lookups || e->out || e->busy)
        return;
    ht_list_del(&e->link);
    free(e->name);
    free(e);
}

void ht_handed_leave(struct ht_fuse *f, struct ht_handed_file *e)
{
    ht_mutex_lock(&f->handout.lock);
    e->busy = false;
    pthread_cond_broadcast(&f->handout.idle);
    ht_handed_free_if_unused(e);
    ht_mutex_unlock(&f->handout.lock);
}

/* -------------------------------------------------------------------- open */

static bool is_pinned(struct ht_fuse *f, uint64_t ino)
{
    char value[8];

    return ht_ns_getxattr(f->ns, ino, HT_XATTR_PREFIX "pin", value, sizeof(value)) == 4 && !memcmp(value, "dram", 4);
}

static bool wanted(struct ht_fuse *f, const struct ht_handed_file *e, struct ht_obj *obj, bool direct)
{
    const struct ht_handout_case c = {
        .parameter = ht_ctl_param(f->ctl, e->ino) != 0,
        .pinned = is_pinned(f, e->ino),
        .direct = direct,
        .bytes = ht_obj_size(obj),
        .opens = e->others,
    };

    return ht_handout_wanted(&c);
}

int ht_handed_pass(fuse_req_t req, struct ht_handed_file *e, struct ht_obj *obj, bool stores)
{
    struct ht_fuse *f = ht_fuse_of(req);
    int fd, r = f->handout.on ? ht_obj_hand_out_to(obj, fuse_req_ctx(req)->uid, &fd) : -EOPNOTSUPP;

    if (r)
        return r;
    r = stores ? ht_obj_expect_stores(obj) : 0;
    e->backing = r ? 0 : fuse_passthrough_open(req, fd);
    if (r == 0 && e->backing <= 0) {
        f->handout.on = false; /* it would go wrong each time */
        r = -EOPNOTSUPP;
    }
    if (r) {
        ht_obj_hand_back(obj);
        return r;
    }
    e->obj = obj;
    e->fd = fd;
    e->out = true;
    e->stores = stores;
    return 0;
}

static void use_memory(const struct ht_handed_file *e, struct fuse_file_info *fi)
{
    bool calls = fi->direct_io || (fi->flags & O_ACCMODE) != O_RDONLY;

    fi->backing_id = e->backing;
    fi->direct_io = calls;
    fi->parallel_direct_writes = calls;
}

int ht_handout_open(fuse_req_t req, struct ht_open *o, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    bool stores = ht_handout_may_store(fi->flags);
    struct ht_handed_file *e;
    int r = 0;

    if (!f->handout.share_bytes)
        return 0;
    e = ht_handed_enter(f, o->ino);
    if (!e)
        return -ENOMEM;
    o->handed = e;
    if (!e->out && wanted(f, e, o->obj, fi->direct_io) && ht_handed_pass(req, e, o->obj, stores))
        f->traffic->handout_fallbacks++;
    if (e->out && stores && !e->stores) {
        r = ht_obj_expect_stores(e->obj);
        e->stores = r == 0;
    }
    if (e->out && r == 0) {
        use_memory(e, fi);
        f->traffic->handed_opens++;
    }
    ht_handed_leave(f, e);
    return r;
}

/* The entry of a file that is not out; busy, so that it stays so. */
static struct ht_handed_file *take_ordinary(struct ht_fuse *f, uint64_t ino)
{
    struct ht_handed_file *e;

    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, ino);
    if (!e)
        e = ht_handed_make(f, ino);
    if (e && (e->out || e->busy))
        e = NULL;
    if (e) {
        e->busy = true;
        e->others = e->opens;
    }
    ht_mutex_unlock(&f->handout.lock);
    return e;
}

bool ht_handout_bring(void *fuse, uint64_t ino, struct ht_obj *obj)
{
    struct ht_fuse *f = fuse;
    struct ht_handed_file *e = f->handout.on ? take_ordinary(f, ino) : NULL;
    bool done;
    int fd;

    if (!e)
        return false;
    done = wanted(f, e, obj, false) && ht_obj_hand_out(obj, &fd) == 0;
    if (done)
        ht_obj_hand_back(obj);
    ht_handed_leave(f, e);
    return done;
}

bool ht_handout_is_out(const struct ht_open *o)
{
    return o->handed && o->handed->out;
}

/* ------------------------------------------------------------ close, forget */

/* The kernel forgets an inode that nobody uses when it has no name for it. */
static void job_drop_names(struct ht_job *job)
{
    struct ht_ctl_cache *cache = &job->fuse->cache;
    char name[HT_NAME_BYTES_MAX + 1];
    uint64_t parent;

    for (unsigned i = 0; ht_ns_link_at(job->fuse->ns, job->ino, i, &parent, name); i++)
        cache->drop_name(cache->ctx, parent, name);
}

void ht_handed_close(struct ht_fuse *f, struct ht_handed_file *e, void (*drop_names)(struct ht_job *job))
{
    uint64_t ino = e->ino;
    struct ht_job *job;
    bool provoke;

    ht_mutex_lock(&f->handout.lock);
    e->opens--;
    provoke = e->out && !e->opens && f->mounted;
    ht_handed_free_if_unused(e);
    ht_mutex_unlock(&f->handout.lock);
    job = provoke ? ht_job_new(f, NULL, drop_names) : NULL;
    if (!job)
        return;
    job->ino = ino;
    ht_job_submit(job, HT_LANE_NAMES, ht_job_key(f, ino));
}

void ht_handout_close(struct ht_fuse *f, struct ht_open *o)
{
    if (o->handed)
        ht_handed_close(f, o->handed, job_drop_names);
}

/* Nobody has it open: is it out? Then the entry is the caller's. */
static struct ht_handed_file *take_closed(struct ht_fuse *f, uint64_t ino)
{
    struct ht_handed_file *e;

    ht_mutex_lock(&f->handout.lock);
    e = ht_handed_find(f, ino);
    if (e && (!e->out || e->opens || e->busy))
        e = NULL;
    if (e)
        e->busy = true;
    ht_mutex_unlock(&f->handout.lock);
    return e;
}

void ht_handout_forget(fuse_req_t req, uint64_t ino)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_handed_file *e = f->handout.share_bytes ? take_closed(f, ino) : NULL;

    if (!e)
        return;
    if (!ht_ns_known(f->ns, ino)) {
        fuse_passthrough_close(req, e->backing);
        ht_obj_hand_back(e->obj);
        e->out = e->stores = false;
    }
    ht_handed_leave(f, e);
}

/* -------------------------------------------------------------------- life */

static bool is_permitted(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];

    return syscall(SYS_capget, &head, data) == 0 && (data[0].effective >> CAP_SYS_ADMIN & 1);
}

void ht_handout_init(struct ht_fuse *f)
{
    struct ht_store_stats st;

    ht_mutex_init(&f->handout.lock, HT_LOCK_HANDOUT);
    pthread_cond_init(&f->handout.idle, NULL);
    for (unsigned i = 0; i < HT_HANDOUT_BUCKETS; i++)
        ht_list_init(&f->handout.files[i]);
    ht_store_stats(f->store, &st);
    f->handout.share_bytes = st.handout_bytes;
}

void ht_handout_agree(struct ht_fuse *f, struct fuse_conn_info *conn)
{
    if (!f->handout.share_bytes)
        return;
    f->handout.on = is_permitted() && fuse_set_feature_flag(conn, FUSE_CAP_PASSTHROUGH);
    if (f->handout.on)
        conn->max_backing_stack_depth = 1;
    else
        ht_info("nothing is handed out: that needs Linux 6.9 and CAP_SYS_ADMIN");
}

void ht_handout_finish(struct ht_fuse *f)
{
    for (unsigned i = 0; i < HT_HANDOUT_BUCKETS; i++) {
        ht_list_for_each_safe(p, next, &f->handout.files[i]) {
            struct ht_handed_file *e = ht_list_entry(p, struct ht_handed_file, link);

            if (e->out)
                ht_obj_hand_back(e->obj);
            if (e->out && ht_hidden_match(e->ino))
                ht_obj_put(e->obj); /* a window: gone with the mount */
            ht_list_del(&e->link);
            free(e->name);
            free(e);
        }
    }
}
