/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inuse.c - finds a user of a file that does not hold it, so that opening it does not show it: swap.
 *
 * The kernel holds block devices in use as swap, by device mapper or md, and opening them fails. Opening finds loop
 * devices, too (tiering/io/open.c).
 */
#include "mount-helpers/mkfs/mkfs.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "tiering/base/log.h"
#include "tiering/sys/mounts.h"

static bool same_file(const char *path, const struct stat *st)
{
    struct stat other;

    if (stat(path, &other) != 0)
        return false;
    if (S_ISBLK(st->st_mode))
        return S_ISBLK(other.st_mode) && other.st_rdev == st->st_rdev;
    return other.st_dev == st->st_dev && other.st_ino == st->st_ino;
}

int ht_mkfs_check_in_use(const char *path, const struct stat *st)
{
    FILE *f = fopen("/proc/swaps", "re");
    char line[4200];
    int rc = 0;

    while (rc == 0 && f && fgets(line, sizeof(line), f)) {
        line[strcspn(line, " \t\n")] = '\0';
        ht_proc_unescape(line);
        if (!same_file(line, st))
            continue;
        ht_error("%s is in use as swap: end that with swapoff", path);
        rc = -EBUSY;
    }
    if (f)
        (void)fclose(f);
    return rc;
}
