/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_file.c - open files: reading, writing, making durable.
 *
 * An open with O_DIRECT gets direct, parallel I/O. Every other open goes through the kernel's page cache, without which
 * the kernel would refuse a shared mapping and cp would turn into small requests. Pages never outlive the last close
 * (no keep_cache), because an optimizer changes parameters without the kernel's knowledge. Passthrough files
 * (passthrough.c) have no such pages.
 */
#include "fs/fuse/fuse_priv.h"

#include <linux/falloc.h>
#include <unistd.h>

enum { COPY_BYTES_MAX = 256 << 20, LARGE_WRITE_BYTES = 512 << 10, AHEAD_BYTES_MAX = 16 << 20 };

static struct ht_open *open_of(const struct fuse_file_info *fi)
{
    return (struct ht_open *)(uintptr_t)fi->fh;
}

static void refresh(struct ht_fuse *f, struct ht_open *o)
{
    uint32_t now = ht_ctl_epoch(f->ctl);

    if (o->epoch == now)
        return;
    o->root = ht_ctl_param(f->ctl, o->ino);
    o->privileged = ht_privileged(f, o->ino);
    o->epoch = now;
}

/* Root of a parameter, or 0; cheap. */
static uint64_t root_of(struct ht_fuse *f, struct ht_open *o)
{
    refresh(f, o);
    return o->root;
}

/* Root's writes leave setuid and setgid bits. */
static void drop_privilege(fuse_req_t req, uint64_t ino)
{
    ht_privilege_drop(ht_fuse_of(req), ino, fuse_req_ctx(req)->uid == 0 ? 0 : ht_privilege_kills(req, ino));
}

static enum ht_traffic_kind traffic_of(struct ht_fuse *f, struct ht_open *o)
{
    return root_of(f, o) ? HT_TRAFFIC_PARAM : HT_TRAFFIC_OTHER;
}

/* -------------------------------------------------------------------- open */

static int truncate_on_open(fuse_req_t req, uint64_t ino)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_passthrough_file *resized;
    struct stat zero = {0}, st;

    int rc = ht_ctl_param(f->ctl, ino) ? ht_ctl_wait_updates(f->ctl, ino, 0, HT_FILE_BYTES_MAX) : 0;
    if (!rc)
        rc = ht_passthrough_resize_begin(f, ino, 0, &resized);
    if (rc)
        return rc;
    if (ht_privileged(f, ino))
        drop_privilege(req, ino);
    rc = ht_ns_setattr(f->ns, ino, HT_SET_SIZE | HT_SET_MTIME_NOW, &zero, &st);
    ht_passthrough_resize_end(f, resized);
    return rc;
}

static void drop_open(struct ht_fuse *f, struct ht_open *o)
{
    ht_passthrough_close(f, o);
    ht_obj_reader_end(&o->reader);
    ht_mutex_lock(ht_fuse_open_lock(f));
    ht_list_del(&o->link);
    ht_mutex_unlock(ht_fuse_open_lock(f));
    ht_ns_close(f->ns, o->ino);
    free(o);
}

static int open_object(fuse_req_t req, uint64_t ino, int flags, struct ht_obj **out)
{
    struct ht_fuse *f = ht_fuse_of(req);
    int rc = ht_ns_open(f->ns, ino, out);

    if (rc)
        return rc;
    if (ht_optim_readable(f->optim, ino, 0, 1, NULL) == -EIO) /* a passthrough file asks nobody afterwards */
        rc = -EIO;
    if (!rc && (flags & O_TRUNC))
        rc = truncate_on_open(req, ino);
    if (rc)
        ht_ns_close(f->ns, ino);
    return rc;
}

