/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops.c - the operations of each kind of inode, and the choice between them.
 *
 * Inodes of the store have the operations ht_op_*, entries of the hidden tree ht_hidden_op_*. The name of the hidden
 * tree leads there from any directory. It has no operations that make, remove or move names.
 */
#include "fs/fuse/fuse_priv.h"

/* Defines an operation of both kinds. hidden: is it about the hidden tree? */
#define BOTH(op, hidden, parameters, arguments) \
    static void op_##op parameters              \
    {                                           \
        if (hidden)                             \
            ht_hidden_op_##op arguments;        \
        else                                    \
            ht_op_##op arguments;               \
    }
/* One of the store alone, with the answer for the hidden tree. */
#define STORE(op, hidden, answer, parameters, arguments) \
    static void op_##op parameters                       \
    {                                                    \
        if (hidden)                                      \
            fuse_reply_err(req, answer);                 \
        else                                             \
            ht_op_##op arguments;                        \
    }
#define INODE ht_hidden_match(ino)
#define NAME ht_hidden_name(parent, name)

BOTH(lookup, NAME, (fuse_req_t req, fuse_ino_t parent, const char *name), (req, parent, name))
STORE(mknod, NAME, EPERM, (fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t dev),
      (req, parent, name, mode, dev))
STORE(mkdir, NAME, EPERM, (fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode), (req, parent, name, mode))
STORE(unlink, NAME, EPERM, (fuse_req_t req, fuse_ino_t parent, const char *name), (req, parent, name))
STORE(rmdir, NAME, EPERM, (fuse_req_t req, fuse_ino_t parent, const char *name), (req, parent, name))
STORE(symlink, NAME, EPERM, (fuse_req_t req, const char *target, fuse_ino_t parent, const char *name),
      (req, target, parent, name))
STORE(create, NAME, ht_hidden_match(parent) ? ENOENT : EPERM,
      (fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi),
      (req, parent, name, mode, fi))
STORE(tmpfile, ht_hidden_match(parent), EPERM,
      (fuse_req_t req, fuse_ino_t parent, mode_t mode, struct fuse_file_info *fi), (req, parent, mode, fi))
STORE(link, INODE || NAME, EPERM, (fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *name),
      (req, ino, parent, name))
STORE(rename, NAME || ht_hidden_name(new_parent, new_name), EPERM,
      (fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
       unsigned flags),
      (req, parent, name, new_parent, new_name, flags))

BOTH(setattr, INODE, (fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set, struct fuse_file_info *fi),
     (req, ino, attr, to_set, fi))
BOTH(open, INODE, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BOTH(read, INODE, (fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi),
     (req, ino, size, off, fi))
BOTH(write, INODE, (fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off, struct fuse_file_info *fi),
     (req, ino, buf, size, off, fi))
BOTH(flush, INODE, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BOTH(release, INODE, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BOTH(fsync, INODE, (fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi), (req, ino, datasync, fi))
STORE(fallocate, INODE, EOPNOTSUPP,
      (fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len, struct fuse_file_info *fi),
      (req, ino, mode, off, len, fi))
/* After a refusal the kernel copies by reads and writes. */
STORE(copy_file_range, ht_hidden_match(ino_in) || ht_hidden_match(ino_out), EOPNOTSUPP,
      (fuse_req_t req, fuse_ino_t ino_in, off_t off_in, struct fuse_file_info *fi_in, fuse_ino_t ino_out, off_t off_out,
       struct fuse_file_info *fi_out, size_t len, int flags),
      (req, ino_in, off_in, fi_in, ino_out, off_out, fi_out, len, flags))
STORE(lseek, INODE, EINVAL, (fuse_req_t req, fuse_ino_t ino, off_t off, int whence, struct fuse_file_info *fi),
      (req, ino, off, whence, fi))

BOTH(opendir, INODE, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BOTH(releasedir, INODE, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
STORE(fsyncdir, INODE, 0, (fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi),
      (req, ino, datasync, fi))

STORE(setxattr, INODE, EOPNOTSUPP,
      (fuse_req_t req, fuse_ino_t ino, const char *name, const char *value, size_t size, int flags),
      (req, ino, name, value, size, flags))
STORE(removexattr, INODE, EOPNOTSUPP, (fuse_req_t req, fuse_ino_t ino, const char *name), (req, ino, name))

static void forget_one(fuse_req_t req, fuse_ino_t ino, uint64_t n)
{
    if (ht_hidden_match(ino)) {
        ht_passthrough_hidden_forget(req, ino, n);
        return;
    }
    ht_ns_forget(ht_fuse_of(req)->ns, ino, n);
    ht_passthrough_forget(req, ino);
}

static void op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t n)
{
    forget_one(req, ino, n);
    fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
    for (size_t i = 0; i < count; i++)
        forget_one(req, forgets[i].ino, forgets[i].nlookup);
    fuse_reply_none(req);
}

/* clang-format off */
#define ROW(op) .op = op_##op,
#define ROW_OF_ALL(op) .op = ht_op_##op,
const struct fuse_lowlevel_ops ht_fuse_ops = {
    HT_FUSE_OPS_OF_BOTH(ROW)
    HT_FUSE_OPS_OF_STORE(ROW)
    HT_FUSE_OPS_OF_ALL(ROW_OF_ALL)
    .init = ht_fuse_init,
    .forget = op_forget,
    .forget_multi = op_forget_multi,
};
/* clang-format on */
