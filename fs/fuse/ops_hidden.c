/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_hidden.c - files of the hidden tree.
 *
 * All such opens are direct: the content changes without the kernel, and gradients are written once and never read.
 * Calls that may wait for updates become jobs.
 */
#include "fs/fuse/fuse_priv.h"

static struct ht_hidden_file *file_of(const struct fuse_file_info *fi)
{
    return (struct ht_hidden_file *)(uintptr_t)fi->fh;
}

static void release(struct ht_fuse *f, uint64_t ino, struct ht_hidden_file *file)
{
    if (ht_hidden_about(file)->counted)
        ht_passthrough_hidden_close(f, ino);
    ht_hidden_release(file);
}

static void job_open(struct ht_job *job)
{
    struct ht_caller caller = ht_fuse_caller(job->req);
    struct fuse_file_info fi = {.flags = job->flags, .direct_io = 1};
    struct ht_hidden_file *file;
    int rc = ht_hidden_open(job->fuse->ctl, job->ino, job->flags, &caller, &file);

    if (rc) {
        ht_reply(job->req, rc);
        return;
    }
    fi.fh = (uintptr_t)file;
    struct ht_hidden_about *about = ht_hidden_about(file);
    fi.parallel_direct_writes = about->writes != HT_TRAFFIC_OTHER;
    about->counted = ht_passthrough_hidden_open(job->req, job->ino, about, job->flags, &fi);
    if (fuse_reply_open(job->req, &fi))
        release(job->fuse, job->ino, file);
}

void ht_hidden_op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_job job = {.fn = job_open, .ino = ino, .flags = fi->flags, .may_end = true};

    ht_job_run(req, ht_hidden_open_waits(ino) ? HT_LANE_GRADIENT : HT_LANE_NONE, &job);
}

static void job_read(struct ht_job *job)
{
    char *buf = ht_fuse_buffer();
    ssize_t n = -ENOMEM;

    if (buf)
        n = ht_hidden_read(job->file, job->off, buf, ht_min_u64(job->size, HT_FUSE_IO_BYTES));
    ht_count_read(job->fuse, ht_hidden_about(job->file)->reads, n);
    if (n < 0)
        ht_reply(job->req, (int)n);
    else
        fuse_reply_buf(job->req, buf, (size_t)n);
}

static void job_read_behind(struct ht_job *job)
{
    ht_background_reads(true);
    job_read(job);
    ht_background_reads(false);
    job->fuse->reads_behind--;
}

void ht_hidden_op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
    struct ht_job job = {.fn = job_read_behind, .ino = ino, .file = file_of(fi), .off = (uint64_t)off, .size = size};
    enum ht_lane_kind lane = ht_hidden_lane(job.file, HT_HIDDEN_READ, NULL, 0);

    if (lane == HT_LANE_PAUSES && ht_read_behind(req, &job))
        return;
    job.fn = job_read;
    job.may_end = true;
    ht_job_run(req, lane == HT_LANE_PAUSES ? HT_LANE_NONE : lane, &job);
}

static void reply_written(struct ht_fuse *f, fuse_req_t req, struct ht_hidden_file *file, uint64_t off, ssize_t n,
                          const struct ht_trace_mark *mark)
{
    const struct ht_hidden_about *about = ht_hidden_about(file);
    bool dense = about->gradient_bytes; /* each write of a sparse gradient is an access of no bytes */

    ht_count_written(f, about->writes, n);
    if (n > 0 && about->writes == HT_TRAFFIC_GRAD && !about->traced)
        ht_trace_end(ht_store_trace(f->store), mark, HT_TRACE_GRADIENT, about->param, dense ? off : 0,
                     dense ? (uint64_t)n : 0);
    if (n < 0)
        ht_reply(req, (int)n);
    else
        fuse_reply_write(req, (size_t)n);
}

/* ------------------------------------------------------ shards of parameters */

/*
 * A write of a shard changes bytes that the kernel may have as pages of the parameter. It drops these pages before and
 * after, and is answered then: so a later read has the new bytes, and no page that a mapping had changed before brings
 * old bytes back. The kernel writes such a page first, with a background request. A write that waits may be one, too,
 * and all together are at most HT_FUSE_BACKGROUND: so at most HT_PAGE_WAITS_MAX writes wait. Their lane is that of the
 * shard: a rank that waits for updates delays no other.
 *
 * Pages of a mapping of the shard, and writes beyond that number, wait for no pages. They are written and answered
 * where nobody waits for pages, and a job of no request drops all pages of the parameter, in the lane of the parameter.
 * fsync of a shard follows it there; it is no background request.
 */
