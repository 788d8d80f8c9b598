/* SPDX-License-Identifier: Apache-2.0 */
/*
 * passthrough_priv.h - the table that passthrough files (passthrough.c) and passthrough gradients (passthrough_grad.c)
 * share.
 */
#ifndef HITRAIN_FS_FUSE_PASSTHROUGH_PRIV_H
#define HITRAIN_FS_FUSE_PASSTHROUGH_PRIV_H

#include "fs/fuse/fuse_priv.h"
#include "tiering/api/object.h"

/*
 * An inode with open files, or an active one. Guarded by passthrough.lock; while it is busy it belongs to one thread,
 * so a thread with the lock looks at busy before it looks at active.
 */
struct ht_passthrough_file {
    struct ht_list link;
    uint64_t ino;
    unsigned others; /* busy: how many had it open before */
    HT_GUARDED_BY(HT_LOCK_PASSTHROUGH) struct {
        unsigned opens;
        unsigned waiting; /* threads that wait until it is idle */
        uint64_t lookups; /* of gradients: fs/ns counts those of files */
        uint64_t parent;  /* of gradients: parent of the last lookup, */
        char *name;       /* and its name */
        bool busy;
    };
    bool active, stores;
    int backing;        /* active: the kernel's name for the memory */
    int fd;             /* active: the memory; the store's */
    struct ht_obj *obj; /* active; the store keeps it */
};

struct ht_passthrough_file *ht_passthrough_file_find(struct ht_fuse *f, uint64_t ino) HT_REQUIRES(HT_LOCK_PASSTHROUGH);
/* Finds it or makes it. NULL: no memory. */
struct ht_passthrough_file *ht_passthrough_file_get(struct ht_fuse *f, uint64_t ino) HT_REQUIRES(HT_LOCK_PASSTHROUGH);
void ht_passthrough_file_free_if_unused(struct ht_passthrough_file *e) HT_REQUIRES(HT_LOCK_PASSTHROUGH);
/* Counts one more open; the caller owns the entry until leave. NULL: no memory. */
struct ht_passthrough_file *ht_passthrough_file_enter(struct ht_fuse *f, uint64_t ino);
void ht_passthrough_file_leave(struct ht_fuse *f, struct ht_passthrough_file *e);
/* Registers the object's memory with the kernel; the caller owns the entry. */
int ht_passthrough_file_begin(fuse_req_t req, struct ht_passthrough_file *e, struct ht_obj *obj,
                              bool stores) HT_MUST_CHECK;
/* Counts one open less; the last one runs job, which drops the inode's names from the kernel's cache. */
void ht_passthrough_file_close(struct ht_fuse *f, struct ht_passthrough_file *e,
                               void (*drop_names)(struct ht_job *job));

#endif
