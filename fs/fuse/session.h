/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session.h - the mount itself: requests of the kernel in, answers out. The only folder that knows libfuse.
 *
 * new, mount, loop (returns when the mount has ended, for whatever reason), finish, free. Only stop may be called from
 * another thread at the same time.
 */
#pragma once

#include "fs/ctl/ctl.h"

struct ht_fuse;

struct ht_fuse_opts {
    const char *source;        /* the device in the output of mount(8) and df */
    const char *mount_options; /* more for libfuse and the kernel, separated by commas; may be empty */
    bool allow_other;
    bool single_thread; /* one worker, even if a device holds it */
    bool debug;         /* log every request on stderr */
    unsigned threads;   /* workers; 0: by the number of CPUs */
    /* The mount answers from now on; called once, by a worker. */
    void (*ready)(void *ctx);
    /* No request comes any more; called once before the loop waits for those that run. Ends what takes long. */
    void (*ending)(void *ctx);
    void *ctx;
};

const char *ht_fuse_library_version(void);
/* May the kernel pass memory of this process to programs (passthrough.c), as far as is known before a mount? */
bool ht_fuse_may_pass(void);

int ht_fuse_new(struct ht_ctl *ctl, const struct ht_fuse_opts *opts, struct ht_fuse **out) HT_MUST_CHECK;
/* Logs the reason of a failure. -errno is a guess: libfuse says only that it failed. */
int ht_fuse_mount(struct ht_fuse *f, const char *mountpoint) HT_MUST_CHECK;
int ht_fuse_loop(struct ht_fuse *f) HT_MUST_CHECK;
/*
 * Ends the mount from outside: first everything that clients have handed to the kernel is written. Mounts in use are
 * detached and their clients get ENOTCONN. Any thread except a worker.
 */
void ht_fuse_stop(struct ht_fuse *f);
/* Detaches the mount without waiting for anything, when the process is about to end. Any thread. */
void ht_fuse_detach(struct ht_fuse *f);
/*
 * After the loop: unmounts, and releases every request that is still held. No thread uses ctl for this mount
 * afterwards.
 */
void ht_fuse_finish(struct ht_fuse *f);
void ht_fuse_free(struct ht_fuse *f);
/* Appends requests that wait, in threads and in queues (tiering/base/dump.h). Any thread, until ht_fuse_free. */
void ht_fuse_dump(struct ht_fuse *f, struct ht_dump *d);