static void job_drop_pages(struct ht_job *job)
{
    struct ht_ctl_cache *cache = &job->fuse->cache;

    cache->drop_data(cache->ctx, job->ino, 0, 0);
}

/* Root's writes leave setuid and setgid bits, and who changed pages of a mapping is unknown. */
static void drop_privilege(fuse_req_t req, struct ht_hidden_file *file, bool pages)
{
    struct ht_fuse *f = ht_fuse_of(req);
    uint64_t param = ht_hidden_about(file)->param;

    if (ht_privileged(f, param))
        ht_privilege_drop(f, param, pages || fuse_req_ctx(req)->uid == 0 ? 0 : ht_privilege_kills(req, param));
}

/* The kernel takes a part of its pages for the whole. A write beyond the end is no lost one. */
static ssize_t count_failed(struct ht_fuse *f, struct ht_hidden_file *file, uint64_t off, size_t size, bool pages,
                            ssize_t n)
{
    if (pages && n >= 0 && (size_t)n < size)
        n = -EIO;
    if (n < 0 && (pages || n != -EINVAL))
        ht_ctl_write_failed(f->ctl, ht_hidden_about(file)->param, off, size, (int)n, pages);
    return n;
}

static ssize_t write_then_drop(struct ht_fuse *f, struct ht_hidden_file *file, uint64_t off, const char *buf,
                               size_t size, bool pages)
{
    ssize_t n = count_failed(f, file, off, size, pages, ht_hidden_write(file, off, buf, size, true));
    struct ht_job *job = ht_job_new(f, NULL, job_drop_pages);

    if (!job)
        return -ENOMEM;
    job->ino = ht_hidden_about(file)->param;
    return ht_job_submit_once(job, HT_LANE_PAGES, job->ino) ? n : -ENOMEM;
}

static void write_pages(fuse_req_t req, struct ht_hidden_file *file, const char *buf, size_t size, uint64_t off)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_trace_mark mark = ht_trace_begin();

    drop_privilege(req, file, true);
    reply_written(f, req, file, off, write_then_drop(f, file, off, buf, size, true), &mark);
}

static void job_write_then_drop(struct ht_job *job)
{
    struct ht_trace_mark mark = ht_trace_begin_at(job->request.began_ns);

    drop_privilege(job->req, job->file, false);
    ht_hidden_wait_updates(job->file, job->off, job->data, job->size);
    ssize_t n = write_then_drop(job->fuse, job->file, job->off, job->data, job->size, false);
    reply_written(job->fuse, job->req, job->file, job->off, n, &mark);
}

static void job_drop_and_write(struct ht_job *job)
{
    struct ht_trace_mark mark = ht_trace_begin_at(job->request.began_ns);
    struct ht_fuse *f = job->fuse;

    drop_privilege(job->req, job->file, false);
    ht_hidden_drop_pages(job->file, job->off, job->data, job->size);
    ht_hidden_wait_updates(job->file, job->off, job->data, job->size);
    ssize_t n = ht_hidden_write(job->file, job->off, job->data, job->size, true);
    n = count_failed(f, job->file, job->off, job->size, false, n);
    ht_hidden_drop_pages(job->file, job->off, job->data, job->size);
    reply_written(f, job->req, job->file, job->off, n, &mark);
    f->page_waits--;
}

static bool may_wait_for_pages(struct ht_fuse *f)
{
    if (f->page_waits++ < HT_PAGE_WAITS_MAX)
        return true;
    f->page_waits--;
    return false;
}

static void write_param(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off,
                        struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    bool waits = may_wait_for_pages(f);
    struct ht_job job = {.fn = waits ? job_drop_and_write : job_write_then_drop,
                         .ino = ino,
                         .file = file_of(fi),
                         .off = (uint64_t)off,
                         .data = buf,
                         .size = size,
                         .key = waits ? ino : 0};
    bool submitted = ht_job_write(f, req, waits ? HT_LANE_PAGES : HT_LANE_UPDATE, &job, fi);

    f->page_waits -= waits && !submitted;
}

/* ------------------------------------------------------------------- write */

static void job_write(struct ht_job *job)
{
    struct ht_trace_mark mark = ht_trace_begin_at(job->request.began_ns);
    ssize_t n = ht_hidden_write(job->file, job->off, job->data, job->size, true);

    reply_written(job->fuse, job->req, job->file, job->off, n, &mark);
}

