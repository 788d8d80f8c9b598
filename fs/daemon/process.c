/* SPDX-License-Identifier: Apache-2.0 */
/* process.c - from a command to a daemon, and its pipe to that command; settings of the process; signals. */
#include "fs/daemon/daemon_priv.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tiering/base/event.h"
#include "tiering/base/lock.h"

#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#endif

/* ------------------------------------------------------------------ daemon */

static int ready_fd = -1;
static pid_t waited_for;

/* The mount was not reported yet, so a signal that ends the command ends the daemon, too; the store survives that. */
static void end_child(int sig)
{
    kill(waited_for, SIGKILL);
    _exit(128 + sig);
}

static int exit_status(pid_t child)
{
    int status;

    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return EXIT_FAILURE;
    if (WIFSIGNALED(status))
        ht_error("the daemon was ended by signal %d before the mount was ready", WTERMSIG(status));
    else if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS)
        ht_error("the mount was gone again before it was ready");
    return WIFEXITED(status) && WEXITSTATUS(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}

static void wait_in_parent(int fd, pid_t child)
{
    char byte;
    ssize_t n;

    waited_for = child;
    signal(SIGINT, end_child);
    signal(SIGTERM, end_child);
    signal(SIGHUP, end_child);
    do
        n = read(fd, &byte, 1);
    while (n < 0 && errno == EINTR);
    _exit(n == 1 ? EXIT_SUCCESS : exit_status(child));
}

/* A daemon needs none of the starter's descriptors: they would keep files, locks and pipes of other programs alive. */
static int keep_only(int fd)
{
    int kept = STDERR_FILENO + 1;

    if (fd != kept && dup3(fd, kept, O_CLOEXEC) != kept)
        return fd;
    (void)close_range((unsigned)kept + 1, ~0u, 0);
    return kept;
}

int ht_daemon_fork(void)
{
    int fds[2];

    if (pipe2(fds, O_CLOEXEC))
        return -errno;
    pid_t child = fork();
    if (child < 0) {
        int rc = -errno;
        close(fds[0]);
        close(fds[1]);
        return rc;
    }
    if (child) {
        close(fds[1]);
        wait_in_parent(fds[0], child);
    }
    ready_fd = keep_only(fds[1]);
    umask(S_IRWXG | S_IRWXO);
    setsid();
    return 0;
}

void ht_daemon_detach(void)
{
    if (ready_fd < 0)
        return;
    ht_log_to_syslog("hitrain");
    if (chdir("/"))
        ht_warn("cannot change to /: %s", strerror(errno));
    ht_stdio_fds_detach();
}

void ht_daemon_ready(void)
{
    if (ready_fd < 0)
        return;
    (void)!write(ready_fd, "", 1); /* the command may be gone: then no process reads this */
    close(ready_fd);
    ready_fd = -1;
}

/* ---------------------------------------------------------------- settings */

static int write_setting(const char *path, const char *value)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);

    if (fd < 0)
        return -errno;
    ssize_t n = write(fd, value, strlen(value));
    int rc = n < 0 ? -errno : 0;
    close(fd);
    return rc;
}

void ht_process_protect(void)
{
    struct rlimit files;

    (void)!write_setting("/proc/self/oom_score_adj", "-900");
    (void)prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGIO, SIG_IGN); /* another program ends a lease (fs/fuse/passthrough_closed.c) */
}

static void tune_one(const char *path, const char *value)
{
    char before[128];

    if (!ht_read_line(path, before, sizeof(before))) {
        ht_info("tune: %s is not there on this system", path);
        return;
    }
    int rc = write_setting(path, value);
    if (rc)
        ht_warn("tune: %s stays '%s': %s", path, before, strerror(-rc));
    else
        ht_info("tune: %s was '%s', is '%s'", path, before, value);
}

void ht_process_tune(void)
{
    static const char path[] = "/sys/kernel/mm/transparent_hugepage/enabled";
    char now[128];

    /* "never" there refuses huge pages even to programs that request them. */
    if (ht_read_line(path, now, sizeof(now)) && strstr(now, "[never]"))
        tune_one(path, "madvise");
    tune_one("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "advise");
    tune_one("/proc/sys/fs/fuse/max_pages_limit", "1024");
}

/* ----------------------------------------------------------------- signals */

/*
 * starting: no client uses the mount yet, a signal ends the process. serving: it ends the mount. The lock is held from
 * before the mount appears until the receiver is known, so that no signal ends the process and leaves the mount.
 */
static struct ht_mutex lock = HT_MUTEX_INIT(HT_LOCK_SIGNALS);
static struct {
    pthread_t thread;
    HT_GUARDED_BY_STATIC(lock) struct {
        void (*stop)(void *ctx); /* NULL: starting */
        void *ctx;
    };
    bool running;
    _Atomic bool shutdown;
} waiter;

void ht_signals_set(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGHUP);
}

static void *wait_for_signal(void *arg)
{
    sigset_t set;
    int sig;

    ht_signals_set(&set);
    while (sigwait(&set, &sig) || (sig != SIGTERM && sig != SIGINT && sig != SIGHUP))
        ;
    if (waiter.shutdown)
        return NULL;
    ht_mutex_lock(&lock);
    if (!waiter.stop) {
        ht_error("signal %d: ended before the mount was there", sig);
        _exit(128 + sig); /* as good as a power cut, which the store survives; waiting could hang with the device */
    }
    void (*stop)(void *ctx) = waiter.stop;
    void *ctx = waiter.ctx;
    ht_mutex_unlock(&lock);
    ht_event(HT_EVENT_UNMOUNTING, NULL, "signal %d: unmounting", sig);
    stop(ctx);
    return NULL;
}

int ht_signals_start(void)
{
    sigset_t set;

    ht_signals_set(&set);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    int rc = pthread_create(&waiter.thread, NULL, wait_for_signal, NULL);
    waiter.running = rc == 0;
    return -rc;
}

void ht_signals_defer(void) HT_ATTRIBUTE(acquire_capability(lock))
{
    ht_mutex_lock(&lock);
}

void ht_signals_direct(void (*stop)(void *ctx), void *ctx) HT_ATTRIBUTE(release_capability(lock))
{
    waiter.stop = stop;
    waiter.ctx = ctx;
    ht_mutex_unlock(&lock);
}

void ht_signals_end(void)
{
    if (!waiter.running)
        return;
    waiter.shutdown = true;
    pthread_kill(waiter.thread, SIGTERM);
    pthread_join(waiter.thread, NULL);
    waiter.running = false;
}
