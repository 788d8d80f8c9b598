/* SPDX-License-Identifier: Apache-2.0 */
/*
 * workers.c - the threads that take requests from the kernel, and their number.
 *
 * A worker may wait for I/O. A device that does not answer holds each worker that needs it: for a chunk that is being
 * written there, for a read, or for a flush. So workers that a request has held for long do
 * not count, and others take their place.
 *
 * Invariants, as of the last check:
 *  1. count >= threads + held, as long as at most HT_WORKERS_ADDED_MAX are held. held: workers
 *     in one request for HELD_NS or longer.
 *  2. If all workers are busy the next check is within LOOK_NS. If all are held the number that is added doubles.
 *  3. Added workers end with a request of theirs when others are no longer held.
 *
 * Tried: a buffer in which the bytes of a write lie at a page, as in the loop of libfuse. Neither the time nor the
 * processor time of writes of 1 MiB changed.
 *
 * Locks: workers.lock, a leaf. Threads: the loop's thread checks; each worker has its place in workers.worker.
 */
#include "fs/fuse/fuse_priv.h"

#include <linux/fuse.h>
#include <signal.h>
#include <unistd.h>

#define HELD_NS 1000000000ull
#define LOOK_NS 250000000ull

enum {
    REQUEST_BYTES_MAX = sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in) + HT_FUSE_IO_BYTES,
};

enum worker_state { WORKER_NONE, WORKER_RUNS, WORKER_ENDED };

struct worker {
    struct ht_fuse *fuse;
    pthread_t thread;
    enum worker_state state;   /* locked */
    _Atomic uint64_t since_ns; /* when it took its request; 0: it has none */
    struct fuse_buf request;   /* with memory for one while there is a thread */
};

static unsigned most(const struct ht_fuse *f)
{
    return f->opts.single_thread ? 1 : f->opts.threads + HT_WORKERS_ADDED_MAX;
}

/* ------------------------------------------------------------------- a worker */

static const char *const names[] = {
    [FUSE_LOOKUP] = "lookup",
    [FUSE_FORGET] = "forget",
    [FUSE_GETATTR] = "getattr",
    [FUSE_SETATTR] = "setattr",
    [FUSE_READLINK] = "readlink",
    [FUSE_SYMLINK] = "symlink",
    [FUSE_MKNOD] = "mknod",
    [FUSE_MKDIR] = "mkdir",
    [FUSE_UNLINK] = "unlink",
    [FUSE_RMDIR] = "rmdir",
    [FUSE_RENAME] = "rename",
    [FUSE_LINK] = "link",
    [FUSE_OPEN] = "open",
    [FUSE_READ] = "read",
    [FUSE_WRITE] = "write",
    [FUSE_STATFS] = "statfs",
    [FUSE_RELEASE] = "release",
    [FUSE_FSYNC] = "fsync",
    [FUSE_SETXATTR] = "setxattr",
    [FUSE_GETXATTR] = "getxattr",
    [FUSE_LISTXATTR] = "listxattr",
    [FUSE_REMOVEXATTR] = "removexattr",
    [FUSE_FLUSH] = "flush",
    [FUSE_INIT] = "init",
    [FUSE_OPENDIR] = "opendir",
    [FUSE_READDIR] = "readdir",
    [FUSE_RELEASEDIR] = "releasedir",
    [FUSE_FSYNCDIR] = "fsyncdir",
    [FUSE_CREATE] = "create",
    [FUSE_INTERRUPT] = "interrupt",
    [FUSE_DESTROY] = "destroy",
    [FUSE_IOCTL] = "ioctl",
    [FUSE_BATCH_FORGET] = "forget",
    [FUSE_FALLOCATE] = "fallocate",
    [FUSE_READDIRPLUS] = "readdirplus",
    [FUSE_RENAME2] = "rename",
    [FUSE_LSEEK] = "lseek",
    [FUSE_COPY_FILE_RANGE] = "copy_file_range",
};

/* What a request of the kernel asks for: len bytes, which begin with its header. It began now. */
static struct ht_request request_of(const void *header, size_t len)
{
    struct fuse_in_header h = {0};

    memcpy(&h, header, ht_min_u64(len, sizeof(h)));
    const char *name = h.opcode < HT_ARRAY_SIZE(names) ? names[h.opcode] : NULL;
    return (struct ht_request){name ? name : "request", h.nodeid, ht_now_ns()};
}