static int make_open(fuse_req_t req, uint64_t ino, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_open *o = calloc(1, sizeof(*o));

    if (((fi->flags & O_ACCMODE) != O_RDONLY || (fi->flags & O_TRUNC)) && ht_ns_is_frozen(f->ns, ino)) {
        free(o);
        return -EROFS;
    }
    if (!o)
        return -ENOMEM;
    o->ino = ino;
    o->stores = (fi->flags & O_ACCMODE) == O_RDWR;
    int rc = open_object(req, ino, fi->flags, &o->obj);
    if (rc) {
        free(o);
        return rc;
    }
    ht_mutex_lock(ht_fuse_open_lock(f));
    ht_list_add_tail(&f->opens, &o->link);
    ht_mutex_unlock(ht_fuse_open_lock(f));
    fi->fh = (uintptr_t)o;
    fi->keep_cache = 0;
    fi->direct_io = (fi->flags & O_DIRECT) != 0;
    fi->parallel_direct_writes = fi->direct_io;
    /* A reader has no lost write to report at close. */
    fi->noflush = (fi->flags & O_ACCMODE) == O_RDONLY;
    rc = ht_passthrough_open(req, o, fi);
    if (rc)
        drop_open(f, o);
    return rc;
}

void ht_open_close_all(struct ht_fuse *f)
{
    while (!ht_list_empty(&f->opens))
        drop_open(f, ht_list_entry(f->opens.next, struct ht_open, link));
}

/* Would the open truncate bytes whose update is queued, or show memory of a step before the last one? */
static bool open_waits(fuse_req_t req, uint64_t ino, const struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);

    if (ht_optim_replaying(f->optim, ino) &&
        (ht_passthrough_may_be(f, ino, fi->flags, fuse_req_ctx(req)->uid) || ht_passthrough_has(f, ino)))
        return true;
    return (fi->flags & O_TRUNC) && ht_job_waits_for_update(f, ino, 0, HT_FILE_BYTES_MAX);
}

static void open_now(fuse_req_t req, uint64_t ino, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    int rc = make_open(req, ino, fi);

    if (rc)
        ht_reply(req, rc);
    else if (fuse_reply_open(req, fi))
        drop_open(f, open_of(fi)); /* the request is gone */
}

static void job_open(struct ht_job *job)
{
    struct fuse_file_info fi = {.flags = job->flags};
    int rc = ht_ctl_wait_updates(job->fuse->ctl, job->ino, 0, HT_FILE_BYTES_MAX);

    if (rc)
        ht_reply(job->req, rc);
    else
        open_now(job->req, job->ino, &fi);
}

void ht_op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_job job = {.fn = job_open, .ino = ino, .flags = fi->flags, .may_end = true};

    if (open_waits(req, ino, fi))
        ht_job_run(req, HT_LANE_UPDATE, &job);
    else
        open_now(req, ino, fi);
}

/* Answers the creation of the inode in st, which holds a lookup count, or its failure (rc). */
static void reply_created(fuse_req_t req, int rc, const struct stat *st, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct fuse_entry_param e;

    if (rc == 0) {
        fi->flags &= ~O_TRUNC;
        rc = make_open(req, st->st_ino, fi);
        if (rc)
            ht_ns_forget(f->ns, st->st_ino, 1);
    }
    if (rc) {
        ht_reply(req, rc);
        return;
    }
    ht_fuse_entry_of(st, &e);
    if (fuse_reply_create(req, &e, fi)) {
        drop_open(f, open_of(fi));
        ht_ns_forget(f->ns, st->st_ino, 1);
    }
}

void ht_op_tmpfile(fuse_req_t req, fuse_ino_t parent, mode_t mode, struct fuse_file_info *fi)
{
    struct stat st;

    reply_created(req, ht_ns_tmpfile(ht_fuse_of(req)->ns, parent, mode & 07777, ht_fuse_cred(req), &st), &st, fi);
}

void ht_op_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi)
{
    struct stat st;
    int rc = ht_ns_mknod(ht_fuse_of(req)->ns, parent, name, S_IFREG | (mode & 07777), 0, ht_fuse_cred(req), &st);

    /*
     * An abort brought the name back after the kernel had looked it up. open() without O_EXCL does not fail for that:
     * with ESTALE the kernel looks the name up again, and checks the permissions of the file that is there.
     */
    if (rc == -EEXIST && !(fi->flags & O_EXCL))
        rc = -ESTALE;
    reply_created(req, rc, &st, fi);
}

