/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session.h - the mount itself: requests of the kernel in, answers out. The only folder that knows libfuse.
 *
 * new, mount, loop (returns when the mount has ended, however that came), finish, free. Only stop may be called from
 * another thread meanwhile.
 */
#ifndef HITRAIN_FS_FUSE_SESSION_H
#define HITRAIN_FS_FUSE_SESSION_H

#include "tiering/base/base.h"
#include "fs/ctl/ctl.h"

struct ht_fuse;

struct ht_fuse_opts {
    const char *source;        /* what mount(8) and df show as the device */
    const char *mount_options; /* more for libfuse and the kernel, separated by commas; may be empty */
    bool allow_other;
    bool single_thread; /* one worker */
    bool debug;         /* tell every request on stderr */
    unsigned threads;   /* workers; 0: by the number of CPUs */
    /* The mount answers from now on; called once, by a worker. */
    void (*ready)(void *ctx);
    void *ctx;
};

/* Does option word belong to libfuse or the kernel, to be passed on in mount_options? */
bool ht_fuse_knows_option(const char *option);
/* Those options, for help: NULL after the last. */
const char *ht_fuse_option(unsigned i);
const char *ht_fuse_library_version(void);

int ht_fuse_new(struct ht_ctl *ctl, const struct ht_fuse_opts *opts, struct ht_fuse **out) HT_CHECK;
/* The reason of a failure is told. -errno is a guess: libfuse says only that it failed. */
int ht_fuse_mount(struct ht_fuse *f, const char *mountpoint) HT_CHECK;
int ht_fuse_loop(struct ht_fuse *f) HT_CHECK;
/*
 * End the mount from outside: everything that clients have handed to the kernel is written first. Mounts in use are
 * detached and their clients get ENOTCONN. Any thread but a worker.
 */
void ht_fuse_stop(struct ht_fuse *f);
/* Take the mount away without waiting for anything, when the process is about to be ended. Any thread. */
void ht_fuse_detach(struct ht_fuse *f);
/* After the loop: unmount, and let go of every request that is still held. Nobody touches ctl for this mount afterwards. */
void ht_fuse_finish(struct ht_fuse *f);
void ht_fuse_free(struct ht_fuse *f);

#endif
