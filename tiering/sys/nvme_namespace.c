/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In sysfs the two are neighbours, below their controller or, with several paths to it, below their subsystem.
 */
#include "tiering/sys/nvme_namespace.h"

#include <sys/sysmacros.h>

#define CLASS "nvme-generic"

bool ht_nvme_namespace_is(const struct stat *st)
{
    char link[64], class[PATH_MAX];

    if (!S_ISCHR(st->st_mode))
        return false;
    snprintf(link, sizeof(link), "/sys/dev/char/%u:%u/subsystem", major(st->st_rdev), minor(st->st_rdev));
    if (!realpath(link, class))
        return false;
    const char *slash = strrchr(class, '/');
    return slash && strcmp(slash + 1, CLASS) == 0;
}

/* "nvme0n1" beside "ng0n1", and its number. */
static int find_beside(const struct stat *st, char name[NAME_MAX + 1], dev_t *out_number)
{
    char link[64], dir[PATH_MAX], path[PATH_MAX + NAME_MAX + 8], line[32], *slash;
    unsigned major_no, minor_no;

    snprintf(link, sizeof(link), "/sys/dev/char/%u:%u", major(st->st_rdev), minor(st->st_rdev));
    if (!realpath(link, dir))
        return -errno;
    slash = strrchr(dir, '/');
    if (!slash || strncmp(slash, "/ng", 3) != 0)
        return -ENOENT;
    *slash = '\0';
    snprintf(name, NAME_MAX + 1, "nvme%.200s", slash + 3);
    snprintf(path, sizeof(path), "%s/%s/dev", dir, name);
    if (!ht_read_line(path, line, sizeof(line)) || sscanf(line, "%u:%u", &major_no, &minor_no) != 2)
        return -ENOENT;
    *out_number = makedev(major_no, minor_no);
    return 0;
}

int ht_nvme_namespace_block(const struct stat *st, char out[PATH_MAX])
{
    char name[NAME_MAX + 1];
    struct stat block;
    dev_t number;
    int rc = find_beside(st, name, &number);

    if (rc < 0)
        return rc;
    snprintf(out, PATH_MAX, "/dev/%s", name);
    return stat(out, &block) == 0 && S_ISBLK(block.st_mode) && block.st_rdev == number ? 0 : -ENODEV;
}

int ht_nvme_namespace_stat(const char *path, struct stat *out)
{
    char block[PATH_MAX];

    if (stat(path, out) != 0)
        return -errno;
    if (ht_nvme_namespace_is(out) && ht_nvme_namespace_block(out, block) == 0 && stat(block, out) != 0)
        return -errno;
    return 0;
}
