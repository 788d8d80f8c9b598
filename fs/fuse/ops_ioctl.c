/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_ioctl.c - the requests of lsattr and chattr: there are no flags here, and none can be set. And the comparison of
 * kept steps, and which files are passed through. Requests to .hitrain/ctl and gather are in ops_hidden.c.
 */
#include "fs/fuse/fuse_priv.h"

#include <linux/fs.h>

/* Size and direction are part of the number; the kernel has prepared that many bytes. */
static bool is_none(unsigned cmd, const void *in, size_t len)
{
    static const struct fsxattr none;
    size_t want = cmd == FS_IOC_SETFLAGS ? sizeof(uint32_t) : sizeof(none);

    return len >= want && memcmp(in, &none, want) == 0;
}

/* open: NULL for a state. */
static void reply_same(fuse_req_t req, uint64_t ino, struct ht_open *open, const void *in, size_t in_len,
                       size_t out_cap)
{
    struct ht_caller caller = ht_fuse_caller(req);
    struct ht_ioctl_same same;
    int rc = in_len < sizeof(same) || out_cap < sizeof(same) ? -EINVAL : 0;

    if (rc == 0) {
        memcpy(&same, in, sizeof(same));
        rc = ht_kept_same(ht_fuse_of(req)->ctl, ino, &caller, &same);
    }
    if (rc) {
        ht_reply(req, rc);
        return;
    }
    if (open)
        open->differs_to = same.is_same ? 0 : same.end;
    fuse_reply_ioctl(req, 0, &same, sizeof(same));
}

static void reply_passed(fuse_req_t req, uint64_t ino, size_t out_cap)
{
    uint32_t passed = ht_passthrough_has(ht_fuse_of(req), ino);

    if (out_cap < sizeof(passed))
        fuse_reply_err(req, EINVAL);
    else
        fuse_reply_ioctl(req, 0, &passed, sizeof(passed));
}

/* fh: of an open file, or NULL. */
static int set_background(struct ht_fuse *f, uint64_t ino, void *fh)
{
    struct ht_open *open = fh;

    if (fh && ht_hidden_match(ino))
        return ht_hidden_set_background(fh);
    if (!open || !ht_ns_is_frozen(f->ns, ino))
        return -EINVAL;
    open->background = true;
    return 0;
}

static void job_places(struct ht_job *job)
{
    struct ht_caller caller = ht_fuse_caller(job->req);
    struct ht_ioctl_places places;

    memcpy(&places, job->data, sizeof(places));
    int rc = job->flags ? ht_cold_tell_places(job->fuse->ctl, job->ino, &caller, &places)
                        : ht_cold_set_places(job->fuse->ctl, job->ino, &caller, &places);
    if (rc)
        ht_reply(job->req, rc);
    else
        fuse_reply_ioctl(job->req, 0, job->flags ? &places : NULL, job->flags ? sizeof(places) : 0);
}

static void run_places(fuse_req_t req, uint64_t ino, unsigned cmd, const void *in, size_t in_len, size_t out_cap)
{
    bool tells = cmd == HT_IOCTL_PLACES_TELL;
    struct ht_job job = {
        .fn = job_places, .ino = ino, .data = in, .size = sizeof(struct ht_ioctl_places), .flags = tells};

    if (in_len < job.size || (tells && out_cap < job.size))
        fuse_reply_err(req, EINVAL);
    else
        ht_job_run(req, HT_LANE_GRADIENT, &job);
}

void ht_op_ioctl(fuse_req_t req, fuse_ino_t ino, unsigned cmd, void *arg, struct fuse_file_info *fi, unsigned flags,
                 const void *in, size_t in_len, size_t out_cap)
{
    static const struct fsxattr none;
    static const uint32_t zero;
    void *fh = fi && !(flags & FUSE_IOCTL_DIR) ? (void *)(uintptr_t)fi->fh : NULL;
    bool hidden = ht_hidden_match(ino);

    if (cmd == HT_IOCTL_PLACES || cmd == HT_IOCTL_PLACES_TELL)
        run_places(req, ino, cmd, in, in_len, out_cap);
    else if (cmd == HT_IOCTL_SAME)
        reply_same(req, ino, hidden ? NULL : fh, in, in_len, out_cap);
    else if (cmd == HT_IOCTL_BACKGROUND)
        ht_reply_ioctl(req, set_background(ht_fuse_of(req), ino, fh));
    else if (cmd == HT_IOCTL_PASSED && (!hidden || ht_hidden_is_gradient(ino)))
        reply_passed(req, ino, out_cap);
    else if (hidden)
        ht_hidden_ioctl(req, ino, cmd, fi, in, in_len);
    else if (cmd == FS_IOC_SETFLAGS || cmd == FS_IOC_FSSETXATTR) {
        if (is_none(cmd, in, in_len))
            fuse_reply_ioctl(req, 0, NULL, 0);
        else
            fuse_reply_err(req, EOPNOTSUPP);
    } else if (cmd == FS_IOC_FSGETXATTR && out_cap >= sizeof(none))
        fuse_reply_ioctl(req, 0, &none, sizeof(none));
    else if ((cmd == FS_IOC_GETFLAGS || cmd == FS_IOC_GETVERSION) && out_cap >= sizeof(zero))
        fuse_reply_ioctl(req, 0, &zero, sizeof(zero)); /* inode numbers are never used again: one generation */
    else
        fuse_reply_err(req, ENOTTY);
}
