/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session.c - life of a mount: the agreement with the kernel, the loop, and its end.
 *
 * Agreed: requests of up to 1 MiB, many in flight; no splice, no write-back cache (each was measured as a loss). The
 * kernel drops data of its page cache when this side says so and not by guessing from times (explicit invalidation).
 *
 * Threads: the caller's (loop), workers (workers.c), job threads; ht_fuse_stop from a thread of its own.
 */
#include "fs/fuse/fuse_priv.h"
#include "tiering/base/dump.h"
#include "tiering/sys/mounts.h"

#include <sys/mount.h>
#include <unistd.h>

enum {
    READ_AHEAD_KB = 4096,
    THREADS_MIN = 4,
    THREADS_MAX = 16,
    NOTIFY_WAIT_MS = 5000,
    PAGES_QUIET_MS = 50,
    PAGES_WAIT_MS = 30000,
};

/* -------------------------------------------------------------------- init */

/* Starts at 128 KiB. Must be done before the kernel learns max_readahead, of which it takes the smaller. */
static void raise_read_ahead(struct ht_fuse *f)
{
    struct ht_mount_entry m;
    char path[96], value[16];
    int n = snprintf(value, sizeof(value), "%d", READ_AHEAD_KB), fd;

    if (ht_mount_at(f->mountpoint, &m))
        return;
    snprintf(path, sizeof(path), "/sys/class/bdi/%u:%u/read_ahead_kb", m.major, m.minor);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    (void)!write(fd, value, (size_t)n);
    close(fd);
}

void ht_fuse_init(void *userdata, struct fuse_conn_info *conn)
{
    struct ht_fuse *f = userdata;

    fuse_unset_feature_flag(conn, FUSE_CAP_SPLICE_READ);
    fuse_unset_feature_flag(conn, FUSE_CAP_SPLICE_WRITE);
    fuse_unset_feature_flag(conn, FUSE_CAP_SPLICE_MOVE);
    fuse_unset_feature_flag(conn, FUSE_CAP_WRITEBACK_CACHE);
    fuse_unset_feature_flag(conn, FUSE_CAP_AUTO_INVAL_DATA);
    /*
     * Setuid bits and capabilities end with a write here (atime.c): left to the kernel, every write would begin with
     * a getxattr.
     */
    fuse_unset_feature_flag(conn, FUSE_CAP_HANDLE_KILLPRIV);
    fuse_set_feature_flag(conn, FUSE_CAP_HANDLE_KILLPRIV_V2);
    /* Default access lists replace the umask, so both come together. */
    if (fuse_set_feature_flag(conn, FUSE_CAP_POSIX_ACL))
        f->masks = fuse_set_feature_flag(conn, FUSE_CAP_DONT_MASK);
    fuse_set_feature_flag(conn, FUSE_CAP_EXPLICIT_INVAL_DATA);
    /* File handles are numbers of inodes, good for as long as the inode lives (ht_op_lookup of "." and ".."). */
    fuse_set_feature_flag(conn, FUSE_CAP_EXPORT_SUPPORT);
    fuse_set_feature_flag(conn, FUSE_CAP_ASYNC_DIO);
    fuse_set_feature_flag(conn, FUSE_CAP_PARALLEL_DIROPS);
    fuse_set_feature_flag(conn, FUSE_CAP_DIRECT_IO_ALLOW_MMAP);
    conn->max_write = HT_FUSE_IO_BYTES;
    conn->max_background = HT_FUSE_BACKGROUND;
    conn->congestion_threshold = HT_FUSE_BACKGROUND * 3 / 4;
    conn->max_readahead = READ_AHEAD_KB * 1024;
    ht_passthrough_negotiate(f, conn);
    raise_read_ahead(f);
    ht_atime_read_options(f);
}

/* ------------------------------------------------------------------- cache */

/* Errors mean that the kernel had no copy, or that the mount is gone: both count as done. */
static void drop_data(void *ctx, uint64_t ino, uint64_t off, uint64_t len)
{
    struct ht_fuse *f = ctx;

    f->notifying++;
    if (f->mounted)
        fuse_lowlevel_notify_inval_inode(f->session, ino, (off_t)off, (off_t)ht_min_u64(len, INT64_MAX));
    f->notifying--;
}

static void drop_name_now(struct ht_fuse *f, uint64_t parent, const char *name)
{
    f->notifying++;
    if (f->mounted)
        fuse_lowlevel_notify_inval_entry(f->session, parent, name, strlen(name));
    f->notifying--;
}

static void job_drop_name(struct ht_job *job)
{
    drop_name_now(job->fuse, job->ino, job->data);
}

/* False: no memory for a job, and too many threads wait for directories already. */
static bool try_drop_name(struct ht_fuse *f, uint64_t parent, const char *name)
{
    if (ht_job_leave_lane(f)) {
        drop_name_now(f, parent, name);
        return true;
    }
    struct ht_job *job = ht_job_new(f, NULL, job_drop_name);
    if (!job || !ht_job_data(job, name, strlen(name)))
        return false;
    job->ino = parent;
    return ht_job_submit(job, HT_LANE_NAMES, parent);
}

