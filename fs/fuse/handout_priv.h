/* SPDX-License-Identifier: Apache-2.0 */
/* handout_priv.h - what files (handout.c) and gradients (handout_grad.c) that are handed out have in common: the table of them. */
#ifndef HITRAIN_FS_FUSE_HANDOUT_PRIV_H
#define HITRAIN_FS_FUSE_HANDOUT_PRIV_H

#include "fs/fuse/fuse_priv.h"

/* An inode with open files, or out. Guarded by handout.lock; while it is busy it belongs to one thread. */
struct ht_handed_file {
    struct ht_list link;
    uint64_t ino;
    unsigned opens;
    unsigned waiting; /* for it to be idle */
    unsigned others;  /* busy: how many had it open before */
    uint64_t lookups; /* of gradients: fs/ns counts those of files */
    uint64_t parent;  /* of gradients: where it was looked up last, */
    char *name;       /* and as what */
    bool out, stores, busy;
    int backing;        /* out: the kernel's name for the memory */
    int fd;             /* out: the memory; the store's */
    struct ht_obj *obj; /* out; handing out keeps it */
};

/* Locked. */
struct ht_handed_file *ht_handed_find(struct ht_fuse *f, uint64_t ino);
struct ht_handed_file *ht_handed_make(struct ht_fuse *f, uint64_t ino); /* NULL: no memory */
void ht_handed_free_if_unused(struct ht_handed_file *e);
/* Not locked. One open more, and the entry is the caller's until leave. NULL: no memory. */
struct ht_handed_file *ht_handed_enter(struct ht_fuse *f, uint64_t ino);
void ht_handed_leave(struct ht_fuse *f, struct ht_handed_file *e);
/* The object's memory to the kernel, by an entry that is the caller's. */
int ht_handed_pass(fuse_req_t req, struct ht_handed_file *e, struct ht_obj *obj, bool stores) HT_CHECK;
/* One open less; the last one has job run, which is to drop the inode's names from the kernel's cache. */
void ht_handed_close(struct ht_fuse *f, struct ht_handed_file *e, void (*drop_names)(struct ht_job *job));

#endif
