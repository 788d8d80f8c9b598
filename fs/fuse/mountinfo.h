/* SPDX-License-Identifier: Apache-2.0 */
/* mountinfo.h - what is mounted at a path, without touching the file system there: it may be dead. */
#ifndef HITRAIN_FS_FUSE_MOUNTINFO_H
#define HITRAIN_FS_FUSE_MOUNTINFO_H

#include "tiering/base/base.h"

struct ht_mountinfo {
    char number[32]; /* MAJOR:MINOR, as /sys/class/bdi names it */
    char type[64];
    char options[256]; /* of this mount: ro, noatime, ...; separated by commas */
};
/* The topmost mount at exactly this absolute path. -ENOENT: none. */
int ht_mountinfo_at(const char *path, struct ht_mountinfo *out) HT_CHECK;

#endif
