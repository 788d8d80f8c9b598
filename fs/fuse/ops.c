/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops.c - the operations of each kind of inode, and the choice between them.
 *
 * Inodes of the store have the operations ht_op_*, entries of the hidden tree ht_hidden_op_*. An operation that the
 * table of a kind lacks is refused: on an inode with EOPNOTSUPP, on a name with EPERM.
 */
#include "fs/fuse/fuse_priv.h"

static const struct fuse_lowlevel_ops store_ops = {
    .lookup = ht_op_lookup,
    .getattr = ht_op_getattr,
    .setattr = ht_op_setattr,
    .mknod = ht_op_mknod,
    .mkdir = ht_op_mkdir,
    .unlink = ht_op_unlink,
    .rmdir = ht_op_rmdir,
    .symlink = ht_op_symlink,
    .create = ht_op_create,
    .tmpfile = ht_op_tmpfile,
    .open = ht_op_open,
    .read = ht_op_read,
    .write = ht_op_write,
    .flush = ht_op_flush,
    .release = ht_op_release,
    .fsync = ht_op_fsync,
    .fallocate = ht_op_fallocate,
    .lseek = ht_op_lseek,
    .ioctl = ht_op_ioctl,
    .opendir = ht_op_opendir,
    .readdir = ht_op_readdir,
    .readdirplus = ht_op_readdirplus,
    .releasedir = ht_op_releasedir,
    .fsyncdir = ht_op_fsyncdir,
    .setxattr = ht_op_setxattr,
    .getxattr = ht_op_getxattr,
    .listxattr = ht_op_listxattr,
    .removexattr = ht_op_removexattr,
};

/* It has no operations that make, remove or move names. */
static const struct fuse_lowlevel_ops hidden_ops = {
    .lookup = ht_hidden_op_lookup,
    .getattr = ht_hidden_op_getattr,
    .setattr = ht_hidden_op_setattr,
    .create = ht_hidden_op_create,
    .open = ht_hidden_op_open,
    .read = ht_hidden_op_read,
    .write = ht_hidden_op_write,
    .flush = ht_hidden_op_flush,
    .release = ht_hidden_op_release,
    .fsync = ht_hidden_op_fsync,
    .lseek = ht_hidden_op_lseek,
    .ioctl = ht_hidden_op_ioctl,
    .opendir = ht_hidden_op_opendir,
    .readdir = ht_hidden_op_readdir,
    .readdirplus = ht_hidden_op_readdirplus,
    .releasedir = ht_hidden_op_releasedir,
    .fsyncdir = ht_hidden_op_fsyncdir,
    .getxattr = ht_hidden_op_getxattr,
    .listxattr = ht_hidden_op_listxattr,
};

static const struct fuse_lowlevel_ops *of_inode(fuse_ino_t ino)
{
    return ht_hidden_match(ino) ? &hidden_ops : &store_ops;
}

/* The name of the hidden tree leads there from any directory. */
static const struct fuse_lowlevel_ops *of_name(fuse_ino_t parent, const char *name)
{
    return ht_hidden_name(parent, name) ? &hidden_ops : &store_ops;
}

/* ------------------------------------------------- by one inode or name */

/* Defines an operation that calls that of the table, or refuses. */
#define OPERATION(op, table, refusal, parameters, arguments) \
    static void op_##op parameters                           \
    {                                                        \
        const struct fuse_lowlevel_ops *chosen = (table);    \
                                                             \
        if (chosen->op)                                      \
            chosen->op arguments;                            \
        else                                                 \
            fuse_reply_err(req, refusal);                    \
    }
#define BY_INODE(op, parameters, arguments) OPERATION(op, of_inode(ino), EOPNOTSUPP, parameters, arguments)
#define BY_NAME(op, parameters, arguments) OPERATION(op, of_name(parent, name), EPERM, parameters, arguments)

BY_NAME(lookup, (fuse_req_t req, fuse_ino_t parent, const char *name), (req, parent, name))
BY_NAME(mknod, (fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t dev),
        (req, parent, name, mode, dev))
BY_NAME(mkdir, (fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode), (req, parent, name, mode))
BY_NAME(unlink, (fuse_req_t req, fuse_ino_t parent, const char *name), (req, parent, name))
BY_NAME(rmdir, (fuse_req_t req, fuse_ino_t parent, const char *name), (req, parent, name))
BY_NAME(symlink, (fuse_req_t req, const char *target, fuse_ino_t parent, const char *name), (req, target, parent, name))
BY_NAME(create, (fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi),
        (req, parent, name, mode, fi))
OPERATION(tmpfile, of_inode(parent), EPERM, (fuse_req_t req, fuse_ino_t parent, mode_t mode, struct fuse_file_info *fi),
          (req, parent, mode, fi))

