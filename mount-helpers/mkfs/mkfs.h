/* SPDX-License-Identifier: Apache-2.0 */
/* mkfs.h - the common part of the files of mkfs.hitrain. */
#ifndef HITRAIN_MOUNT_HELPERS_MKFS_MKFS_H
#define HITRAIN_MOUNT_HELPERS_MKFS_MKFS_H

#include "tiering/base/base.h"
#include "tiering/io/dev.h"
#include "mount-helpers/common/probe.h"
#include <hitrain/limits.h>

struct ht_mkfs_options {
    uint64_t size_bytes; /* of regular files to make; 0: devices are there already */
    uint64_t log_bytes;  /* 0: by the devices' size */
    uint32_t chunk_bytes;
    const char *label; /* or NULL */
    const char *capacity[HT_DEVICES_MAX]; /* devices of that class; capacity_count: as many were named */
    unsigned capacity_count;
    bool force, no_wait, no_discard;
};

/* One device of the store to be. */
struct ht_mkfs_target {
    const char *path;
    struct ht_dev *dev;
    bool created; /* by us: removed again on failure */
    bool sparse;  /* created, and its space is not allocated */
    bool device;  /* no regular file */
    bool held_something;
    char found[HT_PROBE_TEXT_MAX]; /* its former content */
};

/*
 * Makes sure that a path may be formatted, creating the file if asked, and holds it. Reports errors. Existing content
 * stays, except the size of a regular file with both --size and --force.
 */
int ht_mkfs_open(struct ht_mkfs_target *t, const struct ht_mkfs_options *o) HT_MUST_CHECK;
/* Releases the target; undo: and removes the file that ht_mkfs_open created. */
void ht_mkfs_close(struct ht_mkfs_target *t, bool undo);

#endif
