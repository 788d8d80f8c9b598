/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuse_priv.h - what the files of fs/fuse share.
 *
 * Threads: workers (libfuse's; one with -s) take requests from the kernel and must never wait for another request of
 * it. What may wait for updates or invalidations, which may wait for a read that no worker has taken yet, is done by
 * job threads, a few for each model root (job.c); reads of bytes with a pending update wait without a thread (parked.c).
 */
#ifndef HITRAIN_FS_FUSE_FUSE_PRIV_H
#define HITRAIN_FS_FUSE_FUSE_PRIV_H

#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 17)
#include <fuse_lowlevel.h>

#include <stdatomic.h>
#include "fs/fuse/session.h"
#include "fs/ctl/hidden.h"
#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/base/event.h"

enum {
    HT_FUSE_IO_BYTES = 1 << 20, /* largest read or write the kernel is offered */
    HT_FUSE_BACKGROUND = 512,   /* asynchronous requests in flight */
    HT_LANE_THREADS = 32,       /* that jobs of one kind may take */
    HT_LANE_BUCKETS = 64,
    HT_HANDOUT_BUCKETS = 256,
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
    unsigned major, minor; /* device number of the mount */
    unsigned threads;
    pthread_t loop_thread;
    bool single_thread;
    bool masks; /* umasks are applied here, not by the kernel */
    _Atomic bool mounted, ready_told, looping, exited;
    _Atomic unsigned notifying; /* threads inside a notification */
    /* Writes of mapped pages: running now, and when the last one began. */
    _Atomic unsigned page_writes;
    _Atomic uint64_t page_write_ns;
    void (*ready)(void *ctx);
    void *ready_ctx;

    /* atime.c */
    struct ht_mutex atime_lock;    /* a leaf */
    int mounts_fd;                 /* tells of remounts */
    _Atomic uint64_t mounts_asked; /* when, in ticks */
    _Atomic int atime;             /* enum ht_atime */
    _Atomic bool dir_atime;

    struct ht_mutex open_lock; /* a leaf */
    struct ht_list opens;      /* open regular files */
    struct ht_list open_dirs;  /* ops_dir.c */

    /* handout.c */
    struct {
        uint64_t share_bytes; /* 0: nothing is ever handed out */
        _Atomic bool on;
        struct ht_mutex lock; /* a leaf */
        pthread_cond_t idle;
        struct ht_list files[HT_HANDOUT_BUCKETS];
    } handout;

    /* parked.c */
    struct ht_mutex park_lock; /* above the optimizer's lock */
    struct ht_list park_free, parked;

    /* job.c */
    struct ht_mutex job_lock;
    pthread_cond_t job_wanted;
    struct ht_list job_free;
    struct {
        struct ht_list lane[HT_LANE_BUCKETS], lane_free, ready[HT_LANES];
        unsigned running[HT_LANES];
        unsigned turn, idle, threads;
        uint64_t count; /* queued and running */
        bool stop;
        pthread_t thread[HT_LANES * HT_LANE_THREADS];
    } jobs;
};

enum ht_atime { HT_ATIME_NEVER, HT_ATIME_RELATIVE, HT_ATIME_STRICT };

static inline struct ht_fuse *ht_fuse_of(fuse_req_t req)
{
    return fuse_req_userdata(req);
}

/* How long the kernel may believe names and attributes: everything that changes them passes it, or is told to it. */
#define HT_FUSE_VALID_S 3600.0

extern const struct fuse_lowlevel_ops ht_fuse_ops;

/* buffer.c: HT_FUSE_IO_BYTES of the calling thread, page-aligned, made at its first use. NULL: no memory. */
char *ht_fuse_buffer(void);

/* reply.c: short forms. r: 0 or -errno. */
void ht_reply(fuse_req_t req, int r);
void ht_reply_attr(fuse_req_t req, uint64_t ino, int r, const struct stat *st);
/* Of a found or made entry, which has taken a lookup count. */
void ht_reply_entry(fuse_req_t req, int r, const struct stat *st);
void ht_fuse_entry_of(const struct stat *st, struct fuse_entry_param *out);
/* For things that are made: with the umask, where it is ours to apply. */
struct ht_cred ht_fuse_cred(fuse_req_t req);
struct ht_caller ht_fuse_caller(fuse_req_t req);
void ht_count_read(struct ht_fuse *f, enum ht_traffic_kind kind, ssize_t n);
void ht_count_written(struct ht_fuse *f, enum ht_traffic_kind kind, ssize_t n);

/* An open regular file. */
struct ht_open {
    struct ht_list link; /* in fuse.opens */
    uint64_t ino;
    struct ht_obj *obj;
    struct ht_obj_reader reader;
    struct ht_handed_file *handed; /* handout.c */
    bool stores;                   /* a mapping of it can change pages without our knowledge */
    /* What was found out in the epoch of ht_ctl_epoch (0: never), and is asked at each read and write. */
    _Atomic uint32_t epoch;
    _Atomic uint64_t root;   /* the model root this is a parameter of, or 0 */
    _Atomic bool privileged; /* has setuid bits or capabilities, which end with a write */
};
/* Root of a parameter, or 0; cheap. */
uint64_t ht_open_root(struct ht_fuse *f, struct ht_open *o);
/* What is still open when the mount has ended by force. */
void ht_open_close_all(struct ht_fuse *f);
void ht_open_dirs_free(struct ht_fuse *f);

/* atime.c: after a read of a file, a directory or a link. start: the mount is there. */
void ht_atime_init(struct ht_fuse *f);
void ht_atime_start(struct ht_fuse *f);
bool ht_atime_due(struct ht_fuse *f, uint64_t ino, bool dir);
void ht_atime_touch(struct ht_fuse *f, uint64_t ino, bool dir);
void ht_atime_finish(struct ht_fuse *f);

/*
 * handout.c. open: sets what the reply says, or leaves it as it is; -ENOSPC: the file is out and no rewrite of it can be promised; close
 * in any case. forget: after the lookup counts were dropped.
 */
void ht_handout_init(struct ht_fuse *f);
void ht_handout_agree(struct ht_fuse *f, struct fuse_conn_info *conn);
int ht_handout_open(fuse_req_t req, struct ht_open *o, struct fuse_file_info *fi) HT_CHECK;
bool ht_handout_is_out(const struct ht_open *o);
void ht_handout_close(struct ht_fuse *f, struct ht_open *o);
void ht_handout_forget(fuse_req_t req, uint64_t ino);
/*
 * handout_grad.c: the same for hidden files, of which only gradients are handed out. looked_up: as often as the kernel is told of one. close:
 * of every open that got as far as open.
 */
void ht_handout_hidden_looked_up(struct ht_fuse *f, uint64_t ino, uint64_t parent, const char *name);
void ht_handout_hidden_not_looked_up(struct ht_fuse *f, uint64_t ino); /* takes the last one back */
void ht_handout_hidden_forget(fuse_req_t req, uint64_t ino, uint64_t n);
void ht_handout_hidden_open(fuse_req_t req, uint64_t ino, uint64_t bytes, int flags, struct fuse_file_info *fi);
void ht_handout_hidden_close(struct ht_fuse *f, uint64_t ino);
struct ht_obj *ht_handout_mapped(void *fuse, uint64_t ino);          /* ht_ctl_cache.mapped */
bool ht_handout_bring(void *fuse, uint64_t ino, struct ht_obj *obj); /* ht_ctl_cache.bring */
void ht_handout_finish(struct ht_fuse *f);                           /* when the connection has ended */

/* privilege.c */
bool ht_privileged(struct ht_fuse *f, uint64_t ino);
/* Does an access list, set by this caller, take the setgid bit away? Of whoever is not in the file's group. */
bool ht_loses_setgid(fuse_req_t req, uint64_t ino);
/* The bits that this caller's write, truncation or change of owner takes away: HT_KILL_*. */
unsigned ht_privilege_kills(fuse_req_t req, uint64_t ino);
/* Take away capabilities, and these bits. */
void ht_privilege_drop(struct ht_fuse *f, uint64_t ino, unsigned kills);

/* parked.c: answer a read now, or when the updates of its bytes have been applied. */
int ht_park_init(struct ht_fuse *f) HT_CHECK;
void ht_park_read(struct ht_fuse *f, fuse_req_t req, struct ht_open *o, uint64_t off, size_t len);
/* Wait in this thread, which is that of a job where it may be long, until no update of the range is pending. */
void ht_park_wait(struct ht_fuse *f, uint64_t oid, uint64_t off, uint64_t len);
/* reader: of the descriptor it came through, or NULL. */
void ht_read_and_reply(struct ht_fuse *f, fuse_req_t req, struct ht_obj *obj, struct ht_obj_reader *reader,
                       uint64_t off, size_t len, enum ht_traffic_kind kind);
/* Answer everything that still waits with an error, and free the pool. */
void ht_park_finish(struct ht_fuse *f);

/* job.c: run fn(job) on a job thread; fn replies. */
struct lane;
struct ht_job {
    struct ht_list link;
    struct lane *lane; /* while it is running */
    void (*fn)(struct ht_job *job);
    struct ht_fuse *fuse;
    fuse_req_t req;
    uint64_t ino, off, size;
    struct ht_hidden_file *file;
    struct ht_open *open;
    struct open_dir *dir;
    int flags;
    char *data; /* owned: freed after fn */
};
int ht_job_start(struct ht_fuse *f) HT_CHECK;
/* A zeroed job with req set, which may be NULL; NULL: no memory, and req was answered so. */
struct ht_job *ht_job_new(struct ht_fuse *f, fuse_req_t req, void (*fn)(struct ht_job *job));
/* Give it a copy of len bytes (NUL added). False: no memory; req was answered and the job is gone. */
bool ht_job_data(struct ht_job *job, const void *data, size_t len);
/* key: what its lane waits for: a model root, or some inode; 0: nothing that others could hold for long. */
void ht_job_submit(struct ht_job *job, enum ht_lane_kind kind, uint64_t key);
/* The calling job, if it is one of a request, holds its place in its lane no longer: it is about to wait for a lock of the kernel, which the
 * request of a job behind it may hold. */
void ht_job_leave_lane(struct ht_fuse *f);
/* What a job about ino may have to wait for: the model root that it is or lies in, or itself. */
uint64_t ht_job_key(struct ht_fuse *f, uint64_t ino);
/* Is an update of these bytes pending, so that whoever changes them has to wait? */
bool ht_job_waits_for_update(struct ht_fuse *f, uint64_t ino, uint64_t off, uint64_t len);
/*
 * As ht_job_data, for a write that will wait in this lane: where much waits there already only the first bytes are
 * taken (job->size), or, of a write that cannot be cut, none: -ENOMEM.
 */
bool ht_job_bytes(struct ht_job *job, enum ht_lane_kind kind, uint64_t key, const void *buf, size_t len,
                  const struct fuse_file_info *fi);
/* Runs what is queued to its end and stops the threads. */
void ht_job_stop(struct ht_fuse *f);

/* ops_*.c: the operations, by theme. */
void ht_op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name);
void ht_op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t n);
void ht_op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets);
void ht_op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t rdev);
void ht_op_tmpfile(fuse_req_t req, fuse_ino_t parent, mode_t mode, struct fuse_file_info *fi);
void ht_op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode);
void ht_op_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name);
void ht_op_readlink(fuse_req_t req, fuse_ino_t ino);
void ht_op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *name);
void ht_op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name);
void ht_op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name);
void ht_op_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
                  unsigned flags);

