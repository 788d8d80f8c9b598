/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.c - threads for requests that may wait for steps, updates and invalidations.
 *
 * Closing a gradient waits until the kernel has dropped its copies, and the kernel waits for every read of these pages
 * that it has already queued; were all workers closing gradients, none would take these reads. Jobs never wait for
 * other jobs, nor for requests in the kernel's queue except through such reads, which workers and the optimizer's
 * threads answer; so a fixed number of threads is enough.
 *
 * Lanes. Jobs of one kind and one key (the model root that they may wait for) make a lane. A lane runs a few jobs at a
 * time, in order of arrival; the rest wait in its queue and hold no thread. So one root holds few threads, however many
 * requests its clients send, and the jobs of all other lanes go on. Only one command runs that waits for its turn on a
 * root (HT_LANE_TURN).
 *
 *   job   queued in its lane -> running -> free
 *   lane  made with its first job; ready while it has a queued job and may run one more; free without jobs
 *
 * Invariants, which tests/unit/fs/fuse/verify.c asserts:
 *  1. lane.running <= running_max[kind]; f->jobs.running[kind] <= HT_LANE_THREADS. So a ready lane of a kind finds a
 *     thread, or the number of threads that this kind may have is in use.
 *  2. A lane is in the list `ready` of its kind exactly while its queue is not empty and
 *     lane.running is below its limit.
 *  3. A job is queued, or runs in its lane, or has left it: jobs.count counts all of them, and all but the queued ones
 *     have a thread each.
 *  4. lane.bytes are at least those of its queued jobs, and 0 once it has no job.
 *
 * A request's job that takes names out of the kernel's caches (after an abort) leaves its lane first: the kernel may
 * hold that directory's lock for a request whose job follows in the lane, as fsync of the model root's directory does.
 * A job of no request (HT_LANE_NAMES) keeps its place: no request follows it, and no more such jobs wait for
 * directories than one kind may have threads.
 *
 * An invalidation waits for pages that the kernel holds for a buffered write, and for writeback that it holds back
 * during a truncation. So these requests never queue behind a job that waits for
 * invalidations: their lane is HT_LANE_UPDATE.
 *
 * It also waits for pages that a mapping has changed, which the kernel writes with a background request. The kernel has
 * at most HT_FUSE_BACKGROUND of these in flight, and pages of other files and asynchronous direct writes are such
 * requests, too. A write of a shard drops pages of its parameter (HT_LANE_PAGES), so few of them wait for that at a
 * time (ops_hidden.c).
 *
 * A job that has left its lane holds its thread, and its kind does not count it. HT_LANE_LEFT_MAX jobs may have left:
 * there are as many threads more, so each kind can always have its HT_LANE_THREADS. A further job keeps its place and
 * waits for no names: a job of HT_LANE_NAMES takes these out.
 *
 * Threads are started when a job finds none idle, and stay until the end: at most HT_LANES x
 * HT_LANE_THREADS + HT_LANE_LEFT_MAX.
 *
 * Interrupts. A process may wait for a replay of logged steps, which takes long. If its request is interrupted, before
 * the replay or during it, a queued job ends, and a running one learns of it (ht_activity_interrupted). All other waits
 * are short: they go on. A job that was interrupted earlier ends when the replay begins.
 *
 * Locks: job_lock, a leaf. Threads: submit from workers and jobs; fn on job threads.
 */
#include "fs/fuse/fuse_priv.h"

#include "tiering/base/dump.h"
#include "tiering/base/verify.h"

enum {
    THREADS_AT_START = 4,
    NO_ROOT_MAX = 4,          /* jobs of key 0, which no root delays */
    SHORT_BYTES = 32 << 20,   /* copies of waiting bytes in one lane: beyond it writes are cut */
    REFUSE_BYTES = 128 << 20, /* and those that cannot be cut are refused */
    PIECE_BYTES = 4096,
};

static const unsigned running_max[HT_LANES] = {
    [HT_LANE_GRADIENT] = 4, [HT_LANE_WRITE] = 4, [HT_LANE_CTL_SESSION] = 8, [HT_LANE_TURN] = 1,
    [HT_LANE_UPDATE] = 4,   [HT_LANE_PAGES] = 1, [HT_LANE_NAMES] = 4,       [HT_LANE_PAUSES] = 4,
};

