/* SPDX-License-Identifier: Apache-2.0 */
/* remount.c - see remount.h. What is in force is read from the kernel's table, and from the daemon's command line. */
#include "fs/remount.h"

#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/base/holder.h"
#include "tiering/base/log.h"
#include "tiering/base/mounts.h"

enum { COMMAND_BYTES_MAX = 64 * 1024, ARGS_MAX = 256 };

/* --------------------------------------------------------------- the daemon */

/* A command line and what was parsed from it, which points into it. */
struct daemon_options {
    char text[COMMAND_BYTES_MAX + 1];
    char *argv[ARGS_MAX + 1];
    struct ht_options options;
};

static ssize_t read_command(pid_t pid, char *text)
{
    char path[32];
    ssize_t n, len = 0;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/cmdline", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    while (len < COMMAND_BYTES_MAX && (n = read(fd, text + len, (size_t)(COMMAND_BYTES_MAX - len))) > 0)
        len += n;
    close(fd);
    text[len] = 0;
    return len;
}

/* Parsed as the daemon did: the same user, so the same defaults. What others were started with is no matter for messages. */
static bool options_of(pid_t pid, struct daemon_options *d)
{
    ssize_t len = read_command(pid, d->text);
    int argc = 0, r, said = opterr;

    for (char *p = d->text; p < d->text + len && argc < ARGS_MAX; p += strlen(p) + 1)
        d->argv[argc++] = p;
    d->argv[argc] = NULL;
    if (argc == 0)
        return false;
    ht_log_silence(true);
    opterr = 0;
    r = ht_options_parse(argc, d->argv, true, &d->options);
    opterr = said;
    ht_log_silence(false);
    return r == 0 && !d->options.help && !d->options.version;
}