/* With a copy of the bytes. */
static void write_later(fuse_req_t req, fuse_ino_t ino, enum ht_lane_kind lane, const char *buf, size_t size, off_t off,
                        struct fuse_file_info *fi)
{
    struct ht_job job = {.fn = job_write,
                         .ino = ino,
                         .file = file_of(fi),
                         .off = (uint64_t)off,
                         .data = buf,
                         .size = size,
                         .may_end = true};

    ht_job_write(ht_fuse_of(req), req, lane, &job, fi);
}

void ht_hidden_op_write(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off,
                        struct fuse_file_info *fi)
{
    struct ht_hidden_file *file = file_of(fi);
    enum ht_lane_kind lane = ht_hidden_lane(file, HT_HIDDEN_WRITE, buf, size);

    if (lane == HT_LANE_PAGES) {
        if (fi->writepage)
            write_pages(req, file, buf, size, (uint64_t)off);
        else
            write_param(req, ino, buf, size, off, fi);
        return;
    }
    if (lane != HT_LANE_NONE) {
        write_later(req, ino, lane, buf, size, off, fi);
        return;
    }
    struct ht_trace_mark mark = ht_trace_begin();
    ssize_t n = ht_hidden_write(file, (uint64_t)off, buf, size, false);
    if (n == -EAGAIN)
        write_later(req, ino, HT_LANE_WRITE, buf, size, off, fi);
    else
        reply_written(ht_fuse_of(req), req, file, (uint64_t)off, n, &mark);
}

static void job_command(struct ht_job *job)
{
    ht_reply_ioctl(job->req, ht_hidden_write(job->file, 0, job->data, job->size, true));
}

static void job_gather(struct ht_job *job)
{
    struct ht_caller caller = ht_fuse_caller(job->req);

    ht_reply_ioctl(job->req, ht_hidden_gather(job->file, job->data, job->size, &caller));
}

static void gather(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, const void *in, size_t in_len)
{
    size_t len = strnlen(in, in_len);
    struct ht_job job = {.fn = job_gather, .ino = ino, .file = file_of(fi), .data = in, .size = len, .may_end = true};

    if (in_len < sizeof(struct ht_ioctl_gather) || len == in_len)
        ht_reply(req, -E2BIG);
    else
        ht_job_run(req, HT_LANE_GRADIENT, &job);
}

/* A whole line: its newline takes the place of the NUL. */
static void run_line(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, const void *in)
{
    struct ht_job job = {.fn = job_command, .ino = ino, .file = file_of(fi), .may_end = true};
    struct ht_ioctl_line line;

    memcpy(&line, in, sizeof(line));
    job.data = line.text;
    job.size = strnlen(line.text, sizeof(line.text));
    if (job.size == sizeof(line.text)) {
        ht_reply(req, -E2BIG);
        return;
    }
    line.text[job.size++] = '\n';
    ht_job_run(req, ht_hidden_lane(job.file, HT_HIDDEN_WRITE, job.data, job.size), &job);
}

void ht_hidden_ioctl(fuse_req_t req, uint64_t ino, unsigned cmd, struct fuse_file_info *fi, const void *in,
                     size_t in_len)
{
    if (cmd == HT_IOCTL_GATHER && fi && in && ht_hidden_gathers(ino))
        gather(req, ino, fi, in, in_len);
    else if (cmd == HT_IOCTL_COMMAND && fi && in_len >= sizeof(struct ht_ioctl_line) && ht_hidden_commands(ino))
        run_line(req, ino, fi, in);
    else
        ht_reply(req, -ENOTTY);
}

static void job_flush(struct ht_job *job)
{
    ht_reply(job->req, ht_hidden_flush(job->file));
}

void ht_hidden_op_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_job job = {.fn = job_flush, .ino = ino, .file = file_of(fi)};

    ht_job_run(req, ht_hidden_lane(job.file, HT_HIDDEN_FLUSH, NULL, 0), &job);
}

static void job_fsync(struct ht_job *job)
{
    struct ht_caller caller = ht_fuse_caller(job->req);

    ht_reply(job->req, ht_hidden_fsync(job->file, &caller));
}

/* After the pages that writes of the shard have yet to drop. */
void ht_hidden_op_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi)
{
    const struct ht_hidden_about *about = ht_hidden_about(file_of(fi));
    struct ht_job job = {.fn = job_fsync, .file = file_of(fi), .key = about->param};

    ht_job_run(req, about->writes == HT_TRAFFIC_PARAM ? HT_LANE_PAGES : HT_LANE_NONE, &job);
}

void ht_hidden_op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    release(ht_fuse_of(req), ino, file_of(fi));
    fuse_reply_err(req, 0);
}
