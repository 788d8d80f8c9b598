/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mountpoint.c - the place of a mount: what can be mounted on, and the options of a mount that is there. Of those the
 * kernel's table has the flags in force, and the mount itself the daemon's options.
 */
#include "fs/daemon/daemon_priv.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "tiering/base/log.h"
#include "tiering/sys/mounts.h"
#include <hitrain/words.h>

/* ---------------------------------------------------------------- before it */

/* A user other than root may unmount own mounts through libfuse's helper. */
static bool detach_by_helper(const char *path)
{
    char name[] = "fusermount3", unmount[] = "-uzq", end[] = "--", *point = strdup(path);
    char *argv[] = {name, unmount, end, point, NULL};
    int status = -1;
    pid_t pid;

    if (point && posix_spawnp(&pid, name, NULL, NULL, argv, environ) == 0)
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
    free(point);
    errno = EPERM;
    return status == 0;
}

/* Detaches the mount of a dead daemon; the folder below is visible again afterwards. */
static int detach_dead(const char *path)
{
    struct ht_mount_entry m;

    if (ht_mount_at(path, &m) || (strcmp(m.type, "fuse.hitrain") != 0 && strcmp(m.type, "fuse") != 0)) {
        ht_error("%s does not answer, and its mount is not of hitrain: unmount it first", path);
        return -ENOTCONN;
    }
    if (umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW) && (errno != EPERM || !detach_by_helper(path))) {
        int rc = -errno;
        ht_error("%s: the dead mount there cannot be detached: %s", path, strerror(-rc));
        return rc;
    }
    ht_info("%s: detached the mount of a hitrain that is gone", path);
    return 0;
}

/* The kernel may still remember the attributes of a dead mount's root, but not its figures. */
static int inspect(const char *path, struct stat *out)
{
    struct statvfs figures;

    return stat(path, out) || statvfs(path, &figures) ? -errno : 0;
}

int ht_mountpoint_prepare(const char *path, char out[PATH_MAX])
{
    struct stat st;
    int rc;

    if (!realpath(path, out)) {
        rc = -errno;
        ht_error("mount point %s: %s", path, strerror(-rc));
        return rc;
    }
    while ((rc = inspect(out, &st)) != 0) {
        if (rc == -ENOTCONN || rc == -ECONNABORTED) /* the latter: it ended during the check */
            rc = detach_dead(out);
        else
            ht_error("mount point %s: %s", out, strerror(-rc));
        if (rc)
            return rc;
    }
    if (S_ISDIR(st.st_mode))
        return 0;
    ht_error("mount point %s is not a directory", out);
    return -ENOTDIR;
}

int ht_mountpoint_check_fuse(void)
{
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    int rc = -errno;

    if (fd >= 0) {
        close(fd);
        return 0;
    }
    if (rc == -ENOENT || rc == -ENODEV || rc == -ENXIO)
        ht_error("/dev/fuse is missing or does not answer: load the kernel module (modprobe fuse), or give the "
                 "container the device");
    else
        ht_error("/dev/fuse cannot be opened: %s%s", strerror(-rc),
                 rc == -EACCES ? "; where users may mount, its mode is 0666; root may always" : "");
    return rc;
}

/* ------------------------------------------------------------------ remount */

enum { OPTIONS_BYTES_MAX = XATTR_SIZE_MAX + 1, HELD_BYTES = 32 };

