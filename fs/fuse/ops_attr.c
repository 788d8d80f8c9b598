/* SPDX-License-Identifier: Apache-2.0 */
/* ops_attr.c - attributes, plain and extended, and figures of the whole file system. */
#include "fs/fuse/fuse_priv.h"

#include <sys/xattr.h>

void ht_op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct stat st;
    int rc = ht_hidden_match(ino) ? ht_hidden_getattr(f->ctl, ino, &st) : ht_ns_getattr(f->ns, ino, &st);

    ht_reply_attr(req, ino, rc, &st);
}

static unsigned what_to_set(int to_set)
{
    static const struct {
        int fuse;
        unsigned ns;
    } map[] = {
        {FUSE_SET_ATTR_MODE, HT_SET_MODE},
        {FUSE_SET_ATTR_UID, HT_SET_UID},
        {FUSE_SET_ATTR_GID, HT_SET_GID},
        {FUSE_SET_ATTR_SIZE, HT_SET_SIZE},
        {FUSE_SET_ATTR_ATIME, HT_SET_ATIME},
        {FUSE_SET_ATTR_MTIME, HT_SET_MTIME},
        {FUSE_SET_ATTR_CTIME, HT_SET_CTIME},
        {FUSE_SET_ATTR_ATIME_NOW, HT_SET_ATIME_NOW},
        {FUSE_SET_ATTR_MTIME_NOW, HT_SET_MTIME_NOW},
        {FUSE_SET_ATTR_KILL_SUID, HT_KILL_SUID},
        {FUSE_SET_ATTR_KILL_SGID, HT_KILL_SUID},
    };
    unsigned what = 0;

    for (size_t i = 0; i < HT_ARRAY_SIZE(map); i++)
        if (to_set & map[i].fuse)
            what |= map[i].ns;
    /* The kernel sets the plain flag, too, when it wants "now". */
    if (what & HT_SET_ATIME_NOW)
        what &= ~(unsigned)HT_SET_ATIME;
    if (what & HT_SET_MTIME_NOW)
        what &= ~(unsigned)HT_SET_MTIME;
    return what;
}

/* Truncation and times are accepted and change nothing: these files have the sizes that they have. */
void ht_hidden_op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set, struct fuse_file_info *fi)
{
    unsigned what = what_to_set(to_set);
    struct stat st;
    bool refused = what & (HT_SET_MODE | HT_SET_UID | HT_SET_GID);
    int rc = refused ? -EPERM : ht_hidden_getattr(ht_fuse_of(req)->ctl, ino, &st);

    if (rc == 0 && (what & HT_SET_SIZE) && fi)
        rc = ht_hidden_set_size((struct ht_hidden_file *)(uintptr_t)fi->fh, (uint64_t)attr->st_size);
    ht_reply_attr(req, ino, rc, &st);
}

static int set_attributes(fuse_req_t req, uint64_t ino, const struct stat *attr, int to_set, struct stat *out_st)
{
    struct ht_fuse *f = ht_fuse_of(req);
    unsigned what = what_to_set(to_set);
    /* A request that changes nothing is a chown to the present owner, or the kernel's wish to end privileges. */
    bool chown = what & (HT_SET_UID | HT_SET_GID);

    if ((chown || to_set == 0) && ht_privileged(f, ino))
        ht_privilege_drop(f, ino, chown || fuse_req_ctx(req)->uid ? ht_privilege_kills(req, ino) : 0);
    if (what & HT_KILL_SUID)
        what |= ht_privilege_kills(req, ino);
    int rc = ht_ns_setattr(f->ns, ino, what, attr, out_st);
    if (what & HT_SET_MODE)
        ht_ctl_changed(f->ctl);
    return rc;
}

static void job_setattr(struct ht_job *job)
{
    const struct stat *attr = (const struct stat *)(const void *)job->data;
    struct ht_passthrough_file *resized = NULL;
    bool size = what_to_set(job->flags) & HT_SET_SIZE;
    struct ht_fuse *f = job->fuse;
    struct stat st;

    int rc = size && ht_ctl_param(f->ctl, job->ino) ? ht_ctl_wait_updates(f->ctl, job->ino, 0, HT_FILE_BYTES_MAX) : 0;
    if (!rc && size)
        rc = ht_passthrough_resize_begin(f, job->ino, (uint64_t)attr->st_size, &resized);
    if (!rc)
        rc = set_attributes(job->req, job->ino, attr, job->flags, &st);
    ht_passthrough_resize_end(f, resized);
    ht_reply_attr(job->req, job->ino, rc, &st);
}

void ht_op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set, struct fuse_file_info *fi)
{
    bool waits =
        (what_to_set(to_set) & HT_SET_SIZE) && ht_job_waits_for_update(ht_fuse_of(req), ino, 0, HT_FILE_BYTES_MAX);
    struct ht_job job = {.fn = job_setattr,
                         .ino = ino,
                         .data = (const char *)attr,
                         .size = sizeof(*attr),
                         .flags = to_set,
                         .may_end = true};

    ht_job_run(req, waits ? HT_LANE_UPDATE : HT_LANE_NONE, &job);
}

