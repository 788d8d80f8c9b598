/* SPDX-License-Identifier: Apache-2.0 */
/*
 * privilege.c - a write takes privileges of execution from a file: setuid and setgid bits, unless root writes, and file
 * capabilities in any case.
 *
 * The kernel leaves this to us (FUSE_CAP_HANDLE_KILLPRIV_V2). Without that capability it sends setattr and removexattr
 * itself, and this file finds nothing to do.
 */
#include "fs/fuse/fuse_priv.h"

enum { GROUPS_MAX = 1024 };
static const char capability[] = "security.capability";

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