void ht_op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    drop_open(ht_fuse_of(req), open_of(fi));
    fuse_reply_err(req, 0);
}

/* ---------------------------------------------------------- read and write */

struct ht_obj_reader *ht_open_reader(struct ht_open *o, uint64_t off, uint64_t len)
{
    uint64_t end = o->differs_to;

    return off < end && end - off < len + AHEAD_BYTES_MAX ? NULL : &o->reader;
}

static void job_read_background(struct ht_job *job)
{
    ht_background_reads(true);
    ht_reply_read(job->req, job->open->obj, NULL, job->off, job->size, traffic_of(job->fuse, job->open), 0);
    ht_background_reads(false);
    job->fuse->reads_behind--;
}

bool ht_read_behind(fuse_req_t req, struct ht_job *like)
{
    struct ht_fuse *f = ht_fuse_of(req);
    bool may_wait = f->reads_behind++ < HT_READS_BEHIND_MAX;

    if (!may_wait || !ht_job_run(req, HT_LANE_PAUSES, like))
        f->reads_behind--;
    return may_wait;
}

void ht_op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_open *o = open_of(fi);
    struct ht_job behind = {.fn = job_read_background, .ino = ino, .open = o, .off = (uint64_t)off, .size = size};

    if (!(fi->flags & O_NOATIME))
        ht_atime_touch(f, ino, false);
    if (o->background && (fi->flags & O_DIRECT) && ht_read_behind(req, &behind))
        return;
    if (root_of(f, o))
        ht_park_read(f, req, o, (uint64_t)off, size);
    else
        ht_reply_read(req, o->obj, ht_open_reader(o, (uint64_t)off, size), (uint64_t)off, size, HT_TRAFFIC_OTHER, 0);
}

/*
 * True: try again. again: this was such a try. least: with less space than that the call fails all the same. A commit
 * gives back what files that were closed a moment ago have reserved.
 */
static bool made_room(struct ht_fuse *f, int error, bool again, uint64_t least)
{
    if (error != -ENOSPC)
        return false;
    if (ht_lack())
        error = ht_lack_space(ht_max_u64(ht_lack(), least));
    again = again && !ht_passthrough_make_room(f, ht_lack());
    return ht_store_make_space(f->store, again) == 0;
}

/* whole: a part is of no use. *out_error: the reason for a short write. */
static ssize_t write_now(struct ht_fuse *f, struct ht_open *o, const char *buf, size_t size, uint64_t off, bool whole,
                         int *out_error)
{
    size_t done = 0;
    ssize_t n = 0;
    bool again = false;

    while (done < size) {
        n = ht_obj_write(o->obj, off + done, buf + done, size - done);
        done += n > 0 ? (size_t)n : 0;
        if (n <= 0 && !made_room(f, (int)n, again, whole ? size - done : 0))
            break;
        again = n <= 0;
    }
    *out_error = n < 0 ? (int)n : 0;
    ht_count_written(f, traffic_of(f, o), (ssize_t)done);
    if (done > 0)
        ht_ns_touch(f->ns, o->ino, true);
    return done > 0 ? (ssize_t)done : n;
}

/*
 * Pages that a mapping dirtied do not wait for an update: only `wait` orders them, and an invalidation may be waiting
 * for this very request. Nor does the daemon know which process dirtied them.
 */
static ssize_t write_pages(struct ht_fuse *f, struct ht_open *o, const char *buf, size_t size, uint64_t off,
                           int *out_error)
{
    f->page_writes++;
    f->page_write_ns = ht_now_ns();
    if (o->privileged)
        ht_privilege_drop(f, o->ino, 0);
    ssize_t n = write_now(f, o, buf, size, off, false, out_error);
    f->page_writes--;
    return *out_error ? *out_error : n; /* the kernel takes a part for the whole */
}

/*
 * The kernel makes EIO of a short answer to an asynchronous direct write, and the request does not say whether it is
 * one. So a direct write that fits in part fails as a whole, and the file is not longer than before: the next append
 * begins where this one did. Bytes inside the former size may have changed.
 */
