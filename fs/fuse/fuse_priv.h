/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuse_priv.h - the common state of the files of fs/fuse.
 *
 * Threads: workers (workers.c; one with -s) take requests from the kernel and must never wait for another request from
 * it. Some requests wait for updates or invalidations, and these may wait for a read that no worker has taken yet: job
 * threads run such requests, a few for each model root (job.c). Reads of bytes with a pending update wait without a
 * thread (parked.c).
 */
#pragma once

#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 17)
#include <fuse_lowlevel.h>

#include <stdatomic.h>
#include "fs/fuse/session.h"
#include "fs/ctl/hidden.h"
#include "tiering/base/activity.h"
#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/base/event.h"
#include "tiering/base/trace.h"
#include "tiering/api/background.h"
#include "tiering/api/object.h"
#include "tiering/api/stats.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"

enum {
    HT_FUSE_IO_BYTES = 1 << 20, /* largest read or write that the kernel may request */
    HT_FUSE_BACKGROUND = 512,   /* asynchronous requests in flight */
    HT_PAGE_WAITS_MAX = HT_FUSE_BACKGROUND / 4,
    HT_READS_BEHIND_MAX = HT_FUSE_BACKGROUND / 4,
    HT_LANE_THREADS = 32,  /* that jobs of one kind may take */
    HT_LANE_LEFT_MAX = 32, /* threads of jobs that have left their lane */
    HT_LANE_BUCKETS = 64,
    HT_PASSTHROUGH_BUCKETS = 256,
    HT_WORKERS_ADDED_MAX = 256, /* workers added while others are held by a device */
};

struct ht_fuse {
    struct ht_ctl *ctl;
    struct ht_store *store;
    struct ht_ns *ns;
    struct ht_optim *optim;
    struct ht_traffic *traffic;
    struct ht_ctl_cache cache;
    struct fuse_session *session;
    char *mountpoint;
    unsigned major, minor;    /* device number of the mount */
    struct ht_fuse_opts opts; /* threads is not 0 */
    bool masks;               /* umasks are applied here, not by the kernel */
    _Atomic bool mounted, ready_reported, exited;
    _Atomic bool ended;         /* the mount ends: no job waits for memory any more */
    _Atomic unsigned notifying; /* threads inside a notification */
    /* Writes of mapped pages: running now, and when the last one began. */
    _Atomic unsigned page_writes;
    _Atomic uint64_t page_write_ns;

    /* workers.c */
    struct {
        struct ht_mutex lock; /* a leaf */
        pthread_cond_t changed;
        struct worker *worker; /* threads + HT_WORKERS_ADDED_MAX */
        _Atomic unsigned count, busy;
        _Atomic unsigned surplus; /* number of workers that end with their next request */
        _Atomic bool asleep;      /* the checking thread waits for a call */
        HT_GUARDED_BY(HT_LOCK_WORKERS) struct {
            bool over, told_full;
            int error;
        };
    } workers;

    /* atime.c */
    struct ht_mutex atime_lock;    /* a leaf */
    int mounts_fd;                 /* readable after a remount */
    _Atomic uint64_t mounts_asked; /* when, in ticks */
    _Atomic int atime;             /* enum ht_atime */
    _Atomic bool dir_atime;

    struct ht_mutex open_lock; /* a leaf */
    struct ht_list opens;      /* open regular files */
    struct ht_list open_dirs;  /* ops_dir.c */

    /* passthrough.c */
    struct {
        uint64_t share_bytes; /* 0: no passthrough */
        bool lent;            /* by the DRAM tier, to openers that ask */
        _Atomic bool on;
        struct ht_mutex lock; /* a leaf */
        pthread_cond_t idle;
        struct ht_list files[HT_PASSTHROUGH_BUCKETS];
        /* passthrough_closed.c */
        _Atomic bool keeps_closed;
        pthread_t thread;
        pthread_cond_t closed_changed;
        HT_GUARDED_BY(HT_LOCK_PASSTHROUGH) struct {
            struct ht_list closed; /* a moment ago, the first one first */
            struct ht_list
                mapped; /* that moment is over, and a program had them; that which was looked at first, first */
            bool over;  /* the thread ends */
        };
    } passthrough;

