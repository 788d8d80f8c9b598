/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_dir.c - listing directories, and making them durable: that of a model commits it.
 *
 * Offsets that the kernel hands back: 1 after ".", 2 after "..", then the cookies of fs/ns (or places in a hidden
 * listing, from 1) plus 2.
 *
 * A walk ends at the cookie that was the directory's highest when it began: a renamed entry gets a higher one, and a
 * program that renames the entries it lists would never finish. So two walks of one directory may list different
 * things, and the kernel must not merge both into one kept listing. An open takes no part in the kept listing while an
 * older walk of the directory is still open. When a walk that left something out closes, the kernel's listing is
 * dropped.
 *
 * Locks: open_lock for the list of open directories.
 */
#include "fs/fuse/fuse_priv.h"

enum { AFTER_DOT = 1, AFTER_DOTS = 2 };

struct open_dir {
    struct ht_list link; /* in fuse.open_dirs */
    uint64_t ino;
    _Atomic uint64_t last; /* cookie that its walk ends with */
    _Atomic bool left_out; /* there were higher ones */
    bool quiet;            /* opened with O_NOATIME */
};

static struct open_dir *open_dir_of(const struct fuse_file_info *fi)
{
    return (struct open_dir *)(uintptr_t)fi->fh;
}

static struct ht_hidden_dir *hidden_dir_of(const struct fuse_file_info *fi)
{
    return (struct ht_hidden_dir *)(uintptr_t)fi->fh;
}

struct listing {
    struct ht_fuse *fuse;
    struct open_dir *dir; /* of the store */
    fuse_req_t req;
    char *buf;
    size_t len, cap;
    bool plus;
};

/* False: no memory; req was answered. */
static bool begin_listing(struct listing *l, fuse_req_t req, size_t size, bool plus)
{
    *l = (struct listing){.fuse = ht_fuse_of(req),
                          .req = req,
                          .buf = ht_fuse_buffer(),
                          .cap = ht_min_u64(size, HT_FUSE_IO_BYTES),
                          .plus = plus};
    if (!l->buf)
        fuse_reply_err(req, ENOMEM);
    return l->buf;
}

/* False: full. st is complete when the entry is to be counted as looked up, else only type and number. */
static bool append_entry(struct listing *l, const char *name, const struct stat *st, bool counted, uint64_t off)
{
    size_t left = l->cap - l->len, need;

    if (l->plus) {
        struct fuse_entry_param e = {.attr = *st};
        if (counted)
            ht_fuse_entry_of(st, &e);
        need = fuse_add_direntry_plus(l->req, l->buf + l->len, left, name, &e, (off_t)off);
    } else {
        need = fuse_add_direntry(l->req, l->buf + l->len, left, name, st, (off_t)off);
    }
    if (need > left)
        return false;
    l->len += need;
    return true;
}

static int add_entry(void *ctx, const struct ht_ns_dirent *e) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct listing *l = ctx;
    struct stat st = {.st_ino = e->ino, .st_mode = e->type};
    bool counted = false;

    if (e->cookie > l->dir->last) {
        l->dir->left_out = true;
        return 1;
    }
    /* Room first: the kernel would never give back a count that it does not know. */
    size_t need = l->plus ? fuse_add_direntry_plus(l->req, NULL, 0, e->name, NULL, 0)
                          : fuse_add_direntry(l->req, NULL, 0, e->name, NULL, 0);
    if (need > l->cap - l->len)
        return 1;
    if (l->plus)
        counted = ht_ns_getattr_locked(l->fuse->ns, e->ino, true, &st) == 0;
    return append_entry(l, e->name, &st, counted, e->cookie + AFTER_DOTS) ? 0 : 1;
}

/* A directory without parent is its own. */
static bool add_dots(struct listing *l, uint64_t dir, uint64_t off)
{
    uint64_t parent = ht_ns_parent(l->fuse->ns, dir);
    struct stat here = {.st_ino = dir, .st_mode = S_IFDIR};
    struct stat up = {.st_ino = parent ? parent : dir, .st_mode = S_IFDIR};

    if (off < AFTER_DOT && !append_entry(l, ".", &here, false, AFTER_DOT))
        return false;
    return off >= AFTER_DOTS || append_entry(l, "..", &up, false, AFTER_DOTS);
}

static uint64_t after_dots(uint64_t off)
{
    return off > AFTER_DOTS ? off - AFTER_DOTS : 0;
}

static void list_names(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi, bool plus)
{
    struct ht_fuse *f = ht_fuse_of(req);
    uint64_t at = (uint64_t)off;
    struct listing l;
    int rc = 0;

    if (!begin_listing(&l, req, size, plus))
        return;
    l.dir = open_dir_of(fi);
    if (!l.dir->quiet)
        ht_atime_touch(f, ino, true);
    if (at == 0)
        l.dir->last = ht_ns_dir_last(f->ns, ino);
    if (at >= AFTER_DOTS || add_dots(&l, ino, at))
        rc = ht_ns_readdir(f->ns, ino, after_dots(at), add_entry, &l);
    if (rc < 0 && l.len == 0)
        ht_reply(req, rc);
    else
        fuse_reply_buf(req, l.buf, l.len);
}