static ssize_t write_direct(struct ht_fuse *f, struct ht_open *o, const char *buf, size_t size, uint64_t off,
                            int *out_error)
{
    uint64_t before = ht_max_u64(ht_obj_size(o->obj), off);

    /*
     * An empty file whose first write is direct and large is one that a framework swaps tensors through: it gets the
     * chunks of a tensor. A file that has content keeps its chunks.
     */
    if (size >= LARGE_WRITE_BYTES && ht_obj_size(o->obj) == 0)
        (void)!ht_obj_set_chunk_bytes(o->obj, ht_store_layout(f->store)->chunk_bytes);
    ssize_t n = write_now(f, o, buf, size, off, true, out_error);
    if (*out_error == 0 || n < 0)
        return n;
    (void)!ht_obj_ungrow(o->obj, before, off + (uint64_t)n);
    return *out_error;
}

/* A writer that calls write itself waits for a pending update of the bytes, and wins over it, or is interrupted. */
static ssize_t write_bytes(fuse_req_t req, struct ht_open *o, const char *buf, size_t size, uint64_t off, bool direct,
                           int *out_error)
{
    struct ht_fuse *f = ht_fuse_of(req);
    int rc = o->root ? ht_ctl_wait_updates(f->ctl, o->ino, off, size) : 0;

    *out_error = 0;
    if (rc)
        return rc;
    if (o->privileged)
        drop_privilege(req, o->ino);
    return direct ? write_direct(f, o, buf, size, off, out_error) : write_now(f, o, buf, size, off, false, out_error);
}

static void reply_written(fuse_req_t req, const struct ht_open *o, uint64_t off, size_t size, ssize_t n, int error,
                          bool pages, const struct ht_trace_mark *mark)
{
    if (n > 0)
        ht_trace_end(ht_store_trace(ht_fuse_of(req)->store), mark, HT_TRACE_WRITE, o->ino, off, (uint64_t)n);
    if (error)
        ht_ctl_write_failed(ht_fuse_of(req)->ctl, o->ino, off, size, error, pages);
    if (n < 0)
        fuse_reply_err(req, (int)-n);
    else
        fuse_reply_write(req, (size_t)n);
}

static void job_write(struct ht_job *job)
{
    struct ht_trace_mark mark = ht_trace_begin_at(job->request.began_ns);
    int error;
    ssize_t n = write_bytes(job->req, job->open, job->data, job->size, job->off, job->flags & O_DIRECT, &error);

    reply_written(job->req, job->open, job->off, job->size, n, error, false, &mark);
}

void ht_op_write(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_open *o = open_of(fi);
    int error;

    refresh(f, o);
    if (!fi->writepage && o->root && ht_optim_readable(f->optim, ino, (uint64_t)off, size, NULL) == -EAGAIN) {
        struct ht_job job = {.fn = job_write,
                             .open = o,
                             .off = (uint64_t)off,
                             .data = buf,
                             .size = size,
                             .flags = fi->flags,
                             .key = o->root,
                             .may_end = true};
        ht_job_write(f, req, HT_LANE_UPDATE, &job, fi);
        return;
    }
    struct ht_trace_mark mark = ht_trace_begin();
    ssize_t n = fi->writepage ? write_pages(f, o, buf, size, (uint64_t)off, &error)
                              : write_bytes(req, o, buf, size, (uint64_t)off, (fi->flags & O_DIRECT) != 0, &error);
    reply_written(req, o, (uint64_t)off, size, n, error, fi->writepage, &mark);
}

/* ------------------------------------------------------------- durability */

/*
 * close(2) reports a write that was lost after it had been acknowledged. The word error keeps it until fsync or a
 * clear.
 */
void ht_op_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_obj_stat st;

    ht_obj_stat(open_of(fi)->obj, &st);
    ht_reply(req, st.error);
}

void ht_op_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi)
{
    struct ht_caller caller = ht_fuse_caller(req);

    ht_reply(req, ht_ctl_fsync(ht_fuse_of(req)->ctl, ino, &caller));
}

/* ------------------------------------------------------------------- space */

