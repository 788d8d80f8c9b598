/* SPDX-License-Identifier: Apache-2.0 */
/*
 * namespace.c - see namespace.h.
 *
 * In sysfs the two are neighbours, below their controller or, with several paths to it, below their subsystem.
 */
#include "tiering/base/namespace.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/sysmacros.h>

#define CLASS "nvme-generic"

bool ht_namespace_is(const struct stat *st)
{
    char link[64], class[PATH_MAX];
    const char *slash;

    if (!S_ISCHR(st->st_mode))
        return false;
    snprintf(link, sizeof(link), "/sys/dev/char/%u:%u/subsystem", major(st->st_rdev), minor(st->st_rdev));
    if (realpath(link, class) == NULL)
        return false;
    slash = strrchr(class, '/');
    return slash != NULL && strcmp(slash + 1, CLASS) == 0;
}

/* "nvme0n1" beside "ng0n1", and what number it has. */
static int find_beside(const struct stat *st, char name[NAME_MAX + 1], dev_t *out_number)
{
    char link[64], dir[PATH_MAX], path[PATH_MAX + NAME_MAX + 8], *slash;
    unsigned major_no, minor_no;
    int ret = -ENOENT;
    FILE *f;

    snprintf(link, sizeof(link), "/sys/dev/char/%u:%u", major(st->st_rdev), minor(st->st_rdev));
    if (realpath(link, dir) == NULL)
        return -errno;
    slash = strrchr(dir, '/');
    if (slash == NULL || strncmp(slash, "/ng", 3) != 0)
        return -ENOENT;
    *slash = '\0';
    snprintf(name, NAME_MAX + 1, "nvme%.200s", slash + 3);
    snprintf(path, sizeof(path), "%s/%s/dev", dir, name);
    f = fopen(path, "re");
    if (f == NULL)
        return -ENOENT;
    if (fscanf(f, "%u:%u", &major_no, &minor_no) == 2) {
        *out_number = makedev(major_no, minor_no);
        ret = 0;
    }
    fclose(f);
    return ret;
}

int ht_namespace_block(const struct stat *st, char out[PATH_MAX])
{
    char name[NAME_MAX + 1];
    struct stat block;
    dev_t number;
    int ret = find_beside(st, name, &number);

    if (ret < 0)
        return ret;
    snprintf(out, PATH_MAX, "/dev/%s", name);
    return stat(out, &block) == 0 && S_ISBLK(block.st_mode) && block.st_rdev == number ? 0 : -ENODEV;
}

int ht_namespace_stat(const char *path, struct stat *out)
{
    char block[PATH_MAX];

    if (stat(path, out) != 0)
        return -errno;
    if (ht_namespace_is(out) && ht_namespace_block(out, block) == 0 && stat(block, out) != 0)
        return -errno;
    return 0;
}
