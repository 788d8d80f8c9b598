/* SPDX-License-Identifier: Apache-2.0 */
/*
 * passthrough_priv.h - what passthrough files (passthrough.c, passthrough_closed.c) and passthrough gradients
 * (passthrough_grad.c) share: which opens are passed through, and the table.
 */
#pragma once

#include "fs/fuse/fuse_priv.h"

/* ------------------------------------------------------------------- which */

struct ht_passthrough_case {
    bool parameter; /* of a model root */
    bool pinned;    /* pin=dram */
    bool direct;    /* opened with O_DIRECT */
    bool asked;     /* by its opener, or by the file's attribute */
    bool lent;      /* the memory is, so that only those that ask get it */
    bool frozen;    /* of a kept step */
    uint64_t bytes; /* of the file */
    unsigned opens; /* others that are open, and not passed through */
};

/* Does this file, which is ordinary so far, become a passthrough file with this open? */
bool ht_passthrough_wanted(const struct ht_passthrough_case *c);
/* May an opener with these flags change pages without a call? Only a shared, writable mapping does: it needs both. */
bool ht_passthrough_may_store(int flags);
/*
 * May a passthrough file get another size? A device or the kernel may have pinned pages of a mapping for its transfers.
 * Pages that are cut off leave the file, and the pin keeps them: what is transferred to them reaches nobody. stores: a
 * program has it open for reading and writing, or had and may still map it.
 */
bool ht_passthrough_may_resize(bool stores, uint64_t from_bytes, uint64_t to_bytes);

/* ------------------------------------------------------------------- table */

/*
 * An inode with open files, or an active one. Guarded by passthrough.lock; while it is busy it belongs to one thread,
 * so a thread with the lock looks at busy before it looks at active.
 */
struct ht_passthrough_file {
    struct ht_list link;
    struct ht_list closed_link; /* in passthrough.closed or passthrough.mapped, or in no list */
    uint64_t ino;
    unsigned others; /* busy: how many had it open before */
    HT_GUARDED_BY(HT_LOCK_PASSTHROUGH) struct {
        unsigned opens;
        unsigned waiting; /* threads that wait until it is idle */
        uint64_t lookups; /* of gradients: fs/ns counts those of files */
        uint64_t parent;  /* of gradients: parent of the last lookup, */
        char *name;       /* and its name */
        uint64_t closed_until_ns;
        bool busy;
        bool forgotten; /* busy: the kernel has forgotten it meanwhile */
    };
    bool active, stores;
    uint32_t user;      /* active: who opened it first */
    int backing;        /* active: the kernel's name for the memory */
    int fd;             /* active: the memory; the store's */
    struct ht_obj *obj; /* active; the store keeps it */
};

struct ht_passthrough_file *ht_passthrough_file_find(struct ht_fuse *f, uint64_t ino) HT_REQUIRES(HT_LOCK_PASSTHROUGH);
/* Finds it or makes it. NULL: no memory. */
struct ht_passthrough_file *ht_passthrough_file_get(struct ht_fuse *f, uint64_t ino) HT_REQUIRES(HT_LOCK_PASSTHROUGH);
void ht_passthrough_file_free_if_unused(struct ht_passthrough_file *e) HT_REQUIRES(HT_LOCK_PASSTHROUGH);
/* Counts so many more opens (0 or 1); the caller owns the entry until leave. NULL: no memory. */
struct ht_passthrough_file *ht_passthrough_file_enter(struct ht_fuse *f, uint64_t ino, unsigned more);
void ht_passthrough_file_leave(struct ht_fuse *f, struct ht_passthrough_file *e);
/* Registers the object's memory with the kernel; the caller owns the entry. */
int ht_passthrough_file_begin(fuse_req_t req, struct ht_passthrough_file *e, struct ht_obj *obj,
                              bool stores) HT_MUST_CHECK;
/* Active, and nobody has it: it is ordinary from now on. The caller owns the entry. */
void ht_passthrough_file_deactivate(struct ht_fuse *f, struct ht_passthrough_file *e);
/* Drops all names of the inode from the kernel's cache: it forgets an unused inode when it has no name for it. */
void ht_passthrough_drop_names(struct ht_fuse *f, uint64_t ino);
/*
 * Counts one open less; the last one runs job, which drops the inode's names from the kernel's cache. stays: not before
 * a moment is over, if the kernel can be asked who has the memory.
 */
void ht_passthrough_file_close(struct ht_fuse *f, struct ht_passthrough_file *e, bool stays,
                               void (*drop)(struct ht_job *job));

/* ------------------------------------------- files that were closed a moment ago */

#define HT_PASSTHROUGH_CLOSED_NS UINT64_C(1000000000)

/*
 * Starts the thread that drops names when the moment is over. Without it, and where the kernel does not say who has the
 * memory, no file is kept.
 */
void ht_passthrough_closed_start(struct ht_fuse *f);
void ht_passthrough_closed_add(struct ht_fuse *f, struct ht_passthrough_file *e) HT_REQUIRES(HT_LOCK_PASSTHROUGH);
/*
 * Makes one such file ordinary: that which was closed first, and, if user is given, was opened by that user. False:
 * there is none that no program can have.
 */
bool ht_passthrough_closed_end_one(struct ht_fuse *f, const uint32_t *user);
/* Has no program the memory of this active file? The caller owns the entry, and has counted its own open at most. */
bool ht_passthrough_file_is_free(const struct ht_fuse *f, const struct ht_passthrough_file *e);
/* If so, the file is ordinary from now on. */
bool ht_passthrough_file_end(struct ht_fuse *f, struct ht_passthrough_file *e);