static int extend_to(struct ht_fuse *f, uint64_t ino, struct ht_obj *obj, uint64_t size)
{
    struct stat values = {.st_size = (off_t)size}, st;

    return size > ht_obj_size(obj) ? ht_ns_setattr(f->ns, ino, HT_SET_SIZE, &values, &st) : 0;
}

/* The kernel sends other file systems a request to end setuid bits, but us only writes. */
static int range_written_by(fuse_req_t req, struct ht_open *o, uint64_t off, uint64_t len)
{
    struct ht_fuse *f = ht_fuse_of(req);
    int rc = root_of(f, o) ? ht_ctl_wait_updates(f->ctl, o->ino, off, len) : 0;

    if (!rc && o->privileged)
        drop_privilege(req, o->ino);
    return rc;
}

static bool range_mode_known(int mode)
{
    switch (mode & ~FALLOC_FL_KEEP_SIZE) {
    case 0:
    case FALLOC_FL_ZERO_RANGE:
        return true;
    case FALLOC_FL_PUNCH_HOLE:
        return mode & FALLOC_FL_KEEP_SIZE;
    default:
        return false;
    }
}

static int allocate(struct ht_fuse *f, struct ht_open *o, uint64_t off, uint64_t len)
{
    int rc = ht_obj_prealloc(o->obj, off, len);

    for (bool again = false; made_room(f, rc, again, 0); again = true)
        rc = ht_obj_prealloc(o->obj, off, len);
    return rc;
}

/* The space is set aside before the size grows, so that a file that could not get it stays as it is. */
static int change_range(fuse_req_t req, struct ht_open *o, int mode, uint64_t off, uint64_t len)
{
    struct ht_fuse *f = ht_fuse_of(req);
    int rc = 0;

    if (!range_mode_known(mode))
        return -EOPNOTSUPP;
    if (off > HT_FILE_BYTES_MAX || len > HT_FILE_BYTES_MAX - off)
        return -EFBIG;
    rc = range_written_by(req, o, off, len);
    if (rc)
        return rc;
    if (mode & FALLOC_FL_ZERO_RANGE) /* a refused call leaves the bytes as they are */
        rc = allocate(f, o, off, len);
    uint64_t size = ht_obj_size(o->obj);
    if (!rc && (mode & ~FALLOC_FL_KEEP_SIZE) && off < size)
        rc = ht_obj_punch(o->obj, off, ht_min_u64(len, size - off));
    if (rc == 0 && !(mode & FALLOC_FL_PUNCH_HOLE))
        rc = allocate(f, o, off, len);
    if (rc == 0 && !(mode & FALLOC_FL_KEEP_SIZE))
        rc = extend_to(f, o->ino, o->obj, off + len);
    if (rc == 0)
        ht_ns_touch(f->ns, o->ino, true);
    return rc;
}

static void job_fallocate(struct ht_job *job)
{
    ht_reply(job->req, change_range(job->req, job->open, job->flags, job->off, job->size));
}

void ht_op_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len, struct fuse_file_info *fi)
{
    struct ht_job job = {.fn = job_fallocate,
                         .ino = ino,
                         .open = open_of(fi),
                         .flags = mode,
                         .off = (uint64_t)off,
                         .size = (uint64_t)len,
                         .may_end = true};
    bool waits = ht_job_waits_for_update(ht_fuse_of(req), ino, job.off, job.size);

    ht_job_run(req, waits ? HT_LANE_UPDATE : HT_LANE_NONE, &job);
}

/*
 * Copies within the store: whole chunks share their stored bytes, so nothing crosses the mount. The kernel has written
 * the source's pages and drops the target's. It sends another request for the rest of a long copy: a killed client
 * waits for one piece at most.
 */