/* By the program that runs, also when an update has replaced it on disk, or by the name it goes by. */
static bool is_hitrain(pid_t pid)
{
    char path[32], name[PATH_MAX];
    const char *base;
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/exe", (int)pid);
    n = readlink(path, name, sizeof(name) - 1);
    name[n > 0 ? n : 0] = '\0';
    base = strrchr(name, '/');
    if (base && (strcmp(base, "/hitrain") == 0 || strcmp(base, "/hitrain (deleted)") == 0))
        return true;
    snprintf(path, sizeof(path), "/proc/%d/comm", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    n = fd >= 0 ? read(fd, name, sizeof(name) - 1) : 0;
    if (fd >= 0)
        close(fd);
    return n == 8 && memcmp(name, "hitrain\n", 8) == 0;
}

/* A path that was named relative to where the daemon was started cannot be looked up any more. */
static bool may_mean(const char *named, const char *path)
{
    char real[PATH_MAX];

    return named[0] != '/' || (realpath(named, real) && strcmp(real, path) == 0);
}

struct search {
    const struct ht_mount_entry *mount;
    struct daemon_options *daemon;
    bool found;
};

static bool is_daemon(pid_t pid, void *arg)
{
    struct search *s = arg;
    struct ht_options *o = &s->daemon->options;

    if (!is_hitrain(pid))
        return false;
    s->found = options_of(pid, s->daemon) && may_mean(o->device[0], s->mount->source) &&
        may_mean(o->mountpoint, s->mount->point);
    if (!s->found)
        ht_options_free(o);
    return s->found;
}

/* Others may have the device open, too: it is the hitrain that was started for this mount. */
static int find_daemon(const struct ht_mount_entry *m, struct daemon_options *d)
{
    struct search s = {.mount = m, .daemon = d};
    int r = ht_holder_each(m->source, is_daemon, &s);

    if (r == 0 && !s.found)
        r = -ESRCH;
    if (r)
        ht_error("%s: cannot find the daemon of this mount, which must live and be in sight: %s", m->point,
                 strerror(-r));
    return r;
}

/* ---------------------------------------------------------------- the mount */

static int find_mount(const struct ht_options *o, struct ht_mount_entry *m)
{
    char point[PATH_MAX], source[PATH_MAX];

    if (!realpath(o->mountpoint, point) || access(point, F_OK)) {
        int r = -errno;

        ht_error("mount point %s: %s", o->mountpoint, strerror(-r));
        return r;
    }
    if (ht_mount_at(point, m) || !ht_mount_is_hitrain(m)) {
        ht_error("%s is not a mount of hitrain: there is nothing to remount", point);
        return -EINVAL;
    }
    if (!realpath(o->device[0], source) || strcmp(source, m->source) != 0) {
        ht_error("%s is a mount of %s and not of %s", point, m->source, o->device[0]);
        return -EINVAL;
    }
    return 0;
}

static bool may_become(const struct ht_mount_entry *m, const struct ht_options *running, const struct ht_options *o)
{
    const char *fixed = ht_options_changed(running, o);

    if (fixed)
        ht_error("%s: option '%s' cannot change while it is mounted: unmount it and mount it again", m->point, fixed);
    else if (running->read_only && (o->flags.clear & MS_RDONLY))
        ht_error("%s: the store was opened for reading only: unmount it and mount it again to write", m->point);
    else if (o->labelled && !strstr(m->super_options, "context="))
        ht_error("%s: security contexts cannot change while it is mounted", m->point);
    else
        return true;
    return false;
}

/* fsync of a mount's root is a commit of everything. */
static int commit(const char *point, const char *held)
{
    int fd = open(held, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int r = fd >= 0 && syncfs(fd) == 0 && fsync(fd) == 0 ? 0 : -errno;

    if (fd >= 0)
        close(fd);
    if (r)
        ht_error("%s: it cannot be made durable and stays as it was: %s", point, strerror(-r));
    return r;
}

/*
 * Hold the root of this mount and of no other that has come to its path since the table was read. Its fd, or -errno.
 * Nothing is asked of the daemon: we may be it.
 */
static int hold(const struct ht_mount_entry *m)
{
    int fd = open(m->point, O_PATH | O_NOFOLLOW | O_DIRECTORY | O_CLOEXEC), r = 0;
    struct statx st;

    if (fd < 0 || statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &st) != 0)
        r = -errno;
    else if (st.stx_dev_major != m->major || st.stx_dev_minor != m->minor)
        r = -ESTALE;
    if (r == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    if (r == -ESTALE)
        ht_error("%s: another mount took its place meanwhile: nothing was changed", m->point);
    else
        ht_error("mount point %s: %s", m->point, strerror(-r));
    return r;
}

static int set_flags(const struct ht_mount_entry *m, const struct ht_mount_flags *change)
{
    unsigned long before = ht_mount_flags_of(m->options) | ht_mount_flags_of(m->super_options);
    unsigned long after = (before & ~change->clear) | change->set;
    int fd = hold(m), r;
    char held[32];

    if (fd < 0)
        return fd;
    snprintf(held, sizeof(held), "/proc/self/fd/%d", fd);
    r = (after & ~before & MS_RDONLY) ? commit(m->point, held) : 0;
    if (r == 0 && mount("none", held, NULL, MS_REMOUNT | after, NULL)) {
        r = -errno;
        ht_error("%s: the mount cannot be changed: %s%s", m->point, strerror(-r),
                 r == -EBUSY       ? "; files are open for writing"
                     : r == -EPERM ? "; only root may"
                                   : "");
    }
    close(fd);
    return r;
}

int ht_remount(const struct ht_options *o)
{
    struct ht_mount_entry *m = malloc(sizeof(*m));
    struct daemon_options *d = calloc(1, sizeof(*d));
    int r = m && d ? find_mount(o, m) : -ENOMEM;

    if (r == 0)
        r = find_daemon(m, d);
    if (r == 0 && !may_become(m, &d->options, o))
        r = -EINVAL;
    if (r == 0)
        r = set_flags(m, &o->flags);
    if (d)
        ht_options_free(&d->options);
    free(d);
    free(m);
    return r;
}

int ht_remount_later_flags(const char *mountpoint, const struct ht_options *o)
{
    struct ht_mount_entry *m;
    int r;

    if (!ht_mount_flags_later(&o->flags))
        return 0;
    m = malloc(sizeof(*m));
    r = m ? ht_mount_at(mountpoint, m) : -ENOMEM;
    if (r == 0)
        r = set_flags(m, &o->flags);
    free(m);
    return r;
}