    /* parked.c */
    struct ht_mutex park_lock; /* above the optimizer's lock */
    struct ht_list park_free, parked;

    _Atomic unsigned page_waits;   /* ops_hidden.c: writes that wait until pages are dropped */
    _Atomic unsigned reads_behind; /* ops_file.c: jobs of ht_read_behind */

    /* job.c */
    struct ht_mutex job_lock;
    pthread_cond_t job_wanted;
    struct ht_list job_free;
    struct {
        struct ht_list lane[HT_LANE_BUCKETS], lane_free, ready[HT_LANES];
        unsigned running[HT_LANES];
        unsigned turn, idle, threads;
        unsigned left;  /* jobs that have left their lane and run on */
        uint64_t count; /* queued and running */
        bool stop;
        pthread_t thread[HT_LANES * HT_LANE_THREADS + HT_LANE_LEFT_MAX];
    } jobs HT_GUARDED_BY(HT_LOCK_JOBS);
};

HT_MUTEX_OF(ht_fuse_workers_lock, struct ht_fuse, workers.lock, HT_LOCK_WORKERS)
HT_MUTEX_OF(ht_fuse_atime_lock, struct ht_fuse, atime_lock, HT_LOCK_ATIME)
HT_MUTEX_OF(ht_fuse_open_lock, struct ht_fuse, open_lock, HT_LOCK_OPENS)
HT_MUTEX_OF(ht_fuse_passthrough_lock, struct ht_fuse, passthrough.lock, HT_LOCK_PASSTHROUGH)
HT_MUTEX_OF(ht_fuse_park_lock, struct ht_fuse, park_lock, HT_LOCK_PARKED)
HT_MUTEX_OF(ht_fuse_job_lock, struct ht_fuse, job_lock, HT_LOCK_JOBS)

enum ht_atime { HT_ATIME_NEVER, HT_ATIME_RELATIVE, HT_ATIME_STRICT };

static inline struct ht_fuse *ht_fuse_of(fuse_req_t req)
{
    return fuse_req_userdata(req);
}

/* How long the kernel may believe names and attributes: every change passes the kernel, or is announced to it. */
#define HT_FUSE_VALID_S 3600.0

extern const struct fuse_lowlevel_ops ht_fuse_ops; /* ops.c */

void ht_fuse_init(void *userdata, struct fuse_conn_info *conn);
void ht_fuse_drop_name(void *ctx, uint64_t parent, const char *name); /* ht_ctl_cache.drop_name */

/* workers.c: take requests until the session ends. wake: look whether it has. */
void ht_workers_init(struct ht_fuse *f);
int ht_workers_run(struct ht_fuse *f) HT_MUST_CHECK;
void ht_workers_wake(struct ht_fuse *f);
void ht_workers_destroy(struct ht_fuse *f);

/* reply.c: HT_FUSE_IO_BYTES of the calling thread, page-aligned, made at its first use. NULL: no memory. */
char *ht_fuse_buffer(void);

/* reply.c: short forms. r: 0 or -errno. */
void ht_reply(fuse_req_t req, int rc);
/* To an ioctl whose answer has no bytes. */
void ht_reply_ioctl(fuse_req_t req, ssize_t rc);
void ht_reply_attr(fuse_req_t req, uint64_t ino, int rc, const struct stat *st);
void ht_fuse_entry_of(const struct stat *st, struct fuse_entry_param *out);
/* For new inodes: applies the umask, if the kernel leaves that to us. */
struct ht_cred ht_fuse_cred(fuse_req_t req);
struct ht_caller ht_fuse_caller(fuse_req_t req);
/* With the content's bytes. reader: that of the request's descriptor, or NULL. began_ns: of the request; 0: now. */
void ht_reply_read(fuse_req_t req, struct ht_obj *obj, struct ht_obj_reader *reader, uint64_t off, size_t len,
                   enum ht_traffic_kind kind, uint64_t began_ns);
void ht_count_read(struct ht_fuse *f, enum ht_traffic_kind kind, ssize_t n);
void ht_count_written(struct ht_fuse *f, enum ht_traffic_kind kind, ssize_t n);

