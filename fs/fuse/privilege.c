/* SPDX-License-Identifier: Apache-2.0 */
/*
 * privilege.c - a file that somebody writes to loses what made its execution privileged: setuid and setgid
 * bits, unless root writes, and file capabilities in any case.
 *
 * The kernel leaves this to us (FUSE_CAP_HANDLE_KILLPRIV_V2); where it does not offer that, it sends setattr and
 * removexattr itself and nothing here finds anything to do.
 */
#include "fs/fuse/fuse_priv.h"

static const char capability[] = "security.capability";

bool ht_privileged(struct ht_fuse *f, uint64_t ino)
{
    struct stat st;

    if (ht_ns_getattr(f->ns, ino, &st) || !S_ISREG(st.st_mode))
        return false;
    return (st.st_mode & (S_ISUID | S_ISGID)) || ht_ns_getxattr(f->ns, ino, capability, NULL, 0) >= 0;
}

void ht_privilege_drop(struct ht_fuse *f, uint64_t ino, bool keep_setuid)
{
    const struct stat none = {0};
    struct stat st;
    int r = ht_ns_removexattr(f->ns, ino, capability);

    if (r == 0 || r == -ENODATA)
        r = keep_setuid ? 0 : ht_ns_setattr(f->ns, ino, HT_KILL_SUID, &none, &st);
    if (r)
        ht_error("inode %llu: setuid bits or capabilities of a written file cannot be cleared: %s",
                 (unsigned long long)ino, strerror(-r));
    ht_ctl_changed(f->ctl);
    /* Attributes only (a negative offset): what waits for pages could wait for the write that is being answered. */
    if (f->mounted)
        fuse_lowlevel_notify_inval_inode(f->session, ino, -1, 0);
}
