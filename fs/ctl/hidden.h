/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hidden.h - the tree that is resolved and never listed.
 *
 *   DIR/.hitrain/            of the mount's root, and of each directory at or below a model root
 *     grad/P                 the gradient of P, which is a path below DIR
 *     grad-topk/P            the same, sparse (hitrain/topk.h)
 *     state/P/NAME           optimizer state as f32
 *     update/P  ortho/P      of a step in two phases: the input of the orthogonalisation, and its result, in bf16
 *     ctl  stats
 *     background  devices  roots    of the mount's root: JSON Lines
 *     kept                 of a model root's directory: its kept steps as JSON Lines
 *     redo/STEP            of a model root's directory, for its owner and root: a logged step
 *     delta/STEP           of a model root's directory: what a step has changed
 *     snap/STEP            of a model root's directory: that of a kept step, an ordinary inode
 *     shard/<r>of<R>/      of a model root's directory: param/P, grad/P and state/P/NAME, the blocks of rank r alone
 *     gather               of a model root's directory: many parameters and gradients as one file
 *     events               of the mount's root only; for its owner and root, as it names what others may not see
 *
 * Its inodes exist only as numbers: kind, index and the inode of the directory or parameter they belong to. They take
 * no lookup counts, so that a client that keeps such inodes keeps no removed file: numbers are never used again, and
 * one whose inode is gone is ESTALE.
 *
 * Locks: one per open ctl file, and no other of its own. WAITS as in ctl.h.
 */
#pragma once

#include "fs/ctl/ctl.h"

bool ht_hidden_match(uint64_t ino);
/* Is name in parent (hidden or not) one that belongs to the hidden tree? */
bool ht_hidden_name(uint64_t parent, const char *name);
/* Is it a gradient in .hitrain/grad/? And the gradient's inode of a parameter. */
bool ht_hidden_is_gradient(uint64_t ino);
uint64_t ht_hidden_gradient(uint64_t param);
/* Takes no count, but for a kept step, whose directory is an ordinary inode. */
int ht_hidden_lookup(struct ht_ctl *c, uint64_t parent, const char *name, struct stat *out_st) HT_MUST_CHECK;
/* The lookup of this name answered ENOENT: if the caller may steer the model, its error lists the present names. */
void ht_hidden_missed(struct ht_ctl *c, uint64_t parent, const char *name, const struct ht_caller *caller);
int ht_hidden_getattr(struct ht_ctl *c, uint64_t ino, struct stat *out_st) HT_MUST_CHECK;

/* The access list that belongs to the mode of getattr, and no other attribute: -ENODATA, -ERANGE. cap 0: the length. */
ssize_t ht_hidden_getxattr(struct ht_ctl *c, uint64_t ino, const char *name, void *buf, size_t cap) HT_MUST_CHECK;

/*
 * kept.c: a file or state of a kept step beside another one of the same model, see HT_IOCTL_SAME. -EINVAL: one of them
 * is no such thing; -EACCES: the caller may not read the other one; -ESTALE.
 */
int ht_kept_same(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller,
                 struct ht_ioctl_same *same) HT_MUST_CHECK;

/* ------------------------------------------------------------- directories */

struct ht_hidden_dir;
int ht_hidden_opendir(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller,
                      struct ht_hidden_dir **out) HT_MUST_CHECK;
/* The entry at place i, counted from 0; false: the end. Without "." and "..". */
bool ht_hidden_entry(const struct ht_hidden_dir *d, uint64_t i, const char **out_name, struct stat *out_st);
void ht_hidden_closedir(struct ht_hidden_dir *d);

/* ------------------------------------------------------------------- files */

struct ht_hidden_file;
/* WAITS, for gradients: a running boundary comes first. */
int ht_hidden_open(struct ht_ctl *c, uint64_t ino, int flags, const struct ht_caller *caller,
                   struct ht_hidden_file **out) HT_MUST_CHECK;
