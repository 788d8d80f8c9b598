/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sysfs.c - what sysfs says of a block device: its NUMA node, and how large one transfer may be.
 *
 * Real devices have an attribute, or a folder above them has. Devices that stand for others (device mapper, md; a
 * namespace with several controllers) are at the node of all these, if that is one node.
 *
 * The kernel would cut a transfer that is too large itself, but not in a call that must not wait. It refuses a ring's
 * request that needs cutting, and lets a thread of its own do it instead. That costs two switches, and order.
 */
#include "tiering/io/io_priv.h"
#include "tiering/sys/below.h"

#include <dirent.h>
#include <limits.h>
#include <sys/sysmacros.h>

#define PAGE_BYTES 4096u

enum { DEPTH_MAX = 8, NONE_YET = -2 };

/* ------------------------------------------------------------------- node */

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

/* ------------------------------------------------------------------ limits */

/* The number of the disk, if the device is a partition. */
uint64_t ht_queue_limit(dev_t number, const char *name)
{
    static const char *const of[] = {"queue", "../queue"};
    uint64_t value = 0;

    for (unsigned i = 0; i < HT_ARRAY_SIZE(of) && value == 0; i++) {
        char path[64];
        snprintf(path, sizeof(path), "%s/%s", of[i], name);
        value = ht_block_number(number, path);
    }
    return value;
}

/* A number that is too large to matter is no bound. */
static uint32_t whole_blocks(const struct ht_dev *dev, uint64_t bytes)
{
    return bytes >= UINT32_MAX ? 0 : (uint32_t)(bytes / dev->facts.lba * dev->facts.lba);
}

void ht_dev_learn_limits(struct ht_dev *dev, dev_t number)
{
    uint64_t kib = ht_queue_limit(number, "max_sectors_kb"), segments = ht_queue_limit(number, "max_segments");
    uint64_t most = kib > 0 ? kib * HT_KIB : UINT64_MAX;
    uint64_t scattered = segments > 0 ? segments * PAGE_BYTES : UINT64_MAX;

    dev->facts.transfer_max = whole_blocks(dev, most);
    dev->facts.scattered_max = whole_blocks(dev, ht_min_u64(most, scattered));
}
