/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/daemon/daemon_priv.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tiering/sys/mounts.h"
#include "tiering/base/log.h"

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
