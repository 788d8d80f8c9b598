/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tree.h - a directory of a mounted store as a stream, and a stream as a directory. The state of parameters is read and
 * written through .hitrain/state. One thread each.
 */
#ifndef HITRAIN_MOUNT_HELPERS_STREAM_TREE_H
#define HITRAIN_MOUNT_HELPERS_STREAM_TREE_H

#include "mount-helpers/stream/stream.h"

enum { HT_TREE_WHY_MAX = HT_RECORDS_WHY_MAX + 256 };

/* Bytes of content that were dealt with, or that holes save. */
struct ht_tree_progress {
    void (*add)(void *ctx, uint64_t bytes); /* or NULL */
    void *ctx;
    bool (*stopped)(void); /* or NULL: is the caller to end? */
};

/* Sizes of all files and states below the directory, without reading them. */
int ht_tree_measure(int dir, uint64_t *out_bytes, char why[HT_TREE_WHY_MAX]) HT_MUST_CHECK;
/* The shape of the model in the directory: ht_stream_shape. */
int ht_tree_shape(int dir, uint64_t *out_shape, char why[HT_TREE_WHY_MAX]) HT_MUST_CHECK;
/*
 * Writes the directory and everything below it, without the end mark. The tree must not change meanwhile. base: the
 * directory of the step that an incremental stream builds on, or -1. 0 or -errno with the reason in why: that of the
 * tree, or "" for a failed put of the writer.
 */
int ht_tree_read(int dir, int base, struct ht_stream_writer *w, const struct ht_tree_progress *p,
                 char why[HT_TREE_WHY_MAX]) HT_MUST_CHECK;

/* What the directory itself has at last: it stays the writer's own until then. */
struct ht_tree_root {
    uint16_t mode;
    uint32_t uid, gid;
    int64_t mtime_ns;
    struct ht_buf lists; /* access lists, as struct ht_stream_attributes */
};
/*
 * Makes everything of a stream in a new, empty directory that no other program uses, but for out_root. It follows no
 * symlink and makes nothing elsewhere. With owners: files get the users and groups of the stream. No file becomes
 * setuid or setgid. After a failure a part of the tree is there. The caller frees out_root->lists in any case. base:
 * the directory of the step that an incremental stream builds on, or -1.
 */
int ht_tree_write(int dir, int base, struct ht_stream_reader *r, bool owners, const struct ht_tree_progress *p,
                  struct ht_tree_root *out_root, struct ht_hash128 *out_digest,
                  char why[HT_TREE_WHY_MAX]) HT_MUST_CHECK;
/*
 * Writes the blocks of a stream for a rank into the model in the directory, which has its parameters and their state.
 * All else in the stream is left alone. zeros: a block that the stream leaves out is not zero there already.
 */
int ht_tree_merge(int dir, struct ht_stream_reader *r, bool zeros, const struct ht_tree_progress *p,
                  char why[HT_TREE_WHY_MAX]) HT_MUST_CHECK;
/* Access lists, owner, mode and time of the directory. */
int ht_tree_write_root(int dir, const struct ht_tree_root *root, bool owners, char why[HT_TREE_WHY_MAX]) HT_MUST_CHECK;

#endif