/* ------------------------------------------------------------------- lanes */

unsigned ht_job_lane_limit(const struct ht_job_lane *l)
{
    return l->key ? running_max[l->kind] : ht_max_u64(running_max[l->kind], NO_ROOT_MAX);
}

static struct ht_list *bucket_of(struct ht_fuse *f, enum ht_lane_kind kind, uint64_t key)
{
    return &f->jobs.lane[ht_job_bucket(kind, key)];
}

static struct ht_job_lane *find_lane(struct ht_fuse *f, enum ht_lane_kind kind, uint64_t key) HT_REQUIRES(HT_LOCK_JOBS)
{
    ht_list_for_each_entry(l, bucket_of(f, kind, key), struct ht_job_lane, link)
        if (l->kind == kind && l->key == key)
            return l;
    return NULL;
}

/* NULL: no memory. */
static struct ht_job_lane *make_lane(struct ht_fuse *f, enum ht_lane_kind kind, uint64_t key) HT_REQUIRES(HT_LOCK_JOBS)
{
    struct ht_job_lane *l;

    if (ht_list_empty(&f->jobs.lane_free)) {
        l = malloc(sizeof(*l));
    } else {
        l = ht_list_entry(f->jobs.lane_free.next, struct ht_job_lane, link);
        ht_list_del(&l->link);
    }
    if (!l)
        return NULL;
    *l = (struct ht_job_lane){.kind = kind, .key = key};
    ht_list_init(&l->ready);
    ht_list_init(&l->queue);
    ht_list_add_tail(bucket_of(f, kind, key), &l->link);
    return l;
}

/* Moves it to the end of its present list: lanes take turns. */
static void requeue_lane(struct ht_fuse *f, struct ht_job_lane *l) HT_REQUIRES(HT_LOCK_JOBS)
{
    ht_list_del(&l->ready);
    if (!ht_list_empty(&l->queue) && l->running < ht_job_lane_limit(l)) {
        ht_list_add_tail(&f->jobs.ready[l->kind], &l->ready);
    } else if (ht_list_empty(&l->queue) && !l->running) {
        ht_list_del(&l->link);
        ht_list_add_tail(&f->jobs.lane_free, &l->link);
    }
}

/* --------------------------------------------------------------------- run */

/* The next kind that has a job and a thread left. HT_LANE_NONE: none. */
static enum ht_lane_kind ready_kind(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_JOBS)
{
    for (unsigned i = 0; i < HT_LANES; i++) {
        enum ht_lane_kind kind = (enum ht_lane_kind)(++f->jobs.turn % HT_LANES);
        if (!ht_list_empty(&f->jobs.ready[kind]) && f->jobs.running[kind] < HT_LANE_THREADS)
            return kind;
    }
    return HT_LANE_NONE;
}

static struct ht_job *take_job(struct ht_fuse *f, enum ht_lane_kind kind) HT_REQUIRES(HT_LOCK_JOBS)
{
    struct ht_job_lane *l = ht_list_entry(f->jobs.ready[kind].next, struct ht_job_lane, ready);
    struct ht_job *job = ht_list_entry(l->queue.next, struct ht_job, link);

    ht_list_del(&job->link);
    job->queued = NULL;
    job->lane = l;
    l->running++;
    f->jobs.running[kind]++;
    requeue_lane(f, l);
    return job;
}

/* Releases the lock while the thread waits. NULL: the end. */
static struct ht_job *next_job(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_JOBS)
{
    enum ht_lane_kind kind;

    while ((kind = ready_kind(f)) == HT_LANE_NONE) {
        HT_VERIFY(ht_job_verify(f));
        if (f->jobs.stop && !f->jobs.count)
            return NULL;
        f->jobs.idle++;
        ht_cond_wait(&f->job_wanted, ht_fuse_job_lock(f));
        f->jobs.idle--;
    }
    return take_job(f, kind);
}

static void put_free(struct ht_fuse *f, struct ht_job *job) HT_REQUIRES(HT_LOCK_JOBS)
{
    free((char *)(uintptr_t)job->data);
    job->data = NULL;
    job->req = NULL; /* an interrupt that comes late finds another request, or none */
    ht_list_add_tail(&f->job_free, &job->link);
}

