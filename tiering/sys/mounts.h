/* SPDX-License-Identifier: Apache-2.0 */
/* mounts.h - the mounts of this namespace, from /proc/self/mountinfo. */
#pragma once

#include <limits.h>
#include "tiering/base/base.h"

enum { HT_MOUNT_OPTIONS_MAX = 512 };

struct ht_mount_entry {
    unsigned id, major, minor;
    char root[PATH_MAX]; /* the directory of the file system that is seen at point: not "/" for some bind mounts */
    char point[PATH_MAX];
    char type[64];
    char source[PATH_MAX];
    char options[HT_MOUNT_OPTIONS_MAX];       /* of this mount: rw, noatime, ...; separated by commas */
    char super_options[HT_MOUNT_OPTIONS_MAX]; /* of the file system */
};

#define HT_MOUNTS_HERE "/proc/self/mountinfo"
/* How well an entry matches; 0: not. */
typedef int ht_mount_match(const void *what, const struct ht_mount_entry *m);
/* The last of the entries of a table that match best: it is the one on top. -ENOENT */
int ht_mount_find(const char *table, ht_mount_match *match, const void *what, struct ht_mount_entry *out) HT_MUST_CHECK;
/*
 * The mount whose source is this device or file, by its real path; a device under any name below /dev. A user's FUSE
 * mount may claim any source: it counts only for files of that user. -ENOENT: it is not mounted in this namespace.
 */
int ht_mount_of_source(const char *path, struct ht_mount_entry *out) HT_MUST_CHECK;
/* A mount of hitrain by root with exactly this text as its source. */
int ht_mount_named(const char *source, struct ht_mount_entry *out) HT_MUST_CHECK;
/* The mount that path lies on; where the kernel gives no numbers of mounts, the topmost one of its file system. */
int ht_mount_of_path(const char *path, struct ht_mount_entry *out) HT_MUST_CHECK;
/* The topmost mount at exactly this absolute path, without touching the file system there: it may be dead. */
int ht_mount_at(const char *path, struct ht_mount_entry *out) HT_MUST_CHECK;
/* Served by a process; its source and type are words that the mounting program chose. */
bool ht_mount_is_fuse(const struct ht_mount_entry *m);
/* The user who made a FUSE mount. False: it is none. */
bool ht_mount_user(const struct ht_mount_entry *m, unsigned long *out_uid) HT_MUST_CHECK;
/* hitrain, as the daemon or as mount(8) names it. */
bool ht_mount_is_hitrain(const struct ht_mount_entry *m);
/* Decodes \ooo in place, as the kernel writes blank, tab, newline and backslash in files below /proc. */
void ht_proc_unescape(char *text);