/* An open regular file. */
struct ht_open {
    struct ht_list link; /* in fuse.opens */
    uint64_t ino;
    struct ht_obj *obj;
    struct ht_obj_reader reader;
    struct ht_passthrough_file *passthrough; /* passthrough.c */
    bool stores;                             /* a mapping can change pages without our knowledge */
    /* Found out in the epoch of ht_ctl_epoch (0: never), and checked at each read and write. */
    _Atomic uint32_t epoch;
    _Atomic uint64_t root;   /* the model root this is a parameter of, or 0 */
    _Atomic bool privileged; /* has setuid bits or capabilities, which end with a write */
    /* HT_IOCTL_SAME: its caller reads bytes that differ, up to here. Those after it are the same, and left out. */
    _Atomic uint64_t differs_to;
    _Atomic bool background; /* HT_IOCTL_BACKGROUND: its reads are jobs */
};
/* For readahead at a read; NULL: it could go beyond what the reader wants. */
struct ht_obj_reader *ht_open_reader(struct ht_open *o, uint64_t off, uint64_t len);
/* Closes the files that are still open when the mount has ended by force. */
void ht_open_close_all(struct ht_fuse *f);
void ht_open_dirs_free(struct ht_fuse *f);

/* atime.c: after a read of a file, a directory or a link. read_options: the mount is there. */
void ht_atime_init(struct ht_fuse *f);
void ht_atime_read_options(struct ht_fuse *f);
bool ht_atime_due(struct ht_fuse *f, uint64_t ino, bool dir);
void ht_atime_touch(struct ht_fuse *f, uint64_t ino, bool dir);
void ht_atime_finish(struct ht_fuse *f);

/*
 * passthrough.c. open: sets the fields of the reply, or leaves them as they are; -ENOSPC: passthrough is active and no
 * rewrite can be reserved; close in any case. forget: after the lookup counts were dropped.
 */
void ht_passthrough_init(struct ht_fuse *f);
void ht_passthrough_negotiate(struct ht_fuse *f, struct fuse_conn_info *conn);
/* Can this user's open with these flags be passed through? Those of a gradient are of its parameter ino. */
bool ht_passthrough_may_be(struct ht_fuse *f, uint64_t ino, int flags, uint32_t user);
int ht_passthrough_open(fuse_req_t req, struct ht_open *o, struct fuse_file_info *fi) HT_MUST_CHECK;
bool ht_passthrough_is_active(const struct ht_open *o);
/* Are the opens of this inode, a file or a gradient, passed through? May wait for the I/O of another opener. */
bool ht_passthrough_has(struct ht_fuse *f, uint64_t ino);
/*
 * Around a change of a file's size; no open of the file begins in between. -EBUSY: the file becomes smaller, and a
 * program may store into its pages. end gets *out, which may be NULL.
 */
int ht_passthrough_resize_begin(struct ht_fuse *f, uint64_t ino, uint64_t bytes,
                                struct ht_passthrough_file **out) HT_MUST_CHECK;
void ht_passthrough_resize_end(struct ht_fuse *f, struct ht_passthrough_file *e);
void ht_passthrough_close(struct ht_fuse *f, struct ht_open *o);
void ht_passthrough_forget(fuse_req_t req, uint64_t ino);
/*
 * passthrough_grad.c: the same for hidden files; only gradients are passed through. looked_up: once for each lookup
 * that the kernel gets. open: was it counted? close: for every open that was.
 */
void ht_passthrough_hidden_looked_up(struct ht_fuse *f, uint64_t ino, uint64_t parent, const char *name);
void ht_passthrough_hidden_not_looked_up(struct ht_fuse *f, uint64_t ino); /* takes the last one back */
void ht_passthrough_hidden_forget(fuse_req_t req, uint64_t ino, uint64_t n);
bool ht_passthrough_hidden_open(fuse_req_t req, uint64_t ino, const struct ht_hidden_about *about, int flags,
                                struct fuse_file_info *fi) HT_MUST_CHECK;