static void leave_lane(struct ht_fuse *f, struct ht_job *job) HT_REQUIRES(HT_LOCK_JOBS)
{
    struct ht_job_lane *l = job->lane;

    if (!l)
        return;
    job->lane = NULL;
    l->bytes -= job->data ? job->size : 0;
    l->running--;
    f->jobs.running[l->kind]--;
    requeue_lane(f, l);
}

static void count_left(struct ht_fuse *f, struct ht_job *job, bool left) HT_REQUIRES(HT_LOCK_JOBS)
{
    f->jobs.left += left;
    f->jobs.left -= job->left;
    job->left = left;
    atomic_store_explicit(&f->traffic->jobs_left, f->jobs.left, memory_order_relaxed);
}

static void end_job(struct ht_fuse *f, struct ht_job *job) HT_REQUIRES(HT_LOCK_JOBS)
{
    leave_lane(f, job);
    count_left(f, job, false);
    f->jobs.count--;
    put_free(f, job);
    if (f->jobs.stop)
        pthread_cond_broadcast(&f->job_wanted);
}

static void *run_jobs(void *arg);

static int add_thread(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_JOBS)
{
    int rc = pthread_create(&f->jobs.thread[f->jobs.threads], NULL, run_jobs, f);

    f->jobs.threads += rc == 0;
    atomic_store_explicit(&f->traffic->job_threads, f->jobs.threads, memory_order_relaxed);
    return -rc;
}

/*
 * Wakes or starts a thread for a ready job. Each thread that takes a job looks for the next one: so idle
 * threads are woken one by one. If there can be no new thread, the next free thread runs the job.
 */
static void call_thread(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_JOBS)
{
    if (ready_kind(f) == HT_LANE_NONE)
        return;
    if (f->jobs.idle)
        pthread_cond_signal(&f->job_wanted);
    else if (f->jobs.threads < HT_ARRAY_SIZE(f->jobs.thread))
        (void)add_thread(f);
}

static __thread struct ht_job *current_job;

bool ht_job_leave_lane(struct ht_fuse *f)
{
    struct ht_job *job = current_job;

    if (!job || !job->req)
        return true;
    ht_mutex_lock(ht_fuse_job_lock(f));
    bool may = job->left || f->jobs.left < HT_LANE_LEFT_MAX;
    if (may) {
        leave_lane(f, job);
        count_left(f, job, true);
        call_thread(f);
    }
    ht_mutex_unlock(ht_fuse_job_lock(f));
    return may;
}

static void *run_jobs(void *arg)
{
    const struct ht_request none = {0};
    struct ht_fuse *f = arg;
    struct ht_job *job;

    pthread_setname_np(pthread_self(), "ht-job");
    ht_mutex_lock(ht_fuse_job_lock(f));
    while ((job = next_job(f))) {
        call_thread(f);
        ht_mutex_unlock(ht_fuse_job_lock(f));
        current_job = job;
        ht_activity_set_request(&job->request);
        ht_activity_set_interrupt(job->may_end ? &job->interrupted : NULL);
        job->fn(job);
        ht_activity_set_interrupt(NULL);
        ht_activity_set_request(&none);
        current_job = NULL;
        ht_mutex_lock(ht_fuse_job_lock(f));
        end_job(f, job);
    }
    ht_mutex_unlock(ht_fuse_job_lock(f));
    return NULL;
}

int ht_job_start(struct ht_fuse *f)
{
    int rc = 0;

    ht_list_init(&f->job_free);
    ht_list_init(&f->jobs.lane_free);
    for (unsigned i = 0; i < HT_LANES; i++)
        ht_list_init(&f->jobs.ready[i]);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(f->jobs.lane); i++)
        ht_list_init(&f->jobs.lane[i]);
    pthread_cond_init(&f->job_wanted, NULL);
    ht_mutex_lock(ht_fuse_job_lock(f));
    while (rc == 0 && f->jobs.threads < THREADS_AT_START)
        rc = add_thread(f);
    ht_mutex_unlock(ht_fuse_job_lock(f));
    return rc;
}

