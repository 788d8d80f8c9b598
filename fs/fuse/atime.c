/* SPDX-License-Identifier: Apache-2.0 */
/*
 * atime.c - access times by the options of the mount (noatime, nodiratime, relatime, strictatime).
 *
 * The kernel leaves these times to us and does not pass on its options, which a remount changes. They stand in its
 * table of mounts, which can be polled for changes: reads poll it, and read it again after a change. While the mount is
 * read-only nothing is stamped.
 *
 * Locks: atime_lock, a leaf. Threads: any.
 */
#include "fs/fuse/fuse_priv.h"
#include "tiering/sys/mounts.h"

#include <mntent.h>
#include <poll.h>
#include <unistd.h>

enum { TICK_NS = 4000000 };

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