BY_INODE(getattr, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BY_INODE(setattr, (fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set, struct fuse_file_info *fi),
         (req, ino, attr, to_set, fi))
BY_INODE(open, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BY_INODE(read, (fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi),
         (req, ino, size, off, fi))
BY_INODE(write, (fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off, struct fuse_file_info *fi),
         (req, ino, buf, size, off, fi))
BY_INODE(flush, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BY_INODE(release, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BY_INODE(fsync, (fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi), (req, ino, datasync, fi))
BY_INODE(fallocate, (fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len, struct fuse_file_info *fi),
         (req, ino, mode, off, len, fi))
BY_INODE(lseek, (fuse_req_t req, fuse_ino_t ino, off_t off, int whence, struct fuse_file_info *fi),
         (req, ino, off, whence, fi))
BY_INODE(ioctl,
         (fuse_req_t req, fuse_ino_t ino, unsigned cmd, void *arg, struct fuse_file_info *fi, unsigned flags,
          const void *in, size_t in_len, size_t out_cap),
         (req, ino, cmd, arg, fi, flags, in, in_len, out_cap))

BY_INODE(opendir, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BY_INODE(readdir, (fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi),
         (req, ino, size, off, fi))
BY_INODE(readdirplus, (fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi),
         (req, ino, size, off, fi))
BY_INODE(releasedir, (fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi), (req, ino, fi))
BY_INODE(fsyncdir, (fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi), (req, ino, datasync, fi))

BY_INODE(setxattr, (fuse_req_t req, fuse_ino_t ino, const char *name, const char *value, size_t size, int flags),
         (req, ino, name, value, size, flags))
BY_INODE(getxattr, (fuse_req_t req, fuse_ino_t ino, const char *name, size_t size), (req, ino, name, size))
BY_INODE(listxattr, (fuse_req_t req, fuse_ino_t ino, size_t size), (req, ino, size))
BY_INODE(removexattr, (fuse_req_t req, fuse_ino_t ino, const char *name), (req, ino, name))

/* -------------------------------------------------------------- by several */

static void op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *name)
{
    if (of_inode(ino) == &store_ops && of_name(parent, name) == &store_ops)
        ht_op_link(req, ino, parent, name);
    else
        fuse_reply_err(req, EPERM);
}

static void op_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
                      unsigned flags)
{
    if (of_name(parent, name) == &store_ops && of_name(new_parent, new_name) == &store_ops)
        ht_op_rename(req, parent, name, new_parent, new_name, flags);
    else
        fuse_reply_err(req, EPERM);
}

/* After a refusal the kernel copies by reads and writes. */
static void op_copy_file_range(fuse_req_t req, fuse_ino_t ino_in, off_t off_in, struct fuse_file_info *fi_in,
                               fuse_ino_t ino_out, off_t off_out, struct fuse_file_info *fi_out, size_t len, int flags)
{
    if (of_inode(ino_in) == &store_ops && of_inode(ino_out) == &store_ops)
        ht_op_copy_file_range(req, ino_in, off_in, fi_in, ino_out, off_out, fi_out, len, flags);
    else
        fuse_reply_err(req, EOPNOTSUPP);
}

static void forget_one(fuse_req_t req, fuse_ino_t ino, uint64_t n)
{
    if (of_inode(ino) == &store_ops)
        ht_fuse_forget(req, ino, n);
    else
        ht_passthrough_hidden_forget(req, ino, n);
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

const struct fuse_lowlevel_ops ht_fuse_ops = {
    .init = ht_fuse_init,
    .lookup = op_lookup,
    .forget = op_forget,
    .forget_multi = op_forget_multi,
    .getattr = op_getattr,
    .setattr = op_setattr,
    .readlink = ht_op_readlink,
    .mknod = op_mknod,
    .mkdir = op_mkdir,
    .unlink = op_unlink,
    .rmdir = op_rmdir,
    .symlink = op_symlink,
    .rename = op_rename,
    .link = op_link,
    .create = op_create,
    .tmpfile = op_tmpfile,
    .open = op_open,
    .read = op_read,
    .write = op_write,
    .flush = op_flush,
    .release = op_release,
    .fsync = op_fsync,
    .fallocate = op_fallocate,
    .copy_file_range = op_copy_file_range,
    .lseek = op_lseek,
    .ioctl = op_ioctl,
    .opendir = op_opendir,
    .readdir = op_readdir,
    .readdirplus = op_readdirplus,
    .releasedir = op_releasedir,
    .fsyncdir = op_fsyncdir,
    .statfs = ht_op_statfs,
    .setxattr = op_setxattr,
    .getxattr = op_getxattr,
    .listxattr = op_listxattr,
    .removexattr = op_removexattr,
};