bool ht_hidden_open_waits(uint64_t ino);
/* The model root that an open, or any other call, may have to wait for; 0: none. */
uint64_t ht_hidden_root(struct ht_ctl *c, uint64_t ino);
ssize_t ht_hidden_read(struct ht_hidden_file *f, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
/* waits false: -EAGAIN, where that of a gradient would WAIT for a step. Then the same bytes are written again. */
ssize_t ht_hidden_write(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len, bool waits) HT_MUST_CHECK;
/*
 * A write of a shard of a parameter, with its bytes in buf: waits for updates of these bytes. The kernel drops its
 * pages of them, and writes those that a mapping has changed: WAITS for requests that it may hold back (ops_hidden.c).
 */
void ht_hidden_wait_updates(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len);
void ht_hidden_drop_pages(struct ht_hidden_file *f, uint64_t off, const void *buf, size_t len);
/* ftruncate: of a gradient that is open for writing only, ht_grad_set_size; else nothing. */
int ht_hidden_set_size(struct ht_hidden_file *f, uint64_t bytes) HT_MUST_CHECK;
/* Called for each closing descriptor, maybe early and often. */
int ht_hidden_flush(struct ht_hidden_file *f) HT_MUST_CHECK;
int ht_hidden_fsync(struct ht_hidden_file *f, const struct ht_caller *caller) HT_MUST_CHECK;
void ht_hidden_release(struct ht_hidden_file *f);

/* What fs/fuse asks of an open file. It sets counted alone, before a client can use the file. */
struct ht_hidden_about {
    enum ht_traffic_kind reads, writes;
    uint64_t param;          /* of a gradient or state */
    uint64_t gradient_bytes; /* of the whole; 0: it is no gradient in .hitrain/grad/ */
    bool traced;             /* its writes are, member by member */
    bool counted;            /* among the opens of a passthrough gradient */
};
struct ht_hidden_about *ht_hidden_about(struct ht_hidden_file *f);

/* Its reads go to HT_LANE_PAUSES from now on. -EINVAL: it is no state of a kept step. */
int ht_hidden_set_background(struct ht_hidden_file *f) HT_MUST_CHECK;

/* Is it .hitrain/gather? More members of an open one. WAITS as the open of a gradient does. */
bool ht_hidden_gathers(uint64_t ino);
int ht_hidden_gather(struct ht_hidden_file *f, const char *lines, size_t len,
                     const struct ht_caller *caller) HT_MUST_CHECK;

/* Is it a ctl, whose writes are commands? */
bool ht_hidden_commands(uint64_t ino);

/* The reasons for which a call may have to wait, apart from I/O and memory. */
enum ht_lane_kind {
    HT_LANE_GRADIENT,    /* updates, or a boundary that is being made */
    HT_LANE_WRITE,       /* the same; it brings bytes that are kept while it waits */
    HT_LANE_CTL_SESSION, /* the waits of a command that needs no turn, or the session of another thread */
    HT_LANE_TURN,        /* its turn on the root: one at a time */
    HT_LANE_UPDATE,      /* updates, and nothing else: the kernel holds pages of the parameter, or their writeback */
    HT_LANE_PAGES,       /* pages of a parameter that the kernel drops */
    HT_LANE_PAUSES,      /* a pause of the devices: see HT_IOCTL_BACKGROUND */
    HT_LANE_NAMES,       /* locks of the kernel's directories, on behalf of no request */
    HT_LANES,
    HT_LANE_NONE = HT_LANES,
};
enum ht_hidden_op { HT_HIDDEN_READ, HT_HIDDEN_WRITE, HT_HIDDEN_FLUSH, HT_HIDDEN_OPS };
/* buf: the bytes to write. One in no lane must not wait. */
enum ht_lane_kind ht_hidden_lane(const struct ht_hidden_file *f, enum ht_hidden_op op, const void *buf, size_t len);

/* After a mount that ended with open files: no client will close them. No other call may be in progress. */
void ht_hidden_close_all(struct ht_ctl *c);
