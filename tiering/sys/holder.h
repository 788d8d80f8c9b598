/* SPDX-License-Identifier: Apache-2.0 */
/*
 * holder.h - finds processes by what they keep, so that a message can name them: the one that has a device or store
 * file open, and one that keeps a mount alive that is not in this mount namespace any more.
 */
#pragma once

#include <limits.h>
#include <sys/types.h>
#include "tiering/base/base.h"

enum { HT_HOLDER_COMMAND_MAX = 256, HT_HOLDER_TEXT_MAX = PATH_MAX + HT_HOLDER_COMMAND_MAX + 64 };

struct ht_holder {
    pid_t pid;                           /* 0: none that is alive and that we may see */
    char command[HT_HOLDER_COMMAND_MAX]; /* its command line, arguments separated by blanks; may be cut */
    bool opener;                         /* it has the block device open, and nothing more is known */
    char point[PATH_MAX];                /* where the device is mounted in our namespace; "" when it is not */
    bool mount_lives;                    /* that mount is the kernel's own, or the process is its daemon */
};

/*
 * The process, perhaps this one, that holds path: the owner of a flock on a regular file; among the openers of a block
 * device a program of hitrain, else any. A guess for people, not a lock: it may be another one a moment later. -errno:
 * path cannot be inspected.
 */
int ht_holder_find(const char *path, struct ht_holder *out) HT_MUST_CHECK;
/*
 * "mounted on /mnt and held by process 12 (hitrain a b)", or "in use, perhaps by" a mere opener, or the known part.
 * Returns text.
 */
const char *ht_holder_text(const struct ht_holder *h, char text[HT_HOLDER_TEXT_MAX]);

struct ht_mount_user {
    pid_t pid;
    char command[HT_HOLDER_COMMAND_MAX];
    bool has_mount; /* in its mount namespace; else it has a file or its working directory there */
};

/*
 * Is the file system of this device mounted anywhere in this mount namespace? The kernel gives the number of an ended
 * file system to the next one: source, as the kernel has it, tells them apart (NULL: it is not compared).
 */
bool ht_mount_is_here(unsigned major, unsigned minor, const char *source);
/*
 * A process whose mount namespace, another than ours, has the file system; else one that has a file there open, or
 * its working directory there. source: as above. Queries the kernel only, never the file system. -ENOENT: none that
 * we may see. A mapping whose descriptor is closed is not found.
 */
int ht_mount_user_find(unsigned major, unsigned minor, const char *source, struct ht_mount_user *out) HT_MUST_CHECK;
