/* SPDX-License-Identifier: Apache-2.0 */
/* ops_name.c - operations on names. Permissions were checked by the kernel (default_permissions). */
#include "fs/fuse/fuse_priv.h"

#include <limits.h>
#include <stdio.h>

/* Nothing is made, removed or moved in the hidden tree, and nothing gets its name. */
static bool refuse(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    if (!ht_hidden_name(parent, name))
        return false;
    fuse_reply_err(req, EPERM);
    return true;
}

/* The kernel may believe that a name is missing as long as it may believe one that is there. */
static void reply_missing(fuse_req_t req)
{
    const struct fuse_entry_param none = {.entry_timeout = HT_FUSE_VALID_S};

    fuse_reply_entry(req, &none);
}

static int look_up_hidden(fuse_req_t req, fuse_ino_t parent, const char *name, struct stat *out_st)
{
    struct ht_caller caller = ht_fuse_caller(req);
    struct ht_fuse *f = ht_fuse_of(req);
    int r = ht_hidden_lookup(f->ctl, parent, name, out_st);

    if (r == -ENOENT)
        ht_hidden_missed(f->ctl, parent, name, &caller);
    return r;
}

/* The kernel asks for "." and ".." only to follow a file handle; those into the hidden tree end with its memory of it. */
void ht_op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct ht_fuse *f = ht_fuse_of(req);
    bool hidden = ht_hidden_name(parent, name);
    struct stat st;
    int r;

    if (!strcmp(name, ".") || !strcmp(name, ".."))
        r = ht_hidden_match(parent) ? -ESTALE : ht_ns_lookup_ino(f->ns, parent, name[1] != 0, &st);
    else if (hidden)
        r = look_up_hidden(req, parent, name, &st);
    else
        r = ht_ns_lookup(f->ns, parent, name, &st);
    if (r == 0 && hidden)
        ht_handout_hidden_looked_up(f, st.st_ino, parent, name);
    if (r == -ENOENT && !hidden)
        reply_missing(req);
    else
        ht_reply_entry(req, r, &st);
}

static void forget_one(fuse_req_t req, uint64_t ino, uint64_t n)
{
    if (ht_hidden_match(ino)) {
        ht_handout_hidden_forget(req, ino, n);
        return;
    }
    ht_ns_forget(ht_fuse_of(req)->ns, ino, n);
    ht_handout_forget(req, ino);
}

void ht_op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t n)
{
    forget_one(req, ino, n);
    fuse_reply_none(req);
}

void ht_op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
    for (size_t i = 0; i < count; i++)
        forget_one(req, forgets[i].ino, forgets[i].nlookup);
    fuse_reply_none(req);
}

void ht_op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t rdev)
{
    struct stat st;

    if (!refuse(req, parent, name))
        ht_reply_entry(req, ht_ns_mknod(ht_fuse_of(req)->ns, parent, name, mode, rdev, ht_fuse_cred(req), &st), &st);
}

void ht_op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
    struct stat st;

    if (!refuse(req, parent, name))
        ht_reply_entry(req, ht_ns_mkdir(ht_fuse_of(req)->ns, parent, name, mode, ht_fuse_cred(req), &st), &st);
}

void ht_op_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name)
{
    struct stat st;

    if (!refuse(req, parent, name))
        ht_reply_entry(req, ht_ns_symlink(ht_fuse_of(req)->ns, parent, name, target, ht_fuse_cred(req), &st), &st);
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

    if (ht_hidden_match(ino))
        fuse_reply_err(req, EPERM);
    else if (!refuse(req, parent, name))
        ht_reply_entry(req, ht_ns_link(ht_fuse_of(req)->ns, ino, parent, name, &st), &st);
}

void ht_op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    if (!refuse(req, parent, name))
        ht_reply(req, ht_ns_unlink(ht_fuse_of(req)->ns, parent, name));
}

void ht_op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    if (!refuse(req, parent, name))
        ht_reply(req, ht_ns_rmdir(ht_fuse_of(req)->ns, parent, name));
}

void ht_op_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
                  unsigned flags)
{
    struct ht_ns *ns = ht_fuse_of(req)->ns;

    if (refuse(req, parent, name) || refuse(req, new_parent, new_name))
        return;
    if (flags & RENAME_WHITEOUT)
        ht_reply(req,
                 ht_ns_rename_whiteout(ns, parent, name, new_parent, new_name, flags & ~(unsigned)RENAME_WHITEOUT,
                                       ht_fuse_cred(req)));
    else
        ht_reply(req, ht_ns_rename(ns, parent, name, new_parent, new_name, flags));
}
