/* SPDX-License-Identifier: Apache-2.0 */
/*
 * meta_client.c - operations on names, as fast as so many processes can ask: `make bench-meta` runs it on one mount
 * after another.
 *
 *     meta_client FOLDER CLIENTS FILES own|shared MOUNT DAEMON
 *
 * FILES are divided among CLIENTS, each in a folder of its own or all in one. Every phase begins and ends at a barrier;
 * a line of JSON gives its operations, the time from barrier to barrier, and the processor time that the clients and
 * the process DAEMON used. Cold phases come after the mount's entries have been thrown out of the kernel's cache (by
 * remounting MOUNT as it is: that empties the cache of one file system, and leaves the machine's other users alone).
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tiering/base/base.h"

enum { CLIENTS_MAX = 64, DIRENT_BYTES = 32768, NAME_BYTES = 32, WARM_STATS = 20, MISSING_STATS = 4, WARM_WALKS = 5 };

struct shared {
    pthread_barrier_t barrier;
    uint64_t operations[CLIENTS_MAX], cpu_ns[CLIENTS_MAX];
};

struct client {
    struct shared *shared;
    unsigned index, count;
    unsigned first, end; /* its files */
    int folder;          /* where its files are */
    int top;
    bool own;
    const char *mount;
};

static void fail(const char *what)
{
    fprintf(stderr, "meta_client: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void check(long rc, const char *what)
{
    if (rc < 0)
        fail(what);
}

/* Names as long as those of tensors in a checkpoint. */
static const char *name_of(char *buf, const char *prefix, unsigned file)
{
    snprintf(buf, NAME_BYTES, "%s.tensor-%07u", prefix, file);
    return buf;
}

/* ---------------------------------------------------------------- phases */

static uint64_t do_mkdir(struct client *c)
{
    char name[NAME_BYTES];

    for (unsigned i = c->first; i < c->end; i++)
        check(syscall(SYS_mkdirat, c->folder, name_of(name, "folder", i), 0755), "mkdir");
    return c->end - c->first;
}

static uint64_t do_rmdir(struct client *c)
{
    char name[NAME_BYTES];

    for (unsigned i = c->first; i < c->end; i++)
        check(syscall(SYS_unlinkat, c->folder, name_of(name, "folder", i), AT_REMOVEDIR), "rmdir");
    return c->end - c->first;
}

static uint64_t open_and_close(struct client *c, int flags, const char *what)
{
    char name[NAME_BYTES];

    for (unsigned i = c->first; i < c->end; i++) {
        long fd = syscall(SYS_openat, c->folder, name_of(name, "old", i), flags | O_CLOEXEC, 0644);
        check(fd, what);
        check(syscall(SYS_close, (int)fd), "close");
    }
    return c->end - c->first;
}

static uint64_t do_create(struct client *c)
{
    return open_and_close(c, O_CREAT | O_EXCL | O_WRONLY, "create");
}

static uint64_t do_open_read(struct client *c)
{
    return open_and_close(c, O_RDONLY, "open");
}

static uint64_t do_open_write(struct client *c)
{
    return open_and_close(c, O_WRONLY, "open");
}

static uint64_t do_stat(struct client *c)
{
    char name[NAME_BYTES];
    struct stat st;

    for (unsigned i = c->first; i < c->end; i++)
        check(syscall(SYS_newfstatat, c->folder, name_of(name, "old", i), &st, 0), "stat");
    return c->end - c->first;
}

static uint64_t do_stat_warm(struct client *c)
{
    uint64_t n = 0;

    for (int pass = 0; pass < WARM_STATS; pass++)
        n += do_stat(c);
    return n;
}

/* As a compiler looks for headers in folder after folder. */
static uint64_t do_stat_missing(struct client *c)
{
    uint64_t n = 0;
    char name[NAME_BYTES];
    struct stat st;

    for (int pass = 0; pass < MISSING_STATS; pass++)
        for (unsigned i = c->first; i < c->end; i++, n++)
            if (syscall(SYS_newfstatat, c->folder, name_of(name, "none", i), &st, 0) == 0 || errno != ENOENT)
                fail("stat of a missing name");
    return n;
}

static uint64_t stat_entries(int fd, const char *buf, long len)
{
    uint64_t n = 0;
    struct stat st;

    for (long at = 0; at < len; n++) {
        const struct dirent64 *e = (const void *)(buf + at);
        check(syscall(SYS_newfstatat, fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW), "stat");
        at += e->d_reclen;
    }
    return n;
}

/* As `ls -l` does. */
static uint64_t do_walk(struct client *c)
{
    _Alignas(struct dirent64) char buf[DIRENT_BYTES];
    long fd = syscall(SYS_openat, c->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0), len;
    uint64_t n = 0;

    check(fd, "open");
    while ((len = syscall(SYS_getdents64, (int)fd, buf, sizeof(buf))) > 0)
        n += stat_entries((int)fd, buf, len);
    check(len, "getdents");
    check(syscall(SYS_close, (int)fd), "close");
    return n;
}

static uint64_t do_walk_warm(struct client *c)
{
    uint64_t n = 0;

    for (int pass = 0; pass < WARM_WALKS; pass++)
        n += do_walk(c);
    return n;
}

static uint64_t do_rename(struct client *c)
{
    char from[NAME_BYTES], to[NAME_BYTES];

    for (unsigned i = c->first; i < c->end; i++)
        check(syscall(SYS_renameat2, c->folder, name_of(from, "old", i), c->folder, name_of(to, "new", i), 0),
              "rename");
    return c->end - c->first;
}

static uint64_t do_unlink(struct client *c)
{
    char name[NAME_BYTES];

    for (unsigned i = c->first; i < c->end; i++)
        check(syscall(SYS_unlinkat, c->folder, name_of(name, "new", i), 0), "unlink");
    return c->end - c->first;
}

static const struct phase {
    const char *name; /* NULL: the cache is emptied here */
    uint64_t (*run)(struct client *c);
} phases[] = {
    {"mkdir", do_mkdir},
    {"rmdir", do_rmdir},
    {"create", do_create},
    {"stat warm", do_stat_warm},
    {NULL, NULL},
    {"stat cold", do_stat},
    {"stat missing", do_stat_missing},
    {"open read", do_open_read},
    {"open write", do_open_write},
    {NULL, NULL},
    {"walk cold", do_walk},
    {"walk warm", do_walk_warm},
    {"rename", do_rename},
    {"unlink", do_unlink},
};

/* --------------------------------------------------------------- measuring */

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;

    check(clock_gettime(clock, &t), "clock");
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The flags of mount(2) for the present options. */
static unsigned long mount_flags(const char *path)
{
    static const struct {
        unsigned long statvfs, mount;
    } map[] = {{ST_RDONLY, MS_RDONLY},    {ST_NOSUID, MS_NOSUID},   {ST_NODEV, MS_NODEV},
               {ST_NOEXEC, MS_NOEXEC},    {ST_NOATIME, MS_NOATIME}, {ST_NODIRATIME, MS_NODIRATIME},
               {ST_RELATIME, MS_RELATIME}};
    unsigned long flags = 0;
    struct statvfs v;

    check(statvfs(path, &v), "statvfs");
    for (size_t i = 0; i < HT_ARRAY_SIZE(map); i++)
        if (v.f_flag & map[i].statvfs)
            flags |= map[i].mount;
    return flags;
}

/* The kernel sends the daemon its forgets; the pause gives the daemon time for them. */
static void empty_cache(const struct client *c)
{
    const struct timespec pause = {0, 200000000};

    check(mount("none", c->mount, NULL, MS_REMOUNT | mount_flags(c->mount), ""), "remount");
    nanosleep(&pause, NULL);
}

/* The process that waits for all others at both barriers prints the time between them. */
static void run_phase(struct client *c, const struct phase *p, clockid_t daemon, bool tells)
{
    uint64_t began = 0, daemon_began = 0, cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID), operations = 0;
    struct shared *s = c->shared;

    pthread_barrier_wait(&s->barrier);
    if (tells) {
        began = clock_ns(CLOCK_MONOTONIC);
        daemon_began = clock_ns(daemon);
    } else {
        operations = s->operations[c->index] = p->run(c);
        s->cpu_ns[c->index] = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    }
    pthread_barrier_wait(&s->barrier);
    if (!tells)
        return;
    began = clock_ns(CLOCK_MONOTONIC) - began;
    daemon_began = clock_ns(daemon) - daemon_began;
    cpu = 0;
    for (unsigned i = 0; i < c->count; i++) {
        operations += s->operations[i];
        cpu += s->cpu_ns[i];
    }
    printf("{\"phase\": \"%s\", \"operations\": %llu, \"seconds\": %.6f, \"client_cpu_s\": %.6f, \"daemon_cpu_s\": "
           "%.6f}\n",
           p->name, (unsigned long long)operations, (double)began / 1e9, (double)cpu / 1e9, (double)daemon_began / 1e9);
}

static void run_all(struct client *c, clockid_t daemon, bool tells)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(phases); i++) {
        if (phases[i].name)
            run_phase(c, &phases[i], daemon, tells);
        else if (tells)
            empty_cache(c);
    }
}

