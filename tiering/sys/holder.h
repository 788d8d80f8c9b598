/* SPDX-License-Identifier: Apache-2.0 */
/* holder.h - finds the process that has a device or store file open, so that a refusal can name it. */
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
 * The command line of a process, arguments separated by blanks. False for kernel threads and
 * for processes that have ended: they have none.
 */
bool ht_holder_command(pid_t pid, char command[HT_HOLDER_COMMAND_MAX]);
/*
 * "mounted on /mnt and held by process 12 (hitrain a b)", or "in use, perhaps by" a mere opener, or the known part.
 * Returns text.
 */
const char *ht_holder_text(const struct ht_holder *h, char text[HT_HOLDER_TEXT_MAX]);
