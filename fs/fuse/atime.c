/* SPDX-License-Identifier: Apache-2.0 */
/*
 * atime.c - what reading and writing change beside the content, and the kernel leaves to us: access times, and
 * privileges of execution.
 *
 * Access times follow the options of the mount (noatime, nodiratime, relatime, strictatime). The kernel does not pass
 * these on, and a remount changes them. They stand in its table of mounts, which can be polled for changes: reads poll
 * it, and read it again after a change. While the mount is read-only nothing is stamped.
 *
 * A write takes privileges from a file: setuid and setgid bits, unless root writes, and file capabilities in any case
 * (FUSE_CAP_HANDLE_KILLPRIV_V2). Without that capability the kernel sends setattr and removexattr itself, and there is
 * nothing to do.
 *
 * Locks: atime_lock, a leaf. Threads: any.
 */
#include "fs/fuse/fuse_priv.h"
#include "tiering/sys/mounts.h"

#include <mntent.h>
#include <poll.h>
#include <unistd.h>

enum { TICK_NS = 4000000, GROUPS_MAX = 1024 };
static const char capability[] = "security.capability";

/* ------------------------------------------------------------ access times */

void ht_atime_read_options(struct ht_fuse *f)
{
    struct ht_mount_entry m;
    const struct mntent own = {.mnt_opts = m.options}, super = {.mnt_opts = m.super_options};

    if (ht_mount_at(f->mountpoint, &m))
        return; /* moved, or of another namespace: as it was */
    if (hasmntopt(&own, "ro") || hasmntopt(&super, "ro") || hasmntopt(&own, "noatime"))
        f->atime = HT_ATIME_NEVER;
    else
        f->atime = hasmntopt(&own, "relatime") ? HT_ATIME_RELATIVE : HT_ATIME_STRICT;
    f->dir_atime = !hasmntopt(&own, "nodiratime");
}

void ht_atime_init(struct ht_fuse *f)
{
    f->atime = HT_ATIME_RELATIVE;
    f->dir_atime = true;
    ht_mutex_init(&f->atime_lock, HT_LOCK_ATIME);
    f->mounts_fd = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
}

void ht_atime_finish(struct ht_fuse *f)
{
    if (f->mounts_fd >= 0)
        close(f->mounts_fd);
    ht_mutex_destroy(&f->atime_lock);
}

/*
 * Polling costs half a microsecond. The kernel reports a change once; the thread that sees it reads the options before
 * any other thread continues.
 */
static void follow_options(struct ht_fuse *f)
{
    struct pollfd p = {.fd = f->mounts_fd, .events = POLLPRI};

    ht_mutex_lock(ht_fuse_atime_lock(f));
    if (poll(&p, 1, 0) > 0 && (p.revents & (POLLPRI | POLLERR)))
        ht_atime_read_options(f);
    ht_mutex_unlock(ht_fuse_atime_lock(f));
}

/* By the options known. */
static bool is_due(struct ht_fuse *f, uint64_t ino, bool dir)
{
    return f->atime != HT_ATIME_NEVER && (!dir || f->dir_atime) &&
        ht_ns_atime_due(f->ns, ino, f->atime == HT_ATIME_STRICT);
}

/* Options are polled once in some milliseconds, and before anything is stamped: a read-only mount stays as it is. */
bool ht_atime_due(struct ht_fuse *f, uint64_t ino, bool dir)
{
    uint64_t now = ht_now_ns() / TICK_NS;

    if (f->mounts_asked != now) {
        f->mounts_asked = now;
        follow_options(f);
    }
    if (!is_due(f, ino, dir))
        return false;
    follow_options(f);
    return is_due(f, ino, dir);
}

void ht_atime_touch(struct ht_fuse *f, uint64_t ino, bool dir)
{
    if (ht_atime_due(f, ino, dir))
        ht_ns_touch(f->ns, ino, false);
}

/* -------------------------------------------------------------- privileges */

bool ht_privileged(struct ht_fuse *f, uint64_t ino)
{
    struct stat st;

    if (ht_ns_getattr(f->ns, ino, &st) || S_ISDIR(st.st_mode))
        return false;
    return (st.st_mode & (S_ISUID | S_ISGID)) || ht_ns_getxattr(f->ns, ino, capability, NULL, 0) >= 0;
}

/* The kernel requests this with an access list, in a flag that libfuse 3.17 does not pass on. */
bool ht_loses_setgid(fuse_req_t req, uint64_t ino)
{
    const struct fuse_ctx *ctx = fuse_req_ctx(req);
    uint32_t gids[GROUPS_MAX];
    struct stat st;

    if (ctx->uid == 0 || ht_ns_getattr(ht_fuse_of(req)->ns, ino, &st) || !(st.st_mode & S_ISGID) ||
        ctx->gid == st.st_gid)
        return false;
    int count = fuse_req_getgroups(req, GROUPS_MAX, gids);
    for (int i = 0; i < count && i < GROUPS_MAX; i++)
        if (gids[i] == st.st_gid)
            return false;
    return true;
}

/*
 * A setgid bit where the group may not execute is no privilege. But a user who is not in the group may not leave it on
 * a changed file.
 */
unsigned ht_privilege_kills(fuse_req_t req, uint64_t ino)
{
    return HT_KILL_SUID | (ht_loses_setgid(req, ino) ? HT_KILL_SGID : 0);
}

void ht_privilege_drop(struct ht_fuse *f, uint64_t ino, unsigned kills)
{
    const struct stat none = {0};
    struct stat st;
    int rc = ht_ns_removexattr(f->ns, ino, capability);

    if (rc == 0 || rc == -ENODATA)
        rc = kills ? ht_ns_setattr(f->ns, ino, kills, &none, &st) : 0;
    if (rc) {
        const struct ht_event_about about = {.id = ino, .error = rc};
        ht_event(HT_EVENT_PRIVILEGE_KEPT, &about, "setuid bits or capabilities of a written file cannot be cleared: %s",
                 strerror(-rc));
    }
    ht_ctl_changed(f->ctl);
    /* Attributes only (a negative offset): an invalidation of pages could wait for the write that is being answered. */
    if (f->mounted)
        fuse_lowlevel_notify_inval_inode(f->session, ino, -1, 0);
}