static void open_folder(struct client *c)
{
    char name[NAME_BYTES];

    name_of(name, "client", c->own ? c->index : 0);
    if (syscall(SYS_mkdirat, c->top, name, 0755) < 0 && errno != EEXIST)
        fail(name);
    c->folder = openat(c->top, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(c->folder, name);
}

static void remove_folders(const struct client *c)
{
    char name[NAME_BYTES];

    for (unsigned i = 0; i < (c->own ? c->count : 1); i++)
        check(unlinkat(c->top, name_of(name, "client", i), AT_REMOVEDIR), "rmdir");
}

static struct shared *make_shared(unsigned clients)
{
    struct shared *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attr;

    if (s == MAP_FAILED)
        fail("shared memory");
    pthread_barrierattr_init(&attr);
    pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    errno = pthread_barrier_init(&s->barrier, &attr, clients + 1);
    if (errno)
        fail("barrier");
    return s;
}

/* If one client failed, the others would wait at a barrier for ever: it ends them all. */
static void end_together(int signal)
{
    int status;

    while (waitpid(-1, &status, WNOHANG) > 0)
        if (status)
            _exit(1);
}

static void be_client(struct client *c, clockid_t daemon)
{
    signal(SIGCHLD, SIG_DFL);
    check(prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl");
    run_all(c, daemon, false);
    _exit(0);
}

int main(int argc, char **argv)
{
    struct client c = {0};
    clockid_t daemon;

    if (argc != 7)
        return 2;
    c.count = (unsigned)atoi(argv[2]);
    unsigned files = (unsigned)atoi(argv[3]);
    c.own = strcmp(argv[4], "own") == 0;
    c.mount = argv[5];
    if (c.count == 0 || c.count > CLIENTS_MAX || files < c.count)
        return 2;
    c.top = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(c.top, argv[1]);
    errno = clock_getcpuclockid(atoi(argv[6]), &daemon);
    if (errno)
        fail("the daemon's clock");
    c.shared = make_shared(c.count);
    signal(SIGCHLD, end_together);
    for (c.index = 0; c.index < c.count; c.index++) {
        c.first = files / c.count * c.index;
        c.end = c.first + files / c.count;
        open_folder(&c);
        pid_t pid = fork();
        check(pid, "fork");
        if (pid == 0)
            be_client(&c, daemon);
    }
    run_all(&c, daemon, true);
    while (wait(NULL) > 0)
        ;
    remove_folders(&c);
    return fflush(stdout) ? 1 : 0;
}
