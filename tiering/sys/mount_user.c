/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tables of all processes are read once for each mount namespace, as far as there is room to remember the
 * namespaces. Open files of a process are queried with AT_STATX_DONT_SYNC: the file system, which may be ours or dead,
 * gets no request.
 */
#include "tiering/sys/mount_user.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/sys/mounts.h"

enum { NAMESPACES_MAX = 256 };

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

/* False: it was checked already, or cannot be. */
static bool is_new_namespace(struct search *s, const char *proc)
{
    char path[64];
    struct stat st;

    snprintf(path, sizeof(path), "%s/ns/mnt", proc);
    if (stat(path, &st) != 0)
        return false;
    for (unsigned i = 0; i < s->seen_count; i++)
        if (s->seen[i] == st.st_ino)
            return false;
    if (s->seen_count < NAMESPACES_MAX)
        s->seen[s->seen_count++] = st.st_ino;
    return true;
}

static bool has_mount(struct search *s, const char *proc)
{
    char path[64];

    snprintf(path, sizeof(path), "%s/mountinfo", proc);
    return is_new_namespace(s, proc) && table_has(path, s);
}

static bool is_of_it(int folder, const char *name, const struct search *s)
{
    struct statx st;

    return statx(folder, name, AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_TYPE, &st) == 0 &&
        st.stx_dev_major == s->major && st.stx_dev_minor == s->minor;
}

static bool has_open(struct search *s, const char *proc)
{
    char path[64];
    bool found = false;
    struct dirent *e;

    snprintf(path, sizeof(path), "%s/cwd", proc);
    if (is_of_it(AT_FDCWD, path, s))
        return true;
    snprintf(path, sizeof(path), "%s/fd", proc);
    DIR *dir = opendir(path);
    while (dir && !found && (e = readdir(dir)))
        found = isdigit((unsigned char)e->d_name[0]) && is_of_it(dirfd(dir), e->d_name, s);
    if (dir)
        closedir(dir);
    return found;
}

static bool find(struct search *s, bool (*has)(struct search *s, const char *proc), struct ht_mount_user *out)
{
    DIR *dir = opendir("/proc");
    bool found = false;
    struct dirent *e;

    while (dir && !found && (e = readdir(dir))) {
        pid_t pid = isdigit((unsigned char)e->d_name[0]) ? (pid_t)atol(e->d_name) : 0;
        char proc[32];
        snprintf(proc, sizeof(proc), "/proc/%d", (int)pid);
        found = pid > 0 && pid != getpid() && has(s, proc) && ht_holder_command(pid, out->command);
        out->pid = pid;
    }
    if (dir)
        closedir(dir);
    return found;
}

int ht_mount_user_find(unsigned major, unsigned minor, const char *source, struct ht_mount_user *out)
{
    struct search s = {.major = major, .minor = minor, .source = source};

    *out = (struct ht_mount_user){0};
    (void)is_new_namespace(&s, "/proc/self"); /* mounts in our own namespace do not count */
    out->has_mount = find(&s, has_mount, out);
    if (out->has_mount)
        return 0;
    s.other_source = true;
    if (source && table_has(HT_MOUNTS_HERE, &s)) /* files with this number are those of another one */
        return -ENOENT;
    if (find(&s, has_open, out))
        return 0;
    return -ENOENT;
}