/* ------------------------------------------------------------------ submit */

static struct ht_job *take_free(struct ht_fuse *f)
{
    struct ht_job *job = NULL;

    ht_mutex_lock(ht_fuse_job_lock(f));
    if (!ht_list_empty(&f->job_free)) {
        job = ht_list_entry(f->job_free.next, struct ht_job, link);
        ht_list_del(&job->link);
    }
    ht_mutex_unlock(ht_fuse_job_lock(f));
    return job ? job : malloc(sizeof(*job));
}

/* NULL: no memory, and its request was answered. */
static struct ht_job *make_job(const struct ht_job *like)
{
    struct ht_fuse *f = like->fuse;
    struct ht_job *job = take_free(f);

    if (!job) {
        if (like->req)
            ht_reply(like->req, -ENOMEM);
        return NULL;
    }
    ht_mutex_lock(ht_fuse_job_lock(f)); /* an interrupt of its last request may look at it */
    *job = *like;
    job->request = ht_activity_request();
    job->data = NULL;
    ht_list_init(&job->link);
    ht_mutex_unlock(ht_fuse_job_lock(f));
    return job;
}

struct ht_job *ht_job_new(struct ht_fuse *f, fuse_req_t req, void (*fn)(struct ht_job *job))
{
    const struct ht_job like = {.fn = fn, .fuse = f, .req = req};

    return make_job(&like);
}

static void refuse_job(struct ht_job *job)
{
    struct ht_fuse *f = job->fuse;

    if (job->req)
        ht_reply(job->req, -ENOMEM);
    ht_mutex_lock(ht_fuse_job_lock(f));
    put_free(f, job);
    ht_mutex_unlock(ht_fuse_job_lock(f));
}

bool ht_job_data(struct ht_job *job, const void *data, size_t len)
{
    char *copy = malloc(len + 1);

    if (!copy) {
        refuse_job(job);
        return false;
    }
    memcpy(copy, data, len);
    copy[len] = 0;
    job->data = copy;
    job->size = len;
    return true;
}

/* ---------------------------------------------------------------- interrupt */

/* Takes a queued job out. False: it is not queued. */
static bool take_back(struct ht_fuse *f, struct ht_job *job) HT_REQUIRES(HT_LOCK_JOBS)
{
    struct ht_job_lane *l = job->queued;

    if (!l)
        return false;
    ht_list_del(&job->link);
    job->queued = NULL;
    l->bytes -= job->data ? job->size : 0;
    requeue_lane(f, l);
    end_job(f, job);
    return true;
}

/* Ends it if it is queued and its root computes logged steps again; if it runs, it looks for itself. */
static void end_interrupted(struct ht_fuse *f, struct ht_job *job, fuse_req_t req, uint64_t key)
{
    bool replaying = ht_optim_root_replaying(f->optim, key);

    ht_mutex_lock(ht_fuse_job_lock(f));
    bool ended = replaying && job->req == req && job->interrupted && take_back(f, job);
    ht_mutex_unlock(ht_fuse_job_lock(f));
    if (ended)
        fuse_reply_err(req, EINTR);
    else
        ht_optim_interrupt(f->optim);
}

/*
 * The kernel interrupts a request once: the job remembers it also before it is queued, and before a replay begins.
 * libfuse keeps the request during the call, so no other one has its address. Jobs stay until the end.
 */
static void on_interrupt(fuse_req_t req, void *data)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_job *job = data;

    ht_mutex_lock(ht_fuse_job_lock(f));
    uint64_t key = job->req == req ? job->key : 0; /* 0 also if the request has been answered */
    if (key)
        job->interrupted = true;
    ht_mutex_unlock(ht_fuse_job_lock(f));
    if (key)
        end_interrupted(f, job, req, key);
}

/* Takes it out of its lane; NULL: there is none. */
static fuse_req_t take_interrupted(struct ht_fuse *f, struct ht_job_lane *l) HT_REQUIRES(HT_LOCK_JOBS)
{
    ht_list_for_each_entry(job, &l->queue, struct ht_job, link) {
        fuse_req_t req = job->req;
        if (job->interrupted && take_back(f, job))
            return req;
    }
    return NULL;
}