static void list_hidden(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi, bool plus)
{
    const struct ht_hidden_dir *d = hidden_dir_of(fi);
    uint64_t at = (uint64_t)off;
    const char *name;
    struct listing l;
    struct stat st;

    if (!begin_listing(&l, req, size, plus))
        return;
    bool room = at >= AFTER_DOTS || add_dots(&l, ino, at);
    for (uint64_t i = after_dots(at); room && ht_hidden_entry(d, i, &name, &st); i++)
        room = append_entry(&l, name, &st, false, i + 1 + AFTER_DOTS);
    fuse_reply_buf(req, l.buf, l.len);
}

void ht_op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
    (ht_hidden_match(ino) ? list_hidden : list_names)(req, ino, size, off, fi, false);
}

void ht_op_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
    (ht_hidden_match(ino) ? list_hidden : list_names)(req, ino, size, off, fi, true);
}

/* ------------------------------------------------------------- open, close */

void ht_hidden_op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_caller caller = ht_fuse_caller(req);
    struct ht_hidden_dir *d;
    int rc = ht_hidden_opendir(ht_fuse_of(req)->ctl, ino, &caller, &d);

    if (rc) {
        ht_reply(req, rc);
        return;
    }
    fi->fh = (uintptr_t)d;
    if (fuse_reply_open(req, fi))
        ht_hidden_closedir(d);
}

/* Adds d to the list. False: another open of the directory has a walk that ends earlier. */
static bool enlist(struct ht_fuse *f, struct open_dir *d)
{
    bool alike = true;

    ht_mutex_lock(ht_fuse_open_lock(f));
    ht_list_for_each_entry(other, &f->open_dirs, const struct open_dir, link)
        alike = alike && (other->ino != d->ino || other->last >= d->last);
    ht_list_add_tail(&f->open_dirs, &d->link);
    ht_mutex_unlock(ht_fuse_open_lock(f));
    return alike;
}

static void close_dir(struct ht_fuse *f, struct open_dir *d)
{
    ht_mutex_lock(ht_fuse_open_lock(f));
    ht_list_del(&d->link);
    ht_mutex_unlock(ht_fuse_open_lock(f));
    free(d);
}

void ht_op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct open_dir *d = calloc(1, sizeof(*d));

    if (!d) {
        fuse_reply_err(req, ENOMEM);
        return;
    }
    d->ino = ino;
    d->last = ht_ns_dir_last(f->ns, ino);
    d->quiet = (fi->flags & O_NOATIME) != 0;
    fi->fh = (uintptr_t)d;
    /*
     * The kernel may keep the listing: it drops it with the next name that is made or removed. It drops it at this open
     * if the read counts as an access, or if the kernel does not know the entries: a new listing brings their
     * attributes, which it would request one by one.
     */
    fi->cache_readdir = enlist(f, d);
    fi->keep_cache = (d->quiet || !ht_atime_due(f, ino, true)) && ht_ns_entries_known(f->ns, ino);
    if (fuse_reply_open(req, fi))
        close_dir(f, d);
}

/* Listed until the kernel has dropped the entries that this walk may have given it. */
static void job_close(struct ht_job *job)
{
    struct ht_fuse *f = job->fuse;

    f->cache.drop_data(f, job->ino, 0, 0);
    close_dir(f, job->dir);
    fuse_reply_err(job->req, 0);
}

void ht_op_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_job job = {.fn = job_close, .ino = ino, .dir = open_dir_of(fi), .key = ino};

    if (job.dir->left_out) { /* without memory it stays listed: no listing of the directory is kept any more */
        ht_job_run(req, HT_LANE_CTL_SESSION, &job);
        return;
    }
    close_dir(ht_fuse_of(req), job.dir);
    fuse_reply_err(req, 0);
}

void ht_hidden_op_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    ht_hidden_closedir(hidden_dir_of(fi));
    fuse_reply_err(req, 0);
}

void ht_open_dirs_free(struct ht_fuse *f)
{
    while (!ht_list_empty(&f->open_dirs))
        close_dir(f, ht_list_entry(f->open_dirs.next, struct open_dir, link));
}

/* ------------------------------------------------------------------ commit */

static void job_commit(struct ht_job *job)
{
    struct ht_caller caller = ht_fuse_caller(job->req);

    ht_reply(job->req, ht_ctl_commit(job->fuse->ctl, job->ino, &caller));
}

/* sync(2) does not reach a FUSE file system; fsync of the mount's root takes its place. */
static void job_commit_all(struct ht_job *job)
{
    ht_reply(job->req, ht_store_commit(job->fuse->store));
}

void ht_op_fsyncdir(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_caller caller = ht_fuse_caller(req);
    struct ht_job *job;

    if (ht_ctl_is_root(f->ctl, ino)) {
        job = ht_job_new(f, req, job_commit);
    } else if (ino == HT_NS_ROOT_INO) {
        job = ht_job_new(f, req, job_commit_all);
    } else {
        ht_reply(req, ht_ctl_fsync(f->ctl, ino, &caller));
        return;
    }
    if (!job)
        return;
    job->ino = ino;
    ht_job_submit(job, HT_LANE_TURN, ht_ctl_is_root(f->ctl, ino) ? ino : 0);
}
