/* SPDX-License-Identifier: Apache-2.0 */
/* mounts.h - what is mounted where, as /proc/self/mountinfo says. */
#ifndef HITRAIN_TIERING_BASE_MOUNTS_H
#define HITRAIN_TIERING_BASE_MOUNTS_H

#include <limits.h>
#include "tiering/base/base.h"

enum { HT_MOUNT_OPTIONS_MAX = 512 };

struct ht_mount_entry {
    unsigned major, minor;
    char point[PATH_MAX];
    char type[64];
    char source[PATH_MAX];
    char options[HT_MOUNT_OPTIONS_MAX];       /* of this mount: rw, noatime, ...; separated by commas */
    char super_options[HT_MOUNT_OPTIONS_MAX]; /* of the file system */
};

/*
 * The mount whose source is this device or file, by its real path; a device under any name below /dev. A user's FUSE mount
 * may claim any source: it counts for what that user owns only. -ENOENT: it is not mounted in this namespace.
 */
int ht_mount_of_source(const char *path, struct ht_mount_entry *out) HT_CHECK;
/* The mount that path lies on. */
int ht_mount_of_path(const char *path, struct ht_mount_entry *out) HT_CHECK;
/* The topmost mount at exactly this absolute path, without touching the file system there: it may be dead. */
int ht_mount_at(const char *path, struct ht_mount_entry *out) HT_CHECK;
/* Served by a process; its source and type are the words of whoever mounted it. */
bool ht_mount_is_fuse(const struct ht_mount_entry *m);
/* hitrain, as the daemon or as mount(8) names it. */
bool ht_mount_is_hitrain(const struct ht_mount_entry *m);

#endif
