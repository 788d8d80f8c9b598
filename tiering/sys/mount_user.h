/* SPDX-License-Identifier: Apache-2.0 */
/* mount_user.h - which process keeps a mount alive that is not in this mount namespace any more. */
#pragma once

#include <sys/types.h>
#include "tiering/sys/holder.h"

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