void ht_fuse_drop_name(void *ctx, uint64_t parent, const char *name)
{
    struct ht_fuse *f = ctx;

    while (f->mounted && !f->ended && !try_drop_name(f, parent, name))
        ht_sleep_ns(10000000); /* until there is memory: clients would see the name for an hour */
}

/* ----------------------------------------------------------------- options */

const char *ht_fuse_library_version(void)
{
    return fuse_pkgversion();
}

static void to_log(enum fuse_log_level level, const char *fmt, va_list args)
{
    char text[512];

    vsnprintf(text, sizeof(text), fmt, args);
    size_t len = strlen(text);
    if (len && text[len - 1] == '\n')
        text[len - 1] = 0;
    if (text[0])
        ht_log(level <= FUSE_LOG_ERR           ? HT_LOG_ERROR
                   : level <= FUSE_LOG_WARNING ? HT_LOG_WARN
                                               : HT_LOG_INFO,
               "%s", text);
}

static int add_args(struct fuse_args *args, const struct ht_fuse_opts *opts)
{
    char *words = NULL, *source = NULL;
    int rc = -1;

    /*
     * A device node or a setuid program on this store is as good as on any local file system;
     * mount says otherwise with nodev, nosuid.
     */
    if (asprintf(&words, "subtype=hitrain,default_permissions%s%s%s%s", opts->allow_other ? ",allow_other" : "",
                 geteuid() == 0 ? ",dev,suid" : "", opts->mount_options[0] ? "," : "", opts->mount_options) < 0)
        words = NULL;
    if (asprintf(&source, "fsname=%s", opts->source) < 0)
        source = NULL;
    if (words && source) {
        char *all = words;
        rc = fuse_opt_add_opt_escaped(&all, source);
        words = all;
        if (rc == 0)
            rc = fuse_opt_add_arg(args, "hitrain") || fuse_opt_add_arg(args, "-o") || fuse_opt_add_arg(args, words) ||
                (opts->debug && fuse_opt_add_arg(args, "-d"));
    }
    free(words);
    free(source);
    return rc ? -ENOMEM : 0;
}

/* -------------------------------------------------------------------- life */

static unsigned default_threads(void)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);

    return (unsigned)ht_min_u64(THREADS_MAX, ht_max_u64(THREADS_MIN, (uint64_t)(cpus > 0 ? cpus : 1) * 2));
}

static int make_session(struct ht_fuse *f)
{
    struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
    int rc = add_args(&args, &f->opts);

    fuse_set_log_func(to_log);
    if (rc == 0) {
        f->session = fuse_session_new(&args, &ht_fuse_ops, sizeof(ht_fuse_ops), f);
        if (!f->session)
            rc = -EINVAL;
    }
    fuse_opt_free_args(&args);
    return rc;
}

int ht_fuse_new(struct ht_ctl *ctl, const struct ht_fuse_opts *opts, struct ht_fuse **out)
{
    const struct ht_ctl_parts parts = ht_ctl_parts(ctl);
    struct ht_fuse *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->ctl = ctl;
    f->store = parts.store;
    f->ns = parts.ns;
    f->optim = parts.optim;
    f->traffic = parts.traffic;
    f->cache = (struct ht_ctl_cache){.ctx = f,
                                     .drop_data = drop_data,
                                     .drop_name = ht_fuse_drop_name,
                                     .mapped = ht_passthrough_mapped,
                                     .bring = ht_passthrough_prefetch,
                                     .rest = ht_passthrough_rest,
                                     .replay_begins = ht_job_replay_begins};
    f->opts = *opts;
    f->opts.threads = opts->threads ? opts->threads : default_threads();
    ht_mutex_init(&f->open_lock, HT_LOCK_OPENS);
    ht_list_init(&f->opens);
    ht_list_init(&f->open_dirs);
    ht_mutex_init(&f->park_lock, HT_LOCK_PARKED);
    ht_mutex_init(&f->job_lock, HT_LOCK_JOBS);
    ht_workers_init(f);
    ht_atime_init(f);
    ht_passthrough_init(f);
    int rc = ht_park_init(f);
    if (rc == 0)
        rc = ht_job_start(f);
    if (rc == 0)
        rc = make_session(f);
    if (rc) {
        ht_fuse_finish(f);
        ht_fuse_free(f);
        return rc;
    }
    *out = f;
    return 0;
}

int ht_fuse_mount(struct ht_fuse *f, const char *mountpoint)
{
    struct ht_mount_entry m;

    f->mountpoint = strdup(mountpoint);
    if (!f->mountpoint)
        return -ENOMEM;
    if (fuse_session_mount(f->session, mountpoint))
        return -EIO;
    f->mounted = true;
    if (ht_mount_at(mountpoint, &m) == 0) {
        f->major = m.major;
        f->minor = m.minor;
    }
    ht_ctl_set_cache(f->ctl, &f->cache);
    return 0;
}

int ht_fuse_loop(struct ht_fuse *f)
{
    int rc = ht_workers_run(f);

    if (rc)
        f->exited = true;
    return rc;
}