static int find_mount(const struct ht_options *o, struct ht_mount_entry *m)
{
    char point[PATH_MAX], source[PATH_MAX];

    if (!realpath(o->mountpoint, point) || access(point, F_OK)) {
        int rc = -errno;
        ht_error("mount point %s: %s", o->mountpoint, strerror(-rc));
        return rc;
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

/*
 * Holds the root of this mount, and of no later one at its path since the table was read. Returns its descriptor, or
 * -errno; held is a path to it. The daemon is not asked: it may be the caller.
 */
static int hold_mount(const struct ht_mount_entry *m, char held[HELD_BYTES])
{
    int fd = open(m->point, O_PATH | O_NOFOLLOW | O_DIRECTORY | O_CLOEXEC), rc = 0;
    struct statx st;

    if (fd < 0 || statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &st) != 0)
        rc = -errno;
    else if (st.stx_dev_major != m->major || st.stx_dev_minor != m->minor)
        rc = -ESTALE;
    snprintf(held, HELD_BYTES, "/proc/self/fd/%d", fd);
    if (rc == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    if (rc == -ESTALE)
        ht_error("%s: another mount took its place: nothing was changed", m->point);
    else
        ht_error("mount point %s: %s", m->point, strerror(-rc));
    return rc;
}

/* The options that the daemon of a mount was started with, as far as they cannot change. */
static int ask_daemon(const struct ht_mount_entry *m, const char *held, struct ht_options *out)
{
    char text[OPTIONS_BYTES_MAX];
    ssize_t n = getxattr(held, HT_XATTR_PREFIX "options", text, sizeof(text) - 1);
    int rc = n < 0 ? -errno : 0;

    if (rc == 0) {
        text[n] = '\0';
        rc = ht_options_parse_fixed(text, out);
    }
    if (rc == -ENODATA || rc == -EOPNOTSUPP || rc == -EINVAL)
        ht_error("%s: its daemon is of another version and does not report its options: unmount it and mount it again",
                 m->point);
    else if (rc)
        ht_error("%s: its daemon cannot be asked for its options: %s", m->point, strerror(-rc));
    return rc;
}

static bool may_become(const struct ht_mount_entry *m, const struct ht_options *running, const struct ht_options *o)
{
    const char *fixed = ht_options_changed(running, o);

    if (fixed)
        ht_error("%s: option '%s' cannot change while it is mounted: unmount it and mount it again", m->point, fixed);
    else if (running->store.read_only && (o->flags.clear & MS_RDONLY))
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
    int rc = fd >= 0 && syncfs(fd) == 0 && fsync(fd) == 0 ? 0 : -errno;

    if (fd >= 0)
        close(fd);
    if (rc)
        ht_error("%s: it cannot be made durable and stays as it was: %s", point, strerror(-rc));
    return rc;
}

static int set_flags(const struct ht_mount_entry *m, const char *held, const struct ht_mount_flags *change)
{
    unsigned long before = ht_mount_flags_of(m->options) | ht_mount_flags_of(m->super_options);
    unsigned long after = (before & ~change->clear) | change->set;
    int rc = (after & ~before & MS_RDONLY) ? commit(m->point, held) : 0;

    if (rc == 0 && mount("none", held, NULL, MS_REMOUNT | after, NULL)) {
        rc = -errno;
        ht_error("%s: the mount cannot be changed: %s%s", m->point, strerror(-rc),
                 rc == -EBUSY       ? "; files are open for writing"
                     : rc == -EPERM ? "; only root may"
                                    : "");
    }
    return rc;
}

static int change(const struct ht_options *o, const struct ht_mount_entry *m)
{
    struct ht_options running = {0};
    char held[HELD_BYTES];
    int fd = hold_mount(m, held), rc;

    if (fd < 0)
        return fd;
    rc = ask_daemon(m, held, &running);
    if (rc == 0 && !may_become(m, &running, o))
        rc = -EINVAL;
    if (rc == 0)
        rc = set_flags(m, held, &o->flags);
    ht_options_free(&running);
    close(fd);
    return rc;
}

int ht_remount(const struct ht_options *o)
{
    struct ht_mount_entry m;
    int rc = find_mount(o, &m);

    return rc ? rc : change(o, &m);
}

int ht_remount_later_flags(const char *mountpoint, const struct ht_options *o)
{
    struct ht_mount_entry m;
    char held[HELD_BYTES];

    if (!ht_mount_flags_later(&o->flags))
        return 0;
    int rc = ht_mount_at(mountpoint, &m);
    int fd = rc ? rc : hold_mount(&m, held);
    rc = fd < 0 ? fd : set_flags(&m, held, &o->flags);
    if (fd >= 0)
        close(fd);
    return rc;
}
