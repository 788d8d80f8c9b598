/* SPDX-License-Identifier: Apache-2.0 */
/* request.c - what a request of the kernel asks for, as its header says. Apart from libfuse, which has other names. */
#include "fs/fuse/request.h"

#include <linux/fuse.h>

static const char *const names[] = {
    [FUSE_LOOKUP] = "lookup",
    [FUSE_FORGET] = "forget",
    [FUSE_GETATTR] = "getattr",
    [FUSE_SETATTR] = "setattr",
    [FUSE_READLINK] = "readlink",
    [FUSE_SYMLINK] = "symlink",
    [FUSE_MKNOD] = "mknod",
    [FUSE_MKDIR] = "mkdir",
    [FUSE_UNLINK] = "unlink",
    [FUSE_RMDIR] = "rmdir",
    [FUSE_RENAME] = "rename",
    [FUSE_LINK] = "link",
    [FUSE_OPEN] = "open",
    [FUSE_READ] = "read",
    [FUSE_WRITE] = "write",
    [FUSE_STATFS] = "statfs",
    [FUSE_RELEASE] = "release",
    [FUSE_FSYNC] = "fsync",
    [FUSE_SETXATTR] = "setxattr",
    [FUSE_GETXATTR] = "getxattr",
    [FUSE_LISTXATTR] = "listxattr",
    [FUSE_REMOVEXATTR] = "removexattr",
    [FUSE_FLUSH] = "flush",
    [FUSE_INIT] = "init",
    [FUSE_OPENDIR] = "opendir",
    [FUSE_READDIR] = "readdir",
    [FUSE_RELEASEDIR] = "releasedir",
    [FUSE_FSYNCDIR] = "fsyncdir",
    [FUSE_CREATE] = "create",
    [FUSE_INTERRUPT] = "interrupt",
    [FUSE_DESTROY] = "destroy",
    [FUSE_IOCTL] = "ioctl",
    [FUSE_BATCH_FORGET] = "forget",
    [FUSE_FALLOCATE] = "fallocate",
    [FUSE_READDIRPLUS] = "readdirplus",
    [FUSE_RENAME2] = "rename",
    [FUSE_LSEEK] = "lseek",
    [FUSE_COPY_FILE_RANGE] = "copy_file_range",
};

struct ht_request ht_request_of(const void *header, size_t len)
{
    struct fuse_in_header h = {0};

    memcpy(&h, header, ht_min_u64(len, sizeof(h)));
    const char *name = h.opcode < HT_ARRAY_SIZE(names) ? names[h.opcode] : NULL;
    return (struct ht_request){name ? name : "request", h.nodeid, ht_now_ns()};
}