void ht_passthrough_hidden_close(struct ht_fuse *f, uint64_t ino);
struct ht_obj *ht_passthrough_mapped(void *fuse, uint64_t ino);             /* ht_ctl_cache.mapped */
bool ht_passthrough_prefetch(void *fuse, uint64_t ino, struct ht_obj *obj); /* ht_ctl_cache.bring */
void ht_passthrough_rest(void *fuse, uint64_t ino);                         /* ht_ctl_cache.rest */
/*
 * passthrough_closed.c: ends files that were closed a moment ago, unless these cannot reserve so much. True: the next
 * commit gives back what they have reserved.
 */
bool ht_passthrough_make_room(struct ht_fuse *f, uint64_t lack_bytes);
void ht_passthrough_closed_stop(struct ht_fuse *f);
void ht_passthrough_finish(struct ht_fuse *f); /* when the connection has ended */

/* atime.c */
bool ht_privileged(struct ht_fuse *f, uint64_t ino);
/* Does an access list, set by this caller, take the setgid bit away? True if the caller is not in the file's group. */
bool ht_loses_setgid(fuse_req_t req, uint64_t ino);
/* The bits that this caller's write, truncation or change of owner takes away: HT_KILL_*. */
unsigned ht_privilege_kills(fuse_req_t req, uint64_t ino);
/* Removes capabilities, and these bits. */
void ht_privilege_drop(struct ht_fuse *f, uint64_t ino, unsigned kills);

/* parked.c: answer a read now, or when the updates of its bytes have been applied. */
int ht_park_init(struct ht_fuse *f) HT_MUST_CHECK;
void ht_park_read(struct ht_fuse *f, fuse_req_t req, struct ht_open *o, uint64_t off, size_t len);
/* Answers everything that still waits with an error, and frees the pool. */
void ht_park_finish(struct ht_fuse *f);

/* job.c: run fn(job) on a job thread; fn replies. */
struct ht_job_lane {
    struct ht_list link;  /* in jobs.lane[], or jobs.lane_free */
    struct ht_list ready; /* in jobs.ready[kind] */
    struct ht_list queue; /* jobs */
    enum ht_lane_kind kind;
    uint64_t key;
    unsigned running;
    size_t bytes; /* copied for its jobs */
};

struct ht_job {
    struct ht_list link;
    struct ht_job_lane *lane;   /* while it is running, until it leaves */
    struct ht_job_lane *queued; /* while it waits there */
    bool left;
    void (*fn)(struct ht_job *job);
    struct ht_fuse *fuse;
    fuse_req_t req;
    struct ht_request request; /* req, as the worker took it */
    uint64_t ino, off, size;
    struct ht_hidden_file *file;
    struct ht_open *open;
    struct open_dir *dir;
    int flags;
    const char *data; /* owned: freed after fn */
    /*
     * An interrupt of its request ends it with EINTR while it waits for a replay of logged steps, in its lane or
     * running. So fn leaves nothing undone if its calls return -EINTR.
     */
    bool may_end;
    uint64_t key; /* of its lane */
    _Atomic bool interrupted;
};
/* The place of a lane in jobs.lane[]. */
static inline unsigned ht_job_bucket(enum ht_lane_kind kind, uint64_t key)
{
    return (unsigned)((key * HT_LANES + kind) % HT_LANE_BUCKETS);
}

/* How many of its jobs may run. */
unsigned ht_job_lane_limit(const struct ht_job_lane *l);

/* Asserts the invariants of job.c (tiering/base/verify.h). */
void ht_job_verify(struct ht_fuse *f) HT_REQUIRES(HT_LOCK_JOBS);
int ht_job_start(struct ht_fuse *f) HT_MUST_CHECK;
/* A zeroed job with req set, which may be NULL; NULL: no memory, and req was answered with that error. */
struct ht_job *ht_job_new(struct ht_fuse *f, fuse_req_t req, void (*fn)(struct ht_job *job));
/* Gives it a copy of len bytes (NUL added). False: no memory; req was answered and the job is gone. */
bool ht_job_data(struct ht_job *job, const void *data, size_t len);
/*
 * key: its lane waits for this: a model root, or some inode; 0: nothing that others could hold for long. False: no
 * memory; req was answered and the job is gone.
 */