static bool pages_settled(struct ht_fuse *f)
{
    return f->page_writes == 0 && ht_now_ns() - f->page_write_ns > PAGES_QUIET_MS * 1000000ull;
}

/* Is our mount the one at its path? Not when it is covered by another mount, was moved, or detached (umount -l). */
static bool is_in_place(const struct ht_fuse *f)
{
    struct ht_mount_entry m;

    return ht_mount_at(f->mountpoint, &m) == 0 && m.major == f->major && m.minor == f->minor;
}

/*
 * Pages that mappings have dirtied are still the kernel's: have them written while there are workers to take them.
 * syncfs hands the pages over, but (since Linux 6.18) does not wait until they were written; workers that have seen
 * none for a while have taken all. A mount that has no path any more is reached only with all others.
 */
static void sync_mount(struct ht_fuse *f, bool in_place)
{
    int fd = in_place ? open(f->mountpoint, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;

    if (in_place && fd < 0)
        return;
    if (!in_place)
        sync();
    else if (syncfs(fd))
        ht_warn("%s: not all mapped pages could be written: %s", f->mountpoint, strerror(errno));
    if (fd >= 0)
        close(fd);
    f->page_write_ns = ht_now_ns();
    for (unsigned waited_ms = 0; !pages_settled(f) && waited_ms < PAGES_WAIT_MS; waited_ms++)
        ht_sleep_ns(1000000);
}

/*
 * Ends the connection without using the path, where another mount may be. libfuse unmounts by path unless its
 * descriptor says that the connection has ended, as the end of a pipe without a reader does.
 */
static void abandon_mount(struct ht_fuse *f)
{
    int fds[2];

    if (pipe2(fds, O_CLOEXEC))
        return;
    close(fds[0]);
    (void)dup3(fds[1], fuse_session_fd(f->session), O_CLOEXEC);
    close(fds[1]);
}

void ht_fuse_stop(struct ht_fuse *f)
{
    bool in_place = is_in_place(f);

    sync_mount(f, in_place);
    if (!in_place) {
        ht_warn("%s: this mount is covered by another one, moved or detached: its users get ENOTCONN from now on",
                f->mountpoint);
    } else if (umount2(f->mountpoint, UMOUNT_NOFOLLOW) == 0) {
        return; /* the loop ends by itself */
    } else if (errno == EBUSY) {
        ht_warn("%s is in use: its users get ENOTCONN from now on", f->mountpoint);
        /* Forced, so that the kernel ends its waits; detached, so that a new mount can take the place. */
        if (umount2(f->mountpoint, MNT_FORCE | MNT_DETACH | UMOUNT_NOFOLLOW) == 0)
            return;
    }
    f->exited = true; /* without the right to unmount: libfuse's helper does it after the loop */
    fuse_session_exit(f->session);
    ht_workers_wake(f);
}

void ht_fuse_detach(struct ht_fuse *f)
{
    if (f->mounted && is_in_place(f))
        (void)umount2(f->mountpoint, MNT_FORCE | MNT_DETACH | UMOUNT_NOFOLLOW);
}

/* libfuse closes the descriptor that notifications go to. */
static void settle_notifications(struct ht_fuse *f)
{
    f->mounted = false;
    for (unsigned waited_ms = 0; f->notifying && waited_ms < NOTIFY_WAIT_MS; waited_ms++)
        ht_sleep_ns(1000000);
}

/*
 * Either the kernel ended the connection and with it the loop: then nothing can block on it any more, and jobs end. Or
 * ht_fuse_stop ended the loop: then unmounting comes first, or a job might wait for a read that no worker takes.
 */
void ht_fuse_finish(struct ht_fuse *f)
{
    f->ended = true;
    ht_passthrough_closed_stop(f);
    if (f->mounted && f->exited) {
        settle_notifications(f);
        if (!is_in_place(f))
            abandon_mount(f);
        fuse_session_unmount(f->session);
    }
    ht_job_stop(f);
    ht_park_finish(f);
    if (f->mounted) {
        settle_notifications(f);
        fuse_session_unmount(f->session);
    }
    ht_open_close_all(f);
    ht_passthrough_finish(f);
    ht_open_dirs_free(f);
    ht_hidden_close_all(f->ctl);
    ht_ctl_set_cache(f->ctl, NULL);
}

void ht_fuse_dump(struct ht_fuse *f, struct ht_dump *d)
{
    ht_dump_put(d, "requests:\n  %u threads take requests, %u have one\n", f->workers.count, f->workers.busy);
    ht_job_dump(f, d);
    ht_park_dump(f, d);
}

void ht_fuse_free(struct ht_fuse *f)
{
    if (f->session)
        fuse_session_destroy(f->session);
    ht_atime_finish(f);
    ht_mutex_destroy(&f->open_lock);
    ht_mutex_destroy(&f->passthrough.lock);
    pthread_cond_destroy(&f->passthrough.idle);
    pthread_cond_destroy(&f->passthrough.closed_changed);
    ht_mutex_destroy(&f->park_lock);
    ht_mutex_destroy(&f->job_lock);
    ht_workers_destroy(f);
    free(f->mountpoint);
    free(f);
}
