/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel reports the owner of a flock, but not the holder of a block device; for the latter the descriptors of all
 * processes are searched. Only links below /dev are followed: other open files may hang.
 *
 * The mount tables of all processes are read once for each mount namespace, as far as there is room to remember the
 * namespaces. Open files of a process are queried with AT_STATX_DONT_SYNC: the file system, which may be ours or dead,
 * gets no request.
 */
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"
#include "tiering/sys/nvme_namespace.h"

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
enum { LOCK_TABLE_READS = 16, PIECE_BYTES = 2048, NAMESPACES_MAX = 256 };

/* --------------------------------------------------------------- processes */

/* The next one in /proc, which may be NULL; 0: that was all. */
static pid_t next_process(DIR *proc)
{
    struct dirent *e;

    while (proc && (e = readdir(proc)))
        if (isdigit((unsigned char)e->d_name[0]))
            return (pid_t)atol(e->d_name);
    return 0;
}

/* Is any open file of a process, by its name in that folder, of that kind? */
static bool has_file(pid_t pid, bool (*is)(int folder, const char *name, void *what), void *what)
{
    char path[32];
    bool found = false;
    struct dirent *e;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    while (dir && !found && (e = readdir(dir)))
        found = isdigit((unsigned char)e->d_name[0]) && is(dirfd(dir), e->d_name, what);
    if (dir)
        closedir(dir);
    return found;
}

/* The command line of a process. False for kernel threads and for processes that have ended: they have none. */
static bool read_command(pid_t pid, char command[HT_HOLDER_COMMAND_MAX])
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

/* ----------------------------------------------------------------- holders */

static bool take_owner(pid_t pid, struct ht_holder *h)
{
    if (!read_command(pid, h->command))
        return false;
    h->pid = pid;
    return true;
}

/*
 * Lines are "1: FLOCK ADVISORY WRITE pid major:minor:inode start end", the device in hexadecimal. Returns the size of
 * the table.
 */
static size_t find_owner_once(const struct stat *st, struct ht_holder *h)
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
            done = take_owner(pid, h);
    }
    if (f)
        fclose(f);
    return bytes;
}

static void find_owner(const struct stat *st, struct ht_holder *h)
{
    for (unsigned i = 0; i < LOCK_TABLE_READS && h->pid == 0; i++)
        if (find_owner_once(st, h) < PIECE_BYTES)
            return;
}

/* Files below /dev in a user's own namespace may hang, too: this uses only facts that the kernel has already. */
static bool is_device(int fds, const char *name, void *rdev)
{
    char link[PATH_MAX];
    ssize_t n = readlinkat(fds, name, link, sizeof(link) - 1);
    struct statx st;

    return n > 5 && memcmp(link, "/dev/", 5) == 0 && statx(fds, name, AT_STATX_DONT_SYNC, STATX_TYPE, &st) == 0 &&
        S_ISBLK(st.stx_mode) && makedev(st.stx_rdev_major, st.stx_rdev_minor) == *(const dev_t *)rdev;
}

/* The first that has it open, until one comes that holds its files. */
static bool take_opener(pid_t pid, struct ht_holder *h)
{
    bool holds = pid == getpid() || is_ours(pid);
    char command[HT_HOLDER_COMMAND_MAX];

    if ((!holds && h->pid != 0) || !read_command(pid, command))
        return false;
    memcpy(h->command, command, sizeof(command));
    h->pid = pid;
    h->opener = !holds;
    return holds;
}

static void find_opener(dev_t rdev, struct ht_holder *h)
{
    DIR *dir = opendir("/proc");
    bool done = false;
    pid_t pid;

    while (!done && (pid = next_process(dir)))
        done = has_file(pid, is_device, &rdev) && take_opener(pid, h);
    if (dir)
        closedir(dir);
}

/* The mount that a daemon serves has as its source a file or device that the daemon has open, by whatever name. */
static bool is_mounted(int fds, const char *name, void *mount)
{
    char link[PATH_MAX];
    ssize_t n = readlinkat(fds, name, link, sizeof(link) - 1);

    link[n > 0 ? n : 0] = '\0';
    return link[0] == '/' && ht_mount_named(link, mount) == 0;
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
        find_opener(st.st_rdev, out);
    else
        find_owner(&st, out);
    if (ht_mount_of_source(path, m) == 0 ||
        (out->pid && out->pid != getpid() && !out->opener && has_file(out->pid, is_mounted, m))) {
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

/* ---------------------------------------------------------- users of a mount */

struct search {
    unsigned major, minor;
    const char *source;         /* NULL: any */
    bool other_source;          /* any but that */
    ino_t seen[NAMESPACES_MAX]; /* mount namespaces that need no look */
    unsigned seen_count;
};

static int match(const void *what, const struct ht_mount_entry *m)
{
    const struct search *s = what;

    return m->major == s->major && m->minor == s->minor &&
        (!s->source || (strcmp(m->source, s->source) == 0) != s->other_source);
}

static bool table_has(const char *path, const struct search *s)
{
    struct ht_mount_entry m;

    return ht_mount_find(path, match, s, &m) == 0;
}

bool ht_mount_is_here(unsigned major, unsigned minor, const char *source)
{
    const struct search s = {.major = major, .minor = minor, .source = source};

    return table_has(HT_MOUNTS_HERE, &s);
}

/* By its link in /proc. False: it was checked already, or cannot be. */
static bool is_new_namespace(struct search *s, const char *link)
{
    struct stat st;

    if (stat(link, &st) != 0)
        return false;
    for (unsigned i = 0; i < s->seen_count; i++)
        if (s->seen[i] == st.st_ino)
            return false;
    if (s->seen_count < NAMESPACES_MAX)
        s->seen[s->seen_count++] = st.st_ino;
    return true;
}

static bool has_mount(struct search *s, pid_t pid)
{
    char link[64], table[64];

    snprintf(link, sizeof(link), "/proc/%d/ns/mnt", (int)pid);
    snprintf(table, sizeof(table), "/proc/%d/mountinfo", (int)pid);
    return is_new_namespace(s, link) && table_has(table, s);
}

static bool is_of_it(int folder, const char *name, void *search)
{
    const struct search *s = search;
    struct statx st;

    return statx(folder, name, AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_TYPE, &st) == 0 &&
        st.stx_dev_major == s->major && st.stx_dev_minor == s->minor;
}

static bool has_open(struct search *s, pid_t pid)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%d/cwd", (int)pid);
    return is_of_it(AT_FDCWD, path, s) || has_file(pid, is_of_it, s);
}

static bool find_user(struct search *s, bool (*has)(struct search *s, pid_t pid), struct ht_mount_user *out)
{
    DIR *dir = opendir("/proc");
    bool found = false;

    while (!found && (out->pid = next_process(dir)))
        found = out->pid != getpid() && has(s, out->pid) && read_command(out->pid, out->command);
    if (dir)
        closedir(dir);
    return found;
}

int ht_mount_user_find(unsigned major, unsigned minor, const char *source, struct ht_mount_user *out)
{
    struct search s = {.major = major, .minor = minor, .source = source};

    *out = (struct ht_mount_user){0};
    (void)is_new_namespace(&s, "/proc/self/ns/mnt"); /* mounts in our own namespace do not count */
    out->has_mount = find_user(&s, has_mount, out);
    if (out->has_mount)
        return 0;
    s.other_source = true;
    if (source && table_has(HT_MOUNTS_HERE, &s)) /* files with this number are those of another one */
        return -ENOENT;
    if (find_user(&s, has_open, out))
        return 0;
    return -ENOENT;
}
