/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_dir.c - listing directories.
 *
 * Offsets that the kernel hands back: 1 after ".", 2 after "..", then the cookies of fs/ns (or places in a hidden
 * listing, from 1) plus 2.
 *
 * A walk ends at the cookie that was the directory's highest when it began: a renamed entry gets a higher one, and who
 * renames what it lists would never come to an end. So two walks of one directory may list different things, and the
 * kernel must not make one kept listing of both. Who opens a directory that an older walk still has open takes no part in the
 * kept listing; and the kernel's is dropped when a walk closes that left something out.
 *
 * Locks: open_lock for the list of open directories.
 */
#include "fs/fuse/fuse_priv.h"

#include <stdlib.h>

enum { AFTER_DOT = 1, AFTER_DOTS = 2 };

struct open_dir {
    struct ht_list link; /* in fuse.open_dirs */
    uint64_t ino;
    _Atomic uint64_t last; /* cookie that its walk ends with */
    _Atomic bool left_out; /* there were higher ones */
};

struct listing {
    struct ht_fuse *fuse;
    struct open_dir *dir; /* NULL: hidden */
    fuse_req_t req;
    char *buf;
    size_t len, cap;
    bool plus;
};

/* False: full. st is complete when the entry is to be counted as looked up, else only type and number. */
static bool append(struct listing *l, const char *name, const struct stat *st, bool counted, uint64_t off)
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

static size_t room_for(const struct listing *l, const char *name)
{
    return l->plus ? fuse_add_direntry_plus(l->req, NULL, 0, name, NULL, 0)
                   : fuse_add_direntry(l->req, NULL, 0, name, NULL, 0);
}

static int add_entry(void *ctx, const struct ht_ns_dirent *e)
{
    struct listing *l = ctx;
    struct stat st = {.st_ino = e->ino, .st_mode = e->type};
    bool counted = false;

    if (e->cookie > l->dir->last) {
        l->dir->left_out = true;
        return 1;
    }
    /* Room first: a count that the kernel never hears of would never be given back. */
    if (room_for(l, e->name) > l->cap - l->len)
        return 1;
    if (l->plus)
        counted = ht_ns_getattr_locked(l->fuse->ns, e->ino, true, &st) == 0;
    return append(l, e->name, &st, counted, e->cookie + AFTER_DOTS) ? 0 : 1;
}

static bool add_dots(struct listing *l, uint64_t dir, uint64_t off)
{
    struct stat here = {.st_ino = dir, .st_mode = S_IFDIR};
    struct stat up = here;

    if (!ht_hidden_match(dir))
        up.st_ino = ht_ns_parent(l->fuse->ns, dir);
    if (off < AFTER_DOT && !append(l, ".", &here, false, AFTER_DOT))
        return false;
    return off >= AFTER_DOTS || append(l, "..", &up, false, AFTER_DOTS);
}

static void add_hidden(struct listing *l, const struct ht_hidden_dir *d, uint64_t at)
{
    const char *name;
    struct stat st;

    for (; ht_hidden_entry(d, at, &name, &st); at++)
        if (!append(l, name, &st, false, at + 1 + AFTER_DOTS))
            return;
}

static void list(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi, bool plus)
{
    struct ht_fuse *f = ht_fuse_of(req);
    bool hidden = ht_hidden_match(ino);
    struct listing l = {.fuse = f,
                        .dir = hidden ? NULL : (struct open_dir *)(uintptr_t)fi->fh,
                        .req = req,
                        .buf = ht_fuse_buffer(),
                        .cap = ht_min_u64(size, HT_FUSE_IO_BYTES),
                        .plus = plus};
    uint64_t at = (uint64_t)off;
    int r = 0;

    if (!l.buf) {
        fuse_reply_err(req, ENOMEM);
        return;
    }
    if (!hidden)
        ht_atime_touch(f, ino, true);
    if (!hidden && at == 0)
        l.dir->last = ht_ns_dir_last(f->ns, ino);
    if (at >= AFTER_DOTS || add_dots(&l, ino, at)) {
        at = at > AFTER_DOTS ? at - AFTER_DOTS : 0;
        if (hidden)
            add_hidden(&l, (const struct ht_hidden_dir *)(uintptr_t)fi->fh, at);
        else
            r = ht_ns_readdir(f->ns, ino, at, add_entry, &l);
    }
    if (r < 0 && l.len == 0)
        ht_reply(req, r);
    else
        fuse_reply_buf(req, l.buf, l.len);
}