void ht_op_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_store_stats s;
    struct ht_ns_stats n;
    struct statvfs v = {.f_bsize = HT_BLOCK_BYTES, .f_frsize = HT_BLOCK_BYTES, .f_namemax = HT_NAME_BYTES_MAX};

    ht_store_stats(f->store, &s);
    ht_ns_stats(f->ns, &n);
    uint64_t log_left = s.log.reserve_limit_bytes - ht_min_u64(s.log.reserved_bytes, s.log.reserve_limit_bytes);
    v.f_blocks = s.total_bytes / HT_BLOCK_BYTES;
    /*
     * Reserved space (for dirty data, for the next step of a model) counts as used; space that was just deleted, cut or
     * replaced counts as free.
     */
    v.f_bfree = v.f_bavail = ht_store_free(f->store) / HT_BLOCK_BYTES;
    v.f_ffree = ht_min_u64(v.f_bavail, log_left / n.file_log_bytes); /* a file that holds anything needs a block */
    v.f_files = n.inodes + v.f_ffree;
    fuse_reply_statfs(req, &v);
}

/* ---------------------------------------------------- extended attributes */

static void job_setxattr(struct ht_job *job)
{
    struct ht_caller caller = ht_fuse_caller(job->req);
    const char *name = job->data;
    const char *value = job->data + job->off;

    ht_reply(job->req,
             ht_attribute_set(job->fuse->ctl, job->ino, name, value, job->size - job->off, job->flags, &caller));
}

/* Keeps name and value one after the other, the name with its NUL. */
static void setxattr_later(fuse_req_t req, fuse_ino_t ino, const char *name, const char *value, size_t size, int flags)
{
    size_t name_len = strlen(name) + 1;
    char *both = size <= HT_XATTR_VALUE_BYTES_MAX ? malloc(name_len + size) : NULL;
    struct ht_job job = {
        .fn = job_setxattr, .ino = ino, .data = both, .size = name_len + size, .off = name_len, .flags = flags};

    if (!both) {
        fuse_reply_err(req, size <= HT_XATTR_VALUE_BYTES_MAX ? ENOMEM : E2BIG);
        return;
    }
    memcpy(both, name, name_len);
    memcpy(both + name_len, value, size);
    ht_job_run(req, HT_LANE_TURN, &job);
    free(both);
}

static void set_plain(fuse_req_t req, fuse_ino_t ino, const char *name, const char *value, size_t size, int flags)
{
    struct ht_fuse *f = ht_fuse_of(req);

    if (strcmp(name, HT_NS_ACL_ACCESS) == 0 && ht_loses_setgid(req, ino))
        flags |= HT_XATTR_KILL_SGID;
    int rc = ht_ns_setxattr(f->ns, ino, name, value, size, flags);

    /* Open files remember whether they are privileged, and need no new check after a change of another attribute. */
    if (strncmp(name, "security.", 9) == 0)
        ht_ctl_changed(f->ctl);
    ht_reply(req, rc);
}

void ht_op_setxattr(fuse_req_t req, fuse_ino_t ino, const char *name, const char *value, size_t size, int flags)
{
    struct ht_fuse *f = ht_fuse_of(req);
    struct ht_caller caller = ht_fuse_caller(req);

    if (!ht_attribute_match(name))
        set_plain(req, ino, name, value, size, flags);
    else if (ht_attribute_waits(name))
        setxattr_later(req, ino, name, value, size, flags);
    else
        ht_reply(req, ht_attribute_set(f->ctl, ino, name, value, size, flags, &caller));
}

static void reply_value(fuse_req_t req, ssize_t n, const char *buf, size_t size)
{
    if (n < 0)
        ht_reply(req, (int)n);
    else if (size == 0)
        fuse_reply_xattr(req, (size_t)n);
    else
        fuse_reply_buf(req, buf, (size_t)n);
}

void ht_op_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size)
{
    struct ht_fuse *f = ht_fuse_of(req);
    size_t cap = ht_min_u64(size, HT_FUSE_IO_BYTES);
    char *buf = ht_fuse_buffer();
    ssize_t n;

    if (!buf)
        n = -ENOMEM;
    else if (ht_hidden_match(ino))
        n = ht_hidden_getxattr(f->ctl, ino, name, buf, cap);
    else if (ht_attribute_match(name))
        n = ht_attribute_get(f->ctl, ino, name, buf, cap);
    else
        n = ht_ns_getxattr(f->ns, ino, name, buf, cap);
    reply_value(req, n, buf, size);
}

void ht_op_listxattr(fuse_req_t req, fuse_ino_t ino, size_t size)
{
    size_t cap = ht_min_u64(size, HT_FUSE_IO_BYTES);
    char *buf = ht_fuse_buffer();
    ssize_t n = -ENOMEM;

    if (ht_hidden_match(ino))
        n = 0;
    else if (buf)
        n = ht_ns_listxattr(ht_fuse_of(req)->ns, ino, fuse_req_ctx(req)->uid == 0, buf, cap);
    reply_value(req, n, buf, size);
}

static void job_removexattr(struct ht_job *job)
{
    struct ht_caller caller = ht_fuse_caller(job->req);

    ht_reply(job->req, ht_attribute_remove(job->fuse->ctl, job->ino, job->data, &caller));
}

void ht_op_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name)
{
    struct ht_job job = {.fn = job_removexattr, .ino = ino, .data = name, .size = strlen(name)};

    if (ht_attribute_match(name))
        ht_job_run(req, ht_attribute_waits(name) ? HT_LANE_TURN : HT_LANE_NONE, &job);
    else
        ht_reply(req, ht_ns_removexattr(ht_fuse_of(req)->ns, ino, name));
}