void ht_workers_wake(struct ht_fuse *f)
{
    ht_mutex_lock(ht_fuse_workers_lock(f));
    pthread_cond_signal(&f->workers.changed);
    ht_mutex_unlock(ht_fuse_workers_lock(f));
}

/* The first request agrees with the kernel on a protocol. If that fails libfuse ends the session. */
static void report_ready(struct ht_fuse *f)
{
    if (!f->ready_reported && !fuse_session_exited(f->session) && !atomic_exchange(&f->ready_reported, true))
        f->opts.ready(f->opts.ctx);
}

/* Never inlined: its variables must not be on the stack of a worker that is cancelled (see receive). */
static __attribute__((noinline)) void process(struct worker *w, size_t bytes)
{
    const struct ht_request none = {0}, request = request_of(w->request.mem, bytes);
    struct ht_fuse *f = w->fuse;

    ht_activity_set_request(&request);
    w->request.size = bytes;
    w->since_ns = request.began_ns;
    if (++f->workers.busy >= f->workers.count && f->workers.asleep)
        ht_workers_wake(f);
    fuse_session_process_buf(f->session, &w->request);
    f->workers.busy--;
    w->since_ns = 0;
    ht_activity_set_request(&none);
    report_ready(f);
}

/* A worker leaves if there are more than needed. */
static bool leaves(struct ht_fuse *f)
{
    if (!f->workers.surplus)
        return false;
    ht_mutex_lock(&f->workers.lock);
    bool leave = f->workers.surplus > 0;
    if (leave)
        f->workers.surplus--;
    ht_mutex_unlock(&f->workers.lock);
    return leave;
}

/*
 * Returns the bytes of a request, or 0 when the mount has ended. -ECONNABORTED comes from a forced unmount. The worker
 * can be cancelled only while it waits for a request. ASan marks the stack around a variable whose address is taken,
 * and a cancelled thread leaves these marks where libraries write. So this function and its callers have no such
 * variable.
 */
static ssize_t receive(struct worker *w)
{
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    ssize_t n = read(fuse_session_fd(w->fuse->session), w->request.mem, REQUEST_BYTES_MAX);
    n = n < 0 ? -errno : n;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    return n == -ENODEV || n == -ECONNABORTED ? 0 : n;
}

/*
 * 0: the worker left; 1: the mount has ended; -EPROTO: the session ended in another way; other -errno: it cannot go on.
 */
static int take_requests(struct worker *w)
{
    while (!fuse_session_exited(w->fuse->session)) {
        ssize_t n = receive(w);
        if (n == -EINTR || n == -ENOENT) /* the latter is for an interrupted request */
            continue;
        if (n <= 0)
            return n < 0 ? (int)n : 1;
        process(w, (size_t)n);
        if (leaves(w->fuse))
            return 0;
    }
    return -EPROTO;
}

static void *run_worker(void *arg)
{
    struct worker *w = arg;
    struct ht_fuse *f = w->fuse;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    pthread_setname_np(pthread_self(), "ht-fuse");
    int rc = take_requests(w);
    ht_mutex_lock(ht_fuse_workers_lock(f));
    w->state = WORKER_ENDED;
    f->workers.count--;
    if (rc && !f->workers.over) { /* the first worker that ends has the reason */
        f->workers.over = true;
        f->workers.error = rc < 0 && !f->exited ? rc : 0;
        fuse_session_exit(f->session);
    }
    pthread_cond_signal(&f->workers.changed);
    ht_mutex_unlock(ht_fuse_workers_lock(f));
    return NULL;
}

/* -------------------------------------------------------------------- how many */

/* Signals are for other threads. */
static int start_worker(struct ht_fuse *f, struct worker *w) HT_REQUIRES(HT_LOCK_WORKERS)
{
    sigset_t block, before;

    w->request = (struct fuse_buf){.mem = malloc(REQUEST_BYTES_MAX)};
    if (!w->request.mem)
        return -ENOMEM;
    sigemptyset(&block);
    sigaddset(&block, SIGTERM);
    sigaddset(&block, SIGINT);
    sigaddset(&block, SIGHUP);
    sigaddset(&block, SIGQUIT);
    w->fuse = f;
    w->since_ns = 0;
    pthread_sigmask(SIG_BLOCK, &block, &before);
    int rc = pthread_create(&w->thread, NULL, run_worker, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) {
        free(w->request.mem);
        w->request.mem = NULL;
        return -rc;
    }
    w->state = WORKER_RUNS;
    f->workers.count++;
    return 0;
}