void ht_op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
    list(req, ino, size, off, fi, false);
}

void ht_op_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
    list(req, ino, size, off, fi, true);
}

/* ------------------------------------------------------------- open, close */

static void open_hidden(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_caller caller = ht_fuse_caller(req);
    struct ht_hidden_dir *d;
    int r = ht_hidden_opendir(ht_fuse_of(req)->ctl, ino, &caller, &d);

    if (r) {
        ht_reply(req, r);
        return;
    }
    fi->fh = (uintptr_t)d;
    if (fuse_reply_open(req, fi))
        ht_hidden_closedir(d);
}

/* Into the list. False: somebody has the directory open whose walk ends earlier. */
static bool enlist(struct ht_fuse *f, struct open_dir *d)
{
    bool alike = true;

    ht_mutex_lock(&f->open_lock);
    ht_list_for_each(l, &f->open_dirs) {
        const struct open_dir *other = ht_list_entry(l, struct open_dir, link);

        alike = alike && (other->ino != d->ino || other->last >= d->last);
    }
    ht_list_add_tail(&f->open_dirs, &d->link);
    ht_mutex_unlock(&f->open_lock);
    return alike;
}

static void close_dir(struct ht_fuse *f, struct open_dir *d)
{
    ht_mutex_lock(&f->open_lock);
    ht_list_del(&d->link);
    ht_mutex_unlock(&f->open_lock);
    free(d);
}

void ht_op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct open_dir *d;

    if (ht_hidden_match(ino)) {
        open_hidden(req, ino, fi);
        return;
    }
    d = calloc(1, sizeof(*d));
    if (!d) {
        fuse_reply_err(req, ENOMEM);
        return;
    }
    d->ino = ino;
    d->last = ht_ns_dir_last(f->ns, ino);
    fi->fh = (uintptr_t)d;
    /*
     * The kernel may keep the listing: it drops it with the next name that is made or removed. It is told anew when the
     * read counts as an access, and when it does not know what is listed: that brings the attributes along, which
     * it would ask for one by one.
     */
    fi->cache_readdir = enlist(f, d);
    fi->keep_cache = !ht_atime_due(f, ino, true) && ht_ns_entries_known(f->ns, ino);
    if (fuse_reply_open(req, fi))
        close_dir(f, d);
}

/* Listed until the kernel has dropped what this walk may have given it. */
static void job_close(struct ht_job *job)
{
    struct ht_fuse *f = job->fuse;

    f->cache.drop_data(f, job->ino, 0, 0);
    close_dir(f, job->dir);
    fuse_reply_err(job->req, 0);
}

void ht_op_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct open_dir *d = (struct open_dir *)(uintptr_t)fi->fh;
    struct ht_job *job;

    if (ht_hidden_match(ino)) {
        ht_hidden_closedir((struct ht_hidden_dir *)(uintptr_t)fi->fh);
    } else if (d->left_out) {
        job = ht_job_new(f, req, job_close);
        if (!job)
            return; /* stays listed: the directory's listing is not kept any more */
        job->ino = ino;
        job->dir = d;
        ht_job_submit(job, HT_LANE_TALK, ino);
        return;
    } else {
        close_dir(f, d);
    }
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

    if (ht_hidden_match(ino)) {
        fuse_reply_err(req, 0);
        return;
    }
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