static ssize_t copy_range(fuse_req_t req, struct ht_open *from, uint64_t from_off, struct ht_open *to, uint64_t to_off,
                          uint64_t len)
{
    struct ht_fuse *f = ht_fuse_of(req);

    len = ht_min_u64(len, COPY_BYTES_MAX);
    int rc = root_of(f, from) ? ht_ctl_wait_updates(f->ctl, from->ino, from_off, len) : 0;
    if (!rc)
        rc = range_written_by(req, to, to_off, len);
    if (rc)
        return rc;
    ssize_t n = ht_obj_clone(from->obj, from_off, to->obj, to_off, len);
    for (bool again = false; made_room(f, (int)n, again, 0); again = true)
        n = ht_obj_clone(from->obj, from_off, to->obj, to_off, len);
    if (n < 0)
        return n;
    ht_atime_touch(f, from->ino, false);
    if (n > 0)
        ht_ns_touch(f->ns, to->ino, true);
    ht_count_written(f, traffic_of(f, to), 0);
    return n;
}

struct copy {
    struct ht_open *from, *to;
    uint64_t from_off, to_off, len;
};

static void job_copy(struct ht_job *job)
{
    const struct copy *c = (const struct copy *)(const void *)job->data;
    ssize_t n = copy_range(job->req, c->from, c->from_off, c->to, c->to_off, c->len);

    if (n < 0)
        ht_reply(job->req, (int)n);
    else
        fuse_reply_write(job->req, (size_t)n);
}

void ht_op_copy_file_range(fuse_req_t req, fuse_ino_t ino_in, off_t off_in, struct fuse_file_info *fi_in,
                           fuse_ino_t ino_out, off_t off_out, struct fuse_file_info *fi_out, size_t len, int flags)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct copy c = {open_of(fi_in), open_of(fi_out), (uint64_t)off_in, (uint64_t)off_out, len};
    bool in = ht_job_waits_for_update(f, ino_in, c.from_off, len);
    bool out = ht_job_waits_for_update(f, ino_out, c.to_off, len);
    struct ht_job job = {.fn = job_copy, .ino = in ? ino_in : ino_out, .data = (const char *)&c, .size = sizeof(c)};

    ht_job_run(req, in || out ? HT_LANE_UPDATE : HT_LANE_NONE, &job);
}

/* A mapping keeps its descriptor open, until its pages have been written. */
static bool may_be_mapped(struct ht_fuse *f, uint64_t ino)
{
    bool found = false;

    ht_mutex_lock(ht_fuse_open_lock(f));
    ht_list_for_each_entry(o, &f->opens, struct ht_open, link)
        found = found || (o->ino == ino && o->stores);
    ht_mutex_unlock(ht_fuse_open_lock(f));
    return found;
}

/* Pages of a passthrough file may have been written to: everything counts as data. */
static int64_t seek(struct ht_open *o, uint64_t off, bool hole)
{
    uint64_t size = ht_obj_size(o->obj);

    if (!ht_passthrough_is_active(o))
        return ht_obj_seek(o->obj, off, hole);
    return off >= size ? -ENXIO : (int64_t)(hole ? size : off);
}

static void seek_and_reply(struct ht_job *job)
{
    int64_t at = seek(job->open, job->off, job->flags == SEEK_HOLE);

    if (at < 0)
        ht_reply(job->req, (int)at);
    else
        fuse_reply_lseek(job->req, at);
}

static void job_seek(struct ht_job *job)
{
    struct ht_ctl_cache *cache = &job->fuse->cache;

    cache->drop_data(cache->ctx, job->ino, 0, 0);
    seek_and_reply(job);
}

/*
 * The kernel sends this request without having written the pages that a mapping has changed. A program that copies the
 * file would take them for holes. The kernel writes them when it has to drop them, and a worker must not wait for that.
 */
void ht_op_lseek(fuse_req_t req, fuse_ino_t ino, off_t off, int whence, struct fuse_file_info *fi)
{
    bool drops = may_be_mapped(ht_fuse_of(req), ino);
    struct ht_job job = {.fn = drops ? job_seek : seek_and_reply,
                         .ino = ino,
                         .open = open_of(fi),
                         .off = (uint64_t)off,
                         .flags = whence};

    if (whence != SEEK_DATA && whence != SEEK_HOLE)
        fuse_reply_err(req, EINVAL);
    else
        ht_job_run(req, drops ? HT_LANE_GRADIENT : HT_LANE_NONE, &job);
}
