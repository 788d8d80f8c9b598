/* SPDX-License-Identifier: Apache-2.0 */
/* mkfs.h - the common part of the files of mkfs.hitrain. */
#pragma once

#include "mount-helpers/common/text.h"
#include "tiering/base/log.h"
#include "tiering/io/dev.h"
#include "tiering/space/super.h"
#include "mount-helpers/common/probe.h"
#include <hitrain/limits.h>

#define HT_MKFS_BYTES_MIN (8 * HT_MIB) /* that ht_super_format and ht_super_add take for a device */

struct ht_mkfs_options {
    uint64_t size_bytes; /* of regular files to make; 0: devices are there already */
    uint64_t log_bytes;  /* 0: by the devices' size */
    uint32_t chunk_bytes;
    const char *label;                    /* or NULL */
    const char *capacity[HT_DEVICES_MAX]; /* devices of that class; capacity_count: as many were named */
    unsigned capacity_count;
    const char *add; /* the device that joins a store, or NULL */
    bool add_capacity;
    int force, no_wait, no_discard; /* flags, as getopt sets them */
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
 * stays, except the size of a regular file with both --size and --force. store: the newest superblock of the store that
 * it joins, or NULL: its members are refused, and what an interrupted --add has left on the device does not count.
 */
int ht_mkfs_open(struct ht_mkfs_target *t, const struct ht_mkfs_options *o, const struct ht_super *store) HT_MUST_CHECK;
/* Releases the target; undo: and removes the file that ht_mkfs_open created. */
void ht_mkfs_close(struct ht_mkfs_target *t, bool undo);
/* -EINVAL, and it is reported: two of the paths are the same device, which would wait for itself. */
int ht_mkfs_check_distinct(const struct ht_mkfs_target *targets, unsigned count) HT_MUST_CHECK;
/* Gives back what a device holds: an SSD that knows its free space has less to move. A failure costs nothing else. */
void ht_mkfs_discard(const struct ht_mkfs_target *t, const struct ht_mkfs_options *o);
/* Erases the signatures of other programs, which would take the device for its former content. Reports errors. */
int ht_mkfs_wipe_old(const struct ht_mkfs_target *t) HT_MUST_CHECK;
/* Reads the superblocks of sb back: this is the moment to find a device that lies. Reports errors. */
int ht_mkfs_verify(struct ht_dev *dev, const struct ht_super *sb) HT_MUST_CHECK;

/* add.c: o->add becomes a member of the store on these devices. Reports errors, and success on stdout. */
int ht_mkfs_add(const char *const paths[], unsigned count, const struct ht_mkfs_options *o) HT_MUST_CHECK;
