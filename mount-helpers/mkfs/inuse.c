/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inuse.c - finds users of a file or device that do not hold it, so that opening it does not show them: loop devices
 * over a file, swap.
 *
 * The kernel holds block devices in use as swap, by device mapper or md, and opening them fails.
 */
#include "mount-helpers/mkfs/mkfs.h"

#include <glob.h>
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

/* The first line, without its end. */
static bool read_line(const char *path, char *buf, size_t cap)
{
    FILE *f = fopen(path, "re");
    bool ok = f && fgets(buf, (int)cap, f);

    if (f)
        (void)fclose(f);
    if (ok)
        buf[strcspn(buf, "\n")] = '\0';
    return ok;
}

/* /sys/block/loop7/loop/backing_file: the file of loop7. */
static int check_loops(const char *path, const struct stat *st)
{
    char backing[4096];
    glob_t found;
    int rc = 0;

    if (glob("/sys/block/loop*/loop/backing_file", 0, NULL, &found) != 0)
        return 0;
    for (size_t i = 0; rc == 0 && i < found.gl_pathc; i++) {
        const char *name = found.gl_pathv[i] + strlen("/sys/block/");
        if (!read_line(found.gl_pathv[i], backing, sizeof(backing)) || !same_file(backing, st))
            continue;
        ht_error("%s is in use as the loop device /dev/%.*s: format that, or end it with losetup -d", path,
                 (int)strcspn(name, "/"), name);
        rc = -EBUSY;
    }
    globfree(&found);
    return rc;
}

static int check_swap(const char *path, const struct stat *st)
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

int ht_mkfs_check_in_use(const char *path, const struct stat *st)
{
    int rc = check_swap(path, st);

    return rc == 0 && S_ISREG(st->st_mode) ? check_loops(path, st) : rc;
}
