/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inuse.c - what uses a file or device without holding it so that opening it shows: loop devices over a file, swap.
 *
 * Block devices in use as swap, by device mapper or md are held by the kernel, and opening them says so.
 */
#include "mount-helpers/mkfs/mkfs.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "tiering/base/log.h"

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
    bool ok = f != NULL && fgets(buf, (int)cap, f) != NULL;

    if (f != NULL)
        (void)fclose(f);
    if (ok)
        buf[strcspn(buf, "\n")] = '\0';
    return ok;
}

/* /sys/block/loop7/loop/backing_file: what loop7 is made of. */
static int check_loops(const char *path, const struct stat *st)
{
    char backing[4096];
    glob_t found;
    int ret = 0;

    if (glob("/sys/block/loop*/loop/backing_file", 0, NULL, &found) != 0)
        return 0;
    for (size_t i = 0; ret == 0 && i < found.gl_pathc; i++) {
        const char *name = found.gl_pathv[i] + strlen("/sys/block/");

        if (!read_line(found.gl_pathv[i], backing, sizeof(backing)) || !same_file(backing, st))
            continue;
        ht_error("%s is in use as the loop device /dev/%.*s: format that, or end it with losetup -d", path,
                 (int)strcspn(name, "/"), name);
        ret = -EBUSY;
    }
    globfree(&found);
    return ret;
}

/* As in /proc/swaps: blanks and the like are three octal digits behind a backslash. */
static void unescape(char *text)
{
    char *to = text;

    for (const char *p = text; *p != '\0'; p++)
        if (p[0] == '\\' && strspn(p + 1, "01234567") >= 3) {
            *to++ = (char)((p[1] - '0') * 64 + (p[2] - '0') * 8 + (p[3] - '0'));
            p += 3;
        } else {
            *to++ = *p;
        }
    *to = '\0';
}

static int check_swap(const char *path, const struct stat *st)
{
    FILE *f = fopen("/proc/swaps", "re");
    char line[4200];
    int ret = 0;

    while (ret == 0 && f != NULL && fgets(line, sizeof(line), f) != NULL) {
        line[strcspn(line, " \t\n")] = '\0';
        unescape(line);
        if (!same_file(line, st))
            continue;
        ht_error("%s is in use as swap: end that with swapoff", path);
        ret = -EBUSY;
    }
    if (f != NULL)
        (void)fclose(f);
    return ret;
}

int ht_mkfs_check_in_use(const char *path, const struct stat *st)
{
    int ret = check_swap(path, st);

    return ret == 0 && S_ISREG(st->st_mode) ? check_loops(path, st) : ret;
}
