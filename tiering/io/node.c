/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node.c - the NUMA node of a device, from sysfs.
 *
 * Real devices have an attribute, or a folder above them has. Devices that stand for others (device mapper, md; a
 * namespace with several controllers) are at the node of all these, if that is one node.
 */
#include "tiering/io/io_priv.h"

#include <dirent.h>
#include <limits.h>
#include <sys/sysmacros.h>

#include "tiering/base/files.h"

enum { DEPTH_MAX = 8, NONE_YET = -2 };

/* The attribute of this folder; HT_NUMA_OFF: it has none, or the system does not know. */
static int attribute(const char *dir)
{
    char path[PATH_MAX], line[32];
    int node;

    if (snprintf(path, sizeof(path), "%s/numa_node", dir) >= (int)sizeof(path) ||
        !ht_read_line(path, line, sizeof(line)) || sscanf(line, "%d", &node) != 1 || node < 0)
        return HT_NUMA_OFF;
    return node;
}

/*
 * The node of all devices that are linked in a folder under names that begin so; HT_NUMA_OFF if they differ, or there
 * are none.
 */
static int of_linked(const char *dir, const char *prefix, unsigned depth)
{
    char path[PATH_MAX], real[PATH_MAX];
    const struct dirent *e;
    int all = NONE_YET;
    DIR *d = opendir(dir);

    if (!d)
        return HT_NUMA_OFF;
    while ((e = readdir(d))) {
        if (e->d_type != DT_LNK || strncmp(e->d_name, prefix, strlen(prefix)) != 0)
            continue;
        int node = HT_NUMA_OFF;
        if (snprintf(path, sizeof(path), "%s/%s", dir, e->d_name) < (int)sizeof(path) && realpath(path, real))
            node = ht_node_of_folder(real, depth + 1);
        all = all == NONE_YET || all == node ? node : HT_NUMA_OFF;
        if (all == HT_NUMA_OFF)
            break;
    }
    closedir(d);
    return all == NONE_YET ? HT_NUMA_OFF : all;
}

/* Checks the folder itself, the devices that it represents, then the folders above. */
int ht_node_of_folder(const char *start, unsigned depth)
{
    char dir[PATH_MAX], slaves[PATH_MAX + 8], *name;
    int node = HT_NUMA_OFF;

    if (depth == DEPTH_MAX || snprintf(dir, sizeof(dir), "%s", start) >= (int)sizeof(dir))
        return HT_NUMA_OFF;
    while (node == HT_NUMA_OFF && (name = strrchr(dir, '/')) && strcmp(name, "/devices") != 0) {
        node = attribute(dir);
        snprintf(slaves, sizeof(slaves), "%s/slaves", dir);
        if (node == HT_NUMA_OFF)
            node = of_linked(slaves, "", depth);
        if (node == HT_NUMA_OFF && strncmp(name, "/nvme-subsys", 12) == 0)
            node = of_linked(dir, "nvme", depth);
        *name = '\0';
    }
    return node;
}

int ht_node_of_block(dev_t number)
{
    char link[64], dir[PATH_MAX];

    snprintf(link, sizeof(link), "/sys/dev/block/%u:%u", major(number), minor(number));
    return !realpath(link, dir) ? HT_NUMA_OFF : ht_node_of_folder(dir, 0);
}