bool ht_job_submit(struct ht_job *job, enum ht_lane_kind kind, uint64_t key);
/*
 * Does what a job of these members does: now (HT_LANE_NONE), or later in a lane, with a copy of its data. key 0: what a
 * job about ino waits for. False: no memory, and req was answered.
 */
bool ht_job_run(fuse_req_t req, enum ht_lane_kind kind, struct ht_job *like);
/*
 * As ht_job_run, for a write of these. If much waits in the lane already only its first bytes (like->size is how many);
 * one that cannot be cut gets -ENOMEM. req NULL: nobody waits for an answer.
 */
bool ht_job_write(struct ht_fuse *f, fuse_req_t req, enum ht_lane_kind kind, struct ht_job *like,
                  const struct fuse_file_info *fi);
/*
 * A read after HT_IOCTL_BACKGROUND, as a job; fn counts reads_behind down at its end. Asynchronous reads are requests
 * in the background of the kernel, which has HT_FUSE_BACKGROUND for all. False: so many wait that the caller reads now.
 */
bool ht_read_behind(fuse_req_t req, struct ht_job *like);
/* A job of no request, unless one with its fn is queued in this lane and does the same: then this one is gone. */
bool ht_job_submit_once(struct ht_job *job, enum ht_lane_kind kind, uint64_t key);
/*
 * A replay of this root's logged steps begins: its queued jobs end whose requests were interrupted before. ctx: struct
 * ht_fuse.
 */
void ht_job_replay_begins(void *ctx, uint64_t root);
/*
 * The calling job, if it serves a request, gives up its place in its lane: it is about to wait for a lock of the
 * kernel, which the request of a later job may hold. False: too many have left; it keeps its place and must not wait
 * for that lock.
 */
bool ht_job_leave_lane(struct ht_fuse *f) HT_MUST_CHECK;
/* A job about ino may have to wait for this: the model root that it is or lies in, or itself. */
uint64_t ht_job_key(struct ht_fuse *f, uint64_t ino);
/* Is an update of these bytes pending, so that a writer has to wait? */
bool ht_job_waits_for_update(struct ht_fuse *f, uint64_t ino, uint64_t off, uint64_t len);
/* Runs all queued jobs to their end and stops the threads. */
void ht_job_stop(struct ht_fuse *f);
/* Appends lanes and the requests in their queues, and parked reads. */
void ht_job_dump(struct ht_fuse *f, struct ht_dump *d);
void ht_park_dump(struct ht_fuse *f, struct ht_dump *d);

/*
 * ops_*.c: the operations, by theme: on inodes of the store, and (ht_hidden_op_) on entries of the hidden tree. ops.c
 * chooses, but for those of all, which know both. X(op)
 */
/* clang-format off */
#define HT_FUSE_OPS_OF_ALL(X) X(getattr) X(getxattr) X(ioctl) X(listxattr) X(readdir) X(readdirplus) X(readlink) X(statfs)
#define HT_FUSE_OPS_OF_BOTH(X) \
    X(setattr) X(lookup) X(open) X(read) X(write) X(flush) X(release) X(fsync) X(opendir) X(releasedir)
#define HT_FUSE_OPS_OF_STORE(X) \
    X(create) X(lseek) X(fsyncdir) X(mknod) X(mkdir) X(unlink) X(rmdir) X(symlink) X(link) X(rename) X(tmpfile) \
    X(fallocate) X(copy_file_range) X(setxattr) X(removexattr)
/* clang-format on */
#define HT_OPERATION(op) __typeof__(*((struct fuse_lowlevel_ops *)NULL)->op)
#define HT_OF_BOTH(op) HT_OPERATION(op) ht_op_##op, ht_hidden_op_##op;
#define HT_OF_STORE(op) HT_OPERATION(op) ht_op_##op;
HT_FUSE_OPS_OF_BOTH(HT_OF_BOTH)
HT_FUSE_OPS_OF_STORE(HT_OF_STORE)
HT_FUSE_OPS_OF_ALL(HT_OF_STORE)

/* ops_hidden.c: an ioctl that is of the hidden tree alone. */
void ht_hidden_ioctl(fuse_req_t req, uint64_t ino, unsigned cmd, struct fuse_file_info *fi, const void *in,
                     size_t in_len);