/* A job that comes into a lane later, or is interrupted later, finds the replay. */
void ht_job_replay_begins(void *ctx, uint64_t root)
{
    struct ht_fuse *f = ctx;

    for (unsigned kind = 0; kind < HT_LANES; kind++) {
        fuse_req_t req;
        do {
            ht_mutex_lock(ht_fuse_job_lock(f));
            struct ht_job_lane *l = find_lane(f, (enum ht_lane_kind)kind, root);
            req = l ? take_interrupted(f, l) : NULL;
            ht_mutex_unlock(ht_fuse_job_lock(f));
            if (req)
                fuse_reply_err(req, EINTR);
        } while (req);
    }
}

uint64_t ht_job_key(struct ht_fuse *f, uint64_t ino)
{
    struct ht_ns_tensor t;

    if (ht_hidden_match(ino))
        return ht_hidden_root(f->ctl, ino);
    return ht_ns_tensor(f->ns, ino, &t) || !t.root ? ino : t.root;
}

bool ht_job_waits_for_update(struct ht_fuse *f, uint64_t ino, uint64_t off, uint64_t len)
{
    return ht_ctl_param(f->ctl, ino) && ht_optim_readable(f->optim, ino, off, len, NULL) == -EAGAIN;
}

bool ht_job_submit(struct ht_job *job, enum ht_lane_kind kind, uint64_t key)
{
    struct ht_fuse *f = job->fuse;
    fuse_req_t req = job->req; /* from where it is queued, the job may end */

    job->key = key;
    if (job->may_end)
        fuse_req_interrupt_func(req, on_interrupt, job);
    ht_mutex_lock(ht_fuse_job_lock(f));
    struct ht_job_lane *l = find_lane(f, kind, key);
    if (!l)
        l = make_lane(f, kind, key);
    if (!l) {
        ht_mutex_unlock(ht_fuse_job_lock(f));
        refuse_job(job);
        return false;
    }
    l->bytes += job->data ? job->size : 0;
    ht_list_add_tail(&l->queue, &job->link);
    job->queued = l;
    f->jobs.count++;
    requeue_lane(f, l);
    bool interrupted = job->interrupted;
    call_thread(f);
    ht_mutex_unlock(ht_fuse_job_lock(f));
    if (interrupted)
        end_interrupted(f, job, req, key);
    return true;
}

static bool run_for(struct ht_fuse *f, fuse_req_t req, enum ht_lane_kind kind, struct ht_job *like)
{
    like->fuse = f;
    like->req = req;
    if (kind == HT_LANE_NONE) {
        like->fn(like);
        return true;
    }
    struct ht_job *job = make_job(like);
    if (!job || (like->data && !ht_job_data(job, like->data, like->size)))
        return false;
    return ht_job_submit(job, kind, like->key ? like->key : ht_job_key(f, like->ino));
}

bool ht_job_run(fuse_req_t req, enum ht_lane_kind kind, struct ht_job *like)
{
    return run_for(ht_fuse_of(req), req, kind, like);
}

/*
 * Is a write of len bytes to wait in this lane? If much waits there already only the first bytes (*len is how many),
 * or, if it cannot be cut, none.
 *
 * If an asynchronous direct write is cut, the kernel returns EIO for it, and the request does not say whether it is
 * one. Pages of a mapping would be lost; the kernel has at most HT_FUSE_BACKGROUND such requests in flight.
 */
static bool takes(struct ht_fuse *f, enum ht_lane_kind kind, uint64_t key, const struct fuse_file_info *fi, size_t *len)
{
    ht_mutex_lock(ht_fuse_job_lock(f));
    const struct ht_job_lane *l = find_lane(f, kind, key);
    size_t waiting = l ? l->bytes : 0;
    ht_mutex_unlock(ht_fuse_job_lock(f));
    if (!fi->writepage && (fi->flags & O_DIRECT))
        return waiting + *len <= REFUSE_BYTES;
    if (!fi->writepage && waiting + *len > SHORT_BYTES)
        *len = ht_min_u64(*len, PIECE_BYTES);
    return true;
}

