/* SPDX-License-Identifier: Apache-2.0 */
/* ops_name.c - operations on names. Permissions were checked by the kernel (default_permissions). */
#include "fs/fuse/fuse_priv.h"

/* For a found or made entry, which has taken a lookup count. hidden: of the hidden tree, and looked up each time. */
static void reply_entry(fuse_req_t req, int rc, const struct stat *st, bool hidden)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct fuse_entry_param e;

    if (rc) {
        ht_reply(req, rc);
        return;
    }
    ht_fuse_entry_of(st, &e);
    if (hidden)
        e.entry_timeout = 0;
    if (fuse_reply_entry(req, &e)) {
        /* The kernel did not take the answer: it will not forget what it never knew. The request is gone. */
        if (ht_hidden_match(st->st_ino))
            ht_passthrough_hidden_not_looked_up(f, st->st_ino);
        else
            ht_ns_forget(f->ns, st->st_ino, 1);
    }
}

/* The kernel asks for these only to follow a file handle. */
static bool is_dots(const char *name)
{
    return !strcmp(name, ".") || !strcmp(name, "..");
}

void ht_op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    /* The kernel may believe that a name is missing as long as it may believe one that is there. */
    const struct fuse_entry_param none = {.entry_timeout = HT_FUSE_VALID_S};
    struct ht_fuse *f = ht_fuse_of(req);
    struct stat st;
    int rc =
        is_dots(name) ? ht_ns_lookup_ino(f->ns, parent, name[1] != 0, &st) : ht_ns_lookup(f->ns, parent, name, &st);

    if (rc == -ENOENT)
        fuse_reply_entry(req, &none);
    else
        reply_entry(req, rc, &st, false);
}

/* Handles into the hidden tree end when the kernel forgets the inode. */
void ht_hidden_op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct ht_caller caller = ht_fuse_caller(req);
    struct ht_fuse *f = ht_fuse_of(req);
    struct stat st;
    int rc = is_dots(name) ? -ESTALE : ht_hidden_lookup(f->ctl, parent, name, &st);

    if (rc == -ENOENT)
        ht_hidden_missed(f->ctl, parent, name, &caller);
    if (rc == 0 && ht_hidden_match(st.st_ino))
        ht_passthrough_hidden_looked_up(f, st.st_ino, parent, name);
    reply_entry(req, rc, &st, true);
}

void ht_op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t rdev)
{
    struct stat st;

    reply_entry(req, ht_ns_mknod(ht_fuse_of(req)->ns, parent, name, mode, rdev, ht_fuse_cred(req), &st), &st, false);
}

void ht_op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
    struct stat st;

    reply_entry(req, ht_ns_mkdir(ht_fuse_of(req)->ns, parent, name, mode, ht_fuse_cred(req), &st), &st, false);
}

void ht_op_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name)
{
    struct stat st;

    reply_entry(req, ht_ns_symlink(ht_fuse_of(req)->ns, parent, name, target, ht_fuse_cred(req), &st), &st, false);
}

void ht_op_readlink(fuse_req_t req, fuse_ino_t ino)
{
    struct ht_fuse *f = ht_fuse_of(req);
    char target[HT_SYMLINK_BYTES_MAX + 1];
    ssize_t n = ht_ns_readlink(f->ns, ino, target, HT_SYMLINK_BYTES_MAX);

    if (n < 0) {
        ht_reply(req, (int)n);
        return;
    }
    ht_atime_touch(f, ino, false);
    target[n] = 0;
    fuse_reply_readlink(req, target);
}

void ht_op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *name)
{
    struct stat st;

    reply_entry(req, ht_ns_link(ht_fuse_of(req)->ns, ino, parent, name, &st), &st, false);
}

void ht_op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    ht_reply(req, ht_ns_unlink(ht_fuse_of(req)->ns, parent, name));
}

/* An empty model root takes its kept steps along. EBUSY: they are not the caller's to end, and its error says so. */
static void job_rmdir(struct ht_job *job)
{
    struct ht_fuse *f = job->fuse;
    struct ht_caller caller = ht_fuse_caller(job->req);
    struct stat st;
    int rc = ht_ns_rmdir(f->ns, job->ino, job->data);

    if (rc == -EBUSY && !ht_ns_lookup(f->ns, job->ino, job->data, &st)) {
        rc = ht_ctl_forget_kept(f->ctl, st.st_ino, &caller);
        ht_ns_forget(f->ns, st.st_ino, 1);
        if (!rc)
            rc = ht_ns_rmdir(f->ns, job->ino, job->data);
    }
    ht_reply(job->req, rc);
}

void ht_op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct ht_fuse *f = ht_fuse_of(req);
    int rc = ht_ns_rmdir(f->ns, parent, name);
    struct ht_job job = {.fn = job_rmdir, .ino = parent, .data = name, .size = strlen(name)};

    if (rc == -EBUSY)
        ht_job_run(req, HT_LANE_TURN, &job);
    else
        ht_reply(req, rc);
}

void ht_op_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
                  unsigned flags)
{
    struct ht_cred cred = ht_fuse_cred(req);
    const struct ht_cred *whiteout = flags & RENAME_WHITEOUT ? &cred : NULL;

    flags &= ~(unsigned)RENAME_WHITEOUT;
    ht_reply(req, ht_ns_rename(ht_fuse_of(req)->ns, parent, name, new_parent, new_name, flags, whiteout));
}