static void join(struct worker *w)
{
    pthread_join(w->thread, NULL);
    free(w->request.mem);
    w->request.mem = NULL;
    w->state = WORKER_NONE;
}

static int grow(struct ht_fuse *f, unsigned want) HT_REQUIRES(HT_LOCK_WORKERS)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < most(f) && f->workers.count < want; i++)
        if (f->workers.worker[i].state == WORKER_NONE)
            rc = start_worker(f, &f->workers.worker[i]);
    return rc;
}

static unsigned count_held(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_WORKERS)
{
    uint64_t now = ht_now_ns();
    unsigned held = 0;

    for (unsigned i = 0; i < most(f); i++) {
        struct worker *w = &f->workers.worker[i];
        uint64_t since = w->since_ns;
        held += w->state == WORKER_RUNS && since && now > since + HELD_NS;
    }
    return held;
}

static void report_full(struct ht_fuse *f, unsigned held) HT_REQUIRES(HT_LOCK_WORKERS)
{
    bool full = held >= most(f) && !f->opts.single_thread;

    if (full && !f->workers.told_full)
        ht_warn("all %u threads that take requests have been held for longer than a second, as by a device that does "
                "not answer: other requests wait",
                most(f));
    f->workers.told_full = full;
}

/* Adjusts the number of workers. Returns when to check again; 0: when called. */
static uint64_t look(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_WORKERS)
{
    unsigned held = count_held(f), want = f->opts.threads + held, count;

    /* Frees the places of ended workers. */
    for (unsigned i = 0; i < most(f); i++) {
        struct worker *w = &f->workers.worker[i];
        if (w->state == WORKER_ENDED)
            join(w);
    }
    report_full(f, held);
    if (held >= f->workers.count)
        want = f->opts.threads + 2 * held;
    want = (unsigned)ht_min_u64(want, most(f));
    (void)grow(f, want);
    count = f->workers.count;
    f->workers.surplus = count > want ? count - want : 0;
    atomic_store_explicit(&f->traffic->workers, count, memory_order_relaxed);
    f->workers.asleep = held == 0; /* before `busy` is read: a worker uses the reverse order */
    if (f->workers.asleep && f->workers.busy < count)
        return 0;
    f->workers.asleep = false;
    return ht_now_ns() + LOOK_NS;
}

/* Releases the lock while the thread waits. */
static void end_all(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_WORKERS)
{
    if (f->opts.ending)
        f->opts.ending(f->opts.ctx);
    for (unsigned i = 0; i < most(f); i++)
        if (f->workers.worker[i].state == WORKER_RUNS)
            pthread_cancel(f->workers.worker[i].thread);
    ht_mutex_unlock(ht_fuse_workers_lock(f));
    for (unsigned i = 0; i < most(f); i++)
        if (f->workers.worker[i].request.mem)
            join(&f->workers.worker[i]);
    ht_mutex_lock(ht_fuse_workers_lock(f));
}

int ht_workers_run(struct ht_fuse *f)
{
    f->workers.worker = calloc(most(f), sizeof(*f->workers.worker));
    if (!f->workers.worker)
        return -ENOMEM;
    ht_mutex_lock(ht_fuse_workers_lock(f));
    int rc = grow(f, 1);
    while (rc == 0 && !f->workers.over && !fuse_session_exited(f->session)) {
        uint64_t at_ns = look(f);
        (void)ht_cond_wait_until(&f->workers.changed, ht_fuse_workers_lock(f), at_ns);
    }
    end_all(f);
    rc = rc ? rc : f->workers.error;
    ht_mutex_unlock(ht_fuse_workers_lock(f));
    free(f->workers.worker);
    fuse_session_reset(f->session);
    return rc;
}

void ht_workers_init(struct ht_fuse *f)
{
    ht_mutex_init(&f->workers.lock, HT_LOCK_WORKERS);
    ht_cond_init(&f->workers.changed);
}

void ht_workers_destroy(struct ht_fuse *f)
{
    ht_mutex_destroy(&f->workers.lock);
    pthread_cond_destroy(&f->workers.changed);
}