bool ht_job_write(struct ht_fuse *f, fuse_req_t req, enum ht_lane_kind kind, struct ht_job *like,
                  const struct fuse_file_info *fi)
{
    like->key = like->key ? like->key : ht_job_key(f, like->ino);
    if (takes(f, kind, like->key, fi, &like->size))
        return run_for(f, req, kind, like);
    if (req)
        ht_reply(req, -ENOMEM);
    return false;
}

static bool is_queued(struct ht_fuse *f, const struct ht_job *job, enum ht_lane_kind kind, uint64_t key)
    HT_REQUIRES(HT_LOCK_JOBS)
{
    const struct ht_job_lane *l = find_lane(f, kind, key);

    if (!l)
        return false;
    ht_list_for_each(pos, &l->queue)
        if (ht_list_entry(pos, struct ht_job, link)->fn == job->fn)
            return true;
    return false;
}

bool ht_job_submit_once(struct ht_job *job, enum ht_lane_kind kind, uint64_t key)
{
    struct ht_fuse *f = job->fuse;

    ht_mutex_lock(ht_fuse_job_lock(f));
    bool queued = is_queued(f, job, kind, key);
    if (queued)
        put_free(f, job);
    ht_mutex_unlock(ht_fuse_job_lock(f));
    return queued || ht_job_submit(job, kind, key);
}

void ht_job_stop(struct ht_fuse *f)
{
    ht_mutex_lock(ht_fuse_job_lock(f));
    f->jobs.stop = true;
    pthread_cond_broadcast(&f->job_wanted);
    /* One that runs may start another. */
    for (unsigned i = 0; i < f->jobs.threads; i++) {
        pthread_t thread = f->jobs.thread[i];
        ht_mutex_unlock(ht_fuse_job_lock(f));
        pthread_join(thread, NULL);
        ht_mutex_lock(ht_fuse_job_lock(f));
    }
    f->jobs.threads = 0;
    ht_mutex_unlock(ht_fuse_job_lock(f));
    HT_UNSHARED(HT_LOCK_JOBS);
    ht_list_for_each_entry_safe(job, &f->job_free, struct ht_job, link)
        free(job);
    ht_list_for_each_entry_safe(l, &f->jobs.lane_free, struct ht_job_lane, link)
        free(l);
}

/* -------------------------------------------------------------------- dump */

enum { DUMP_JOBS_MAX = 16 }; /* of one lane */

static void dump_lane(const struct ht_job_lane *l, struct ht_dump *d)
{
    static const char *const words[] = {
        [HT_LANE_GRADIENT] = "gradients", [HT_LANE_WRITE] = "writes",   [HT_LANE_CTL_SESSION] = "commands",
        [HT_LANE_TURN] = "turns",         [HT_LANE_UPDATE] = "updates", [HT_LANE_PAGES] = "pages",
        [HT_LANE_NAMES] = "names",        [HT_LANE_PAUSES] = "pauses",
    };
    unsigned queued = 0;

    ht_list_for_each(pos, &l->queue)
        queued++;
    ht_dump_put(d, "  lane %s of %llu: %u running, %u queued\n", words[l->kind], (unsigned long long)l->key, l->running,
                queued);
    ht_dump_id(d, l->key);
    queued = 0;
    ht_list_for_each_entry(job, &l->queue, const struct ht_job, link) {
        if (!job->request.what || queued++ >= DUMP_JOBS_MAX)
            continue;
        ht_dump_put(d, "    %s of inode %llu for ", job->request.what, (unsigned long long)job->request.ino);
        ht_dump_age(d, job->request.began_ns);
        ht_dump_put(d, "\n");
        ht_dump_id(d, job->request.ino);
    }
}

void ht_job_dump(struct ht_fuse *f, struct ht_dump *d)
{
    if (!ht_dump_lock(d, ht_fuse_job_lock(f), "jobs"))
        return;
    ht_dump_put(d, "  %u threads run jobs, %u are idle; %llu jobs are queued or running\n", f->jobs.threads,
                f->jobs.idle, (unsigned long long)f->jobs.count);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(f->jobs.lane); i++)
        ht_list_for_each_entry(l, &f->jobs.lane[i], const struct ht_job_lane, link)
            dump_lane(l, d);
    ht_mutex_unlock(ht_fuse_job_lock(f));
}
