/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel reports the owner of a flock, but not the holder of a block device; for the latter the descriptors of all
 * processes are searched. Only links below /dev are followed: other open files may hang.
 */
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"
#include "tiering/sys/nvme_namespace.h"
#include "tiering/base/files.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/*
 * The kernel gives the table of locks in pieces of a page. A lock is missing in what a reader sees if one before it
 * ends between two pieces, so a table of more than a piece is read again before a lock counts as none.
 */
enum { LOCK_TABLE_READS = 16, PIECE_BYTES = 2048 };

/* True: enough. */
typedef bool visit_fn(pid_t pid, struct ht_holder *h);

bool ht_holder_command(pid_t pid, char command[HT_HOLDER_COMMAND_MAX])
{
    char path[32];

    snprintf(path, sizeof(path), "/proc/%d/cmdline", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, command, HT_HOLDER_COMMAND_MAX - 1);
    close(fd);
    while (n > 0 && command[n - 1] == '\0')
        n--;
    for (ssize_t i = 0; i < n; i++)
        if (command[i] == '\0')
            command[i] = ' ';
    command[n > 0 ? n : 0] = '\0';
    return n > 0;
}

/* A program of hitrain, by its name: others may have a block device open without holding it. */
static bool is_ours(pid_t pid)
{
    char path[32], name[32];

    snprintf(path, sizeof(path), "/proc/%d/comm", (int)pid);
    return ht_read_line(path, name, sizeof(name)) && strstr(name, "hitrain");
}

/*
 * Lines are "1: FLOCK ADVISORY WRITE pid major:minor:inode start end", the device in hexadecimal. Returns the size of
 * the table.
 */
static size_t each_flock_once(const struct stat *st, visit_fn *visit, struct ht_holder *h)
{
    FILE *f = fopen("/proc/locks", "re");
    size_t bytes = 0;
    char line[256];
    bool done = false;

    while (f && !done && fgets(line, sizeof(line), f)) {
        bytes += strlen(line);
        unsigned major_no, minor_no;
        unsigned long long inode;
        int pid;
        if (sscanf(line, "%*s FLOCK %*s %*s %d %x:%x:%llu", &pid, &major_no, &minor_no, &inode) == 4 && pid > 0 &&
            makedev(major_no, minor_no) == st->st_dev && inode == st->st_ino)
            done = visit(pid, h);
    }
    if (f)
        fclose(f);
    return bytes;
}

static void each_flock(const struct stat *st, visit_fn *visit, struct ht_holder *h)
{
    for (unsigned i = 0; i < LOCK_TABLE_READS && h->pid == 0; i++)
        if (each_flock_once(st, visit, h) < PIECE_BYTES)
            return;
}

/* Files below /dev in a user's own namespace may hang, too: this uses only facts that the kernel has already. */
static bool is_device(int fds, const char *name, dev_t rdev)
{
    char link[PATH_MAX];
    ssize_t n = readlinkat(fds, name, link, sizeof(link) - 1);
    struct statx st;

    return n > 5 && memcmp(link, "/dev/", 5) == 0 && statx(fds, name, AT_STATX_DONT_SYNC, STATX_TYPE, &st) == 0 &&
        S_ISBLK(st.stx_mode) && makedev(st.stx_rdev_major, st.stx_rdev_minor) == rdev;
}

static bool has_open(pid_t pid, dev_t rdev)
{
    char path[32];
    struct dirent *e;
    bool found = false;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    while (dir && !found && (e = readdir(dir)))
        found = is_device(dirfd(dir), e->d_name, rdev);
    if (dir)
        closedir(dir);
    return found;
}

static void each_opener(dev_t rdev, visit_fn *visit, struct ht_holder *h)
{
    DIR *dir = opendir("/proc");
    bool done = false;
    struct dirent *e;

    while (dir && !done && (e = readdir(dir))) {
        pid_t pid = isdigit((unsigned char)e->d_name[0]) ? (pid_t)atol(e->d_name) : 0;
        if (pid > 0 && has_open(pid, rdev))
            done = visit(pid, h);
    }
    if (dir)
        closedir(dir);
}

static bool take_owner(pid_t pid, struct ht_holder *h)
{
    if (!ht_holder_command(pid, h->command))
        return false;
    h->pid = pid;
    return true;
}

/* The first that has it open, until one comes that holds its files. */
static bool take_opener(pid_t pid, struct ht_holder *h)
{
    bool holds = pid == getpid() || is_ours(pid);
    char command[HT_HOLDER_COMMAND_MAX];

    if ((!holds && h->pid != 0) || !ht_holder_command(pid, command))
        return false;
    memcpy(h->command, command, sizeof(command));
    h->pid = pid;
    h->opener = !holds;
    return holds;
}

/* The mount that a daemon serves has as its source a file or device that the daemon has open, by whatever name. */
static int mount_of_process(pid_t pid, struct ht_mount_entry *m)
{
    char path[32], link[PATH_MAX];
    struct dirent *e;
    int rc = -ENOENT;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    while (dir && rc != 0 && (e = readdir(dir))) {
        ssize_t n = readlinkat(dirfd(dir), e->d_name, link, sizeof(link) - 1);
        link[n > 0 ? n : 0] = '\0';
        if (link[0] == '/')
            rc = ht_mount_named(link, m);
    }
    if (dir)
        closedir(dir);
    return rc;
}

int ht_holder_find(const char *path, struct ht_holder *out)
{
    struct ht_mount_entry *m;
    struct stat st;
    int rc = ht_nvme_namespace_stat(path, &st);

    if (rc < 0)
        return rc;
    m = malloc(sizeof(*m));
    if (!m)
        return -ENOMEM;
    *out = (struct ht_holder){0};
    if (S_ISBLK(st.st_mode))
        each_opener(st.st_rdev, take_opener, out);
    else
        each_flock(&st, take_owner, out);
    if (ht_mount_of_source(path, m) == 0 ||
        (out->pid && out->pid != getpid() && !out->opener && mount_of_process(out->pid, m) == 0)) {
        memcpy(out->point, m->point, sizeof(out->point));
        out->mount_lives = !ht_mount_is_fuse(m) || (out->pid != 0 && !out->opener);
    }
    free(m);
    return 0;
}

const char *ht_holder_text(const struct ht_holder *h, char text[HT_HOLDER_TEXT_MAX])
{
    int n = h->point[0] ? snprintf(text, HT_HOLDER_TEXT_MAX, "mounted on %s", h->point) : 0;
    const char *and = n ? " and " : "";

    if (h->pid && h->opener)
        snprintf(text + n, HT_HOLDER_TEXT_MAX - (size_t)n, "%sin use, perhaps by process %d (%s), which has it open",
                 and, (int)h->pid, h->command);
    else if (h->pid)
        snprintf(text + n, HT_HOLDER_TEXT_MAX - (size_t)n, "%sheld by process %d (%s)", and, (int)h->pid, h->command);
    else if (n == 0)
        snprintf(text, HT_HOLDER_TEXT_MAX,
                 "in use: by a program that cannot be seen from here, or by the last writes of one that was killed");
    return text;
}