void ht_op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void ht_op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set, struct fuse_file_info *fi);
void ht_op_statfs(fuse_req_t req, fuse_ino_t ino);
void ht_op_setxattr(fuse_req_t req, fuse_ino_t ino, const char *name, const char *value, size_t size, int flags);
void ht_op_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size);
void ht_op_listxattr(fuse_req_t req, fuse_ino_t ino, size_t size);
void ht_op_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name);

void ht_op_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi);
void ht_op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void ht_op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi);
void ht_op_write(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off, struct fuse_file_info *fi);
void ht_op_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void ht_op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void ht_op_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi);
void ht_op_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len, struct fuse_file_info *fi);
void ht_op_copy_file_range(fuse_req_t req, fuse_ino_t ino_in, off_t off_in, struct fuse_file_info *fi_in,
                           fuse_ino_t ino_out, off_t off_out, struct fuse_file_info *fi_out, size_t len, int flags);
void ht_op_lseek(fuse_req_t req, fuse_ino_t ino, off_t off, int whence, struct fuse_file_info *fi);
void ht_op_ioctl(fuse_req_t req, fuse_ino_t ino, unsigned cmd, void *arg, struct fuse_file_info *fi, unsigned flags,
                 const void *in, size_t in_len, size_t out_cap);

void ht_op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void ht_op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi);
void ht_op_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi);
void ht_op_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void ht_op_fsyncdir(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi);

/* Hidden files: the same operations once it is known that the inode is one. */
void ht_hop_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void ht_hop_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi);
void ht_hop_write(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off, struct fuse_file_info *fi);
void ht_hop_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void ht_hop_ioctl(fuse_req_t req, fuse_ino_t ino, unsigned cmd, struct fuse_file_info *fi, const void *in,
                  size_t in_len);

#endif
