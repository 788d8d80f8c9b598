/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reply.c - answers, and what every operation needs to form one: its caller, and a buffer for each thread that answers
 * reads, kept until the thread ends.
 */
#include "fs/fuse/fuse_priv.h"

/* Clients may ignore the result of a call. For writes ht_ctl_write_failed reports more. */
static void report_full(fuse_req_t req, int rc)
{
    const struct ht_event_about about = {.error = rc};

    if (rc == -ENOSPC)
        ht_event(HT_EVENT_NO_SPACE, &about, "a request of process %d was refused: the store is full",
                 (int)fuse_req_ctx(req)->pid);
}

void ht_reply(fuse_req_t req, int rc)
{
    report_full(req, rc);
    fuse_reply_err(req, rc < 0 ? -rc : 0);
}

void ht_reply_ioctl(fuse_req_t req, ssize_t rc)
{
    if (rc < 0)
        ht_reply(req, (int)rc);
    else
        fuse_reply_ioctl(req, 0, NULL, 0);
}

/* The hidden tree follows roots and parameters that change without the kernel: the kernel must look it up each time. */
static double valid_for(uint64_t ino)
{
    return ht_hidden_match(ino) ? 0.0 : HT_FUSE_VALID_S;
}

/*
 * Blocks are an estimate while a file is dirty, or cut and not published: they become exact without the kernel, except
 * for a file that is whole or empty.
 */
static double attr_valid_for(const struct stat *st)
{
    blkcnt_t whole = (blkcnt_t)(ht_round_up((uint64_t)st->st_size, HT_BLOCK_BYTES) / S_BLKSIZE);
    bool exact = !S_ISREG(st->st_mode) || st->st_blocks == 0 || st->st_blocks == whole;

    return exact ? valid_for(st->st_ino) : 0.0;
}

void ht_reply_attr(fuse_req_t req, uint64_t ino, int rc, const struct stat *st)
{
    if (rc)
        ht_reply(req, rc);
    else
        fuse_reply_attr(req, st, attr_valid_for(st));
}

void ht_fuse_entry_of(const struct stat *st, struct fuse_entry_param *out)
{
    *out = (struct fuse_entry_param){
        .ino = st->st_ino,
        .generation = 1, /* inode numbers are never used again, not even after a crash */
        .attr = *st,
        .attr_timeout = attr_valid_for(st),
        .entry_timeout = valid_for(st->st_ino),
    };
}

static size_t caller_groups(void *ctx, uint32_t *gids, size_t cap)
{
    int n = fuse_req_getgroups(ctx, (int)cap, gids);

    return n > 0 ? (size_t)n : 0;
}

struct ht_cred ht_fuse_cred(fuse_req_t req)
{
    const struct fuse_ctx *ctx = fuse_req_ctx(req);

    return (struct ht_cred){.uid = ctx->uid, .gid = ctx->gid, .umask = ht_fuse_of(req)->masks ? ctx->umask : 0};
}

/* The kernel names the thread. */
static int caller_process(void *ctx)
{
    int thread = fuse_req_ctx(ctx)->pid, process = 0;
    char path[32], line[256];

    snprintf(path, sizeof(path), "/proc/%d/status", thread);
    FILE *f = thread ? fopen(path, "re") : NULL;
    while (f && fgets(line, sizeof(line), f) && sscanf(line, "Tgid: %d", &process) != 1)
        ;
    if (f)
        fclose(f);
    return process ? process : thread;
}

struct ht_caller ht_fuse_caller(fuse_req_t req)
{
    return (struct ht_caller){ht_fuse_cred(req), caller_groups, req, caller_process};
}

void ht_count_read(struct ht_fuse *f, enum ht_traffic_kind kind, ssize_t n)
{
    if (n > 0)
        atomic_fetch_add_explicit(&f->traffic->read_bytes[kind], (uint64_t)n, memory_order_relaxed);
    atomic_fetch_add_explicit(&f->traffic->requests, 1, memory_order_relaxed);
}

void ht_count_written(struct ht_fuse *f, enum ht_traffic_kind kind, ssize_t n)
{
    if (n > 0)
        atomic_fetch_add_explicit(&f->traffic->written_bytes[kind], (uint64_t)n, memory_order_relaxed);
    atomic_fetch_add_explicit(&f->traffic->requests, 1, memory_order_relaxed);
}

/* ------------------------------------------------------------------ buffer */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool have_key;

static void make_key(void)
{
    have_key = pthread_key_create(&key, free) == 0;
}

char *ht_fuse_buffer(void)
{
    static _Thread_local char *buffer;
    void *p;

    if (buffer)
        return buffer;
    pthread_once(&once, make_key);
    if (!have_key || posix_memalign(&p, HT_BLOCK_BYTES, HT_FUSE_IO_BYTES))
        return NULL;
    if (pthread_setspecific(key, p)) {
        free(p);
        return NULL;
    }
    buffer = p;
    return buffer;
}

/* -------------------------------------------------------------------- read */

struct reading {
    struct ht_fuse *fuse;
    fuse_req_t req;
    uint64_t oid, off;
    enum ht_traffic_kind kind;
    struct ht_trace_mark mark;
};

/* Copies the bytes from the image to the kernel's pages, and waits for nothing. */
static void reply_bytes(void *ctx, const void *bytes, size_t len)
{
    struct reading *r = ctx;

    ht_count_read(r->fuse, r->kind, (ssize_t)len);
    ht_trace_end(ht_store_trace(r->fuse->store), &r->mark, HT_TRACE_READ, r->oid, r->off, len);
    fuse_reply_buf(r->req, bytes, len);
}

void ht_reply_read(fuse_req_t req, struct ht_obj *obj, struct ht_obj_reader *reader, uint64_t off, size_t len,
                   enum ht_traffic_kind kind, uint64_t began_ns)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct reading r = {.fuse = f, .req = req, .oid = ht_obj_id(obj), .off = off, .kind = kind};
    char *buf = ht_fuse_buffer();
    ssize_t n = -ENOMEM;

    r.mark = began_ns ? ht_trace_begin_at(began_ns) : ht_trace_begin();
    if (buf)
        n = ht_obj_read_in_place(obj, reader, off, buf, ht_min_u64(len, HT_FUSE_IO_BYTES), reply_bytes, &r);
    if (n < 0) {
        ht_count_read(f, kind, n);
        ht_reply(req, (int)n);
    }
}
